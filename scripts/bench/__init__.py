"""Benchmarks of Sunspot. Each measures Sunspot and its yardsticks in turns, and reports medians."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Figures: TypeAlias = dict[str, list[float]]
"""The measurements of each way, one per turn."""


@dataclass(frozen=True)
class Benchmark:
    """A comparison of several ways to do the same work. Sunspot is the first way, and its yardstick is the second."""

    title: str
    unit: str
    goal: float
    "The factor by which Sunspot must be better than its yardstick."
    measure: Callable[[int], Figures]
    "A function that measures up to this number of ways."

    @property
    def higher_is_better(self) -> bool:
        return self.unit.endswith("/s")


class Figure(NamedTuple):
    """A figure that grows with a size, as a row of a table."""

    what: str
    size: str
    "Size at which it was measured, such as '64 workers'."
    value: float
    unit: str


def in_turns(ways: Mapping[str, Callable[[], float]], turns: int) -> Figures:
    """Measure all ways one after the other, and repeat this for each turn."""
    figures: Figures = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            figures[name].append(way())
    return figures
