"""`sunspot stop`: has a run save and end, then removes its cluster."""

import argparse
import getpass
import socket
import time

from sunspot.errors import GaveUpError
from sunspot.run import Run
from sunspot.run.status import RunState, request_stop
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.cluster.watch import (
    GONE_WITHIN_S,
    Follower,
    RunSnapshot,
    command_arguments,
    delete_jobs,
    observe_existing,
    print_state,
    reach_run,
)
from sunspot.submitter.commands.arguments import add_run, seconds
from sunspot.submitter.output import doing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--timeout", metavar="S", type=seconds, default=600, help="seconds to wait for it; default: 600"
    )
    parser.add_argument("--no-wait", action="store_true", help="only leave the stop marker")


def run(args: argparse.Namespace) -> None:
    cluster, run, cluster_error = reach_run(args)
    stop(cluster, run, args.timeout, not args.no_wait, args.json, cluster_error)


def stop(cluster: Cluster | None, run: Run, timeout: float, wait: bool, as_json: bool, cluster_error: str = "") -> None:
    """Leave the stop marker, wait until the run has saved and ended, and delete its RayJobs with their clusters.

    Raises `NotFoundError` when there is no such run, `GaveUpError` when it has not ended after `timeout` seconds.
    """
    snapshot = observe_existing(cluster, run, cluster_error)
    state, reason = snapshot.state()
    if state is RunState.SUCCEEDED:
        print_state(run, state, f"there is nothing to stop: {reason}", as_json)
        return
    request_stop(run, f"{getpass.getuser()}@{socket.gethostname()}")
    if not wait:
        reason = "it saves and ends by itself; its cluster goes when its RayJob has ended"
        print_state(run, RunState.STOPPING, reason, as_json)
        return
    began = time.monotonic()
    training = snapshot.driver_began and state is not RunState.RETRYING
    if not state.terminal and (training or not snapshot.job):
        with doing("waiting for the run to save and end"):
            snapshot = _await_end(cluster, run, timeout, cluster_error)
        state, reason = snapshot.state()
    if cluster:
        left = max(GONE_WITHIN_S, timeout - (time.monotonic() - began))
        with doing("waiting for its pods to go"):
            gone = delete_jobs(cluster, snapshot.jobs, left)
        if not gone:
            raise GaveUpError(f"{run.name} has ended ({reason}), but its pods are still there; they go by themselves")
    if state not in (RunState.SUCCEEDED, RunState.FAILED):
        state = RunState.STOPPED
    checkpoint = snapshot.status and snapshot.status.checkpoint
    saved = f"saved as {checkpoint}" if checkpoint else "it had not saved anything yet"
    print_state(run, state, f"{saved}; `sunspot resume {command_arguments(cluster, run)}` lets it go on", as_json)


def _await_end(cluster: Cluster | None, run: Run, timeout: float, cluster_error: str) -> RunSnapshot:
    deadline = time.monotonic() + timeout
    follower = Follower(cluster, run, cluster_error)
    for snapshot in follower:
        state, reason = snapshot.state()
        if state.terminal and follower.settled:
            return snapshot
        if time.monotonic() > deadline:
            raise GaveUpError(
                f"{run.name} has not ended after {timeout:.0f} s ({state}: {reason}); its stop marker stands, and "
                f"`sunspot stop {command_arguments(cluster, run)}` waits again"
            )
    raise AssertionError("following never ends by itself")
