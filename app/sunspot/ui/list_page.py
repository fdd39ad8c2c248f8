"""The page that lists all runs, or only the runs that match a query, with their states."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from sunspot.formatting import in_words, money, plural
from sunspot.metric_names import HELD_OUT
from sunspot.report.charts import Point, sparkline
from sunspot.report.html import Html, element, integer, join, paragraph, result, text
from sunspot.report.page import STATE_SIGNS
from sunspot.run.attempts import step_of
from sunspot.run.cost import Spending
from sunspot.run.seen import RunSeen
from sunspot.run.status import RunState
from sunspot.ui.all_runs import Curve

PER_PAGE = 50
"""Number of runs on a page, limited because each curve takes requests."""

MAX_REASON = 160
"""Largest number of characters of a reason in the list. The run's own page shows the whole reason."""

SIGNS = {**STATE_SIGNS, RunState.SILENT: ("!", "bad"), RunState.RUNNING: ("●", "good")}
"""The symbol and color of each state in the list."""

COLUMNS = ("run", "state", "steps", "held out", "loss", "checkpoint", "incidents", "cost", "last sign of life")


@dataclass(frozen=True)
class Query:
    """A filter for the list of runs."""

    q: str = ""
    "Words that must all occur in the name, the state or the reason."
    state: str = ""
    "The state of the runs, or an empty string for any state."
    page: int = 1

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> "Query":
        """Parse the query of a URL. Invalid fields are ignored."""
        number = fields.get("page", "")
        page = int(number) if number.isdecimal() and len(number) < 7 else 1
        return cls(fields.get("q", ""), fields.get("state", ""), max(1, page))

    def choose(self, runs: Iterable[RunSeen]) -> list[RunSeen]:
        """Return all matching runs, with the most recently active runs first."""
        found = [seen for seen in runs if self._matches(seen)]
        return sorted(found, key=lambda seen: (-seen.last_active, seen.run.name))

    def _matches(self, seen: RunSeen) -> bool:
        state, reason = describe_state(seen)
        shown = f"{seen.run.name} {state} {reason}".lower()
        return self.state in ("", state) and all(word in shown for word in self.q.lower().split())

    def on_page(self, found: Sequence[RunSeen]) -> Sequence[RunSeen]:
        """Return the runs on this page, given all runs that match."""
        return found[(self.page - 1) * PER_PAGE : self.page * PER_PAGE]

    def link(self, name: str, **fields: Any) -> Html:
        """Return a link to the list with some of the query's fields changed."""
        current = "page" if fields.get("state") == self.state else None
        return element("a", name, href=f"/?{urlencode(asdict(replace(self, **fields)))}", aria_current=current)


def describe_state(seen: RunSeen) -> tuple[str, str]:
    """Return the state and its reason, or an empty state and the error if the run cannot be read."""
    return ("", f"cannot be read: {seen.trouble}") if seen.trouble else seen.judge()


def show_all(runs: Sequence[RunSeen], curves: Mapping[str, Curve], query: Query, notes: Sequence[Html]) -> Html:
    """Return the body of the page."""
    found = query.choose(runs)
    shown = query.on_page(found)
    counts = Counter(str(seen.state) for seen in runs if not seen.trouble)
    states = [("", "all", len(runs)), *((state, state, number) for state, number in counts.most_common())]
    chips = join(element("li", query.link(f"{name} {number:,}", state=s, page=1)) for s, name, number in states)
    words = Html(f'<input type="search" name="q" value="{text(query.q)}" aria-label="words in name, state or reason">')
    state = Html(f'<input type="hidden" name="state" value="{text(query.state)}">')
    search = element("form", join([words, state, " ", element("button", "Search")]), role="search")
    header = [element("h1", "Runs"), element("nav", element("ul", chips), id="counts", aria_label="States"), search]
    parts: list[Html] = [*notes]
    if shown:
        button = element("button", "Compare selected runs")
        parts.append(element("form", join([_table(shown, curves), button]), action="/compare"))
    elif runs:
        parts.append(paragraph("No run matches; ", element("a", "show all", href="/"), "."))
    else:
        parts.append(paragraph("There are no runs yet. A run appears when it is submitted, or when its driver begins."))
    if len(found) > len(shown):
        back = query.link("Previous", page=query.page - 1) if query.page > 1 else ""
        further = query.link("Next", page=query.page + 1) if query.page * PER_PAGE < len(found) else ""
        place = f"Page {query.page} of {plural(len(found), 'run')}. "
        parts.append(element("nav", join([place, back, " ", further]), aria_label="Pages"))
    return join([element("header", join(header)), element("main", join(parts), id="all", class_="runs")])


def _table(runs: Sequence[RunSeen], curves: Mapping[str, Curve]) -> Html:
    """Return the table. A narrow window shows each row as a card, but ARIA roles keep it a table for screen readers."""
    now = time.time()
    heads = [Html("<span>compare</span>"), *COLUMNS]
    head = element("tr", join(element("th", name, scope="col", role="columnheader") for name in heads), role="row")
    body = join(element("tr", join(_cells(seen, curves.get(seen.run.name, Curve()), now)), role="row") for seen in runs)
    parts = [element("thead", head, role="rowgroup"), element("tbody", body, role="rowgroup")]
    return element("table", join([element("caption", "Runs and their states"), *parts]), role="table")


def _cells(seen: RunSeen, curve: Curve, now: float) -> Iterator[Html]:
    name = seen.run.name
    tick = Html(f'<input type="checkbox" name="run" value="{text(name)}" aria-label="compare {text(name)}">')
    yield element("td", tick, role="cell", class_="tick")
    location = element("small", seen.status.location) if seen.status and seen.status.location else Html("")
    link = join([element("a", name, href=f"/run/{name}"), location])
    yield element("th", link, scope="row", role="rowheader")
    for column, value in zip(COLUMNS[1:], _values(seen, curve, now), strict=True):
        yield element("td", "—" if value is None else value, role="cell", data_name=column)


def _values(seen: RunSeen, curve: Curve, now: float) -> Iterator[Html | None]:
    """Yield the row's values in the columns after the name. Unknown values are None."""
    status = seen.progress
    state, why = describe_state(seen)
    sign, color = SIGNS.get(seen.state, ("", "")) if state else ("?", "bad")
    if state in (RunState.RUNNING, RunState.SUCCEEDED):
        why = status.nan_warning if status and state == RunState.RUNNING else ""
    why = why if len(why) <= MAX_REASON else f"{why[: MAX_REASON - 1]}…"
    shown = element("span", f"{sign} {state or 'not known'}".strip(), class_=f"state {color}".strip())
    yield join([shown, element("small", why)])
    if status is None:
        yield from [None] * (len(COLUMNS) - 3)
    else:
        total = status.total_steps
        bar = Html(f'<progress max="{total}" value="{status.step}" aria-hidden="true"></progress>' if total else "")
        yield join([integer(status.step), join([" of ", integer(total)]) if total else "", bar])
        name, value = curve.held_out or (f"{HELD_OUT}loss", status.test_loss)
        yield None if value is None else join([name.removeprefix(HELD_OUT), " ", result(name, value)])
        loss = curve.points[-1].y if status.loss is None and curve.points else status.loss
        yield None if loss is None else join([result("loss", loss), _draw(curve.points)])
        checkpoint = status.checkpoint
        age = _ago(status.checkpoint_time, now) if status.checkpoint_time is not None else ""
        yield join([age, element("small", f"step {step_of(checkpoint):,}")]) if checkpoint else None
        yield None if curve.incidents is None else join([integer(curve.incidents)])
        yield _cost(curve.spending) if curve.spending else None
    yield _ago(seen.last_active, now) if seen.last_active else None


def _cost(spending: Spending) -> Html:
    hours = f"{spending.node_hours:,.3g} node hours"
    return join([money(spending.cost), element("small", hours)]) if spending.cost is not None else join([hours])


def _draw(points: Sequence[Point]) -> Html:
    if len(points) < 2:
        return Html("")
    first, last = points[0], points[-1]
    description = f"Loss from {first.y:.4g} at step {first.x:.0f} to {last.y:.4g} at step {last.x:.0f}"
    return sparkline(points, description)


def _ago(timestamp: float, now: float) -> Html:
    exact = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(timestamp))
    return element("time", f"{in_words(now - timestamp)} ago", datetime=exact, title=exact)
