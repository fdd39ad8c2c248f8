"""Renders a report as a self-contained HTML page without scripts."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sunspot.formatting import as_bytes, money, plural
from sunspot.report import checkpoints, incidents, learning, predictions, settings, speed
from sunspot.report.html import Html, duration, element, integer, join, paragraph, percent, rate, result, text, utc_time
from sunspot.report.model import Report
from sunspot.run.size_limits import MAX_LISTED, MAX_PAGE_BYTES, cut
from sunspot.run.status import RunState

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Content security policy of the page. It blocks scripts, even if a run's text contains one."""

Sections = dict[str, tuple[str, Callable[[Report], Html]]]

SECTIONS: Sections = {
    "learning": ("Learning", learning.show),
    "predictions": ("Predictions", predictions.show),
    "speed": ("Speed", speed.show),
    "incidents": ("Incidents", incidents.show),
    "checkpoints": ("Checkpoints", checkpoints.show),
    "settings": ("Settings and versions", settings.show),
}
"""The heading and function of each section, keyed by anchor, in page order."""

STATE_SIGNS = {RunState.SUCCEEDED: ("✓", "good"), RunState.FAILED: ("✗", "bad"), RunState.LOST: ("✗", "bad")}
"""The symbol and color of each state."""

STYLE = Path(__file__).with_name("style.css")

STANDALONE = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'


def render(report: Report) -> bytes:
    """Return a report as an HTML page, encoded as UTF-8."""
    return whole_page(f"{report.seen.run.name}: {report.seen.state}", show(report, SECTIONS))


def show(report: Report, sections: Sections) -> Html:
    """Return the body of a report page with these sections."""
    # A run without attempts has only errors and output to show. Damage can also hide the attempts.
    begun = report.seen.attempts or report.troubles
    shown = [(anchor, *section) for anchor, section in sections.items() if begun or anchor in ("incidents", "log")]
    contents = element("ul", join(element("li", element("a", name, href=f"#{anchor}")) for anchor, name, _ in shown))
    parts = fitting(of(report) for _, _, of in shown)
    made = [
        element("section", join([element("h2", name), part]), id=anchor)
        for (anchor, name, _), part in zip(shown, parts, strict=True)
    ]
    nav = element("nav", contents, aria_label="Contents")
    return join([_header(report), nav, element("main", join(made)), footer(report.seen.run.location, report.seen.time)])


def fitting(sections: Iterable[Html]) -> Iterator[Html]:
    """Yield the sections. A section that would make the page too large is replaced by a note."""
    room = MAX_PAGE_BYTES
    for section in sections:
        if len(section) <= room:
            room -= len(section)
            yield section
        else:
            size = as_bytes(len(section))
            most = as_bytes(MAX_PAGE_BYTES)
            yield paragraph(
                f"This section is not shown, because it has {size}, and a page has at most {most}.", kind="trouble"
            )


def whole_page(title: str, body: Html, head: str = "") -> bytes:
    """Return an HTML page, encoded as UTF-8.

    If `head` is empty, the page's head contains the style sheet and the content security policy.
    """
    head = head or f"{STANDALONE}\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>"
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
    return page.encode()


def _header(report: Report) -> Html:
    seen = report.seen
    state = paragraph(in_color(seen.state, str(seen.state).capitalize()), kind="lead")
    parts = [paragraph("Sunspot run", kind="kicker"), element("h1", seen.run.name), state]
    if seen.reason and seen.state is not RunState.SUCCEEDED:
        parts.append(paragraph(seen.reason, kind="trouble" if seen.state in STATE_SIGNS else "note"))
    if seen.status and seen.status.nan_since and seen.state is not RunState.FAILED:
        parts.append(paragraph(f"{seen.status.nan_warning.capitalize()}.", kind="trouble"))
    if seen.status and seen.status.location:
        parts.append(paragraph(f"Trained in {seen.status.location}.", kind="note"))
    troubles, more = cut(report.troubles, MAX_LISTED, "parts that cannot be read")
    parts += [paragraph(trouble[0].upper() + trouble[1:], kind="trouble") for trouble in (*troubles, more) if trouble]
    parts.append(element("dl", join(_figures(report)), class_="figures"))
    return element("header", join(parts))


def in_color(state: RunState, word: str) -> Html:
    """Return `word` with a state's symbol and color."""
    sign, color = STATE_SIGNS.get(state, ("", ""))
    return element("span", f"{sign} {word}".strip(), class_=f"state {color}".strip())


def _figures(report: Report) -> Iterator[Html]:
    seen = report.seen
    metric = seen.retention.metric
    for name in dict.fromkeys(("test_accuracy", "accuracy", "test_loss", "loss", f"test_{metric}", metric)):
        newest = report.result(name)
        if newest:
            value, step = newest
            at = f"at step {step}" if step != seen.step else None
            yield _figure(_in_words(name).capitalize(), name, result(name, value), at)
    of = f"of {seen.total_steps:,}" if seen.total_steps else "total not known yet"
    yield _figure("Steps", "steps", integer(seen.step), of)
    if report.seconds is None:
        yield _figure("Time", "time", "none", "no worker has begun")
    else:
        paused_s = sum(receipt.paused_s for receipt in seen.receipts)
        paused = f"paused for {duration(paused_s).text} of it" if paused_s else None
        yield _figure("Time", "time", duration(report.seconds), paused)
    throughput = report.history.newest_values.get("rows_per_s")
    speed = (rate(throughput[0], " rows/s"), "in the newest record") if throughput else ("not known", None)
    yield _figure("Throughput", "throughput", *speed)
    goodput = (percent(seen.goodput, 0), None) if seen.goodput is not None else ("not known", "no receipt yet")
    yield _figure("Goodput", "goodput", *goodput)
    cost = seen.spending
    if cost.cost is not None:
        yield _figure("Cost", "cost", money(cost.cost), f"{money(cost.lost or 0.0)} of it lost to incidents")
    yield _figure("Incidents", "incidents", integer(len(seen.incidents)), plural(seen.restarts, "restart"))


def _figure(name: str, anchor: str, value: Any, remark: str | None) -> Html:
    shown = join([value, element("small", remark) if remark else ""])
    return element("div", join([element("dt", name), element("dd", shown, id=f"figure-{anchor}")]))


def _in_words(name: str) -> str:
    """Return a metric's name in words, such as "held-out accuracy" for `test_accuracy`."""
    held_out = name.startswith("test_")
    words = name.removeprefix("test_").replace("_", " ")
    return f"held-out {words}" if held_out else f"training {words}"


def footer(location: str, time: float) -> Html:
    """Return a footer with the data's location and the time at which it was read, in seconds since the epoch."""
    return element("footer", join(["Read from ", element("code", location), " at ", utc_time(time), " UTC."]))
