"""What a run's nodes cost: which ones its attempts had, how long, and at the price that they have recorded. Pure.

An attempt has its nodes from its claim to the next one's, or to the run's end; time in which the run had ended and
nothing was there to train is left out. A cloud bills more than that: nodes that start or wait, disks, traffic.
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
"""The group of a node for which none is recorded, among the setting PRICES."""

HOUR_S = 3600

Interval = tuple[float, float]
"""Begin and end, in seconds since the epoch."""


@dataclass(frozen=True)
class Spending:
    """What a run cost, or a part of it, or several runs. Sums of money are in the currency of the prices."""

    node_hours: float = 0.0
    "Of the workers' nodes, without the head."
    unpriced_hours: float = 0.0
    "Of these, hours whose price is not known."
    cost: float | None = None
    "None: no price is known. Otherwise what has a price, and so has the head, if that has one."
    lost_hours: float = 0.0
    "Node hours that incidents lost."
    lost: float | None = None
    "What these cost."
    saved: float | None = None
    """What the same nodes would have cost more on demand, where no incident would have lost their time. None: no price
    on demand is known."""

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
        """Return it by the names of the JSON documents; `steps` are those that count."""
        each = self.cost / steps if self.cost is not None and steps else None
        return {**asdict(self), "cost_per_step": each}

    def describe(self, steps: int = 0) -> str:
        """Return it for people, in one line; empty before a node has worked."""
        if not self.node_hours and not self.cost:
            return ""
        hours = f"{_hours(self.node_hours)} node hours"
        if self.cost is None:
            return f"{hours}, {_hours(self.lost_hours)} of them lost to incidents; no price is known"
        parts = [f"{money(self.cost)} for {hours}"]
        if self.unpriced_hours:
            parts.append(f"{_hours(self.unpriced_hours)} of them without a price, and not in it")
        if steps:
            parts.append(f"{money(self.cost / steps)} a step")
        parts.append(f"{money(self.lost or 0.0)} lost to incidents")
        if self.saved is not None:
            saved = f"{money(abs(self.saved))} {'saved by' if self.saved >= 0 else 'more than without'} spot nodes"
            parts.append(saved)
        return ", ".join(parts)


class _Rate(NamedTuple):
    """The nodes of an attempt, and what they cost per hour; None: no price, or none on demand, is known."""

    nodes: int
    unpriced: int
    price: float | None
    on_demand: float | None


def compute_spending(attempts: Sequence[Attempt], receipts: Sequence[Receipt], end: float) -> Spending:
    """Return what a run cost until `end`, in seconds since the epoch; attempts and receipts are in their order."""
    if not attempts:
        return Spending()
    return _spent(attempts, receipts, (attempts[0].time, max(end, *(attempt.time for attempt in attempts))))


def cost_of_loss(attempts: Sequence[Attempt], receipt: Receipt) -> float | None:
    """Return what the time that a receipt tells of cost, up to its first step; None: no price is known."""
    return _spent(attempts, [receipt], (receipt.left, receipt.first_step)).cost


def _spent(attempts: Sequence[Attempt], receipts: Sequence[Receipt], span: tuple[float, float]) -> Spending:
    # Where the time of each attempt begins, and that of the last one ends, in order: clocks may disagree.
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
    """Return how many hours of the spans, without the pauses, are between each two bounds; overlaps count once."""
    covered, paused = _until([*spans, *pauses], bounds), _until(pauses, bounds)
    until = [one - other for one, other in zip(covered, paused, strict=True)]
    return [max(0.0, after - before) / HOUR_S for before, after in pairwise(until)]


def _until(spans: Iterable[Interval], bounds: Sequence[float]) -> list[float]:
    """Return how many seconds of the spans are before each bound."""
    merged = list(without_overlap(span for span in spans if span[0] < span[1]))
    before = [0.0, *accumulate(last - first for first, last in merged)]
    found = []
    for bound in bounds:
        number = bisect_right(merged, bound, key=lambda span: span[0])
        beyond = max(0.0, merged[number - 1][1] - bound) if number else 0.0
        found.append(before[number] - beyond)
    return found


def _rate(attempt: Attempt) -> _Rate:
    """Return what the nodes of an attempt cost per hour, each host counted once, and the head."""
    from sunspot.settings import HEAD, PREFIX  # pydantic: slow to import, and most verbs do without

    metadata = attempt.metadata
    prices = _read_prices(metadata.settings.get(PREFIX + "PRICES", ""))
    hosts = set(metadata.nodes.values())
    nodes = [prices.get(metadata.groups.get(host) or FIRST_GROUP) for host in hosts]
    known = [(p.price, p.on_demand_price) for p in (*nodes, prices.get(HEAD)) if p and p.price is not None]
    # A node without a price on demand is on demand already.
    on_demand = [price if other is None else other for price, other in known]
    return _Rate(
        nodes=len(hosts),
        unpriced=sum(price is None or price.price is None for price in nodes),
        price=sum(price for price, _ in known) if known else None,
        on_demand=sum(on_demand) if any(other is not None for _, other in known) else None,
    )


@functools.lru_cache
def _read_prices(text: str) -> dict[str, NodePrice]:
    """Return the prices that a setting has recorded; none when it is not to be understood."""
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
