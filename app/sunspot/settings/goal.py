"""Parses the values of DEADLINE and BUDGET, whether from settings or from a run's records."""

import math
from datetime import datetime


def parse_deadline(text: str) -> float | None:
    """Return a deadline in seconds since the epoch, or None if `text` is empty.

    Raises `ValueError` unless `text` is a date and time with its offset from UTC, as in ISO 8601.
    """
    if not text:
        return None
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("the time zone is missing, so the time would depend on the machine")
    return moment.timestamp()


def parse_budget(text: str) -> float | None:
    """Return a budget in the currency of the prices, or None if `text` is empty.

    Raises `ValueError` unless `text` is a finite number above 0.
    """
    if not text:
        return None
    budget = float(text)
    if not 0 < budget < math.inf:
        raise ValueError("not an amount of money")
    return budget


def check_deadline(text: str) -> str:
    """Return `text` unchanged if it is a valid deadline. Otherwise, raise `ValueError`, as `parse_deadline` does."""
    parse_deadline(text)
    return text


def check_budget(text: str) -> str:
    """Return `text` unchanged if it is a valid budget. Otherwise, raise `ValueError`, as `parse_budget` does."""
    parse_budget(text)
    return text
