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
        cells = [spread(column) for column in zip(*turns, strict=True)]
        print(f"| {' | '.join([name, *cells, str(len(turns))])} |", flush=True)


def spread(values: tuple[float, ...]) -> str:
    """Their median, and their range in brackets, with at least four digits."""
    all = (median(values), min(values), max(values))
    middle, least, most = (f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in all)
    return f"{middle} ({least} to {most})"
