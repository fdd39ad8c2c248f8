"""A chart with its legend and its text alternative, over the steps or over the wall clock, with the restarts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from app.formatting import plural
from app.report.charts import Axis, Line, Point, Range, can_draw, key, line_chart, linear_axis
from app.report.gather import Report
from app.report.html import Html, element, join


class Across(NamedTuple):
    """The x axis: a place for each record of the history, and the restarts on it."""

    label: str
    places: Sequence[float | None]
    marks: Sequence[tuple[float, str]]
    groups: Sequence[int]
    "Records of different groups are not joined: in between, nothing was done that counts."


def over_steps(report: Report) -> Across:
    """Optimizer steps."""
    marks = [(float(attempt.step), str(attempt.number)) for attempt in report.attempts[1:]]
    return Across("steps", [float(step) for step in report.history.step], marks, [0] * len(report.history))


def over_time(report: Report) -> Across:
    """Time since the first start of the workers, pauses included."""
    known = [time for time in report.history.time if time is not None]
    begun = min([*known[:1], *([report.begun] if report.begun is not None else [])], default=0.0)
    reached = max([*known, *(attempt.time for attempt in report.attempts)], default=begun) - begun
    unit, seconds = next(
        (unit for unit in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)) if reached >= 2 * unit[1]),
        ("seconds", 1.0),
    )
    places = [(time - begun) / seconds if time is not None else None for time in report.history.time]
    marks = [((attempt.time - begun) / seconds, str(attempt.number)) for attempt in report.attempts[1:]]
    return Across(f"wall clock, {unit} since the first start", places, marks, report.history.attempt)


def points_of(across: Across, values: Sequence[float | None], gaps: bool = True) -> list[Point]:
    """What of a column can be drawn, with `gaps` where the groups change."""
    return [
        Point(x, y, group if gaps else 0)
        for x, y, group in zip(across.places, values, across.groups, strict=True)
        if x is not None and y is not None and can_draw(x) and can_draw(y)
    ]


def chart(
    title: str, across: Across, y: Axis, lines: Sequence[Line], band: Sequence[Range] = (), band_name: str = ""
) -> Html:
    """The figure: title and legend, then the drawing."""
    name = f"{title} over {across.label.partition(',')[0]}"
    lines = [line for line in lines if line.points]
    if not lines:
        return element("figure", element("figcaption", f"{name}: nothing is recorded"))
    known = [(line.style, line.name) for line in lines]
    known += [("band", band_name)] if band else []
    known += [("mark", "restart, and its attempt")] if across.marks else []
    said = [f"{name}; across: {across.label}.", *(_describe(line) for line in lines)]
    if band:
        low, high = min(item.low for item in band), max(item.high for item in band)
        said.append(f"{band_name.capitalize()}: {low:.4g} to {high:.4g}.")
    said += [f"{plural(len(across.marks), 'restart')}."] if across.marks else []
    places = [point.x for line in lines for point in line.points] + [place for place, _ in across.marks]
    x = linear_axis(places, from_zero=True, tight=True)
    drawing = line_chart(" ".join(said), x, across.label, y, lines, band, across.marks)
    return figure(name, known, drawing)


def figure(title: str, legend: Sequence[tuple[str, str]], drawing: str) -> Html:
    """A drawing below its title and its legend, the style (`key`) and the name of each thing that is drawn."""
    samples = join(element("span", join([Html(key(style)), label])) for style, label in legend)
    caption = element("figcaption", join([element("strong", title), element("span", samples, class_="legend")]))
    return element("figure", join([caption, Html(drawing)]))


def _describe(line: Line) -> str:
    first, last = line.points[0], line.points[-1]
    least, most = min(line.points, key=lambda p: p.y), max(line.points, key=lambda p: p.y)
    return (
        f"{line.name.capitalize()}: {first.y:.4g} at {first.x:.4g}, {last.y:.4g} at {last.x:.4g}; "
        f"lowest {least.y:.4g} at {least.x:.4g}, highest {most.y:.4g} at {most.x:.4g}."
    )
