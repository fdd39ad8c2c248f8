"""`sunspot wait`: shows progress until a run ends, and exits with its outcome. `--all` watches all runs forever.

With `--profile`, it also moves runs between the profile's places.
"""

import argparse
import os
import time

from sunspot.background import map_parallel
from sunspot.errors import SettingsError
from sunspot.run.status import RunState
from sunspot.submitter.cluster.api import connect
from sunspot.submitter.cluster.mover import Mover
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.progress_lines import ProgressLines
from sunspot.submitter.cluster.waiting import RECONCILE_EVERY_S, Reconciler, wait_for_end
from sunspot.submitter.commands.arguments import add_cluster, run_target, seconds
from sunspot.submitter.manifest.render import STORAGE_PATH
from sunspot.submitter.printing import print_json_line, print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="name of the run")
    add_cluster(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="watch all runs in the namespace forever, as k8s/gitops/wait does (only without RUN)",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="move runs to better places of this profile; only affects runs that `submit` has started",
    )
    parser.add_argument("--timeout", metavar="S", type=seconds, help="stop waiting after S seconds (exit code 5)")


def run(args: argparse.Namespace) -> None:
    if args.all == (args.run is not None) or (args.all and args.timeout is not None):
        raise SettingsError(
            "pass either the name of a run or --all, and pass --timeout only with the name of a run, because `wait "
            "--all` never ends"
        )
    mover = Mover(args.profile) if args.profile else None
    if mover and not os.environ.get(STORAGE_PATH):  # moves change files, so the RayJob's location is not trusted
        args.storage = args.storage or mover.storage_path
    if args.all:
        _watch_all(args, mover)
    access = reach_run(run_target(args), "wait" if mover else "")
    if mover and args.context is None:
        access = mover.find(access)
    wait_for_end(access, args.timeout, ProgressLines(access.run, args.json), mover)


def _watch_all(args: argparse.Namespace, mover: Mover | None) -> None:
    """Print the state changes of all runs in the namespace, or in the mover's places, until Ctrl-C."""

    def show(run: str, state: RunState, reason: str) -> None:
        if args.json:
            print_json_line({"time": time.time(), "run": run, "state": state, "reason": reason})
        else:
            print_text(f"{run}: {state}{f', {reason}' if reason else ''}", flush=True)

    clusters = mover.clusters().values() if mover else [connect(args.context, args.namespace)]
    distinct = {(cluster.server, cluster.namespace): cluster for cluster in clusters}
    reconcilers = [Reconciler(cluster, args.storage, show, mover) for cluster in distinct.values()]
    while True:
        map_parallel(Reconciler.reconcile, reconcilers)
        time.sleep(RECONCILE_EVERY_S)
