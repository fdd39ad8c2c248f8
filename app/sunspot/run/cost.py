"""The cost of a run's nodes, computed from its attempts, its receipts and the recorded prices.

An attempt is charged for its nodes from its claim until the next claim or the end of the run. If the run was resumed
after its end, the time in between is not charged. Clouds also bill for disks, traffic, and nodes that are starting or
idle. These costs are not included.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from sunspot.formatting import money
from sunspot.run.attempts import Attempt
from sunspot.run.incidents import Receipt, without_overlap

if TYPE_CHECKING:
    from sunspot.settings import NodePrice

FIRST_GROUP = "workers"
"""The node group in the setting PRICES that applies to nodes without a recorded group."""

HOUR_S = 3600

Interval = tuple[float, float]
"""The beginning and end of a time interval, in seconds since the epoch."""


@dataclass(frozen=True)
class Spending:
    """The cost of a run, part of a run, or several runs, in the currency of the prices."""

    node_hours: float = 0.0
    "Hours of the workers' nodes, excluding the head."
    unpriced_hours: float = 0.0
    "Node hours without a known price."
    cost: float | None = None
    "The cost of everything with a known price, including the head, or None if no price is known."
    lost_hours: float = 0.0
    "Node hours lost to incidents."
    lost: float | None = None
    "The cost of the lost node hours."
    saved: float | None = None
    """The amount saved compared with on-demand nodes, or None if no on-demand price is known. On-demand nodes would not
    have lost time to incidents."""

    def __add__(self, other: Spending) -> Spending:
        return Spending(
            node_hours=self.node_hours + other.node_hours,
            unpriced_hours=self.unpriced_hours + other.unpriced_hours,
            cost=_add(self.cost, other.cost),
            lost_hours=self.lost_hours + other.lost_hours,
            lost=_add(self.lost, other.lost),
            saved=_add(self.saved, other.saved),
        )

    def record(self, steps: int = 0) -> dict[str, Any]:
        """Return the spending as fields for a JSON document. `steps` is the run's number of steps."""
        cost_per_step = self.cost / steps if self.cost is not None and steps else None
        return {**asdict(self), "cost_per_step": cost_per_step}

    def describe(self, steps: int = 0) -> str:
        """Return the spending as one line of readable text, or an empty string if nothing was spent."""
        if not self.node_hours and not self.cost:
            return ""
        hours = f"{_hours(self.node_hours)} node hours"
        if self.cost is None:
            return f"{hours}, {_hours(self.lost_hours)} of them lost to incidents; no price is known"
        parts = [f"{money(self.cost)} for {hours}"]
        if self.unpriced_hours:
            parts.append(f"{_hours(self.unpriced_hours)} of them without a price and not included")
        if steps:
            parts.append(f"{money(self.cost / steps)} a step")
        parts.append(f"{money(self.lost or 0.0)} lost to incidents")
        if self.saved is not None:
            saved = f"{money(abs(self.saved))} {'saved by' if self.saved >= 0 else 'more than without'} spot nodes"
            parts.append(saved)
        return ", ".join(parts)


class _Rate(NamedTuple):
    """An attempt's node count, the number of nodes without a price, and the total hourly prices, actual and on-demand.

    A total is None if no price of its kind is known.
    """

    nodes: int
    unpriced: int
    price: float | None
    on_demand: float | None


def compute_spending(attempts: Sequence[Attempt], receipts: Sequence[Receipt], end: float) -> Spending:
    """Return a run's spending until `end`, in seconds since the epoch. Attempts and receipts are oldest first."""
    if not attempts:
        return Spending()
    return _spent(attempts, receipts, (attempts[0].time, max(end, *(attempt.time for attempt in attempts))))


def cost_of_loss(attempts: Sequence[Attempt], receipt: Receipt) -> float | None:
    """Return the cost of the interruption that a receipt describes, or None if no price is known.

    The interruption begins when the run completes the step from which it later continues (`Receipt.left`). It ends
    when the next attempt has completed its first step (`Receipt.first_step`).
    """
    return _spent(attempts, [receipt], (receipt.left, receipt.first_step)).cost


def _spent(attempts: Sequence[Attempt], receipts: Sequence[Receipt], span: tuple[float, float]) -> Spending:
    # The start of each attempt and the end of the last one, made monotonic because clocks can disagree.
    bounds = list(accumulate((*(attempt.time for attempt in attempts), span[1]), max))
    pauses = [(receipt.restarted - receipt.paused_s, receipt.restarted) for receipt in receipts]
    losses = [(receipt.left, receipt.first_step) for receipt in receipts if receipt.cause.incident]
    total = Spending()
    for attempt, used, lost in zip(
        attempts, _hours_of([span], pauses, bounds), _hours_of(losses, pauses, bounds), strict=True
    ):
        nodes, unpriced, price, on_demand = _rate(attempt)
        cost = _times(price, used)
        total += Spending(
            node_hours=nodes * used,
            unpriced_hours=unpriced * used,
            cost=cost,
            lost_hours=nodes * lost,
            lost=_times(price, lost),
            saved=None if on_demand is None or cost is None else on_demand * (used - lost) - cost,
        )
    return total


def _hours_of(spans: Sequence[Interval], pauses: Sequence[Interval], bounds: Sequence[float]) -> list[float]:
    """Return, for each pair of adjacent bounds, the hours between them that are in a span but not in a pause.

    Overlapping spans are not counted twice.
    """
    covered = _until([*spans, *pauses], bounds)
    paused = _until(pauses, bounds)
    until = [one - other for one, other in zip(covered, paused, strict=True)]
    return [max(0.0, after - before) / HOUR_S for before, after in pairwise(until)]


def _until(spans: Iterable[Interval], bounds: Sequence[float]) -> list[float]:
    """Return, for each bound, how many seconds before the bound are covered by the spans."""
    merged = list(without_overlap(span for span in spans if span[0] < span[1]))
    before = [0.0, *accumulate(last - first for first, last in merged)]
    found = []
    for bound in bounds:
        number = bisect_right(merged, bound, key=lambda span: span[0])
        beyond = max(0.0, merged[number - 1][1] - bound) if number else 0.0
        found.append(before[number] - beyond)
    return found


def hourly_price(attempt: Attempt) -> float | None:
    """Return the hourly price of an attempt's nodes, including the head, or None if no price is known."""
    return _rate(attempt).price


def _rate(attempt: Attempt) -> _Rate:
    """Count an attempt's nodes, and add up their hourly prices, both actual and on-demand.

    The totals include the head's prices. A node with several workers counts once.
    """
    from sunspot.settings import HEAD, PREFIX  # pydantic is slow to import, and most verbs do not need it

    metadata = attempt.metadata
    prices = _read_prices(metadata.settings.get(PREFIX + "PRICES", ""))
    hosts = set(metadata.nodes.values())
    nodes = [prices.get(metadata.groups.get(host) or FIRST_GROUP) for host in hosts]
    known = [(p.price, p.on_demand_price) for p in (*nodes, prices.get(HEAD)) if p and p.price is not None]
    # A node without an on-demand price is an on-demand node.
    on_demand = [price if other is None else other for price, other in known]
    return _Rate(
        nodes=len(hosts),
        unpriced=sum(price is None or price.price is None for price in nodes),
        price=sum(price for price, _ in known) if known else None,
        on_demand=sum(on_demand) if any(other is not None for _, other in known) else None,
    )


@functools.lru_cache
def _read_prices(text: str) -> dict[str, NodePrice]:
    """Return the recorded prices keyed by node group, or an empty dict if they cannot be parsed."""
    from pydantic import ValidationError

    from sunspot.run.objects import adapter
    from sunspot.settings import NodePrice

    try:
        found: dict[str, NodePrice] = adapter(dict[str, NodePrice]).validate_json(text or "{}")
        return found
    except ValidationError:
        return {}


def _hours(number: float) -> str:
    return f"{number:,.1f}" if number >= 10 else f"{number:.3g}"


def _times(price: float | None, hours: float) -> float | None:
    return None if price is None else price * hours


def _add(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other
