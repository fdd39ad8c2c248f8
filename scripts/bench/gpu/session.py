"""The device, the clock and the results of a measurement, and steps measured in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import torch

WARM_UP_TURNS = 2
"""Turns at the beginning that are not measured: cuDNN chooses kernels, and torch.compile compiles."""

PROFILED_STEPS = 3
"""Steps in which operations are counted."""


@dataclass
class Session:
    """One call of the benchmark on one device."""

    device: torch.device
    limit_s: float
    "Maximum number of seconds for the whole call."
    folder: Path
    "The folder of the results."
    clock: Callable[[], float] = time.monotonic
    subject: str = ""
    subject_ends: float = 0.0

    def __post_init__(self) -> None:
        self._began = self.clock()
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("table.md", "turns.jsonl"):
            (self.folder / name).write_text("")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self._began

    @property
    def left_s(self) -> float:
        """The seconds that are left to the current subject."""
        return self.subject_ends - self.elapsed_s

    def begin(self, subject: str, limit_s: float) -> None:
        """Begin a subject, which ends within `limit_s` seconds and before the limit of the whole call."""
        self.subject = subject
        self.subject_ends = min(self.elapsed_s + limit_s, self.limit_s)
        self.say(f"\n## {subject} (after {self.elapsed_s:.0f} s)\n")

    def synchronize(self) -> None:
        """Wait until the device has done all of its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def say(self, line: str) -> None:
        """Print a line and append it to the table."""
        print(line, flush=True)
        with (self.folder / "table.md").open("a") as file:
            file.write(f"{line}\n")

    def store(self, what: str, figures: Mapping[str, object]) -> None:
        """Append the figures of each turn to the results."""
        with (self.folder / "turns.jsonl").open("a") as file:
            file.write(json.dumps({"subject": self.subject, "what": what, **figures}) + "\n")


@dataclass(frozen=True)
class Turn:
    """One turn of one way."""

    step_ms: float
    host_ms: float
    "Milliseconds of the training thread in each step, without what other threads do."


def in_turns(session: Session, ways: Mapping[str, Iterator[None]], steps: int, turns: int) -> dict[str, list[Turn]]:
    """Measure the ways in turn, each for `steps` steps, while time is left. Return the turns of each way.

    A way that fails, for example for lack of memory or of a compiler, is left out.
    """
    figures: dict[str, list[Turn]] = {}
    turn_s = 0.0  # of all ways together
    for name, way in ways.items():
        if session.left_s <= turn_s:
            session.say(f"{name}: left out for lack of time")
            continue
        try:
            for _ in range(WARM_UP_TURNS):
                began = session.elapsed_s
                take_turn(session, way, steps)
        except Exception as error:
            session.say(f"{name}: left out, {type(error).__name__}: {str(error)[:200]}")
            continue
        figures[name] = []
        turn_s += session.elapsed_s - began
    for turn in range(turns):
        if session.left_s < turn_s:
            session.say(f"only {turn} of {turns} turns fit into the time")
            break
        began = session.elapsed_s
        for name in figures:
            figures[name].append(take_turn(session, ways[name], steps))
        turn_s = max(turn_s, session.elapsed_s - began)
    return {name: taken for name, taken in figures.items() if taken}


def most_steps(steps: int, turns: int) -> int:
    """Return more steps than all turns of a way take, so that no epoch ends, with a checkpoint, during a turn."""
    return steps * (WARM_UP_TURNS + turns) + PROFILED_STEPS + 1


def take_turn(session: Session, way: Iterator[None], steps: int) -> Turn:
    """Take steps, and return the milliseconds of each."""
    session.synchronize()
    began, host_began = time.perf_counter(), time.thread_time()
    for _ in islice(way, steps):
        pass
    host_s = time.thread_time() - host_began
    session.synchronize()
    return Turn(1000 * (time.perf_counter() - began) / steps, 1000 * host_s / steps)


def compare(session: Session, title: str, figures: Mapping[str, list[Turn]], rate: tuple[str, float]) -> None:
    """Write a table that compares each way with the first one, turn by turn.

    `rate` contains the name of a unit, such as tokens, and the number of these units in a step.
    """
    unit, per_step = rate
    session.say(f"| {title} | ms per step | thread, ms | ratio of each turn | {unit} |\n|---|---|---|---|---|")
    first = next(iter(figures.values()), [])
    for name, turns in figures.items():
        session.store(f"{title}: {name}", {"turns": [asdict(turn) for turn in turns]})
        ratios = sorted(turn.step_ms / base.step_ms for turn, base in zip(turns, first, strict=True))
        step_ms = median(turn.step_ms for turn in turns)
        session.say(
            f"| {name} | {step_ms:.3f} | {median(turn.host_ms for turn in turns):.3f} | {median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} turns) | {1000 * per_step / step_ms:,.0f} |"
        )


def count_launches(session: Session, way: Iterator[None]) -> float:
    """Return the operations of the device in a step: kernels and copies on a GPU, PyTorch's operators on a CPU."""
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CUDA if session.on_gpu else activities.CPU]) as profiler:
        take_turn(session, way, PROFILED_STEPS)
    kinds = [event.device_type.name.lower() for event in profiler.events() or () if not event.is_user_annotation]
    return kinds.count(session.device.type) / PROFILED_STEPS
