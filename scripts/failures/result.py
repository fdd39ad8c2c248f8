"""The contenders' results in the failure benchmark, with their table and plot."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import median

from sunspot.report.charts import HEIGHT, LEFT, WIDTH, Drawing, Line, Point, legend_sample, linear_axis

RESULTS = "results.jsonl"

LEGEND = 14
"""Height of a line in the legend above the drawing, in the drawing's units."""


@dataclass
class Result:
    """One contender's result so far. Times are in seconds since all its workers trained."""

    name: str
    job: str
    "Name of the RayJob, and of its folder in storage."
    steps: int
    "Number of steps to take."
    points: list[tuple[float, int]] = field(default_factory=list)
    "Times and the steps that had been taken by then."
    again: int = 0
    "Number of repeated steps."
    losses: list[tuple[float, str, str]] = field(default_factory=list)
    "Time, kind and node of each loss."
    missing: int | None = None
    "Number of rows in finished epochs that the model has not learned from, or None if unknown."
    repeated: int | None = None
    "Number of rows that the model has learned from again within an epoch, or None if unknown."
    ended: str = ""
    "The reason why it did not take all steps. Empty if it did or is still training."

    @property
    def reached(self) -> int:
        """Highest step."""
        return max((step for _, step in self.points), default=0)

    @property
    def wall_s(self) -> float:
        """Time of the highest step. If steps are missing, it is the time of the last step or of the time limit."""
        if self.ended and self.points:
            return self.points[-1][0]
        return next((at for at, step in self.points if step == self.reached), 0.0)

    @property
    def goodput(self) -> float | None:
        """Time of all steps at the contender's usual pace, divided by the time that it took, or None if unknown."""
        paces = [(t1 - t0) / (s1 - s0) for (t0, s0), (t1, s1) in pairwise(self.points) if s1 > s0 and t1 > t0]
        taken = self.reached - self.points[0][1] if self.points else 0
        return min(1.0, taken * median(paces) / self.wall_s) if paces and self.wall_s else None

    @property
    def longest_s(self) -> float:
        """Longest time without a new step."""
        best = 0
        since = longest = 0.0
        for at, step in self.points:
            if step > best:
                longest = max(longest, at - since)
                since = at
                best = step
        return max(longest, self.wall_s - since)


def read(folder: Path) -> list[Result]:
    """Return the results that earlier benchmarks have written to a folder."""
    file = folder / RESULTS
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def write(results: Sequence[Result], folder: Path) -> None:
    """Write the results, one JSON object per line, and their table and plot."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {RESULTS: "".join(json.dumps(asdict(result)) + "\n" for result in results)}
    for name, text in {**texts, "table.md": table(results), "plot.svg": plot(results)}.items():
        part = folder / f"{name}.part"  # if this process is killed, the old file with hours of work must be intact
        part.write_text(text)
        part.replace(folder / name)


def table(results: Sequence[Result]) -> str:
    """Return a table with a line for each contender."""
    names = ["", "steps", "wall time", "goodput", "losses with notice", "without", "steps again", "rows missing"]
    lines = [[*names, "rows repeated", "longest without a new step"], ["---"] * (len(names) + 2)]
    for result in results:
        kinds = [kind for _, kind, _ in result.losses]
        goodput = f"{result.goodput:.1%}" if result.goodput is not None else ""
        steps = f"{result.reached:,}" + (f" of {result.steps:,}" if result.reached < result.steps else "")
        figures = [steps, f"{result.wall_s / 60:.1f} min", goodput, kinds.count("reclaim"), kinds.count("kill")]
        rows = ["" if rows is None else f"{rows:,}" for rows in (result.missing, result.repeated)]
        name = f"{result.name} ({textwrap.shorten(result.ended, 100)})" if result.ended else result.name
        lines.append([name, *map(str, figures), f"{result.again:,}", *rows, f"{result.longest_s:.0f} s"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plot(results: Sequence[Result]) -> str:
    """Return an SVG file with a line of steps over wall time for each contender, and with the losses."""
    drawn = [result for result in results if result.points]
    lines = [
        Line(result.name, [Point(at / 60, float(step)) for at, step in result.points], style)
        for result, style in zip(drawn, "abcd", strict=False)
    ]
    longest = max(drawn, key=lambda result: len(result.losses), default=None)
    marks = [(at / 60, "n" if kind == "reclaim" else "") for at, kind, _ in longest.losses] if longest else []
    places = [point.x for line in lines for point in line.points] + [at for at, _ in marks]
    x = linear_axis(places, from_zero=True, tight=True)
    y = linear_axis((point.y for line in lines for point in line.points), from_zero=True)
    said = "Steps over wall time. " + " ".join(
        f"{r.name}: {r.reached} steps in {r.wall_s / 60:.1f} min." for r in drawn
    )
    label = "minutes since all trained; dotted: losses (n: with notice)"
    chart = Drawing(said, x, label, y, lines, marks=marks).svg()
    style = files("sunspot.report").joinpath("style.css").read_text()
    style += "svg:root { width: 720px; background: var(--paper); font-family: system-ui, sans-serif; }"
    style += ".line.d { stroke: var(--mark); stroke-dasharray: 1 3; }"
    added = [f"<style>{style}</style>"]
    above = LEGEND * len(lines)
    for place, line in enumerate(lines):
        top = LEGEND * place - above
        sample = legend_sample(line.style).replace("<svg ", f'<svg x="{LEFT}" y="{top}" width="24" height="12" ', 1)
        added.append(f'{sample}<text x="{LEFT + 28}" y="{top + 10}">{escape(line.name)}</text>')
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    grown = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 {-above} {WIDTH} {HEIGHT + above}"'
    return chart.replace(box, grown, 1).removesuffix("</svg>") + "".join(added) + "</svg>\n"
