"""Stops a run once its nodes have cost as much as its BUDGET."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sunspot.background import Background
from sunspot.errors import SettingsError
from sunspot.formatting import money
from sunspot.run import Run
from sunspot.run.forecast import find_spent
from sunspot.run.requests import SPENT_BUDGET, request_stop, stop_requested
from sunspot.settings import Settings
from sunspot.settings.goal import parse_budget

CHECK_EVERY_S = 60.0
"""Seconds between two computations of what the run has cost."""


def refuse_unpriced_budget(settings: Settings) -> None:
    """Raise `SettingsError` if the run has a budget, but its cost is unknown because the nodes have no prices."""
    if settings.budget and not settings.job.prices:
        raise SettingsError(
            f"SUNSPOT_BUDGET={settings.budget} needs the prices of the nodes; set price under head and worker in a "
            "profile and submit the run with this profile, or omit the budget"
        )


@contextmanager
def within_budget(run: Run, settings: Settings) -> Iterator[None]:
    """Context manager that asks the run to save and stop once it has cost as much as its budget.

    As after `sunspot stop`, later attempts do not train. If the budget is already spent, the run is asked to
    stop before it trains.
    """
    budget = parse_budget(settings.budget)
    if budget is None:
        yield
        return

    def check() -> None:
        spent = find_spent(run)
        if spent >= budget and not stop_requested(run):
            request_stop(run, f"{SPENT_BUDGET} of {money(budget)}, because it has cost {money(spent)}")

    check()
    with Background(CHECK_EVERY_S, check):
        yield
