"""Builds HTML elements from escaped text, numbers and tables."""

import base64
import html
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sunspot.formatting import UNPRINTABLE, as_bytes
from sunspot.run.size_limits import MAX_TABLE_CELLS, MAX_TABLE_COLUMNS, MAX_TABLE_ROWS, cut

MAX_TEXT = 600
"""Largest number of characters of a text. The run's events and logs contain the rest."""


class Html(str):
    """Text that is already HTML. All other text is escaped."""

    __slots__ = ()


class Number(NamedTuple):
    """A readable number and its exact value."""

    text: str
    value: float


def text(value: Any) -> str:
    """Return a value as HTML. Text is escaped, and truncated if it is long."""
    if isinstance(value, Html):
        return value
    if isinstance(value, Number):
        return f'<data value="{value.value!r}">{text(value.text)}</data>'
    if value is None:
        return ""
    if isinstance(value, float):
        return text(Number(f"{value:.4g}", value))
    words = UNPRINTABLE.sub("�", str(value))
    return html.escape(words if len(words) <= MAX_TEXT else words[: MAX_TEXT - 1] + "…", quote=True)


def element(name: str, content: Any, **attributes: Any) -> Html:
    """Return an element. Content is escaped unless it is `Html`, and `_` in attribute names becomes `-`."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    words = "".join(f' {key}="{text(value)}"' for key, value in given.items())
    return Html(f"<{name}{words}>{text(content)}</{name}>")


def join(parts: Iterable[Any], between: str = "") -> Html:
    """Join parts into HTML. Each part is escaped unless it is `Html`."""
    return Html(text(Html(between)).join(text(part) for part in parts))


def paragraph(*parts: Any, kind: str | None = None) -> Html:
    """Return a paragraph with these parts."""
    return element("p", join(parts), class_=kind)


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Html:
    """Return a horizontally scrolling table. The first cell of each row is a heading. None is shown as a dash.

    A large table is truncated, with a note about the omitted rows and columns.
    """
    columns, more_columns = cut(columns, MAX_TABLE_COLUMNS, "columns")
    rows, more_rows = cut(rows, min(MAX_TABLE_ROWS, max(1, MAX_TABLE_CELLS // len(columns))), "rows")
    rows = [row[: len(columns)] for row in rows]
    numeric = [any(isinstance(row[place], (int, float, Number)) for row in rows) for place in range(len(columns))]
    kinds = ["number" if number else None for number in numeric]

    def cell(place: int, value: Any) -> Html:
        shown = "—" if value is None else value
        if place == 0:
            return element("th", shown, scope="row", class_=kinds[place])
        return element("td", shown, class_=kinds[place])

    names = [Html(text(name).replace("_", "_<wbr>")) for name in columns]  # long names of metrics may break there
    heads = join(element("th", name, scope="col", class_=kind) for name, kind in zip(names, kinds, strict=True))
    body = join(element("tr", join(cell(place, value) for place, value in enumerate(row))) for row in rows)
    content = join([titled(caption), element("thead", element("tr", heads)), element("tbody", body)])
    left_out = [paragraph(f"{more}.", kind="note") for more in (more_rows, more_columns) if more]
    return join([scrolled(caption, element("table", content)), *left_out])


def titled(caption: str) -> Html:
    """Return a table caption that stays visible while the table scrolls horizontally."""
    return element("caption", element("span", caption))


def scrolled(name: str, content: Html) -> Html:
    """Return a box that scrolls horizontally, also with the keyboard."""
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=name)


def picture(png: bytes, alt: str) -> Html:
    """Return an image element with the PNG inline."""
    return Html(f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}" alt="{text(alt)}">')


# -------------------------------------------------------------------------------------------------------------- numbers


def percent(fraction: float, digits: int = 2) -> Number:
    """Return a fraction as a percentage, such as 98.05 %."""
    return Number(f"{100 * fraction:.{digits}f} %" if math.isfinite(fraction) else str(fraction), fraction)


def result(name: str, value: Any) -> Any:
    """Return a metric's value, as a percentage if it is an accuracy."""
    return percent(value) if name.endswith("accuracy") and isinstance(value, int | float) else value


def integer(number: float) -> Number:
    """Return a number without decimal places, such as 12,345."""
    return Number(f"{number:,.0f}", number)


def rate(number: float, unit: str = "") -> Number:
    """Return a rate, such as 12,735 rows/s, with three significant digits if it is small."""
    return Number(f"{number:,.0f}{unit}" if number >= 100 else f"{number:.3g}{unit}", number)


def duration(seconds: float) -> Number:
    """Return a duration in its two largest units, such as 0.35 s, 2 min 14 s or 2 days 4 h."""
    if seconds < 10:
        return Number(f"{seconds:.3g} s", seconds)
    units = (("day", 86400), ("h", 3600), ("min", 60), ("s", 1))
    left = round(seconds)
    parts: list[str] = []
    for unit, size in units:
        number, left = divmod(left, size)
        if number or parts:
            parts.append(f"{number} {unit}{'s' if unit == 'day' and number != 1 else ''}" if number else "")
    return Number(" ".join(part for part in parts[:2] if part), seconds)


def size(number: float) -> Number:
    """Return a number of bytes in a readable unit, for example as 134 MB."""
    return Number(as_bytes(number, ("kB", "MB", "GB", "TB")), number)


def utc_time(seconds: float) -> Html:
    """Return seconds since the epoch as a date in UTC."""
    parts = time.gmtime(seconds)
    shown = time.strftime("%Y-%m-%d %H:%M:%S", parts)
    machine = time.strftime("%Y-%m-%dT%H:%M:%SZ", parts)
    return Html(f'<time datetime="{machine}">{shown}</time>')
