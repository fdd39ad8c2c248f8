"""`sunspot move`: moves a live run to another place of its profile."""

import argparse

from sunspot.submitter.cluster.moving import move_run
from sunspot.submitter.cluster.progress_lines import print_submission
from sunspot.submitter.commands.arguments import add_context, add_job_options, add_run, job_request, seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--to", metavar="PLACE", dest="place", required=True, help="the place to move to")
    parser.add_argument(
        "--profile",
        metavar="NAME",
        required=True,
        help="the profile that lists the places; the other options are those of submit",
    )
    add_job_options(parser)
    add_context(parser)
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=seconds,
        default=1800,
        help="seconds to wait for nodes in the new place (exit code 5); default: 1800",
    )


def run(args: argparse.Namespace) -> None:
    print_submission(move_run(job_request(args), args.context, args.timeout), args.json)
