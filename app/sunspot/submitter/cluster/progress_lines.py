"""Prints a run's state and progress."""

import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from sunspot.formatting import in_words
from sunspot.run import Run
from sunspot.run.status import RunState, Status
from sunspot.submitter.cluster.observation import RunSnapshot, stored_arguments
from sunspot.submitter.cluster.start import Submission
from sunspot.submitter.manifest.pods import PodPrice
from sunspot.submitter.printing import print_json, print_json_line, print_table, print_text

PROGRESS_EVERY_S, PROGRESS_FRACTION = 10.0, 0.01
"""Minimum number of seconds between progress lines, and minimum progress between them as a fraction of all steps."""

SOME_PROGRESS_EVERY_S = 60.0
"""Seconds after which even a single new step gets a line."""

AGES = re.compile(r"\b\d+ (s|min|h|days)\b")
"""Pattern of durations in reasons (`in_words`), which change from one snapshot to the next."""


def print_state(run: Run, state: RunState, reason: str, as_json: bool) -> None:
    """Print a run's state and the reason."""
    if as_json:
        print_json({"run": run.name, "state": state, "reason": reason})
    else:
        print_text(f"{run.name}: {state}, {reason}")


def print_pods(pods: Sequence[PodPrice]) -> None:
    """Print how many pods a job can have, and their prices per hour if known."""
    if not pods:
        return
    rows: list[list[Any]] = []
    for each in pods:
        number = str(each.most) if each.least == each.most else f"{each.least}..{each.most}"
        rows.append([each.name, number, each.price, each.price and each.price * each.most])
    at_most = sum(row[-1] or 0.0 for row in rows)
    if at_most:
        print_table(["pods", "number", "an hour each", "an hour at most"], [*rows, ["all", None, None, at_most]])
    else:
        print_table(["pods", "number"], [row[:2] for row in rows])


def print_submission(submission: Submission, as_json: bool) -> None:
    """Print the result of a submission."""
    access, job = submission.access, submission.job
    namespace = access.require_cluster().namespace
    if as_json:
        record = {"run": access.run.name, "job": job, "namespace": namespace, "storage": access.run.location}
        record |= {"place": submission.place} if submission.place else {}
        done = {name: getattr(submission, name) for name in ("action", "reason", "dry_run")}
        print_json_line({**record, **done})  # `submit --wait` prints more lines
        return
    would = "would be " if submission.dry_run else ""
    print_text(f"{job} {would}{submission.action} in namespace {namespace} ({submission.reason})")
    if submission.action != "finished" and not submission.dry_run:
        print_text(f"  sunspot wait {access.arguments}")
        print_text(f"  sunspot logs -f {stored_arguments(access.run)}")


class ProgressLines:
    """Prints a line whenever the state or the reason changes.

    On a terminal, a live line shows the progress. Otherwise a progress line is printed from time to time.
    """

    def __init__(self, run: Run, as_json: bool = False) -> None:
        self._run, self._as_json = run, as_json
        self._live: Any = None
        if sys.stdout.isatty() and not as_json:
            from rich.console import Console

            self._live = Console(highlight=False, markup=False, emoji=False).status("")
        self._began = time.monotonic()
        self._before: tuple[RunState, str] | None = None
        self._step = -1
        self._at = 0.0

    def __call__(self, snapshot: RunSnapshot, state: RunState, reason: str) -> None:
        if self._live:
            self._live.start()
            waited = f"{state}, {in_words(time.monotonic() - self._began)}"
            self._live.update(describe(snapshot, state, "") if state is RunState.RUNNING else waited)
        shown = state, AGES.sub("", reason)
        status = snapshot.storage.status
        if shown == self._before and not self._is_progress_due(state, status):
            return
        self._before = shown
        self._step = status.step if status else 0
        self._at = time.monotonic()
        if self._as_json:
            record = {"time": snapshot.cluster.time, "run": self._run.name, "state": state, "reason": reason}
            print_json_line({**record, **progress(snapshot)})
        else:
            print_text(f"{time.strftime('%H:%M:%S')}  {state:9}  {describe(snapshot, state, reason)}", flush=True)

    def _is_progress_due(self, state: RunState, status: Status | None) -> bool:
        """Return True if a progress line is due. Always False on a terminal, which has a live line."""
        if self._live or state is not RunState.RUNNING or not status or status.step == self._step:
            return False
        far = abs(status.step - self._step) >= PROGRESS_FRACTION * status.total_steps
        return time.monotonic() - self._at >= (PROGRESS_EVERY_S if far else SOME_PROGRESS_EVERY_S)

    def close(self) -> None:
        """Remove the live line from the terminal."""
        if self._live:
            self._live.stop()


def describe(snapshot: RunSnapshot, state: RunState, reason: str) -> str:
    """Return one line: the progress of a run that is training, or the reason for any other state.

    For FAILED and LOST, return only "for good", which follows the state in the printed line. The reason is in the error
    with which the command ends.
    """
    if state in (RunState.FAILED, RunState.LOST):
        return "for good"
    now = progress(snapshot)
    if state is not RunState.RUNNING or not now["total_steps"]:
        return reason
    parts = [f"step {now['step']} of {now['total_steps']}", f"epoch {now['epoch']}"]
    if now["loss"] is not None:
        since = f" since step {now['nan_since']}" if now["nan_since"] else ""
        parts.append(f"loss {now['loss']:.4g}{since}")
    if now["rows_per_s"] is not None:
        parts.append(f"{now['rows_per_s']:.0f} rows/s")
    if now["seconds_left"] is not None:
        parts.append(f"{in_words(now['seconds_left'])} left")
    return "  ".join(part for part in (*parts, reason) if part)


def progress(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return the progress in the run's last status, with the keys of the printed JSON lines."""
    status = snapshot.storage.status
    left = None
    if status and status.state is RunState.RUNNING and status.step_time_s is not None:
        left = max(0.0, (status.total_steps - status.step) * status.step_time_s - (snapshot.cluster.time - status.seen))
    names = ("step", "total_steps", "epoch", "checkpoint", "loss", "rows_per_s")
    since = (status.nan_since or None) if status else None
    return {**{name: getattr(status, name, None) for name in names}, "nan_since": since, "seconds_left": left}
