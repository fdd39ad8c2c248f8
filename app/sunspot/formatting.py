"""Formats numbers, durations, dates and sizes for readers, and makes untrusted text safe for a terminal."""

import re
import time
from collections.abc import Iterator, Sequence

COLOR = re.compile(r"\x1b\[[0-9;:]*m")

UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Characters that control a terminal, change the direction of the surrounding text, are invisible, or cannot be
encoded. Tabs, line ends, and the joiners that Persian and emoji need do not match."""


def visible(text: str) -> str:
    """Return text that is safe to print on a terminal. Colors are removed, and UNPRINTABLE characters become escapes
    such as `\\x1b`."""
    plain = COLOR.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), plain)


def plural(number: int, what: str) -> str:
    """Return a number with its noun, such as `1 step` or `2 steps`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def kind_of(value: object) -> str:
    """Return the name of a value's type with its indefinite article, such as `a float` or `an int`."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def brief(text: str, most: int = 60) -> str:
    """Shorten text to its first `most` characters, for use in a message."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def some_of(names: Sequence[str], most: int = 10) -> str:
    """Return the first `most` names as a list for a message, with the number of omitted names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(brief(name) for name in names[:most]) + more


def in_words(seconds: float) -> str:
    """Return a human-readable duration, such as `90 s` or `3 h`."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h" if whole < 172800 else f"{whole // 86400} days"


def as_time(moment: float) -> str:
    """Return a time (seconds since the epoch) as a human-readable date."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment)) + " UTC"


def as_bytes(size: float, units: Sequence[str] = ("KB", "MB", "GB")) -> str:
    """Format `size`, a number of bytes, for people.

    A size below 1000 is given in bytes. A larger size is given in the largest of the decimal `units` in which it is at
    least 1.
    """
    if size < 1000:
        return f"{size:.0f} bytes"
    number, power = size / 1000, 0
    while number >= 1000 and power + 1 < len(units):
        number, power = number / 1000, power + 1
    return f"{number:.3g} {units[power]}"


def money(sum_: float) -> str:
    """Return a human-readable amount of money, with two decimals, or three significant digits if it is below 1."""
    return f"{sum_:,.2f}" if abs(sum_) >= 1 else f"{sum_:.3g}"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
