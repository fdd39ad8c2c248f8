"""`sunspot wait`: progress until the run ends; the exit code says how it ended."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from sunspot.errors import ConflictError, GaveUpError, SunspotError
from sunspot.formatting import in_words
from sunspot.run import Run
from sunspot.run.status import RunState
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.cluster.restart import HeadRestarts, head_given_up, start_again
from sunspot.submitter.cluster.watch import (
    Follower,
    Outage,
    RunSnapshot,
    command_arguments,
    observe_run,
    reach_run,
    require_known,
    warn_of_hidden,
)
from sunspot.submitter.commands.arguments import add_run, seconds
from sunspot.submitter.output import print_json_line, print_text, warn

PROGRESS_EVERY_S = 10.0
"""How often progress is printed when nothing else changes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--timeout", metavar="S", type=seconds, help="give up after so many seconds (exit code 5)")


def run(args: argparse.Namespace) -> None:
    cluster, run, cluster_error = reach_run(args)
    wait(cluster, run, args.timeout, args.json, cluster_error)


def wait(cluster: Cluster | None, run: Run, timeout: float | None, as_json: bool, cluster_error: str = "") -> RunState:
    """Follow the run to its end; the job goes on whatever happens to this command.

    A run that ends because the operator gave up its head is started again. Returns whether the run succeeded or was
    stopped. Raises `SunspotError` when it failed or is lost, `ConflictError` when it is being deleted, `NotFoundError`
    when there is no such run, `GaveUpError` after `timeout` seconds, and `ClusterError` when the API server stays out
    of reach.
    """
    snapshot = observe_run(cluster, run, cluster_error)
    require_known(cluster, run, snapshot)
    warn_of_hidden(snapshot)
    show = LiveLine(run) if sys.stdout.isatty() and not as_json else Lines(run, as_json)
    restarts, began = HeadRestarts(run), time.monotonic()
    try:
        while True:
            snapshot = _follow(cluster, run, began, timeout, show, cluster_error)
            state, reason = snapshot.state()
            manifest = restarts.next(snapshot)
            if not (cluster and snapshot.job and manifest):
                break
            show(snapshot, RunState.RETRYING, f"{reason}; it is started again")
            start_again(cluster, run, snapshot.job, manifest)
        show(snapshot, state, reason)
    finally:
        show.close()
    if state in (RunState.FAILED, RunState.LOST):
        raise SunspotError(f"{run.name} {state}: {reason}")
    if state is RunState.DELETING:
        raise ConflictError(f"{run.name} is {state}: {reason}")
    return state


def _follow(
    cluster: Cluster | None, run: Run, began: float, timeout: float | None, show: Lines, cluster_error: str
) -> RunSnapshot:
    """Print every change until the run has ended; returns what is known then.

    An end because the head was given up is not printed: it may be none.
    """
    outage, again = Outage(), command_arguments(cluster, run)
    follower = Follower(cluster, run, cluster_error)
    try:
        for snapshot in follower:
            state, reason = snapshot.state()
            if cluster:
                outage.note(snapshot)
            if not head_given_up(snapshot):
                show(snapshot, state, reason)
            # As long as the cluster does not answer, a failure may be followed by another try.
            sure = state in (RunState.SUCCEEDED, RunState.STOPPED) or not (cluster and snapshot.cluster_trouble)
            if state.terminal and sure and (follower.settled or snapshot.storage_trouble):
                return snapshot
            if timeout is not None and time.monotonic() - began > timeout:
                raise GaveUpError(
                    f"{run.name} is {state} after {timeout:g} s: {reason}. It goes on; `sunspot wait {again}` "
                    "comes back to it"
                )
    except KeyboardInterrupt:
        show.close()
        warn(f"\nthe run goes on; `sunspot wait {again}` comes back to it, `sunspot stop {again}` ends it")
        raise
    raise AssertionError("following never ends by itself")


# ------------------------------------------------------------------------------------------------------------- display


class Lines:
    """Prints a line for every change of state or reason, and one for progress now and then."""

    def __init__(self, run: Run, as_json: bool, progress_every_s: float = PROGRESS_EVERY_S) -> None:
        self._run, self._as_json, self._progress_every_s = run, as_json, progress_every_s
        self._before: tuple[RunState, str] | None = None
        self._step = -1
        self._at = 0.0

    def __call__(self, snapshot: RunSnapshot, state: RunState, reason: str) -> None:
        step = snapshot.status.step if snapshot.status else 0
        goes_on = state is RunState.RUNNING and step != self._step
        due = goes_on and time.monotonic() - self._at >= self._progress_every_s
        if (state, reason) == self._before and not due:
            return
        self._before, self._step, self._at = (state, reason), step, time.monotonic()
        if self._as_json:
            record = {"time": snapshot.time, "run": self._run.name, "state": state, "reason": reason}
            print_json_line({**record, **progress(snapshot)})
        else:
            print_text(f"{time.strftime('%H:%M:%S')}  {state:9}  {describe(snapshot, state, reason)}", flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""


class LiveLine(Lines):
    """For a terminal: the same lines, and below them a live one."""

    def __init__(self, run: Run) -> None:
        from rich.console import Console

        super().__init__(run, as_json=False, progress_every_s=float("inf"))
        self._began = time.monotonic()
        self._status = Console(highlight=False, markup=False, emoji=False).status("")
        self._status.start()

    def __call__(self, snapshot: RunSnapshot, state: RunState, reason: str) -> None:
        super().__call__(snapshot, state, reason)
        waited = f"{state}, {in_words(time.monotonic() - self._began)}"
        self._status.update(describe(snapshot, state, "") if state is RunState.RUNNING else waited)

    def close(self) -> None:
        self._status.stop()


def describe(snapshot: RunSnapshot, state: RunState, reason: str) -> str:
    """One line for people: the progress while it trains, otherwise the reason of the state."""
    if state in (RunState.FAILED, RunState.LOST):
        return "for good"  # the error with which the command ends says why
    now = progress(snapshot)
    if state is not RunState.RUNNING or not now["total_steps"]:
        return reason
    parts = [f"step {now['step']} of {now['total_steps']}", f"epoch {now['epoch']}"]
    if now["loss"] is not None:
        parts.append(f"loss {now['loss']:.4g}")
    if now["rows_per_s"] is not None:
        parts.append(f"{now['rows_per_s']:.0f} rows/s")
    if now["seconds_left"] is not None:
        parts.append(f"{in_words(now['seconds_left'])} left")
    return "  ".join(part for part in (*parts, reason) if part)


def progress(snapshot: RunSnapshot) -> dict[str, Any]:
    """How far the run is, by its own last status."""
    status, left = snapshot.status, None
    if status and status.state is RunState.RUNNING and status.step_time_s is not None:
        left = max(0.0, (status.total_steps - status.step) * status.step_time_s - (snapshot.time - status.seen))
    names = ("step", "total_steps", "epoch", "checkpoint", "loss", "rows_per_s")
    return {**{name: getattr(status, name, None) for name in names}, "seconds_left": left}
