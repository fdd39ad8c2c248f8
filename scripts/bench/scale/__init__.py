"""What grows with workers, rows, time and bytes. Each module is a subject, whose `measure` yields rows of one table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple, Protocol


class Figure(NamedTuple):
    """A row of the table."""

    what: str
    size: str
    "What it was measured at, such as '64 workers'."
    value: float
    unit: str
    before: float | None = None
    "The same with the way of before, where that can still be run."


class Subject(Protocol):
    """A module of this package."""

    def measure(self) -> Iterator[Figure]:
        """Measure its figures, one after the other."""


def timed(act: Callable[[], Any]) -> float:
    """Median seconds of processor time of a call that works in one thread."""
    times = []
    for _ in range(9):
        began = time.process_time()
        act()
        times.append(time.process_time() - began)
    return median(times)


def print_table(subjects: dict[str, Subject]) -> None:
    """Measure everything and print each row as it comes; behind each subject, the seconds that it took."""
    print("| what | at | Sunspot | the way of before | ratio |\n|---|---|---|---|---|")
    for name, subject in subjects.items():
        began = time.perf_counter()
        for figure in subject.measure():
            print(f"| {' | '.join(_cells(figure))} |", flush=True)
        taken = Figure("measuring the above", name, time.perf_counter() - began, "s")
        print(f"| {' | '.join(_cells(taken))} |", flush=True)


def _cells(figure: Figure) -> list[str]:
    before, ratio = "", ""
    if figure.before is not None:
        before = f"{figure.before:,.4g} {figure.unit}"
        ratio = f"{figure.before / figure.value:.3g}x" if figure.value else ""
    return [figure.what, figure.size, f"{figure.value:,.4g} {figure.unit}", before, ratio]
