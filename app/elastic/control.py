"""Where the driver and rank 0 leave word for each other: an actor beside the driver, which workers cannot call."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.background import Background
from app.run import Run
from app.run.status import stop_requested

COMMAND_EVERY_S = 0.5
"""Seconds between two questions whether to go on: a notice may be as short as 15 s."""

CONTROL_TIMEOUT_S = 60
"""The control channel is beside the driver: if it does not answer for so long, the driver is gone."""


@dataclass(frozen=True)
class Command:
    """What the driver wants of the worker group."""

    stop: bool = False
    "Save and return: the run is to end here."
    restart: bool = False
    "Save and end: Ray starts a new worker group, as a node goes or more have come."
    deadline: float | None = None
    "When the node that goes is gone, in seconds since the epoch."


@ray.remote(num_cpus=0)
class ControlChannel:
    """Holds the newest news of the worker group, and what is wanted of it."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._records: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._command = Command()
        self._group: dict[str, Any] = {}
        self._incident: dict[str, Any] = {}
        "What is known of why the worker group ends."
        self._fatal_error: Exception | None = None
        self._restart: dict[str, Any] = {}
        "What is known of why it began; empty once it has taken a step."

    # ------------------------------------------------------------------------------------------------- by the workers

    def begin(self, group: dict[str, Any]) -> dict[str, Any]:
        """A new worker group is there: its `attempt`, `world_size` and `nodes` (Ray's id for each rank).

        The answer is what is known of the incident that ended the one before: its facts, and `seen`, its last state.
        """
        self._group = group
        self._command = replace(self._command, restart=False, deadline=None)
        self._restart, self._incident = {**self._incident, **self._restart}, {}
        return {**self._restart, "seen": self._state}

    def recovered(self) -> None:
        """The new group has taken its first step: the incident is closed."""
        self._restart = {}

    def command(self) -> Command:
        """What the driver wants."""
        return self._command

    def fail(self, error: Exception) -> None:
        """An error that no new worker group can mend: the first one stands."""
        self._fatal_error = self._fatal_error or error

    def fatal_error(self) -> Exception | None:
        """The error that ended the training for good, if one did."""
        return self._fatal_error

    def show(self, state: dict[str, Any]) -> None:
        """Take the newest state: `attempt`, `step`, `loss`, `committed` (step of the last checkpoint) and `time`."""
        self._state = state

    def record(self, record: dict[str, Any]) -> None:
        """Take a record of the metric history."""
        self._records.append(record)

    def say(self, line: str) -> None:
        """Take a line for the user."""
        self._lines.append(line)

    # -------------------------------------------------------------------------------------------------- by the driver

    def stop(self) -> None:
        """From now on, every worker group hears that the run is to stop."""
        self._command = replace(self._command, stop=True)

    def restart_group(self, cause: str, detail: str, noticed: float, deadline: float | None) -> None:
        """The worker group hears that it is to save and end; times are in seconds since the epoch."""
        self.note(cause=cause, detail=detail, noticed=noticed)
        self._command = replace(self._command, restart=True, deadline=deadline)
        self._group = {}

    def note(self, **facts: Any) -> None:
        """Add to what is known of the open incident; what was known first stands."""
        self._incident = {**facts, **self._incident}

    def group(self) -> dict[str, Any]:
        """The newest worker group; empty before there is one, and once it was told to end."""
        return self._group

    def fetch(self) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
        """The newest state, and the records and lines since the last fetch."""
        news = self._state, self._records, self._lines
        self._records, self._lines = [], []
        return news


@contextmanager
def open_control() -> Iterator[Any]:
    """A control channel on the driver's node, where no spot node takes it along; for as long as the context lasts."""
    here = ray.get_runtime_context().get_node_id()
    control = ControlChannel.options(  # type: ignore[attr-defined]
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)
    ).remote()
    try:
        yield control
    finally:
        ray.kill(control)


class CommandPoller:
    """One worker's view of what the driver wants, never more than about a second old; asking does not wait."""

    def __init__(self, control: Any) -> None:
        self._control = control
        self._answer: Any = None
        self._asked = 0.0
        self._known = Command()

    def look(self) -> Command:
        """The newest answer; sends the next question when it is time."""
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            self._known, self._answer = ray.get(self._answer), None
        if self._answer is None and time.monotonic() - self._asked >= COMMAND_EVERY_S:
            self._answer, self._asked = self._control.command.remote(), time.monotonic()
        return self._known


STOP_CHECK_EVERY_S = 1.0
"""Seconds between two looks at the signal: a stopped Ray job has RAY_JOB_STOP_WAIT_TIME_S left to save."""

MARKER_READ_EVERY_S = 5.0
"""Seconds between two looks at the marker: each is a request to storage."""


class StopRequest:
    """Why the run is to stop; both are false while it is not."""

    def __init__(self) -> None:
        self.marked = False
        "`sunspot stop` left its marker: no later start may train either."
        self.terminated = False
        "This process got SIGTERM: a later start goes on."

    def __bool__(self) -> bool:
        return self.marked or self.terminated


@contextmanager
def watch_stop(run: Run, control: Any, stop_request: StopRequest) -> Iterator[None]:
    """Fill in `stop_request`, and tell the workers to save and return as soon as it is true."""
    read = 0.0

    def look() -> None:
        nonlocal read
        if time.monotonic() - read >= MARKER_READ_EVERY_S:
            read = time.monotonic()
            stop_request.marked = stop_request.marked or stop_requested(run)
        if stop_request:
            control.stop.remote()

    def terminate(number: int, frame: FrameType | None) -> None:
        stop_request.terminated = True  # no more: a signal may come in the middle of anything

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if in_main_thread else None
    try:
        with Background(STOP_CHECK_EVERY_S, look):
            yield
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
