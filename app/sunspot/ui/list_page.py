"""The page that lists all runs and their states, or only those that match a query."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from sunspot.formatting import in_words, money, plural
from sunspot.metric_names import HELD_OUT
from sunspot.report.charts import sparkline
from sunspot.report.html import Html, element, integer, join, paragraph, result, text
from sunspot.report.page import STATE_SIGNS
from sunspot.run.attempts import step_of
from sunspot.run.cost import Spending
from sunspot.run.status import RunState
from sunspot.ui.all_runs import RunRow

PER_PAGE = 50
"""Number of runs on a page, limited because each curve takes requests."""

MAX_REASON = 160
"""Largest number of characters of a reason in the list. The run's own page shows the whole reason."""

SIGNS = {**STATE_SIGNS, RunState.SILENT: ("!", "bad"), RunState.RUNNING: ("●", "good")}
"""The sign and colour of each state in the list."""

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
        """Parse the query of an address. Invalid fields are ignored."""
        number = fields.get("page", "")
        page = int(number) if number.isdecimal() and len(number) < 7 else 1
        return cls(fields.get("q", ""), fields.get("state", ""), max(1, page))

    def choose(self, rows: Iterable[RunRow]) -> list[RunRow]:
        """Return the matching rows of all pages, the most recently active first."""
        words = self.q.lower().split()
        found = [row for row in rows if self.state in ("", str(row.state))]
        found = [row for row in found if all(w in f"{row.name} {row.state} {row.reason}".lower() for w in words)]
        return sorted(found, key=lambda row: (-row.last_active, row.name))

    def on_page(self, found: Sequence[RunRow]) -> Sequence[RunRow]:
        """Return the rows on this page, given all rows that match."""
        return found[(self.page - 1) * PER_PAGE : self.page * PER_PAGE]

    def link(self, name: str, **fields: Any) -> Html:
        """Return a link to the list with these fields of the query changed."""
        current = "page" if fields.get("state") == self.state else None
        return element("a", name, href=f"/?{urlencode(asdict(replace(self, **fields)))}", aria_current=current)


def show_all(rows: Sequence[RunRow], query: Query, notes: Sequence[Html]) -> Html:
    """Return the body of the page."""
    found = query.choose(rows)
    shown = query.on_page(found)
    counts = Counter(str(row.state) for row in rows if row.state)
    states = [("", "all", len(rows)), *((state, state, number) for state, number in counts.most_common())]
    chips = join(element("li", query.link(f"{name} {number:,}", state=s, page=1)) for s, name, number in states)
    words = Html(f'<input type="search" name="q" value="{text(query.q)}" aria-label="words in name, state or reason">')
    state = Html(f'<input type="hidden" name="state" value="{text(query.state)}">')
    search = element("form", join([words, state, " ", element("button", "Search")]), role="search")
    header = [element("h1", "Runs"), element("nav", element("ul", chips), id="counts", aria_label="States"), search]
    parts: list[Html] = [*notes]
    if shown:
        button = element("button", "Compare selected runs")
        parts.append(element("form", join([_table(shown), button]), action="/compare"))
    elif rows:
        parts.append(paragraph("No run matches; ", element("a", "show all", href="/"), "."))
    else:
        parts.append(paragraph("There are no runs yet. A run appears when it is submitted, or when its driver begins."))
    if len(found) > len(shown):
        back = query.link("Previous", page=query.page - 1) if query.page > 1 else ""
        further = query.link("Next", page=query.page + 1) if query.page * PER_PAGE < len(found) else ""
        place = f"Page {query.page} of {plural(len(found), 'run')}. "
        parts.append(element("nav", join([place, back, " ", further]), aria_label="Pages"))
    return join([element("header", join(header)), element("main", join(parts), id="all", class_="runs")])


def _table(rows: Sequence[RunRow]) -> Html:
    """Return the table. Narrow windows show rows as cards, and roles keep it a table for screen readers."""
    now = time.time()
    heads = [Html("<span>compare</span>"), *COLUMNS]
    head = element("tr", join(element("th", name, scope="col", role="columnheader") for name in heads), role="row")
    body = join(element("tr", join(_cells(row, now)), role="row") for row in rows)
    parts = [element("thead", head, role="rowgroup"), element("tbody", body, role="rowgroup")]
    return element("table", join([element("caption", "Runs and their states"), *parts]), role="table")


def _cells(row: RunRow, now: float) -> Iterator[Html]:
    tick = Html(f'<input type="checkbox" name="run" value="{text(row.name)}" aria-label="compare {text(row.name)}">')
    yield element("td", tick, role="cell", class_="tick")
    place = element("small", row.status.place) if row.status and row.status.place else Html("")
    link = join([element("a", row.name, href=f"/run/{row.name}"), place])
    yield element("th", link, scope="row", role="rowheader")
    for name, value in zip(COLUMNS[1:], _values(row, now), strict=True):
        yield element("td", "—" if value is None else value, role="cell", data_name=name)


def _values(row: RunRow, now: float) -> Iterator[Html | None]:
    """Yield the values of the columns after the name, or None for unknown values."""
    sign, colour = SIGNS.get(row.state, ("", "")) if row.state else ("?", "bad")
    why = row.reason if row.state not in (RunState.RUNNING, RunState.SUCCEEDED) else ""
    if row.state is RunState.RUNNING and row.status:
        why = row.status.nan_warning
    why = why if len(why) <= MAX_REASON else f"{why[: MAX_REASON - 1]}…"
    state = element("span", f"{sign} {row.state or 'not known'}".strip(), class_=f"state {colour}".strip())
    yield join([state, element("small", why)])
    status = row.status
    if status is None:
        yield from [None] * (len(COLUMNS) - 3)
    else:
        total = status.total_steps
        bar = Html(f'<progress max="{total}" value="{status.step}" aria-hidden="true"></progress>' if total else "")
        yield join([integer(status.step), join([" of ", integer(total)]) if total else "", bar])
        name, value = row.held_out or (f"{HELD_OUT}loss", status.test_loss)
        yield None if value is None else join([name.removeprefix(HELD_OUT), " ", result(name, value)])
        loss = row.curve[-1].y if status.loss is None and row.curve else status.loss
        yield None if loss is None else join([result("loss", loss), _curve(row)])
        checkpoint = status.checkpoint
        age = _ago(status.checkpoint_time, now) if status.checkpoint_time is not None else ""
        yield join([age, element("small", f"step {step_of(checkpoint):,}")]) if checkpoint else None
        yield None if row.incidents is None else join([integer(row.incidents)])
        yield _cost(row.spending) if row.spending else None
    yield _ago(row.last_active, now) if row.last_active else None


def _cost(spending: Spending) -> Html:
    hours = f"{spending.node_hours:,.3g} node hours"
    return join([money(spending.cost), element("small", hours)]) if spending.cost is not None else join([hours])


def _curve(row: RunRow) -> Html:
    if len(row.curve) < 2:
        return Html("")
    first, last = row.curve[0], row.curve[-1]
    description = f"Loss from {first.y:.4g} at step {first.x:.0f} to {last.y:.4g} at step {last.x:.0f}"
    return sparkline(row.curve, description)


def _ago(timestamp: float, now: float) -> Html:
    exact = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(timestamp))
    return element("time", f"{in_words(now - timestamp)} ago", datetime=exact, title=exact)
