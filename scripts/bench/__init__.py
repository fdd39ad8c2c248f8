"""The benchmarks: each measures the product and its yardsticks in turns, and reports medians."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Figures: TypeAlias = dict[str, list[float]]
"""What each way to do the same took, or reached, in each of its turns."""


@dataclass(frozen=True)
class Benchmark:
    """Several ways to do the same: Sunspot's comes first, its yardstick second."""

    title: str
    unit: str
    goal: float
    "How many times better than its yardstick Sunspot has to be."
    measure: Callable[[int], Figures]
    "Measures that many ways, or all there are."

    @property
    def higher_is_better(self) -> bool:
        return self.unit.endswith("/s")


class Figure(NamedTuple):
    """A figure that grows with something, as a row of a table."""

    what: str
    size: str
    "What it was measured at, such as '64 workers'."
    value: float
    unit: str


def in_turns(ways: Mapping[str, Callable[[], float]], turns: int) -> Figures:
    """Measure each of the ways so often, one after the other."""
    figures: Figures = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            figures[name].append(way())
    return figures
