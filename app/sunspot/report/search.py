"""Renders the report of a search: its trials, their learning curves, and the metric over each varied setting."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sunspot.errors import NotFoundError
from sunspot.formatting import plural
from sunspot.report.charts import MIN_DRAWN, Axis, Drawing, Line, Point, figure, fitting_axis, linear_axis, log_axis
from sunspot.report.history import can_draw
from sunspot.report.html import Html, element, integer, join, paragraph, result, table
from sunspot.report.model import read_report
from sunspot.report.page import fitting, footer, in_color, render, whole_page
from sunspot.run import Run
from sunspot.run.attempts import Span, lineage, read_attempts
from sunspot.run.history import iter_records
from sunspot.run.objects import read_or_default
from sunspot.run.search import SearchResults, Trial, read_results
from sunspot.run.seen import look
from sunspot.run.size_limits import MAX_LISTED, MAX_TRIALS, cut
from sunspot.run.status import RunState

Curves = Mapping[str, Sequence[tuple[int, float]]]
"""The step and metric of each record, keyed by the name of the trial's run."""

MAX_NAMED = 24
"""Largest number of characters of an axis label."""


def render_stored(run: Run) -> bytes:
    """Return the report page of a run or a search, read from storage."""
    try:
        return render_search(*read_search(run))
    except NotFoundError:
        return render(read_report(look(run)))


def read_search(run: Run) -> tuple[Run, SearchResults, Curves]:
    """Read the content of a search's report.

    Raises `NotFoundError` if the run is not a search, and `StorageError` if storage cannot be read."""
    results = read_results(run)
    if results is None:
        raise NotFoundError(f"{run.location} is not a search")
    trials = {trial.run: Run(run.storage, trial.run) for trial in results.ranking[:MAX_TRIALS]}
    curves = {name: _curve(trial, results.metric) for name, trial in trials.items()}
    return run, results, curves


def render_search(run: Run, results: SearchResults, curves: Curves, link: str = "") -> bytes:
    """Return the report page of a search, encoded as UTF-8.

    `link` is the address of a trial's report, with {} in place of the name of the trial's run.
    """
    return whole_page(f"{run.name}: search", show_search(run, results, curves, link))


def show_search(run: Run, results: SearchResults, curves: Curves, link: str = "") -> Html:
    """Return the body of the page. `link` is as in `render_search`."""
    parts = {"Trials": _trials(results, link), _name(results): _charts(results, curves)}
    parts = dict(zip(parts, fitting(parts.values()), strict=True))
    header = [paragraph("Sunspot search", kind="kicker"), element("h1", run.name), _lead(results)]
    main = [element("section", join([element("h2", name), part])) for name, part in parts.items()]
    return join([element("header", join(header)), element("main", join(main)), footer(run.location, results.time)])


def _curve(run: Run, metric: str) -> list[tuple[int, float]]:
    spans = read_or_default(lambda: lineage(read_attempts(run)), list[Span]())
    values = [(record["step"], record.get(metric)) for record in iter_records(run, "metrics", spans)]
    return [(step, float(value)) for step, value in values if isinstance(value, int | float) and can_draw(value)]


def _name(results: SearchResults) -> str:
    return results.metric.replace("_", " ").capitalize()


def _lead(results: SearchResults) -> Html:
    counts = {state: sum(trial.state is state for trial in results.trials) for state in RunState}
    states = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    parts: list[Any] = [f"{plural(len(results.trials), 'trial')}: {states}."]
    best = next((trial for trial in results.trials if trial.run == results.promoted), None)
    if best:
        goal = f"{'lowest' if results.order == 'min' else 'highest'} {results.metric}"
        values = ", ".join(f"{name} {_as_text(value)}" for name, value in best.settings.items())
        parts += [" Best: ", element("strong", best.run), f", {goal} ", result(results.metric, best.best)]
        parts.append(f" with {values}.")
    else:
        parts.append(" No checkpoint is promoted.")
    return paragraph(*parts, kind="lead")


def _trials(results: SearchResults, link: str) -> Html:
    rows = []
    for trial in results.ranking:
        run = element("a", trial.run, href=link.format(trial.run)) if link else trial.run
        run = element("strong", join([run, " (best)"])) if trial.run == results.promoted else run
        steps = f"{trial.step:,} of {trial.total_steps:,}" if trial.total_steps else integer(trial.step)
        values = map(trial.settings.get, results.space)
        why = element("span", trial.reason, class_="wide") if trial.reason else None
        rows.append([run, in_color(trial.state, trial.state), steps, result(results.metric, trial.best), *values, why])
    columns = ["trial", "state", "steps", f"best {results.metric}", *results.space, "why"]
    space = element("ul", join(element("li", element("code", f"{n}={text}")) for n, text in results.space.items()))
    return join([table("Trials, the best first", columns, rows), element("h3", "Search space"), space])


def _charts(results: SearchResults, curves: Curves) -> Html:
    """Return a chart of all trials' metrics over steps, and a chart of their best metrics for each varied setting."""
    measured = [trial for trial in results.ranking[:MAX_TRIALS] if can_draw(trial.best)]
    y = linear_axis(float(trial.best or 0.0) for trial in measured)
    dimensions, more = cut([*results.space], MAX_LISTED, "settings")
    scattered = [_scatter(results, name, measured, y) for name in dimensions if measured]
    charts = element("div", join([_learning(results, curves), *scattered]), class_="charts")
    _, more_trials = cut(results.trials, MAX_TRIALS, "trials")
    notes = [paragraph(f"{note} in charts.", kind="note") for note in (more_trials, more) if note]
    return join([charts, *notes])


def _scatter(results: SearchResults, name: str, trials: Sequence[Trial], y: Axis) -> Html:
    values = [trial.settings[name] for trial in trials]
    x, positions = _axis_of(results.space[name], values)
    drawn = list(zip(trials, values, positions, strict=True))
    points = {trial.run: [Point(position, float(trial.best or 0.0))] for trial, _, position in drawn}
    description = "; ".join(f"{trial.run}: {_as_text(value)}, {trial.best:.4g}" for trial, value, _ in drawn)
    title = f"{_name(results)} over {name}"
    drawing = Drawing(f"{title}. {description}.", x, name, y, _best_in_front(results, points)).svg()
    legend = [("dot c", "trial"), *([("dot a", "best")] if results.promoted in points else [])]
    return figure(title, legend, drawing)


def _best_in_front(results: SearchResults, points: dict[str, list[Point]]) -> list[Line]:
    """Return a line for each trial. The best trial's line is last, so that it is drawn in front of the others."""
    order = sorted(points, key=lambda run: run == results.promoted)
    return [Line(run, points[run], "a" if run == results.promoted else "c") for run in order]


def _axis_of(expression: str, values: Sequence[Any]) -> tuple[Axis, list[float]]:
    """Return a dimension's axis and each value's position. Values other than numbers are evenly spaced."""
    numbers = [float(value) for value in values if type(value) in (int, float) and can_draw(value)]
    if len(numbers) == len(values) and not expression.startswith("choice"):
        log = expression.startswith("loguniform") and min(numbers) >= MIN_DRAWN
        return (log_axis(numbers) if log else linear_axis(numbers)), numbers
    kinds = {_as_text(value): value for value in values}
    in_order = sorted(kinds, key=lambda kind: (kinds[kind] if isinstance(kinds[kind], int | float) else math.inf, kind))
    positions = {kind: float(position) for position, kind in enumerate(in_order)}
    ticks = tuple((position, kind[:MAX_NAMED]) for kind, position in positions.items())
    return Axis(-0.5, len(kinds) - 0.5, ticks), [positions[_as_text(value)] for value in values]


def _learning(results: SearchResults, curves: Curves) -> Html:
    """Return a chart of all trials' metrics over their steps, with the best trial in front."""
    drawn = {run: [Point(step, value) for step, value in curve] for run, curve in curves.items() if curve}
    if not drawn:
        return paragraph("No trial has recorded the metric.")
    every = [point for points in drawn.values() for point in points]
    x = linear_axis([point.x for point in every], from_zero=True, tight=True)
    y = fitting_axis(results.metric, [point.y for point in every])
    last = "; ".join(f"{run}: {points[-1].y:.4g} at step {points[-1].x:.0f}" for run, points in drawn.items())
    title = f"{_name(results)} over steps{' on a logarithmic axis' if y.log else ''}"
    drawing = Drawing(f"{title}. {last}.", x, "steps", y, _best_in_front(results, drawn)).svg()
    legend = [("c", "trial"), *([("a", f"best: {results.promoted}")] if results.promoted in drawn else [])]
    return figure(title, legend, drawing)


def _as_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
