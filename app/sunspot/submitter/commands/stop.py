"""`sunspot stop`: makes a run save and stop, and removes its cluster."""

import argparse

from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.progress_lines import print_state
from sunspot.submitter.cluster.stopping import stop_run
from sunspot.submitter.commands.arguments import add_run_and_cluster, run_target, seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_and_cluster(parser)
    parser.add_argument(
        "--timeout", metavar="S", type=seconds, default=600, help="seconds to wait for the run to end; default: 600"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="write the stop marker, but do not wait for the run to end"
    )


def run(args: argparse.Namespace) -> None:
    access = reach_run(run_target(args), changed_by="stop")
    state, reason = stop_run(access, args.timeout, not args.no_wait)
    print_state(access.run, state, reason, args.json)
