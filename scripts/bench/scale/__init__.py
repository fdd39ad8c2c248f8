"""What grows with workers, rows, time and bytes. Each module is a subject, whose `measure` yields rows of one table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Figure(NamedTuple):
    """A row of the table."""

    what: str
    size: str
    "What it was measured at, such as '64 workers'."
    value: float
    unit: str


class Subject(Protocol):
    """A module of this package."""

    def measure(self) -> Iterator[Figure]:
        """Measure its figures, one after the other."""


def print_table(subjects: dict[str, Subject]) -> None:
    """Measure everything and print each row as it comes; behind each subject, the seconds that it took."""
    print("| what | at | Sunspot |\n|---|---|---|")
    for name, subject in subjects.items():
        began = time.perf_counter()
        for figure in subject.measure():
            _print_row(figure)
        _print_row(Figure("measuring the above", name, time.perf_counter() - began, "s"))


def _print_row(figure: Figure) -> None:
    print(f"| {figure.what} | {figure.size} | {figure.value:,.4g} {figure.unit} |", flush=True)
