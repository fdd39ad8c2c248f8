"""Renders the section on learning: curves over steps and time, and a table of their values."""

from collections.abc import Sequence

from sunspot.formatting import plural
from sunspot.metric_names import HELD_OUT
from sunspot.report.charts import BUCKETS, Line, chart, fitting_axis, over_steps, over_time, points_of
from sunspot.report.history import can_draw
from sunspot.report.html import Html, Number, duration, element, join, paragraph, result, table
from sunspot.report.model import Report
from sunspot.run.size_limits import MAX_NAMES, cut

MAX_CURVES = 8
"""Largest number of metrics with curves: a loss, an accuracy, and the task's own metrics."""

MAX_NUMBERS, MAX_COLUMNS = 40, 250
"""Largest numbers of rows and of metrics in the table. `sunspot metrics` shows all."""


def show(report: Report) -> Html:
    """Return the metrics as curves over steps and time, and as a table."""
    history = report.history
    if not history.series:
        return paragraph("No metric is recorded yet. The first record comes with the first report or checkpoint.")
    bases = list(dict.fromkeys(name.removeprefix(HELD_OUT) for name in sorted(history.results, key=results_first)))
    parts: list[Html] = [_curves(report, base) for base in bases[:MAX_CURVES]]
    if not bases:
        parts.append(paragraph("The records have no loss, no accuracy, and nothing on held-out rows."))
    if len(bases) > MAX_CURVES:
        command = element("code", f"sunspot metrics {report.seen.run.name}")
        parts.append(paragraph(f"Not drawn here: {', '.join(bases[MAX_CURVES:])}. ", command, " shows them."))
    if bases and not any(name.startswith(HELD_OUT) for name in history.results):
        parts.append(paragraph("The model has not been evaluated on held-out rows yet.", kind="note"))
    if history.left_out:
        note = f"{len(history.left_out):,} more metrics are not shown, because a report has at most {MAX_NAMES:,}."
        parts.append(paragraph(note, kind="trouble"))
    records = len(history.series)
    if records > 2 * BUCKETS:
        note = f"Of {records:,} records, the lowest and the highest in each of {BUCKETS} sections are drawn."
        parts.append(paragraph(note, kind="note"))
    return join([*parts, _numbers(report)])


def results_first(name: str) -> tuple[int, str]:
    """Return a sort key that puts the loss first, then the accuracy, then the task's own metrics."""
    base = name.removeprefix(HELD_OUT)
    return {"loss": 0, "accuracy": 1}.get(base, 2), base


def _curves(report: Report, base: str) -> Html:
    history = report.history
    factor = 100.0 if base.endswith("accuracy") else 1.0
    rows = [("training rows", base, "a"), ("held-out rows", HELD_OUT + base, "b")]
    values = {
        name: [value * factor if value is not None else None for value in history.drawn(name)]
        for _, name, _ in rows
        if name in history.results
    }
    finite = [v for column in values.values() for v in column if v is not None and can_draw(v)]
    title = base.replace("_", " ").capitalize()
    broken = [_not_finite(name, *history.undrawable[name]) for name in values if name in history.undrawable]
    if not finite:
        return join([paragraph(f"{title}: no number can be drawn."), *broken])
    y = fitting_axis(base, finite)
    unit = " in %" if factor == 100.0 else " on a logarithmic axis" if y.log else ""
    charts = []
    for x_axis in (over_steps(report), over_time(report, history.series)):
        lines = [Line(name, points_of(x_axis, values[each]), style) for name, each, style in rows if each in values]
        charts.append(chart(f"{title}{unit}", x_axis, y, lines))
    return join([element("div", join(charts), class_="charts"), *broken])


def _not_finite(name: str, times: int, first: int) -> Html:
    records = plural(times, "record")
    message = f"{name} could not be drawn in {records} (NaN, infinite or huge), first at step {first}."
    return paragraph(message, kind="trouble")


def _numbers(report: Report) -> Html:
    """Return a table with the results of each evaluation, or of each record if the run was never evaluated."""
    history = report.history
    results = sorted(history.results, key=results_first)
    held_out = [name for name in results if name.startswith(HELD_OUT)]
    names, more = cut(results, MAX_COLUMNS, "metrics")
    lines: Sequence[int] = history.series.indexes_with(held_out) if held_out else range(len(history.series))
    shown = lines
    if len(lines) > MAX_NUMBERS:
        shown = [lines[round(n * (len(lines) - 1) / (MAX_NUMBERS - 1))] for n in range(MAX_NUMBERS)]
    columns = [history.series.values_at(name, shown) for name in ("step", "epoch", "time", *names)]
    begun = report.seen.begun
    rows = []
    for step, epoch, time, *values in zip(*columns, strict=True):
        passed = duration(time - begun) if time is not None and begun is not None else None
        rows.append([Number(f"{step:.0f}", step), epoch, passed, *map(result, names, values)])
    of = f", {len(shown)} of {len(lines):,}" if len(shown) < len(lines) else ""
    what = "Results where held-out rows were evaluated" if held_out else "Results"
    numbers = table(f"{what}{of}", ["step", "epoch", "time", *names], rows)
    rest = paragraph(f"{more}.", kind="note") if more else ""
    return element("details", join([element("summary", "The numbers as a table"), numbers, rest]))
