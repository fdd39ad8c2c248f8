"""Numbers, durations, moments and sizes as people read them."""

from __future__ import annotations

import time


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
    """A moment, in seconds since the epoch, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment)) + " UTC"


def as_bytes(size: int) -> str:
    """An amount of data for people."""
    number, units = float(size), iter(("bytes", "KB", "MB", "GB"))
    unit = next(units)
    while number >= 1000 and (larger := next(units, "")):
        number, unit = number / 1000, larger
    return f"{size} bytes" if unit == "bytes" else f"{number:.3g} {unit}"
