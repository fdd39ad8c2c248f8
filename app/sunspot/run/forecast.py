"""Compares a run's progress and cost with its DEADLINE and BUDGET."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from sunspot.errors import NotFoundError
from sunspot.formatting import as_time, in_words, money
from sunspot.run import Run
from sunspot.run.attempts import recorded_setting
from sunspot.run.cost import HOUR_S, hourly_price
from sunspot.run.seen import RunDetails, look, read_details


@dataclass(frozen=True)
class Forecast:
    """A run's limits, and its expected end and cost if its speed and nodes stay the same. Unknown values are None."""

    now: float
    "Seconds since the epoch."
    deadline: float | None = None
    "Seconds since the epoch, or None if the run has no deadline."
    done_at: float | None = None
    "The expected time of the last step, or None if the run is not training."
    budget: float | None = None
    spent: float | None = None
    "The cost of the nodes so far."
    total: float | None = None
    "The expected cost of the nodes until the last step."

    @property
    def late_s(self) -> float:
        """The number of seconds by which the run will miss its deadline, or 0."""
        if self.deadline is None:
            return 0.0
        return max(0.0, max(self.now, self.done_at or 0.0) - self.deadline)

    @property
    def excess(self) -> float:
        """The amount by which the run will exceed its budget, or 0."""
        return 0.0 if self.budget is None or self.total is None else max(0.0, self.total - self.budget)

    def describe_deadline(self) -> str:
        """Return the deadline and the expected end of the run as text, or an empty string without a deadline."""
        if self.deadline is None:
            return ""
        if self.late_s:
            outcome = f"it will be missed by {in_words(self.late_s)} at this speed"
        elif self.done_at is None:
            outcome = f"in {in_words(self.deadline - self.now)}"
        else:
            outcome = f"the run will finish {in_words(self.deadline - self.done_at)} early at this speed"
        return f"{as_time(self.deadline)}, {outcome}"

    def describe_budget(self) -> str:
        """Return the budget, the cost so far and the expected cost as text, or an empty string without a budget."""
        if self.budget is None:
            return ""
        known = f"{money(self.spent or 0.0)} of {money(self.budget)} spent"
        return known if self.total is None else f"{known}, {money(self.total)} expected in total with these nodes"

    @property
    def warnings(self) -> list[str]:
        """A warning for each limit that the run will exceed."""
        late = f"it will miss its deadline by {in_words(self.late_s)}; it needs more workers or faster nodes"
        excess = (
            f"its budget is too small; it is expected to cost {money(self.total or 0.0)}, but will stop with a "
            f"checkpoint at {money(self.budget or 0.0)}"
        )
        return [text for text, is_true in ((late, self.late_s), (excess, self.excess)) if is_true]


def forecast(seen: RunDetails) -> Forecast:
    """Return the forecast for a run.

    If the run has ended or has not begun, the forecast contains only the time at which it was made.
    """
    from sunspot.settings.goal import parse_budget, parse_deadline  # pydantic is slow to import

    if seen.state.terminal or not seen.attempts:
        return Forecast(seen.time)
    deadline = budget = None
    with contextlib.suppress(ValueError):  # a record that another program has changed
        deadline = parse_deadline(recorded_setting(seen.attempts, "deadline"))
        budget = parse_budget(recorded_setting(seen.attempts, "budget"))
    left_s = seen.seconds_left
    spent = seen.spending.cost
    price = hourly_price(seen.attempts[-1])
    total = None
    if spent is not None and price is not None and left_s is not None:
        total = spent + price * left_s / HOUR_S
    return Forecast(seen.time, deadline, None if left_s is None else seen.time + left_s, budget, spent, total)


def find_spent(run: Run) -> float:
    """Return the cost of a run's nodes so far, or 0 if the run has not begun. Raises `StorageError`."""
    try:
        return read_details(look(run)).spending.cost or 0.0
    except NotFoundError:
        return 0.0
