"""Summarizes a torch.profiler trace by operation."""

from __future__ import annotations

import gzip
import io
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sunspot.errors import DamageError
from sunspot.run.objects import parse
from sunspot.run.size_limits import MAX_TRACE_BYTES
from sunspot.storage.base import Storage

CPU, GPU = "CPU", "GPU"

DEVICES = {
    **dict.fromkeys(("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"), CPU),
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), GPU),
}
"""Devices, keyed by the categories of events that take time on them."""

STEP = "ProfilerStep#"
"""Prefix of the name of an event that covers a step."""

OUTSIDE, BUSY = "(outside operations)", "(all operations)"
"""Names for the time of a step in no operation, and for the time in which the GPU had any work."""


@dataclass(frozen=True)
class TraceEvent:
    """An event in a trace, with times in microseconds."""

    name: str
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0


@dataclass(frozen=True)
class Trace:
    """The part of a trace file that the summary uses."""

    traceEvents: tuple[TraceEvent, ...]  # the name in the file


class Operation(NamedTuple):
    """The number and the total time of an operation's calls on the CPU or the GPU."""

    device: str
    operation: str
    calls: int
    seconds: float
    "Time in the operation itself, without the operations that it calls."


def read_summary(storage: Storage, key: str) -> list[Operation]:
    """Return the operations in a compressed trace. Raises `DamageError` if the trace is too large or malformed."""
    where = storage.locate(key)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(storage.read(key))) as stream:
            content = stream.read(MAX_TRACE_BYTES + 1)
    except (OSError, EOFError) as error:
        raise DamageError(f"{where} cannot be unpacked: {error}") from error
    if len(content) > MAX_TRACE_BYTES:
        raise DamageError(f"{where} cannot be summarized: it is larger than {MAX_TRACE_BYTES >> 20} MiB")
    return summarize(parse(Trace, content, where).traceEvents)


def summarize(events: Iterable[TraceEvent]) -> list[Operation]:
    """Return the operations in a trace, sorted from the longest to the shortest total time."""
    calls: dict[tuple[str, str], int] = defaultdict(int)
    times: dict[tuple[str, str], float] = defaultdict(float)
    callers: dict[tuple[int | str, int | str], list[TraceEvent]] = defaultdict(list)
    gpu_end = 0.0

    def add(device: str, name: str, number: int, us: float) -> None:
        key = device, OUTSIDE if name.startswith(STEP) else name
        calls[key] += number
        times[key] += us / 1e6

    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        device = DEVICES.get(event.cat)
        end = event.ts + event.dur
        if device:
            add(device, event.name, 1, event.dur)
        if device == GPU:
            add(GPU, BUSY, 1, max(0.0, end - max(event.ts, gpu_end)))
            gpu_end = max(gpu_end, end)
        elif device == CPU:
            stack = callers[event.pid, event.tid]
            while stack and stack[-1].ts + stack[-1].dur <= event.ts:
                stack.pop()
            if stack:
                add(CPU, stack[-1].name, 0, -event.dur)
            stack.append(event)
    return sorted((Operation(*key, calls[key], times[key]) for key in times), key=lambda each: -each.seconds)
