"""Throughput and step time: over the wall clock, and of each rank."""

import math
from typing import Any

from sunspot.report.charts import Line, Point, chart, linear_axis, over_time, points_of
from sunspot.report.history import RankTotal
from sunspot.report.html import Html, duration, element, join, paragraph, percent, rate, size, table, text, whole
from sunspot.report.model import Report

MAX_RANKS = 64
"""Rows of the table; with more ranks, it shows the slowest."""


def show(report: Report) -> Html:
    """Show throughput and step time: over the wall clock, and of each rank."""
    history = report.history
    if not history.ranks.totals:
        return paragraph("No numbers of single ranks are recorded.")
    across = over_time(report, history.series)
    throughput = points_of(across, history.series.column("rows_per_s"))
    y = linear_axis((point.y for point in throughput), from_zero=True)
    charts = [
        chart("Rows per second, all ranks,", across, y, [Line("all ranks", throughput)]),
        _spread("Rows per second of one rank", report, "rows_per_s"),
        _spread("Seconds of a step on one rank", report, "step_time"),
    ]
    lag = "In every step all ranks wait for the slowest, so one that lags slows all of them down. "
    doctor = element("code", f"sunspot doctor {report.run.name}")
    note = paragraph(lag, doctor, " looks for it.", kind="note")
    return join([element("div", join(charts), class_="charts"), _ranks(report), note])


def _spread(title: str, report: Report, name: str) -> Html:
    series = report.history.ranks.series
    across = over_time(report, series)
    columns = [series.column(each) for each in (f"{name}_low", name, f"{name}_high")]
    known = [
        (x, *values, group)
        for x, *values, group in zip(across.places, *columns, across.groups, strict=True)
        if x is not None and None not in values
    ]
    low, mean, high = ([Point(x, values[at], group) for x, *values, group in known] for at in range(3))
    y = linear_axis((point.y for point in low + high), from_zero=True)
    return chart(title, across, y, [Line("mean of the ranks", mean)], (low, high))


def _ranks(report: Report) -> Html:
    every = report.history.ranks.totals
    nodes = report.attempts[-1].metadata.nodes if report.attempts else {}
    slowest = sorted(every, key=lambda rank: every[rank].step_time or 0.0, reverse=True)[:MAX_RANKS]
    limits = [edge for rank in slowest for edge in (every[rank].fastest, every[rank].slowest) if math.isfinite(edge)]
    low, high = min(limits, default=0.0), max(limits, default=1.0)
    rows = [
        [str(rank), nodes.get(str(rank)) or "not recorded", *_rank(every[rank], low, high)] for rank in sorted(slowest)
    ]
    some = f", the {len(slowest)} slowest of {len(every):,}" if len(slowest) < len(every) else ""
    columns = ["rank", "last node", "rows", "rows/s", "median step", "its range", "worst 95 %", "forward pass"]
    return table(f"Each rank over the whole run{some}", [*columns, "waits for rows", "most memory"], rows)


def _rank(total: RankTotal, low: float, high: float) -> list[Any]:
    return [
        whole(total.rows),
        rate(total.rows_per_s) if total.rows_per_s is not None else None,
        duration(total.step_time) if total.step_time is not None else None,
        _range(total, low, high),
        duration(total.p95) if math.isfinite(total.p95) else None,
        duration(total.forward_time) if total.forward_time is not None else "not measured",
        percent(total.data_wait / total.seconds, 1) if total.seconds else None,
        size(total.memory_mib * 2**20) if total.memory_mib else None,
    ]


def _range(total: RankTotal, low: float, high: float) -> Html | None:
    """Return a rank's step times on the scale from the lowest to the highest of all ranks."""
    if total.step_time is None:
        return None
    width = (high - low) or 1.0
    first, mean, last = (4 + 136 * (value - low) / width for value in (total.fastest, total.step_time, total.slowest))
    said = f"Median step of a window: {total.fastest:.3g} to {total.slowest:.3g} s, mean {total.step_time:.3g} s"
    return Html(
        f'<svg class="range" viewBox="0 0 144 14" role="img" aria-label="{text(said)}">'
        f'<path class="whole" d="M{first:.1f} 3v8M{first:.1f} 7H{last:.1f}M{last:.1f} 3v8"/>'
        f'<circle class="mean" cx="{mean:.1f}" cy="7" r="3.2"/></svg>'
    )
