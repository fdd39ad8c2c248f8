"""Inline SVG charts over steps or time, with legends, text alternatives, and a mark for each new worker group.

Colors and fonts come from the page's style sheet.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import NamedTuple

from sunspot.formatting import plural
from sunspot.report.history import Series, can_draw
from sunspot.report.html import Html, element, join
from sunspot.report.model import Report

WIDTH, HEIGHT = 360, 214
"""Size of a drawing in its own units. On a phone, a unit is about a pixel, so a font size of 11 is readable."""

LEFT, RIGHT = 42, 8
"""Margins beside the plot. The left margin has room for the axis labels."""

TOP, BOTTOM = 18, 32
"""Margins above and below the plot, with room for the labels of marks and of the axis."""

BUCKETS = 240
"""Number of sections of the x axis, each a pixel or two wide. Each section shows its lowest and highest point."""

DIGIT = 7
"""Width of a digit. A mark has no number if the number would be closer than this to the previous one."""

MAX_DOTS = 60
"""Largest number of points in a line that is drawn with dots."""

ALIKE = 1e-6
"""Relative difference below which values count as equal, because an axis between them would have no numbers."""

MIN_DRAWN = 1e-100
"""Smallest number that is drawn on a logarithmic axis. Ratios of smaller numbers overflow floats."""

LOG_FROM = 100.0
"""Smallest ratio of highest to lowest loss for a logarithmic axis. A linear axis would show the end as flat."""


class Point(NamedTuple):
    """A point of a line. Points of different worker groups are not connected."""

    x: float
    y: float
    group: int = 0


Band = tuple[Sequence[Point], Sequence[Point]]
"""Lower and upper points of a band."""


@dataclass(frozen=True)
class Line:
    """A named sequence of points."""

    name: str
    points: Sequence[Point]
    style: str = "a"
    "Class in the style sheet: `a` (solid), `b` (dashed, with dots), or `c` (thin, in the background)."


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic range of values, with ticks."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def position(self, value: float) -> float:
        """Return a value's position on the axis, from 0 (`low`) to 1 (`high`)."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


# -------------------------------------------------------------------------------------------------------------- figures


class XAxis(NamedTuple):
    """An x axis with the positions of a history's records, and a mark for each new worker group."""

    label: str
    positions: Sequence[float | None]
    marks: Sequence[tuple[float, str]]
    groups: Sequence[int]
    "Worker group of each record. No line connects records of different groups."


def over_steps(report: Report) -> XAxis:
    """Return an x axis of optimizer steps."""
    marks = [(float(attempt.step), str(attempt.number)) for attempt in report.seen.attempts[1:]]
    series = report.history.series
    return XAxis("steps", [float(step) for step in series.column("step")], marks, [0] * len(series))


def over_time(report: Report, series: Series) -> XAxis:
    """Return an x axis of the time since the first start of the workers, including pauses."""
    times = series.column("time")
    known = [time for time in times if time is not None]
    begun = min([*known[:1], *([report.seen.begun] if report.seen.begun is not None else [])], default=0.0)
    reached = max([*known, *(attempt.time for attempt in report.seen.attempts)], default=begun) - begun
    unit, seconds = next(
        (unit for unit in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)) if reached >= 2 * unit[1]),
        ("seconds", 1.0),
    )
    places = [(time - begun) / seconds if time is not None else None for time in times]
    marks = [((attempt.time - begun) / seconds, str(attempt.number)) for attempt in report.seen.attempts[1:]]
    return XAxis(f"wall clock, {unit} since the first start", places, marks, series.column("attempt"))


def points_of(x_axis: XAxis, values: Sequence[float | None]) -> list[Point]:
    """Return a point for each of the `values` that can be drawn (`can_draw`)."""
    return [
        Point(x, y, group)
        for x, y, group in zip(x_axis.positions, values, x_axis.groups, strict=True)
        if x is not None and y is not None and can_draw(x) and can_draw(y)
    ]


def chart(title: str, x_axis: XAxis, y: Axis, lines: Sequence[Line], band: Band | None = None) -> Html:
    """Return a line chart as a figure with a title and a legend. `band` spans the range of the ranks' values."""
    name = f"{title} over {x_axis.label.partition(',')[0]}"
    lines = [line for line in lines if line.points]
    if not lines:
        return element("figure", element("figcaption", f"{name}: nothing is recorded"))
    known = [(line.style, line.name) for line in lines]
    known += [("band", "lowest to highest rank")] if band else []
    known += [("mark", "new worker group, and its attempt")] if x_axis.marks else []
    description = [f"{name}; x axis: {x_axis.label}.", *(_describe(line) for line in lines)]
    if band:
        low, high = min(point.y for point in band[0]), max(point.y for point in band[1])
        description.append(f"Lowest to highest rank: {low:.4g} to {high:.4g}.")
    description += [f"{plural(len(x_axis.marks), 'new worker group')}."] if x_axis.marks else []
    places = [point.x for line in lines for point in line.points] + [place for place, _ in x_axis.marks]
    x = linear_axis(places, from_zero=True, tight=True)
    drawing = Drawing(" ".join(description), x, x_axis.label, y, lines, band, x_axis.marks)
    return figure(name, known, drawing.svg())


def figure(title: str, legend: Sequence[tuple[str, str]], drawing: str) -> Html:
    """Return a figure. `legend` contains the style (see `legend_sample`) and the name of each item."""
    samples = join(element("span", join([Html(legend_sample(style)), label])) for style, label in legend)
    caption = element("figcaption", join([element("strong", title), element("span", samples, class_="legend")]))
    return element("figure", join([caption, Html(drawing)]))


def _describe(line: Line) -> str:
    first, last = line.points[0], line.points[-1]
    least = min(line.points, key=lambda p: p.y)
    most = max(line.points, key=lambda p: p.y)
    return (
        f"{line.name.capitalize()}: {first.y:.4g} at {first.x:.4g}, {last.y:.4g} at {last.x:.4g}; "
        f"lowest {least.y:.4g} at {least.x:.4g}, highest {most.y:.4g} at {most.x:.4g}."
    )


# -------------------------------------------------------------------------------------------------------------- drawing


@dataclass(frozen=True)
class Drawing:
    """A line chart, rendered as SVG."""

    description: str
    "Text alternative of the chart."
    x: Axis
    x_label: str
    y: Axis
    lines: Sequence[Line]
    band: Band | None = None
    marks: Sequence[tuple[float, str]] = ()
    "Values on the x axis that are marked, each with a short label."

    def svg(self) -> str:
        """Return the chart as an SVG element."""
        to_x = _scale(self.x, LEFT, WIDTH - RIGHT)
        to_y = _scale(self.y, HEIGHT - BOTTOM, TOP)
        parts = [*self._grid(to_x, to_y), *_marks([(to_x(place), label) for place, label in self.marks])]

        def at(point: Point) -> str:
            return f"{to_x(point.x):.1f} {to_y(point.y):.1f}"

        if self.band:
            parts.append(f'<path class="band" d="{_area(self.band, at)}"/>')
        for line in self.lines:
            points = downsample(line.points)
            parts.append(f'<path class="line {line.style}" d="{_path(points, at)}"/>')
            dotted = points if line.style == "b" and len(points) <= MAX_DOTS else _alone(points)
            parts += [
                f'<circle class="dot {line.style}" cx="{to_x(p.x):.1f}" cy="{to_y(p.y):.1f}" r="2.6"/>' for p in dotted
            ]
        label = escape(self.description, quote=True)
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'

    def _grid(self, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> Iterable[str]:
        floor = HEIGHT - BOTTOM
        for value, text in self.y.ticks:
            place = to_y(value)
            yield f'<path class="grid" d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}"/>'
            yield f'<text x="{LEFT - 5}" y="{place + 3.5:.1f}" class="end">{escape(text)}</text>'
        for value, text in self.x.ticks:
            place = to_x(value)
            anchor = "end" if place > WIDTH - RIGHT - 8 else "mid"
            yield f'<path class="grid" d="M{place:.1f} {floor}v4"/>'
            yield f'<text x="{place:.1f}" y="{floor + 15}" class="{anchor}">{escape(text)}</text>'
        yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" class="mid name">{escape(self.x_label)}</text>'


def legend_sample(style: str) -> str:
    """Return a sample of a line, a band or a mark for the legend."""
    shapes = {
        "b": '<path class="line b" d="M1 6H23"/><circle class="dot b" cx="12" cy="6" r="2.6"/>',
        "dot a": '<circle class="dot a" cx="12" cy="6" r="2.6"/>',
        "dot c": '<circle class="dot c" cx="12" cy="6" r="2.6"/>',
        "band": '<rect class="band" x="1" y="1" width="22" height="10"/>',
        "mark": '<path class="mark" d="M12 0V12"/>',
    }
    shape = shapes.get(style, f'<path class="line {style}" d="M1 6H23"/>')
    return f'<svg class="key" viewBox="0 0 24 12" aria-hidden="true">{shape}</svg>'


def sparkline(points: Sequence[Point], description: str) -> Html:
    """Return a word-sized loss curve without axes."""
    y = fitting_axis("loss", [point.y for point in points])
    x = linear_axis((point.x for point in points), tight=True)
    to_x, to_y = _scale(x, 1, 95), _scale(y, 27, 1)
    curve = _path(points, lambda point: f"{to_x(point.x):.1f} {to_y(point.y):.1f}")
    label = escape(description, quote=True)
    shape = f'<path class="line a" d="{curve}"/>'
    return Html(f'<svg class="spark" viewBox="0 0 96 28" role="img" aria-label="{label}">{shape}</svg>')


# ----------------------------------------------------------------------------------------------------------------- axes


def linear_axis(values: Iterable[float], from_zero: bool = False, tight: bool = False) -> Axis:
    """Return an axis over all values with a few round ticks. A `tight` axis ends where the values end."""
    low, high = _bounds(values)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    largest = max(abs(low), abs(high), MIN_DRAWN) if low or high else 1.0
    if high - low < largest * ALIKE:
        low, high = (0.0, largest) if from_zero else (low - largest / 2, high + largest / 2)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    if tight:
        first, last = math.ceil(low / step), math.floor(high / step)
    ticks = tuple((number * step, tick_label(number * step, step)) for number in range(first, last + 1))
    return Axis(min(low, ticks[0][0]), max(high, ticks[-1][0]), ticks)


def log_axis(values: Iterable[float]) -> Axis:
    """Return a logarithmic axis with ticks at powers of ten.

    If the values span few powers of ten, there are also ticks at 2 and 5 times each power.
    """
    low, high = _bounds(values)
    if high < low * (1 + ALIKE):
        low, high = low / 2, high * 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(powers) // 5)
    factors = (1, 2, 5) if len(powers) <= 3 else (1,)
    ticks = [factor * 10.0**power for power in powers[::every] for factor in factors]
    below = max([tick for tick in ticks if tick <= low], default=low)
    above = min([tick for tick in ticks if tick >= high], default=high)
    labeled = tuple((tick, tick_label(tick, tick)) for tick in ticks if below <= tick <= above)
    return Axis(below, above, labeled, log=True)


def fitting_axis(name: str, values: Sequence[float]) -> Axis:
    """Return an axis for the metric `name`.

    The axis is logarithmic for a loss whose highest value is at least LOG_FROM times its lowest value.
    """
    log = name.endswith("loss") and values and min(values) >= MIN_DRAWN and max(values) / min(values) >= LOG_FROM
    return log_axis(values) if log else linear_axis(values)


def tick_label(value: float, step: float) -> str:
    """Return a tick's label, such as 0.25, 1.5k or 20M. Ticks are `step` apart."""
    if step < 1e-4:
        return f"{value:.4g}"
    unit, size = next(((u, s) for u, s in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if abs(value) >= s), ("", 1.0))
    digits = max(0, -math.floor(math.log10(step / size) + 1e-9))
    words = f"{value / size:.{digits}f}"
    return (words.rstrip("0").rstrip(".") if "." in words else words) + unit


def _bounds(values: Iterable[float]) -> tuple[float, float]:
    known = list(values)
    return (min(known), max(known)) if known else (0.0, 1.0)


def _round_step(size: float) -> float:
    """Return the smallest number that is 1, 2 or 5 times a power of ten and not below `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * 0.999)


def _scale(axis: Axis, begin: float, end: float) -> Callable[[float], float]:
    return lambda value: begin + (end - begin) * axis.position(value)


# --------------------------------------------------------------------------------------------------- points and paths


def downsample(points: Sequence[Point]) -> list[Point]:
    """Divide the x axis into BUCKETS sections, and return the lowest and the highest point in each."""
    if len(points) <= 2 * BUCKETS:
        return list(points)
    low, high = _bounds(point.x for point in points)
    width = (high - low) / BUCKETS or 1.0
    buckets: dict[int, list[Point]] = {}
    for point in points:
        buckets.setdefault(min(BUCKETS - 1, int((point.x - low) / width)), []).append(point)
    chosen: list[Point] = []
    for _, bucket in sorted(buckets.items()):
        least = min(bucket, key=lambda p: p.y)
        most = max(bucket, key=lambda p: p.y)
        chosen += sorted({least, most}, key=lambda p: p.x)
    return chosen


def _path(points: Sequence[Point], at: Callable[[Point], str]) -> str:
    """Return an SVG path through the points of each group. `at` returns the coordinates of a point."""
    return "".join(f"M{'L'.join(map(at, group))}" for _, group in groupby(points, lambda point: point.group))


def _alone(points: Sequence[Point]) -> list[Point]:
    """Return each point that is the only one in its worker group."""
    sizes = Counter(point.group for point in points)
    return [point for point in points if sizes[point.group] == 1]


def _area(band: Band, at: Callable[[Point], str]) -> str:
    low, high = map(downsample, band)
    outlines = []
    for group in dict.fromkeys(point.group for point in high):
        there = [at(point) for point in high if point.group == group]
        back = [at(point) for point in reversed(low) if point.group == group]
        outlines.append(f"M{'L'.join(there + back)}Z")
    return "".join(outlines)


def _marks(marks: Sequence[tuple[float, str]]) -> Iterable[str]:
    places = {round(place, 1): label for place, label in reversed(marks)}
    if places:
        yield f'<path class="mark" d="{"".join(f"M{place} {TOP}V{HEIGHT - BOTTOM}" for place in sorted(places))}"/>'
    free = 0.0
    for place, label in sorted(places.items()):
        if place >= free:
            yield f'<text x="{place}" y="{TOP - 5}" class="mid number">{escape(label)}</text>'
            free = place + DIGIT * (len(label) + 1)
