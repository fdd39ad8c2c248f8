"""Settings, data and versions of the run, and what changed between attempts."""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

from sunspot.report.html import Html, element, join, paragraph, table
from sunspot.report.model import Report
from sunspot.run.attempts import Attempt
from sunspot.settings import PREFIX, Settings, differences

MAX_CHANGES = 100
"""Lines of changes from one attempt to the next."""


def show(report: Report) -> Html:
    """Return the newest attempt's settings and versions, their changes, and the data."""
    return join([_settings(report), _data(report), _versions(report)])


def _settings(report: Report) -> Html:
    recorded = _recorded(report.attempts, "settings")
    if not recorded:
        return paragraph("No settings are recorded yet.")
    number, values = recorded[-1]
    defaults = Settings.model_construct().environment()
    known = sorted(values.items())
    rows = [[name.removeprefix(PREFIX), _code(value), _default(name, value, defaults)] for name, value in known]
    caption = f"Settings of attempt {number}, without their prefix {PREFIX}"
    return join([table(caption, ["setting", "value", "default"], rows), _changes("settings", recorded)])


def _data(report: Report) -> Html:
    if not report.identity or not report.identity.rows:
        return paragraph("Nothing is recorded of the data yet.")
    rows = report.identity.rows
    counts = [["training rows", rows.rows], ["steps of an epoch", rows.steps_per_epoch]]
    return table("Data", ["what", "is"], [*counts, ["fingerprint", _code(rows.data)]])


def _versions(report: Report) -> Html:
    recorded = _recorded(report.attempts, "versions")
    if not recorded:
        return paragraph("No versions are recorded yet.")
    number, values = recorded[-1]
    rows = [[name, _code(version)] for name, version in sorted(values.items())]
    caption = f"Versions of attempt {number}"
    return join([table(caption, ["what", "version"], rows), _changes("versions", recorded)])


def _code(value: Any) -> Html:
    return element("code", value, class_="wide") if value != "" else Html("(empty)")


def _recorded(attempts: Sequence[Attempt], what: Literal["settings", "versions"]) -> list[tuple[int, dict[str, str]]]:
    """Return what each attempt has recorded of its settings or versions, if anything."""
    return [(attempt.number, found) for attempt in attempts if (found := getattr(attempt.metadata, what))]


def _default(name: str, value: str, defaults: dict[str, str]) -> Any:
    if name not in defaults:
        return "not known to this version"
    if _equal(value, defaults[name]):
        return "the same"
    return _code(defaults[name])


def _equal(one: str, other: str) -> bool:
    """Compare two values of a setting, of which 60 and 60.0 are the same."""
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
    return join([element("h3", f"Changes of the {what}{of}"), items])
