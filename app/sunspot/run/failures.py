"""Records of failed processes: errors with tracebacks, and hung ranks as reported by their watchdogs.

A process leaves no record if it is killed by anything other than its watchdog.
"""

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sunspot.background import map_parallel
from sunspot.errors import SunspotError, by_name, format_trace, without_secrets
from sunspot.run import Run, to_json
from sunspot.run.logs import STREAM, driver_stream, rank_stream
from sunspot.run.objects import Count, SmallCount, Timestamp, as_event, read, read_or_default

INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen ")
"""Pattern for paths of installed code, which is the least relevant to users."""

OURS = re.compile(re.escape(f"{Path(__file__).resolve().parent.parent}/") + r"(?!tasks/)")
"""Pattern for paths of Sunspot's code, which is less relevant to users than their own code."""

FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)

MAX_MESSAGE, MAX_TRACEBACK = 2000, 20_000
"""Maximum numbers of characters kept. A message can quote a page, and a recursion can have a thousand frames. The end
is kept, because it describes the error."""

LOST_PEER = re.compile(r"gloo|NCCL|Connection closed by peer|ActorDied|actor died", re.IGNORECASE)
"""Pattern for the errors of processes that lost a peer, for which gloo raises a plain RuntimeError."""


@dataclass(frozen=True)
class Failure:
    """The error that ended one of a run's processes."""

    attempt: Count
    "The attempt's number, or 0 for the driver, which can have several attempts."
    rank: Count | None
    "The process's rank, or None for the driver."
    step: Count
    "The number of optimizer steps taken."
    type: str
    message: str
    traceback: str
    file: str = ""
    "The file of the innermost frame in the user's code. Empty if the error has no location."
    line: Count = 0
    function: str = ""
    time: Timestamp = field(default_factory=time.time)
    "Seconds since the epoch."

    @property
    def summary(self) -> str:
        """The first line of the error's message, preceded by the error's class unless the error is Sunspot's own."""
        first = next((line.strip() for line in self.message.splitlines() if line.strip()), "")
        if by_name(self.type).__name__ == self.type:
            return first
        return f"{self.type}: {first}" if first else self.type

    @property
    def is_consequence(self) -> bool:
        """True if the process failed because it lost a peer."""
        return bool(LOST_PEER.search(f"{self.type}: {self.message}"))


def describe_failure(error: BaseException, attempt: int, rank: int | None, step: int) -> Failure:
    """Return the record of an error that ends a process.

    The record of an error raised by Sunspot itself has no file and line, because the message says what is wrong.
    """
    kind = type(error).__name__
    message = without_secrets(str(error))
    trace = format_trace(error)
    place = find_place(trace)
    if not OURS.match(place[0]):  # the folder of an unpacked code archive is named after the archive's hash
        place = (place[0].removeprefix(f"{os.getcwd()}/"), *place[1:])
    elif isinstance(error, SunspotError):
        place = ("", 0, "")
    return Failure(attempt, rank, step, kind, message[-MAX_MESSAGE:], trace[-MAX_TRACEBACK:], *place)


def find_place(text: str) -> tuple[str, int, str]:
    """Return the file, line and function of a traceback's innermost frame, preferably one in the user's code."""
    frames = [(file, int(line), function) for file, line, function in FRAME.findall(text)]
    called = [frame for frame in frames if not INSTALLED.search(frame[0])]
    own = [frame for frame in called if not OURS.match(frame[0])]
    return (own or called or frames or [("", 0, "")])[-1]


def record_failure(run: Run, failure: Failure) -> None:
    """Write a failure to the run. Raises `StorageError`."""
    name = driver_stream() if failure.rank is None else rank_stream(failure.attempt, failure.rank)
    run.storage.write(run.key("failures", f"{name}.json"), to_json(asdict(failure)))


def read_failures(run: Run, damaged: list[str] | None = None) -> list[Failure]:
    """Return all readable failures, oldest first. Raises `StorageError`.

    A message about each damaged failure is added to `damaged`, or logged as a warning if `damaged` is None.
    """
    ours = [file for file, _ in run.entries("failures") if STREAM.fullmatch(file.removesuffix(".json"))]
    found = map_parallel(
        lambda file: read_or_default(lambda: read(run, Failure, "failures", file), None, damaged), ours
    )
    return sorted((failure for failure in found if failure), key=lambda failure: failure.time)


# ----------------------------------------------------------------------------------------------------------- hung ranks

HUNG = "hung"
"""The name of the event that records a hung rank."""

BRING_ROWS = (
    "Ray Data brought no rows: the processes that read them are gone or busy, or its object store is full. Give it "
    "more CPUs for reading, in a cluster on nodes that are not reclaimed (data_workers in the profile; `kubectl get "
    "pods` shows which pods are gone), or set a longer SUNSPOT_HANG_TIMEOUT_S"
)
"""The reason why ranks received no rows, and the remedy."""


NO_STACKS = "left no stacks: it was stopped, or lost with its node"
"""The description of a rank that the others waited for, if its watchdog reported nothing."""


@dataclass(frozen=True)
class Hang:
    """A rank that hung until its watchdog killed the process."""

    rank: SmallCount
    detail: str
    "The location at which the rank was hanging, as readable text."
    waiting: bool
    "True if the rank was waiting for other ranks."
    loading: bool = False
    "True if the rank was waiting for rows from Ray Data."
    starting: bool = False
    "True if the rank's group had not claimed an attempt yet. `attempt` is then the previous one."
    world_size: SmallCount = 0
    attempt: Count = 0
    step: Count = 0
    time: Timestamp = 0.0
    stacks: str = ""

    def record(self) -> dict[str, Any]:
        """Return the hang as one of the run's events."""
        return {**asdict(self), "event": HUNG}


def read_hangs(events: Iterable[dict[str, Any]]) -> list[Hang]:
    """Return the hung ranks recorded in a run's events. Malformed events are skipped."""
    return [hang for event in events if event["event"] == HUNG and (hang := as_event(Hang, event))]


def find_suspects(hangs: Iterable[Hang], world_size: int) -> list[int]:
    """Return the ranks of one attempt that probably blocked the others, or an empty list if there is no clear suspect.

    A hung rank makes all other ranks wait in a collective. A suspect is therefore a rank that was not waiting, or that
    left no stacks because its process was suspended or its node was lost.
    """
    waiting = {hang.rank: hang.waiting for hang in hangs}
    return [rank for rank in range(world_size) if not waiting.get(rank)] if waiting else []


def waited_for_rows(hangs: Sequence[Hang], world_size: int) -> bool:
    """Return True if the ranks that blocked the others were only waiting for rows from Ray Data."""
    loading = {hang.rank for hang in hangs if hang.loading}
    blamed = find_suspects(hangs, world_size)
    return bool(blamed) and loading.issuperset(blamed)


def describe_suspects(hangs: Sequence[Hang], world_size: int) -> str:
    """Describe which ranks of one attempt blocked the others, and where.

    If there is no suspect, describe all hung ranks.
    """
    ordered = sorted(hangs, key=lambda hang: hang.rank)
    blamed = find_suspects(ordered, world_size)
    details = [hang.detail for hang in ordered if hang.rank in blamed or not blamed]
    silent = [f"rank {rank}: {NO_STACKS}" for rank in blamed if rank not in {hang.rank for hang in ordered}]
    return "; ".join([*details, *silent])
