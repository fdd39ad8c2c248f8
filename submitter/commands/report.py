"""`sunspot report`: all that storage has to say of a run, in one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.errors import NotFoundError
from app.formatting import as_bytes
from app.report import gather, render
from app.report.search import gather_search, render_search
from app.run import Run
from app.run.overview import read_state
from submitter.commands.arguments import add_run
from submitter.output import print_json, write_file
from submitter.runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--output", metavar="FILE", help="default: RUN-report.html")


def run(args: argparse.Namespace) -> None:
    write(find_run(args.run, args.storage), args.output, args.json)


def write(run: Run, output: str | None, as_json: bool) -> None:
    """Write the report to `output`, or RUN-report.html. Raises `StorageError` when that cannot be written."""
    try:
        page = render_search(*gather_search(run))
    except NotFoundError:  # no search
        page = render(gather(run, *read_state(run)))
    path = write_file(Path(output or f"{run.name}-report.html"), page)
    if as_json:
        print_json({"run": run.name, "path": str(path), "bytes": len(page)})
    else:
        print(f"{path}: {as_bytes(len(page))}; a browser shows it")
