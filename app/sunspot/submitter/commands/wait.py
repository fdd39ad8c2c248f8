"""`sunspot wait`: progress until the run ends; the exit code says how it ended."""

import argparse

from sunspot.submitter.cluster.completion import wait_for_end
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.progress_lines import show_progress
from sunspot.submitter.commands.arguments import add_run, run_target, seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--timeout", metavar="S", type=seconds, help="give up after so many seconds (exit code 5)")


def run(args: argparse.Namespace) -> None:
    access = reach_run(run_target(args))
    wait_for_end(access, args.timeout, show_progress(access.run, args.json))
