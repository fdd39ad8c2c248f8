"""The errors that ended processes of a run, with their tracebacks. A killed process leaves none."""

import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sunspot.background import map_parallel
from sunspot.errors import DamageError, format_trace, without_secrets
from sunspot.run import Run, to_json
from sunspot.run.logs import STREAM, driver_stream, rank_stream
from sunspot.run.objects import Count, Moment, read, tell_damage

INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen ")
"""Code that a user looks at last."""

OURS = re.compile(re.escape(f"{Path(__file__).resolve().parent.parent}/") + r"(?!tasks/)")
"""Sunspot's code, which calls the user's: looked at after the user's, before installed code."""

FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)

MAX_MESSAGE, MAX_TRACEBACK = 2000, 20_000
"""Characters kept. A message may quote a page and a recursion has a thousand frames; the end says what happened."""

LOST_PEER = re.compile(r"gloo|NCCL|Connection closed by peer|ActorDied|actor died", re.IGNORECASE)
"""Matches errors of processes that failed because another one was gone: gloo raises a plain RuntimeError for it."""


@dataclass(frozen=True)
class Failure:
    """The error that ended one process of a run."""

    attempt: Count
    "0: the driver's, in whichever attempt."
    rank: Count | None
    "None: the driver."
    step: Count
    "Optimizer steps taken."
    type: str
    message: str
    traceback: str
    file: str = ""
    "The innermost line of the user's own code; empty when there is none."
    line: Count = 0
    function: str = ""
    time: Moment = field(default_factory=time.time)
    "Seconds since the epoch."

    @property
    def consequence(self) -> bool:
        """Whether it failed because another process was gone."""
        return bool(LOST_PEER.search(f"{self.type}: {self.message}"))


def describe_failure(error: BaseException, attempt: int, rank: int | None, step: int) -> Failure:
    """Return the record of an error that ends a process; that of a remote Ray task is found in its text."""
    kind, message, trace = type(error).__name__, without_secrets(str(error)), format_trace(error)
    place = find_place(trace)
    return Failure(attempt, rank, step, kind, message[-MAX_MESSAGE:], trace[-MAX_TRACEBACK:], *place)


def find_place(text: str) -> tuple[str, int, str]:
    """Return file, line and function of the innermost frame, in the user's code if it has any."""
    frames = [(file, int(line), function) for file, line, function in FRAME.findall(text)]
    called = [frame for frame in frames if not INSTALLED.search(frame[0])]
    own = [frame for frame in called if not OURS.match(frame[0])]
    return (own or called or frames or [("", 0, "")])[-1]


def record_failure(run: Run, failure: Failure) -> None:
    """Write it to the run; raises `StorageError`."""
    name = driver_stream() if failure.rank is None else rank_stream(failure.attempt, failure.rank)
    run.storage.write(run.key("failures", f"{name}.json"), to_json(asdict(failure)))


def read_failures(run: Run, damaged: list[str] | None = None) -> list[Failure]:
    """Return all failures that can be read, oldest first; `damaged` gets why others cannot. Raises `StorageError`."""
    ours = [file for file, _ in run.entries("failures") if STREAM.fullmatch(file.removesuffix(".json"))]

    def read_one(file: str) -> Failure | None:
        try:
            return read(run, Failure, "failures", file)
        except DamageError as error:
            tell_damage(str(error), damaged)
            return None

    found = map_parallel(read_one, ours)
    return sorted((failure for failure in found if failure), key=lambda failure: failure.time)
