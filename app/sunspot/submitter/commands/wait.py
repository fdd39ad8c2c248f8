"""`sunspot wait`: shows progress until a run ends, and exits with its outcome. `--all` watches all runs forever."""

import argparse
import time

from sunspot.errors import SettingsError
from sunspot.run.status import RunState
from sunspot.submitter.cluster.api import connect
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.progress_lines import ProgressLines
from sunspot.submitter.cluster.waiting import RECONCILE_EVERY_S, Reconciler, wait_for_end
from sunspot.submitter.commands.arguments import add_cluster, run_target, seconds
from sunspot.submitter.printing import print_json_line, print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="name of the run")
    add_cluster(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="without RUN: watch all runs in the namespace forever, as k8s/gitops/wait does",
    )
    parser.add_argument("--timeout", metavar="S", type=seconds, help="stop waiting after S seconds (exit code 5)")


def run(args: argparse.Namespace) -> None:
    if args.all == (args.run is not None) or (args.all and args.timeout is not None):
        raise SettingsError("pass either the name of a run or --all. `wait --all` never ends, so it takes no --timeout")
    if args.all:
        _watch_all(args)
    access = reach_run(run_target(args))
    wait_for_end(access, args.timeout, ProgressLines(access.run, args.json))


def _watch_all(args: argparse.Namespace) -> None:
    """Print the state changes of all runs until Ctrl-C."""

    def show(run: str, state: RunState, reason: str) -> None:
        if args.json:
            print_json_line({"time": time.time(), "run": run, "state": state, "reason": reason})
        else:
            print_text(f"{run}: {state}{f', {reason}' if reason else ''}", flush=True)

    reconciler = Reconciler(connect(args.context, args.namespace), args.storage, show)
    while True:
        reconciler.reconcile()
        time.sleep(RECONCILE_EVERY_S)
