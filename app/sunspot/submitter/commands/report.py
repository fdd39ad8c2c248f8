"""`sunspot report`: writes everything that is stored about a run to one HTML file."""

import argparse

from sunspot.formatting import as_bytes
from sunspot.report import FILE
from sunspot.report.page import POLICY
from sunspot.report.search import render_stored
from sunspot.submitter.commands.arguments import add_run
from sunspot.submitter.printing import print_json, print_text, progress_note, write_file
from sunspot.submitter.runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--output", metavar="FILE", help="the file to write; default: RUN-report.html")


def run(args: argparse.Namespace) -> None:
    """Write the report to `--output` or, by default, to RUN-report.html."""
    run = find_run(args.run, args.storage)
    with progress_note("reading the run"):
        page = render_stored(run)
    path = write_file(args.output or f"{run.name}-report.html", page, mark=POLICY.encode())
    if args.json:
        print_json({"run": run.name, "path": str(path), "bytes": len(page)})
    else:
        print_text(f"{path}: {as_bytes(len(page))}; open it in a browser")
        if run.storage.exists(run.key(FILE)):
            print_text(f"{run.storage.locate(run.key(FILE))} is the report that the run itself wrote when it ended")
