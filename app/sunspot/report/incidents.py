"""Renders the section on incidents and the cost of each worker start."""

from typing import Any

from sunspot.formatting import money, plural
from sunspot.report.charts import Line, chart, linear_axis, over_time, points_of
from sunspot.report.history import Series
from sunspot.report.html import Html, Number, duration, element, integer, join, paragraph, percent, table, utc_time
from sunspot.report.model import Report
from sunspot.run.attempts import Attempt
from sunspot.run.incidents import Cause, Receipt, describe_replayed
from sunspot.run.size_limits import MAX_LISTED, cut

MAX_ROWS = 100
"""Largest number of rows in a table. `sunspot events` shows all rows."""

MAX_FAILURES = 20
"""Largest number of errors shown. Most ranks fail only because another rank is gone."""


def show(report: Report) -> Html:
    """Return the incidents, worker starts, errors and other events."""
    seen = report.seen
    if not seen.attempts:
        return join([paragraph("No worker has begun yet."), _failures(report), _events(report)])
    parts = [_timeline(report)]
    if seen.incidents:
        causes = ", ".join(f"{times} {cause}" for cause, times in seen.incidents_by_cause.most_common())
        incidents = plural(len(seen.incidents), "incident")
        replayed = describe_replayed(seen.steps_replayed, seen.replayed_at_least)
        parts.append(paragraph(f"{incidents} ({causes}); {replayed} taken again."))
    else:
        parts.append(paragraph("No incident is recorded."))
    if seen.goodput is None:
        parts.append(paragraph("Goodput is not known: no receipt is recorded.", kind="note"))
    else:
        goodput = percent(seen.goodput, 1)
        parts.append(paragraph("Goodput ", goodput, ": the fraction of all worker-seconds that counts for the result."))
    cost = seen.spending.describe(seen.step)
    if cost:
        parts.append(paragraph(f"Cost: {cost}."))
    gaps, more = cut(report.gaps, MAX_LISTED, "missing receipts")
    parts += [paragraph(gap.capitalize() + ".", kind="trouble") for gap in (*gaps, more) if gap]
    receipts = {receipt.attempt: receipt for receipt in seen.receipts}
    shown = seen.attempts[-MAX_ROWS:]
    of = f", the newest {len(shown)} of {len(seen.attempts):,}" if len(shown) < len(seen.attempts) else ""
    columns = ["attempt", "began (UTC)", "why", "steps repeated", "first step after", "state saved after"]
    columns += ["from step", "state from", "workers", "worker-seconds lost", "cost"]
    stepped = {*report.history.attempts, *(receipt.since for receipt in seen.receipts)}
    rows = [_start(attempt, receipts.get(attempt.number), attempt.number in stepped) for attempt in shown]
    parts.append(table(f"Each start of the workers, with its receipt{of}", columns, rows))
    return join([*parts, _failures(report), _events(report)])


def _timeline(report: Report) -> Html:
    """Return a chart of the number of training workers over time.

    The number is 0 between the last step before an incident and the first step after it.
    """
    seen = report.seen
    workers: list[tuple[float, float]] = []
    for receipt in seen.receipts:
        down = min(receipt.left, receipt.first_step)
        workers += [(down, receipt.world_before), (down, 0), (receipt.first_step, 0)]
        workers.append((receipt.first_step, receipt.world_after))
    if not workers:
        return Html("")
    without_step = [attempt.time for attempt in seen.attempts if attempt.number > seen.receipts[-1].attempt]
    if without_step:
        workers += [(without_step[0], workers[-1][1]), (without_step[0], 0)]
    workers.append((seen.ended, workers[-1][1]))
    moments = Series()
    for time, number in workers:
        moments.add({"time": time, "workers": number, "attempt": 0})
    x_axis = over_time(report, moments)
    y = linear_axis((number for _, number in workers), from_zero=True)
    line = Line("workers that train", points_of(x_axis, moments.column("workers")))
    return element("div", chart("Workers", x_axis, y, [line]), class_="timeline")


def _start(attempt: Attempt, receipt: Receipt | None, stepped: bool) -> list[Any]:
    began = [f"{attempt.number}", utc_time(attempt.time)]
    if receipt is None:
        why = "no receipt, though it took steps" if stepped else "no receipt: it took no step"
        tier, world = attempt.metadata.tier or None, attempt.metadata.world_size or None
        return [*began, _wide(why), None, None, None, integer(attempt.step), tier, world, None, None]
    label = "first start" if receipt.cause is Cause.BEGIN else str(receipt.cause)
    label = f"incident: {label}" if receipt.cause.incident else label
    detail = f" ({receipt.detail})" if receipt.detail else ""
    safe = None
    if receipt.committed is not None and receipt.noticed is not None:
        safe = duration(max(0.0, receipt.committed - receipt.noticed))
    took = receipt.recovery_s if receipt.cause.incident else receipt.first_step - receipt.restarted
    workers = f"{receipt.world_before} → {receipt.world_after}"
    same = receipt.world_before in (0, receipt.world_after)
    return [
        *began,
        _wide(label + detail),
        Number(f"at least {receipt.replayed:,}", receipt.replayed) if receipt.at_least else integer(receipt.replayed),
        duration(max(0.0, took)),
        safe,
        integer(receipt.step),
        "the beginning" if receipt.tier == "beginning" else receipt.tier,
        str(receipt.world_after) if same else workers,
        integer(receipt.worker_seconds_lost),
        None if receipt.cost is None else Number(money(receipt.cost), receipt.cost),
    ]


def _wide(words: str) -> Html:
    return element("span", words, class_="wide")


def _failures(report: Report) -> Html:
    """Return a table of the errors that ended processes, with causes before consequences."""
    if not report.failures:
        return Html("")
    found = sorted(report.failures, key=lambda failure: failure.is_consequence)
    shown = found[:MAX_FAILURES]
    of = f", {len(shown)} of {len(found):,}" if len(shown) < len(found) else ""
    rows = [
        [
            utc_time(failure.time),
            f"rank {failure.rank} of attempt {failure.attempt}" if failure.rank is not None else "the driver",
            integer(failure.step),
            _wide(f"{failure.type}: {failure.message}"),
            _wide(f"{failure.file}:{failure.line}, {failure.function}" if failure.file else ""),
        ]
        for failure in shown
    ]
    return table(f"Errors that ended processes{of}", ["time (UTC)", "process", "step", "error", "where"], rows)


def _events(report: Report) -> Html:
    events = report.other_events
    if not events:
        return paragraph("No other event is recorded.", kind="note")
    shown = events[-MAX_ROWS:]
    of = f", the newest {len(shown)} of {len(events):,}" if len(shown) < len(events) else ""
    rows = [
        [
            utc_time(event["time"]),
            event["event"],
            *("" if event.get(name) is None else str(event[name]) for name in ("attempt", "step", "rank")),
            _wide(event.get("detail", "")),
        ]
        for event in shown
    ]
    return table(f"Other events{of}", ["time (UTC)", "event", "attempt", "step", "rank", "detail"], rows)
