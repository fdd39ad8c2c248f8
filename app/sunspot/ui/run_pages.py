"""Renders the page of one run and the page that compares several runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, Literal

from sunspot.formatting import money
from sunspot.report import checkpoints
from sunspot.report.charts import Line, XAxis, chart, fitting_axis, over_steps, points_of
from sunspot.report.html import Html, duration, element, integer, join, paragraph, percent, result, table
from sunspot.report.learning import MAX_CURVES, results_first
from sunspot.report.model import Report
from sunspot.report.page import SECTIONS, Sections
from sunspot.report.page import show as show_report
from sunspot.run.objects import RUN
from sunspot.settings import PREFIX
from sunspot.settings.search_space import SEARCH_LABEL

BACK = element("nav", element("a", "All runs", href="/"), aria_label="Back")


@dataclass(frozen=True)
class Log:
    """The tail of one process's log, and the names of the run's other logs."""

    stream: str
    text: str
    others: Sequence[str]
    "Names of other streams, newest first."


LOG_PLACEHOLDER = Html("<!-- log -->")
"""Placeholder for the log in a run's page. The log is read more often than the page is rendered."""


def show_run(report: Report) -> Html:
    """Return the body of a run's page with its report, its log, and commands for its checkpoints."""
    location = report.seen.run.storage.locate("").rstrip("/")

    def show_checkpoints(report: Report) -> Html:
        options = f"{quote(report.seen.run.name)} --storage {quote(location)}"
        read = paragraph("Verify every byte: ", element("code", f"sunspot checkpoints verify {options}"), ".")
        get = paragraph("Fetch the newest: ", element("code", f"sunspot checkpoints get {options} newest"), ".")
        return join([checkpoints.show(report), read, get])

    sections: Sections = {}
    for anchor, section in SECTIONS.items():
        sections[anchor] = section
        if anchor == "incidents":
            sections["log"] = ("Log", lambda _: LOG_PLACEHOLDER)
    sections["checkpoints"] = (SECTIONS["checkpoints"][0], show_checkpoints)
    search = report.seen.labels.get(SEARCH_LABEL, "")
    shown = show_report(report, sections)
    if search == report.seen.run.name or not RUN.fullmatch(search):
        return shown
    return join([paragraph("A trial of ", element("a", search, href=f"/run/{search}"), ".", kind="note"), shown])


def show_log(run: str, log: Log | None) -> Html:
    """Return the tail of a run's log, with links to its other logs."""
    if not log:
        return paragraph("No process of this run has shipped output yet.")
    lines = element("pre", join(log.text.splitlines(), "\n"), tabindex="0", aria_label=f"the end of {log.stream}")
    links = join((element("a", name, href=f"/run/{run}?log={name}#log") for name in log.others), ", ")
    more = paragraph("Others: ", links, ".") if log.others else ""
    return join([paragraph("The end of ", element("code", log.stream), "."), lines, more])


def show_comparison(reports: Sequence[Report], notes: Sequence[Html]) -> Html:
    """Return the body of a page that compares runs: their curves, results, and settings that differ."""
    names = [report.seen.run.name for report in reports]
    if len(reports) < 2:
        how = paragraph("Select two to six runs in ", element("a", "the list", href="/"), ".")
        return join([BACK, element("main", join([element("h1", "Compare runs"), *notes, how]), id="compared")])
    parts = {
        "Curves": _compared_curves(reports),
        "Results": _results(reports),
        "Settings that differ": _differing("setting", names, [_recorded(r, "settings") for r in reports]),
        "Versions that differ": _differing("version", names, [_recorded(r, "versions") for r in reports]),
    }
    sections = [element("section", join([element("h2", name), part])) for name, part in parts.items()]
    title = element("h1", " and ".join(names) if len(names) == 2 else f"{len(names)} runs")
    links = join((element("a", name, href=f"/run/{name}") for name in names), ", ")
    return join([BACK, element("main", join([title, paragraph(links), *notes, *sections]), id="compared")])


def _compared_curves(reports: Sequence[Report]) -> Html:
    found = list(
        dict.fromkeys(name for report in reports for name in sorted(report.history.results, key=results_first))
    )
    charts = join(_compared_curve(name, reports) for name in found[:MAX_CURVES])
    rest = paragraph(f"Not drawn here: {', '.join(found[MAX_CURVES:])}.") if found[MAX_CURVES:] else ""
    return join([element("div", charts, class_="charts"), rest if found else paragraph("No metric is recorded.")])


def _compared_curve(name: str, reports: Sequence[Report]) -> Html:
    columns = [points_of(over_steps(report), report.history.drawn(name)) for report in reports]
    lines = [Line(reports[n].seen.run.name, points, f"s{n}") for n, points in enumerate(columns)]
    y = fitting_axis(name, [point.y for points in columns for point in points])
    title = f"{name.replace('_', ' ').capitalize()}{' on a logarithmic axis' if y.log else ''}"
    return chart(title, XAxis("steps", (), (), ()), y, lines)


def _results(reports: Sequence[Report]) -> Html:
    columns = [dict(_figures(report)) for report in reports]
    names = dict.fromkeys(name for each in columns for name in each)
    rows = [[name, *(each.get(name) for each in columns)] for name in names]
    return table("Results of each run", ["figure", *(report.seen.run.name for report in reports)], rows)


def _figures(report: Report) -> Iterator[tuple[str, Any]]:
    seen = report.seen
    yield "state", str(seen.state)
    yield "steps", integer(seen.step)
    yield "time", duration(report.seconds) if report.seconds is not None else None
    yield "goodput", percent(seen.goodput, 0) if seen.goodput is not None else None
    yield "incidents", integer(len(seen.incidents))
    yield "node hours", seen.spending.node_hours
    yield "cost", money(seen.spending.cost) if seen.spending.cost is not None else None
    for name in sorted(report.history.results, key=results_first):
        newest = report.result(name)
        if newest:
            yield name, result(name, newest[0])


def _recorded(report: Report, what: Literal["settings", "versions"]) -> dict[str, str]:
    return next((found for a in reversed(report.seen.attempts) if (found := getattr(a.metadata, what))), {})


def _differing(what: str, names: Sequence[str], values: Sequence[Mapping[str, str]]) -> Html:
    known = dict.fromkeys(name for each in values for name in sorted(each))
    differing = [name for name in known if len({each.get(name) for each in values}) > 1]
    if not differing:
        return paragraph(f"All {what}s are equal." if known else f"No {what} is recorded.")
    rows = [[name.removeprefix(PREFIX), *(each.get(name) for each in values)] for name in differing]
    return table(f"{what.capitalize()}s that differ", [what, *names], rows)
