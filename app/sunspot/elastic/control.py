"""The control channel between driver and workers: a Ray actor on the driver's node, as workers cannot call a driver."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sunspot.background import Background
from sunspot.errors import SunspotError, TerminatedError
from sunspot.run import Run
from sunspot.run.failures import Failure
from sunspot.run.incidents import Cause, blame, starved
from sunspot.run.status import stop_requested

COMMAND_EVERY_S = 0.5
"""Seconds between two polls of the command: a notice may be as short as 15 s."""

CONTROL_TIMEOUT_S = 60
"""A control channel that does not answer for so long is gone, and with it the driver."""


@dataclass(frozen=True)
class Command:
    """What the driver asks of the worker group."""

    stop: bool = False
    "Save and return: the run ends here."
    restart: bool = False
    "Save and end: Ray starts a new worker group, without the preempted nodes or with the new ones."
    deadline: float | None = None
    "When the first preempted node is gone, in seconds since the epoch."
    save: bool = False
    "Save, and train on: the head is to go, and a new one continues from there."
    moves: bool = False
    "Nodes are given back, and with them the copies in their memory: the state has to be in storage."


@dataclass(frozen=True)
class RankError:
    """The error that ended one rank."""

    failure: Failure
    world_size: int
    taken: int
    "Steps that its group had taken."
    from_outside: bool
    "It is no error of the program, but of a network, a disk, memory or a device."
    from_memory: bool = False
    "Its group began from a copy in memory."
    node: str = ""
    "Ray's id of its node."
    cuda_error: int | None = None
    "CUDA's code, if it is an error of CUDA other than too little memory."


@dataclass(frozen=True)
class GroupEnd:
    """What is known of the end of the newest worker group."""

    errors: list[RankError] = field(default_factory=list)
    "Of the ranks that could tell."
    state: dict[str, Any] = field(default_factory=dict)
    "The newest, as in `ControlChannel.show`."
    hangs: list[dict[str, Any]] = field(default_factory=list)
    "The events of ranks that hung, without stacks."
    fatal: Exception | None = None
    "The error that ends the training for good."
    gave_up: str = ""
    "Why no other group starts; empty if one may."
    nodes: dict[int, str] = field(default_factory=dict)
    "Ray's id of each rank's node, unless the group was asked to end."


@ray.remote(num_cpus=0)
class ControlChannel:
    """Holds the newest state of the worker group, the command for it, and the facts of the open incident."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._records: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._command = Command()
        self._group: dict[str, Any] = {}
        self._incident: dict[str, Any] = {}
        "Why the present group ends, as far as is known."
        self._fatal_error: Exception | None = None
        self._errors: list[RankError] = []
        "Of the newest attempt that failed."
        self._hangs: list[dict[str, Any]] = []
        "Of ranks, since a group has begun."
        self._judged = 0
        "How many of these are of groups that have been followed by another."
        self._gave_up = ""
        self._restart: dict[str, Any] = {}
        "Why it began; empty once it has taken a step."
        self._free_memory: dict[str, int] = {}
        "Of each GPU, as the newest group began on it."
        self._left_out: list[dict[str, Any]] = []
        "Nodes left out since the newest group began."

    # ------------------------------------------------------------------------------------------------- by the workers

    def begin(self, group: dict[str, Any]) -> dict[str, Any]:
        """Register a new worker group: its `attempt`, `world_size` and `nodes` (Ray's id for each rank).

        Returns the facts of the incident that ended the group before, that group's `last_state`, and, as `left_out`,
        the `detail` and `time` of each node left out since it began.
        """
        self._group = group
        self._command = replace(self._command, restart=False, deadline=None, moves=False, save=False)
        self._restart, self._incident = {**self._incident, **self._restart}, {}
        self._hangs, self._judged = [], 0
        left_out, self._left_out = self._left_out, []
        return {**self._restart, "last_state": self._state, "left_out": left_out}

    def explain(self, incident: dict[str, Any]) -> None:
        """Put why the driver's first group begins, as its claim found it, before what was noted meanwhile."""
        self._incident = {**self._incident, **incident}

    def recovered(self) -> None:
        """Close the incident: the new group has taken its first step."""
        self._restart = {}

    def free_memory(self, gpu: str) -> int:
        """The bytes that were free on a GPU when the newest group began on it; 0: none has."""
        return self._free_memory.get(gpu, 0)

    def keep_free_memory(self, gpu: str, size: int) -> None:
        """Keep how many bytes are free on a GPU as a group begins on it."""
        self._free_memory[gpu] = size

    def command(self) -> Command:
        """The newest command."""
        return self._command

    def fail(self, error: Exception) -> None:
        """Keep an error that no restart can fix; the first one stands."""
        self._fatal_error = self._fatal_error or error

    def failed(self, error: RankError) -> None:
        """Keep the error that ends a rank."""
        others = [other for other in self._errors if other.failure.attempt == error.failure.attempt]
        self._errors = [*others, error]

    def hung(self, event: dict[str, Any], late: bool) -> None:
        """Keep what a rank that hung tells of itself, and with it why its group ends; `late`: another has begun."""
        self._hangs.insert(0 if late else len(self._hangs), event)
        self._judged += late
        if self._incident.get("cause") in (None, Cause.HUNG, Cause.NO_ROWS):
            cause = Cause.NO_ROWS if starved(self._hangs, event["world_size"]) else Cause.HUNG
            detail = blame(self._hangs, event["world_size"])
            self._incident = {"noticed": event["time"], **self._incident, "cause": cause, "detail": detail}

    def fatal_error(self) -> Exception | None:
        """The error that ends the training for good, if there is one."""
        return self._fatal_error

    def show(self, state: dict[str, Any]) -> None:
        """Keep the newest state: `attempt`, `step`, `loss`, `committed` (step of the last checkpoint) and `time`."""
        self._state = state

    def record(self, record: dict[str, Any]) -> None:
        """Keep a record of the metric history for the terminal."""
        self._records.append(record)

    def say(self, line: str) -> None:
        """Keep a line for the user."""
        self._lines.append(line)

    # ----------------------------------------------------------------------------------------- by Ray's controller

    def group_end(self) -> GroupEnd:
        """What is known of why the newest group ended."""
        hangs, nodes = self._hangs[self._judged :], self._group.get("nodes", {})
        return GroupEnd(self._errors, self._state, hangs, self._fatal_error, self._gave_up, nodes)

    def start_again(self, line: str) -> None:
        """Say why another group starts, and forget what is known of the end of the one before."""
        self.say(line)
        if self._state:
            self._state = {**self._state, "doing": "starting again"}
        self._errors, self._judged = [], len(self._hangs)

    def give_up(self, reason: str) -> None:
        """Keep why no other group starts."""
        self._gave_up = reason

    def over(self) -> None:
        """The newest group has ended: what becomes of its nodes now is no event for it."""
        self._group = {}

    # -------------------------------------------------------------------------------------------------- by the driver

    def stop(self) -> None:
        """Ask this worker group, and any after it, to stop."""
        self._command = replace(self._command, stop=True)

    def save(self) -> None:
        """Ask the worker group to save once."""
        self._command = replace(self._command, save=True)

    def restart_group(self, cause: str, detail: str, noticed: float, deadline: float | None) -> None:
        """Ask the worker group to save and end; times are in seconds since the epoch."""
        self.note(cause=cause, detail=detail, noticed=noticed)
        self.say(f"{cause}: {detail}; the workers save, and start again")
        self._command = replace(self._command, restart=True, deadline=deadline, moves=cause == Cause.MOVED)
        self._group = {}

    def note(self, **facts: Any) -> None:
        """Add facts of the open incident; what was noted first stands."""
        self._incident = {**facts, **self._incident}

    def leave_out(self, lines: list[str]) -> None:
        """Keep which nodes were left out, and why, for the events."""
        self._left_out += [{"detail": line, "time": time.time()} for line in lines]

    def group(self) -> dict[str, Any]:
        """The newest worker group; empty before the first, and once it was asked to end or has failed for a GPU."""
        return self._group

    def fetch(self) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
        """The newest state, and the records and lines since the last fetch."""
        fetched = self._state, self._records, self._lines
        self._records, self._lines = [], []
        return fetched


@contextmanager
def open_control() -> Iterator[Any]:
    """A control channel while the context lasts; on the driver's node, where no preemption ends it."""
    here = ray.get_runtime_context().get_node_id()
    control = ControlChannel.options(  # type: ignore[attr-defined]
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)
    ).remote()
    try:
        yield control
    finally:
        ray.kill(control)


class CommandPoller(Background):
    """The command as it was less than a second ago, while the context lasts; no step is too long for that."""

    def __init__(self, control: Any) -> None:
        super().__init__(COMMAND_EVERY_S, self._ask)
        self._control = control
        self._known = Command()

    def poll(self) -> Command:
        """The newest answer; before the context, and until the first answer, nothing is asked for."""
        return self._known

    def _ask(self) -> None:
        with suppress(RayError):  # the driver is gone, and Ray ends this process
            self._known = ray.get(self._control.command.remote(), timeout=CONTROL_TIMEOUT_S)


STOP_CHECK_EVERY_S = 1.0
"""Seconds between two checks for SIGTERM: a stopped Ray job has RAY_JOB_STOP_WAIT_TIME_S left to save."""

MARKER_READ_EVERY_S = 5.0
"""Seconds between two checks for the stop marker: each is a request to storage."""


class StopRequest:
    """Whether, and why, the run stops."""

    def __init__(self) -> None:
        self.marked = False
        "`sunspot stop` left its marker: later starts may not train either."
        self.terminated = False
        "This process got SIGTERM: a later start resumes the run."
        self.interrupted = False
        "It got SIGINT (Ctrl-C): likewise."

    def __bool__(self) -> bool:
        return self.marked or self.terminated or self.interrupted

    def raise_signal(self, kept: str, job: str) -> None:
        """Raise, once all is saved, what a signal asked for: the run is stopped; `kept` says what is there.

        A cluster's `job` has failed instead: its operator starts it again, elsewhere.
        """
        if self.interrupted:
            raise KeyboardInterrupt(f"interrupted: {kept}")
        if self.terminated:
            raise (SunspotError if job else TerminatedError)(f"told to end by SIGTERM: {kept}")


@contextmanager
def watch_stop(run: Run, control: Any, stop_request: StopRequest) -> Iterator[None]:
    """Watch for SIGTERM, SIGINT and the stop marker while the context lasts, and ask the workers to stop.

    A second SIGINT raises `KeyboardInterrupt` at once.
    """
    read, told = 0.0, False

    def check() -> None:
        nonlocal read, told
        if time.monotonic() - read >= MARKER_READ_EVERY_S:
            read = time.monotonic()
            stop_request.marked = stop_request.marked or stop_requested(run)
        if stop_request.interrupted and not told:
            told = True
            print("interrupted: it saves, and ends; Ctrl-C again ends it at once, without", flush=True)
        if stop_request.terminated and not told:
            told = True
            print("told to end by SIGTERM: it saves, and ends", flush=True)
        if stop_request:
            control.stop.remote()

    def terminate(number: int, frame: FrameType | None) -> None:
        stop_request.terminated = True  # and no more: a signal may interrupt anything

    def interrupt(number: int, frame: FrameType | None) -> None:
        if stop_request.interrupted:
            raise KeyboardInterrupt
        stop_request.interrupted = True

    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {signal.SIGTERM: terminate, signal.SIGINT: interrupt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with Background(STOP_CHECK_EVERY_S, check):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
