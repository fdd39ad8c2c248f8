"""Numbers, durations, dates and sizes as people read them."""

import time
from collections.abc import Iterator, Sequence


def plural(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def in_words(seconds: float) -> str:
    """A duration for people."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h" if whole < 172800 else f"{whole // 86400} days"


def as_time(moment: float) -> str:
    """Seconds since the epoch as a date for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment)) + " UTC"


def as_bytes(size: float, units: Sequence[str] = ("KB", "MB", "GB")) -> str:
    """An amount of data for people: bytes, or the largest of the decimal `units` that fits."""
    if size < 1000:
        return f"{size:.0f} bytes"
    number, power = size / 1000, 0
    while number >= 1000 and power + 1 < len(units):
        number, power = number / 1000, power + 1
    return f"{number:.3g} {units[power]}"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells as lines, in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
