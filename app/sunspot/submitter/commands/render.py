"""`sunspot render`: prints the manifest that `submit` would apply. It needs no cluster."""

import argparse
from dataclasses import asdict

from sunspot.errors import SettingsError
from sunspot.submitter.commands.arguments import add_render_options, job_request
from sunspot.submitter.printing import print_document, print_json, print_table, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_render_options(parser)
    parser.add_argument(
        "--output", metavar="DIR", help="write the manifest and a kustomization.yaml to this directory, for GitOps"
    )
    parser.add_argument(
        "--explain", action="store_true", help="print each chosen value and its origin instead of the manifest"
    )


def run(args: argparse.Namespace) -> None:
    """Print the manifest.

    With `--output`, write it to a directory. With `--explain`, print where its values come from.
    """
    from sunspot.submitter.manifest.absent_code import find_absent
    from sunspot.submitter.manifest.foreign_storage import find_foreign_storage
    from sunspot.submitter.manifest.render import render, write_directory

    if args.output == "":
        raise SettingsError("--output cannot be empty; pass a directory")
    rendered = render(job_request(args))
    for text in find_absent(rendered):
        warn(f"warning: {text}")
    for problem in find_foreign_storage(rendered.manifest):
        warn(problem)
    if args.output is not None:
        for path in write_directory(rendered, args.output):
            warn(f"wrote {path}")
    if args.explain and args.json:
        print_json([asdict(value) for value in rendered.derived])
    elif args.explain:
        print_table(["value", "is", "from"], [[v.name, v.value, v.source] for v in rendered.derived])
    elif args.json:
        print_json(rendered.manifest)
    elif args.output is None:
        print_document(rendered.to_yaml())
