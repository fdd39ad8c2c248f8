"""Renders the section on the run's data, settings and versions, and on how these changed between attempts."""

import itertools
from collections.abc import Callable
from typing import Any, Literal

from sunspot.report.html import Html, element, join, paragraph, table
from sunspot.report.model import Report
from sunspot.settings import PREFIX, Settings, differences

MAX_CHANGES = 100
"""Largest number of lines about changes between attempts."""


def show(report: Report) -> Html:
    """Render the newest attempt's settings and versions, and a table that describes the training data.

    The section also lists the changes to the settings and versions between attempts.
    """
    defaults = Settings.model_construct().environment()

    def describe(name: str, value: str) -> list[Any]:
        return [name.removeprefix(PREFIX), _code(value), _default(name, value, defaults)]

    settings = _newest(report, "settings", [f"{PREFIX}…", "value", "default"], describe)
    versions = _newest(report, "versions", ["what", "version"], lambda name, version: [name, _code(version)])
    return join([settings, _data(report), versions])


def _newest(
    report: Report, what: Literal["settings", "versions"], columns: list[str], describe: Callable[[str, str], list[Any]]
) -> Html:
    """Render the newest attempt's settings or versions as a table, and list the changes between attempts."""
    recorded = [(each.number, found) for each in report.seen.attempts if (found := getattr(each.metadata, what))]
    if not recorded:
        return paragraph(f"No {what} are recorded yet.")
    number, values = recorded[-1]
    rows = [describe(*each) for each in sorted(values.items())]
    return join([table(f"{what.capitalize()} of attempt {number}", columns, rows), _changes(what, recorded)])


def _data(report: Report) -> Html:
    if not report.seen.identity or not report.seen.identity.rows:
        return paragraph("Nothing is recorded about the data yet.")
    rows = report.seen.identity.rows
    counts = [["training rows", rows.rows], ["steps per epoch", rows.steps_per_epoch]]
    return table("Data", ["what", "is"], [*counts, ["fingerprint", _code(rows.data)]])


def _code(value: Any) -> Html:
    return element("code", value, class_="wide") if value != "" else Html("(empty)")


def _default(name: str, value: str, defaults: dict[str, str]) -> Any:
    default = defaults.get(name)
    if default is None:
        return "not known to this version"
    return "the same" if _equal(value, default) else _code(default)


def _equal(one: str, other: str) -> bool:
    """Return True if two values of a setting are equal, such as 60 and 60.0."""
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


def _changes(what: str, recorded: list[tuple[int, dict[str, str]]]) -> Html:
    lines = [
        f"attempt {number}: {line}"
        for (_, before), (number, after) in itertools.pairwise(recorded)
        for line in differences(before, after)
    ]
    if not lines:
        return paragraph(f"Every attempt has had the same {what}.", kind="note") if len(recorded) > 1 else Html("")
    shown = lines[-MAX_CHANGES:]
    of = f", the newest {len(shown)} of {len(lines):,}" if len(shown) < len(lines) else ""
    items = element("ul", join(element("li", line) for line in shown))
    return join([element("h3", f"Changes to the {what}{of}"), items])
