"""Chooses a place by prices, past experience, the remaining work, the deadline and the budget.

The rule, in order:

1. Places that the remaining budget cannot pay for are excluded. If no place would remain, the cheapest place is kept.
2. If the time until the deadline is barely enough for the work, the run goes to an affordable place with on-demand
   nodes. If no such place exists, rule 3 applies with a pace of 1.
3. Otherwise the run goes to the cheapest place that is expected to keep the pace. The pace is the share of the
   run's nodes with which the run would just meet the deadline. Without a deadline, the pace is USUAL_PACE.
4. If no place keeps the pace, the run goes to the place with the most nodes.

A move must pay for itself within STAY_S, so that the run does not move back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sunspot.formatting import in_words, money
from sunspot.places.experience import Experience

HOUR_S = 3600.0

STAY_S = HOUR_S
"""Seconds within which a move must pay for itself, because nobody knows how long the nodes stay."""

USUAL_PACE = 0.9
"""Share of a run's nodes that a place should have if the run has no deadline."""

PRICE_LIMIT = 2.0
"""Highest price that a run without a deadline pays, as a multiple of the lowest price."""

LEAST_PACE = 0.05
"""Lowest share of a run's nodes for which the run goes to a place."""


@dataclass(frozen=True)
class Offer:
    """A place and the price of its nodes."""

    place: str
    price: float | None = None
    "The price per hour of all nodes that the run wants there, or None if it is unknown."
    on_demand: bool = False
    "True if nodes that have started are never taken away."


@dataclass(frozen=True)
class Move:
    """The time and money that it costs to move a run to another place."""

    start_s: float = 600.0
    "Seconds until a new place has nodes, or is known to have none. The run trains in the old place meanwhile."
    pause_s: float = 120.0
    "Seconds without training: the last checkpoint is written, and read in the new place."
    cost: float = 0.0
    "The cost of the traffic, in the currency of the prices."


def plan_move(state_bytes: float, bytes_per_s: float, price_per_gb: float, start_s: float = 600.0) -> Move:
    """Return the cost of moving a state of `state_bytes` bytes that is written and read at `bytes_per_s`.

    `price_per_gb` is the price of 10^9 bytes of traffic between the bucket and the new place.
    """
    restart_s = 60.0  # processes, the worker group and the model, measured with a small state
    return Move(start_s, restart_s + 2 * state_bytes / bytes_per_s, state_bytes / 1e9 * price_per_gb)


@dataclass(frozen=True)
class Situation:
    """A run's current place and remaining work."""

    now: float
    "Seconds since the epoch."
    place: str = ""
    "The place where the run trains, or an empty string if it trains nowhere."
    work_s: float | None = None
    "Seconds of training left if the run has all of its nodes, or None if unknown."
    move: Move = Move()


@dataclass(frozen=True)
class Goal:
    """The user's deadline and budget for a run."""

    deadline: float | None = None
    "Seconds since the epoch."
    budget: float | None = None
    "The amount that may still be spent, in the currency of the prices."


@dataclass(frozen=True)
class Choice:
    """The chosen place and the reason for the choice."""

    place: str
    "The place's name, or an empty string if the run must stop because its budget is spent."
    reason: str
    warning: str = ""
    "The limit that the run will probably exceed, or an empty string."


def choose_place(
    offers: Sequence[Offer], known: Mapping[str, Experience], situation: Situation, goal: Goal = Goal()
) -> Choice:
    """Return the place where the run should train.

    `known` contains the experience of recent runs, keyed by place. Raises `ValueError` if there are no offers.
    """
    if goal.budget is not None and goal.budget <= 0:
        return Choice("", "the budget is spent")
    here, move = situation.place, situation.move
    work_s = situation.work_s
    prices = _fill_prices(offers)
    shares = {each.place: _expect(each, known, situation.now) for each in offers}
    affordable = [each.place for each in offers if _is_affordable(prices[each.place], work_s, goal)]
    places = affordable or [min(prices, key=lambda name: prices[name])]
    warning = "" if affordable else "the budget will be spent before the work is done"

    def cost(place: str) -> float:
        """Return the hourly price of all nodes in a place.

        If the run would have to move there, the price includes an hour's share of the move's cost.
        """
        if not here or place == here:
            return prices[place]
        useful_hours = max(LEAST_PACE, shares[place]) * STAY_S / HOUR_S
        return prices[place] * (1 + move.pause_s / STAY_S) + move.cost / useful_hours

    pace = USUAL_PACE
    if goal.deadline is not None and work_s is not None:
        left_s = goal.deadline - situation.now
        # If the nodes here vanish, the run first notices, and then waits for nodes elsewhere.
        reserve_s = move.pause_s + 2 * move.start_s
        safe = [each.place for each in offers if each.on_demand and each.place in places]
        if work_s > left_s:
            warning = warning or f"the deadline will be missed by at least {in_words(work_s - left_s)}"
        if left_s - work_s < reserve_s:
            if safe:
                chosen = max(safe, key=lambda name: (shares[name], -cost(name)))
                return Choice(chosen, _explain_last_chance(left_s, work_s), warning)
            pace = 1.0
        else:
            pace = max(LEAST_PACE, work_s / (left_s - reserve_s))
            if left_s - work_s < reserve_s + move.pause_s:
                places = [each for each in places if each == here or each in safe] or places
    elif len(places) > 1:
        limit = PRICE_LIMIT * min(prices[each] for each in places)
        places = [each for each in places if prices[each] <= limit]

    fast = [each for each in places if shares[each] >= pace]
    if fast:
        chosen = min(fast, key=lambda name: (cost(name), -shares[name]))
        return Choice(chosen, _explain_cheapest(chosen, known, situation, pace, prices[chosen]), warning)
    staying = 1 - min(1.0, move.pause_s / STAY_S)
    chosen = max(places, key=lambda name: (shares[name] * (1 if not here or name == here else staying), -cost(name)))
    none = f"no place is expected to have {pace:.0%} of the nodes; this one is expected to have the most"
    return Choice(chosen, f"{none}, {shares[chosen]:.0%}", warning)


def _expect(offer: Offer, known: Mapping[str, Experience], now: float) -> float:
    """Return the share of a run's nodes that a place is expected to have, or 1 if no run has used the place yet."""
    experience = known.get(offer.place)
    return experience.expect(now) if experience else 1.0


def _fill_prices(offers: Sequence[Offer]) -> dict[str, float]:
    """Return each place's price. An unknown price counts as the highest known one, or as 0 if none is known."""
    highest = max((each.price for each in offers if each.price is not None), default=0.0)
    return {each.place: highest if each.price is None else each.price for each in offers}


def _is_affordable(price: float, work_s: float | None, goal: Goal) -> bool:
    """Return True if the budget pays for all remaining work at this price, or if the budget or the work is unknown."""
    return goal.budget is None or work_s is None or price * work_s / HOUR_S <= goal.budget


def _explain_last_chance(left_s: float, work_s: float) -> str:
    spare = in_words(max(0.0, left_s - work_s))
    return f"the deadline leaves only {spare} of spare time, so the run needs on-demand nodes"


def _explain_cheapest(
    place: str, known: Mapping[str, Experience], situation: Situation, pace: float, price: float
) -> str:
    experience = known.get(place)
    ago = in_words(situation.now - experience.time) if experience else ""
    seen = f"{experience.share:.0%} were available {ago} ago" if experience else "no run has been there yet"
    return f"the cheapest place ({money(price)} an hour) that can provide {pace:.0%} of the nodes; {seen}"
