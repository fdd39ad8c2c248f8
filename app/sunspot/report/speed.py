"""Renders the section on throughput and step time."""

from typing import Any

from sunspot.report.charts import Line, chart, linear_axis, over_time, points_of
from sunspot.report.history import RankTotal
from sunspot.report.html import Html, duration, element, integer, join, paragraph, percent, rate, size, table
from sunspot.report.model import Report

MAX_RANKS = 64
"""Largest number of ranks in the table. If there are more, the slowest are shown."""


def show(report: Report) -> Html:
    """Return charts of throughput and step time over time, and a table of the ranks."""
    history = report.history
    if not history.ranks:
        return paragraph("No numbers of individual ranks are recorded.")
    x_axis = over_time(report, history.series)
    throughput = points_of(x_axis, history.series.column("rows_per_s"))
    y = linear_axis((point.y for point in throughput), from_zero=True)
    charts = [
        chart("Rows per second, all ranks,", x_axis, y, [Line("all ranks", throughput)]),
        _spread("Rows per second of one rank", report, "rows_per_s"),
        _spread("Seconds of a step on one rank", report, "step_time"),
    ]
    lag = "In every step, all ranks wait for the slowest one, so a slow rank slows down the whole run. "
    doctor = element("code", f"sunspot doctor {report.seen.run.name}")
    note = paragraph(lag, doctor, " looks for slow ranks.", kind="note")
    return join([element("div", join(charts), class_="charts"), _ranks(report), note])


def _spread(title: str, report: Report, name: str) -> Html:
    series = report.history.speeds
    x_axis = over_time(report, series)
    low = points_of(x_axis, series.column(f"{name}_low"))
    mean = points_of(x_axis, series.column(name))
    high = points_of(x_axis, series.column(f"{name}_high"))
    y = linear_axis((point.y for point in low + high), from_zero=True)
    return chart(title, x_axis, y, [Line("mean of the ranks", mean)], (low, high))


def _ranks(report: Report) -> Html:
    every = report.history.ranks
    nodes = report.seen.attempts[-1].metadata.nodes if report.seen.attempts else {}
    slowest = sorted(every, key=lambda rank: every[rank].step_time or 0.0, reverse=True)[:MAX_RANKS]
    rows = [[str(rank), nodes.get(str(rank)) or "not recorded", *_rank(every[rank])] for rank in sorted(slowest)]
    some = f", the {len(slowest)} slowest of {len(every):,}" if len(slowest) < len(every) else ""
    columns = ["rank", "last node", "rows", "rows/s", "median step", "worst 95 %", "forward pass"]
    return table(f"Each rank over the whole run{some}", [*columns, "waits for rows", "most memory"], rows)


def _rank(total: RankTotal) -> list[Any]:
    return [
        integer(total.rows),
        rate(total.rows / total.seconds) if total.seconds else None,
        duration(total.step_time) if total.step_time is not None else None,
        duration(total.p95) if total.p95 is not None else None,
        duration(total.forward / total.steps) if total.forward and total.steps else "not measured",
        percent(total.data_wait / total.seconds, 1) if total.seconds else None,
        size(total.memory_mib * 2**20) if total.memory_mib else None,
    ]
