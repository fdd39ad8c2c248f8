"""Several ways to do the same, measured in turns: a table of their own, beside that of the pairs."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple, TypeAlias

Figures: TypeAlias = dict[str, list[tuple[float, ...]]]
"""Of each way, in each of its turns."""


class Ways(NamedTuple):
    """A table."""

    title: str
    columns: tuple[str, ...]
    "What is measured, with its unit."
    measure: Callable[[], Figures]


def print_ways(ways: Ways) -> None:
    """Measure, and print a line for each way: medians, ranges in brackets."""
    figures = ways.measure()
    print(f"\n| {' | '.join([ways.title, *ways.columns, 'turns'])} |\n|{'---|' * (2 + len(ways.columns))}")
    for name, turns in figures.items():
        cells = [f"{median(all):,.4g} ({min(all):,.4g} to {max(all):,.4g})" for all in zip(*turns, strict=True)]
        print(f"| {' | '.join([name, *cells, str(len(turns))])} |", flush=True)
