"""The errors that ended processes of a run, with their tracebacks.

    failures/attempt-0001-rank-0003.json     a worker's
    failures/driver-20261121T141013679Z.json a driver's

A killed process leaves none.
"""

import json
import re
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from app.run import Run, to_json
from app.run.logs import driver_stream, rank_stream
from app.storage.base import map_parallel

INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen ")
"""Code that a user looks at last."""

OURS = re.compile(re.escape(f"{Path(__file__).resolve().parent.parent}/") + r"(?!tasks/)")
"""Sunspot's code, which calls the user's: looked at after the user's, before installed code."""

FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)

LONGEST_MESSAGE, LONGEST_TRACEBACK = 2000, 20_000
"""Characters kept. A message may quote a page and a recursion has a thousand frames; the end says what happened."""

LOST_PEER = re.compile(r"gloo|NCCL|Connection closed by peer|ActorDied|actor died", re.IGNORECASE)
"""Matches errors of processes that failed because another one was gone."""


@dataclass(frozen=True)
class Failure:
    """The error that ended one process of a run."""

    attempt: int
    "0: the driver's, in whichever attempt."
    rank: int | None
    "None: the driver."
    step: int
    "Optimizer steps taken."
    type: str
    message: str
    traceback: str
    file: str = ""
    "The innermost line of the user's own code; empty when there is none."
    line: int = 0
    function: str = ""
    time: float = field(default_factory=time.time)
    "Seconds since the epoch."

    @property
    def consequence(self) -> bool:
        """Whether it failed because another process was gone."""
        return bool(LOST_PEER.search(f"{self.type}: {self.message}"))


def describe_failure(error: BaseException, attempt: int, rank: int | None, step: int) -> Failure:
    """The record of an error that ends a process; that of a remote Ray task is found in its text."""
    text = "".join(traceback.format_exception(error))
    file, line, function = find_place(text)
    return Failure(
        attempt=attempt,
        rank=rank,
        step=step,
        type=type(error).__name__,
        message=str(error)[-LONGEST_MESSAGE:],
        traceback=text[-LONGEST_TRACEBACK:],
        file=file,
        line=line,
        function=function,
    )


def find_place(text: str) -> tuple[str, int, str]:
    """File, line and function of a traceback's innermost frame, in the user's code if it has any."""
    frames = [(file, int(line), function) for file, line, function in FRAME.findall(text)]
    called = [frame for frame in frames if not INSTALLED.search(frame[0])]
    own = [frame for frame in called if not OURS.match(frame[0])]
    return (own or called or frames or [("", 0, "")])[-1]


def record_failure(run: Run, failure: Failure) -> None:
    """Write it to the run; raises `StorageError`."""
    name = driver_stream() if failure.rank is None else rank_stream(failure.attempt, failure.rank)
    run.storage.write(run.key("failures", f"{name}.json"), to_json(asdict(failure)))


def read_failures(run: Run) -> list[Failure]:
    """All failures, oldest first. Raises `StorageError`."""
    keys = [entry.key for entry in run.storage.list(run.key("failures")) if entry.key.endswith(".json")]
    found = [Failure(**json.loads(text)) for text in map_parallel(run.storage.read, keys)]
    return sorted(found, key=lambda failure: failure.time)
