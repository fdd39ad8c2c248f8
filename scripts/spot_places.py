"""`python -m scripts.spot_places FOLDER`: simulate how `sunspot.places.choose_place` does on recorded spot capacity.

FOLDER contains two CSV files. The name of one ends with `prices.csv`: it has a row for each zone, with the zone's name
and the price of eight GPUs per hour. The other has the column `minute` and a column for each zone: how many nodes with
one GPU could be started then.

A run wants as many nodes as the trace ever had in one zone. It starts at a random time, knows nothing of the zones but
their prices, and looks around at each row of the trace. It sees only the nodes in its own zone, and in the zone that it
tries while it trains on. It pays for all nodes that it has, for the nodes of a zone that it tried (half of the time
between two rows), and for the traffic of a move. A row says how many nodes could be started. The simulation counts them
as the nodes that a run keeps.

The oracle knows the whole trace, pays for no tries, and starts at once. It is an exact lower bound, found by dynamic
programming over the time, the zone and the work done.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sunspot.places.choice import HOUR_S, Goal, Move, Offer, Situation, choose_place, plan_move
from sunspot.places.experience import Experience

FACTORS = (1.2, 1.5, 2.0, 2.5, 3.0)
"""The deadlines, as multiples of the time that the work takes with all nodes."""

ON_DEMAND = "on-demand"
ON_DEMAND_PRICE = 88.49
"""Price per hour of eight H100 that are never taken away (a3-highgpu-8g, as in SkyNomad's simulator)."""

GPUS_PER_PRICE = 8

STATE_BYTES = 100e9
CONNECTION_BYTES_PER_S = 90e6
CONNECTIONS = 8
"""Connections with which a node writes and reads the state."""

EGRESS_PER_GB = 0.05
"""Price of 10^9 bytes between two regions. Clouds charge 0.02 within a continent, and up to 0.12 between continents."""

REPEATED_S = 60 / 2 + STATE_BYTES / (CONNECTION_BYTES_PER_S * CONNECTIONS)
"""Training that is repeated if a zone loses all nodes: half a checkpoint interval, and the time to write one."""

RESTART_S = 60.0

GIVE_UP_AFTER = 10
"""A run ends without success after this multiple of the time that its work takes with all nodes."""


@dataclass(frozen=True)
class Trace:
    """Recorded spot capacity, with on-demand nodes as the last zone."""

    zones: tuple[str, ...]
    nodes: np.ndarray
    "The nodes at each time in each zone: int64, (times, zones)."
    prices: np.ndarray
    "The price of a node per hour in each zone: float64, (zones,)."
    step_s: float
    "Seconds between two times."
    wanted: int

    def offers(self) -> list[Offer]:
        """Return each zone with the price of all nodes that the run wants."""
        return [
            Offer(zone, float(price) * self.wanted, zone == ON_DEMAND)
            for zone, price in zip(self.zones, self.prices, strict=True)
        ]


@dataclass
class Journey:
    """One simulated run."""

    work_s: float
    place: str = field(default="", init=False)
    "The zone where the run is."
    trying: str = field(default="", init=False)
    "The zone where nodes are starting for the run."
    left_s: float = field(init=False)
    cost: float = field(default=0.0, init=False)
    moves: int = field(default=0, init=False)
    lost_s: float = field(default=0.0, init=False)
    "Seconds without training or with repeated training, although nodes were there."
    end_s: float = field(default=math.inf, init=False)
    known: dict[str, Experience] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.left_s = self.work_s

    @property
    def done(self) -> bool:
        return self.left_s < 1e-6

    @property
    def seen_places(self) -> set[str]:
        """The zones whose nodes the run sees."""
        return {self.place, self.trying} - {""}

    def look(self, now: float, shares: Mapping[str, float]) -> None:
        """Remember what share of the run's nodes each of these zones has."""
        for place, share in shares.items():
            before = self.known.get(place)
            self.known[place] = before.then(now, share) if before else Experience(now, share, share)


Policy = Callable[[Journey, float], str]
"""Returns the zone where a journey should be at a time, in seconds since its start."""


def read_trace(folder: Path) -> Trace:
    """Read a trace. Rows that are missing in the capacity file repeat the previous row."""
    price_file = next(folder.glob("*prices.csv"))
    capacity_file = next(file for file in sorted(folder.glob("*.csv")) if file != price_file)
    with price_file.open(newline="") as lines:
        prices = {row[0]: float(row[1]) / GPUS_PER_PRICE for row in list(csv.reader(lines))[1:]}
    with capacity_file.open(newline="") as lines:
        header, *rows = csv.reader(lines)
    table = np.array(rows, dtype=np.int64)
    minutes = table[:, 0]
    step = int(np.diff(minutes).min())
    newest = np.searchsorted(minutes, np.arange(minutes[0], minutes[-1] + 1, step), side="right") - 1
    capacity = table[newest, 1:]
    wanted = int(capacity.max())
    always = np.full((len(capacity), 1), wanted)
    return Trace(
        zones=(*header[1:], ON_DEMAND),
        nodes=np.concatenate([capacity, always], axis=1),
        prices=np.array([*(prices[zone] for zone in header[1:]), ON_DEMAND_PRICE / GPUS_PER_PRICE]),
        step_s=step * 60.0,
        wanted=wanted,
    )


def travel(trace: Trace, start: int, journey: Journey, move: Move, policy: Policy) -> Journey:
    """Simulate a run from row `start` until its work is done, and return its journey. The trace repeats at its end."""
    step_s = trace.step_s
    zones = {zone: number for number, zone in enumerate(trace.zones)}
    pause_s = 0.0
    had = 0
    for step in range(int(GIVE_UP_AFTER * journey.work_s / step_s)):
        now = step * step_s
        row = trace.nodes[(start + step) % len(trace.nodes)]
        journey.look(now, {place: int(row[zones[place]]) / trace.wanted for place in journey.seen_places})
        if journey.trying:
            tried = zones[journey.trying]
            journey.cost += float(row[tried] * trace.prices[tried]) * step_s / 2 / HOUR_S
        if had and not row[zones[journey.place]]:  # the state is read from storage when nodes are back
            journey.left_s += REPEATED_S * had / trace.wanted
            journey.lost_s += REPEATED_S
            pause_s = RESTART_S + (move.pause_s - RESTART_S) / 2

        chosen = policy(journey, now)
        if chosen == journey.trying and row[zones[chosen]]:
            pause_s = move.pause_s if journey.place else RESTART_S
            journey.cost += move.cost if journey.place else 0.0
            journey.moves += bool(journey.place)
            journey.place = chosen
        journey.trying = "" if chosen == journey.place else chosen

        had = int(row[zones[journey.place]]) if journey.place else 0
        if had:
            away_s = min(pause_s, step_s)
            pause_s -= away_s
            journey.lost_s += away_s
            used_s = min(step_s, away_s + journey.left_s * trace.wanted / had)
            journey.cost += had * float(trace.prices[zones[journey.place]]) * used_s / HOUR_S
            journey.left_s -= (used_s - away_s) * had / trace.wanted
            if journey.done:
                journey.end_s = now + used_s
                break
    return journey


def choosing(trace: Trace, move: Move, deadline_s: float | None) -> Policy:
    """Return the policy that asks `choose_place`."""
    offers = trace.offers()

    def policy(journey: Journey, now: float) -> str:
        situation = Situation(now, journey.place, journey.left_s, move)
        return choose_place(offers, journey.known, situation, Goal(deadline_s)).place

    return policy


def cheapest_first(trace: Trace) -> Policy:
    """Return the policy that keeps a zone while it has any nodes, and then tries the zones in order of price."""
    order = [trace.zones[number] for number in np.argsort(trace.prices, kind="stable")]

    def policy(journey: Journey, now: float) -> str:
        for place in (journey.trying, journey.place):
            last = journey.known.get(place)
            if last and last.time == now and last.share:
                return place
        return order[(order.index(journey.trying) + 1) % len(order)] if journey.trying else order[0]

    return policy


def only_full(trace: Trace) -> Trace:
    """Return the trace as seen by a run that needs all nodes to train."""
    full = np.where(trace.nodes >= trace.wanted, trace.wanted, 0)
    return Trace(trace.zones, full, trace.prices, trace.step_s, trace.wanted)


def find_least_costs(trace: Trace, start: int, work_s: float, move: Move) -> list[float]:
    """Return the least cost of the work by each deadline in FACTORS, or infinity if no plan meets it.

    Work is counted in steps of one node, and rounded up, so that the result is a lower bound.
    """
    target = math.ceil(work_s / trace.step_s * trace.wanted)
    training = max(0.0, 1 - move.pause_s / trace.step_s)
    hours = trace.step_s / HOUR_S
    costs = np.full((len(trace.zones), target + 1), np.inf)  # for each zone and amount of work done
    costs[:, 0] = 0.0
    ends = [math.ceil(factor * work_s / trace.step_s) for factor in FACTORS]
    found = []
    for step in range(ends[-1]):
        row = trace.nodes[(start + step) % len(trace.nodes)]
        arriving = costs.min(axis=0) + (move.cost if step else 0.0)
        after = costs.copy()  # without nodes, or without using them
        for zone, nodes in enumerate(row):
            price = nodes * trace.prices[zone] * hours
            _advance(after[zone], costs[zone], int(nodes), price)
            _advance(after[zone], arriving, math.ceil(nodes * (training if step else 1.0)), price)
        costs = after
        found += [float(costs[:, target].min())] * ends.count(step + 1)
    return found


def _advance(after: np.ndarray, before: np.ndarray, done: int, price: float) -> None:
    """Lower the costs in `after` to those of doing `done` units of work for `price`. Both are float64, (work,)."""
    if done:
        np.minimum(after[done:], before[: len(before) - done] + price, out=after[done:])
        after[-1] = min(after[-1], before[len(before) - done - 1 :].min() + price)


@dataclass
class Row:
    """A line of the table: the journeys of one policy."""

    name: str
    journeys: list[Journey]
    least: list[float]
    "The oracle's cost of each journey."
    deadlines: list[float]

    def cells(self) -> list[str]:
        """Return the line's cells."""
        done = [(each, least) for each, least in zip(self.journeys, self.least, strict=True) if each.done]
        if len(done) < len(self.journeys) / 2:
            return [self.name, *"----", "all"]
        number = len(done)
        share = sum(each.work_s for each, _ in done) / sum(each.end_s for each, _ in done)
        ratio = sum(each.cost for each, _ in done) / sum(least for _, least in done)
        missed = sum(
            not each.done or each.end_s > limit + 1 for each, limit in zip(self.journeys, self.deadlines, strict=True)
        )
        return [
            self.name,
            f"{share:.0%}",
            f"{ratio:.2f}",
            f"{sum(each.moves for each, _ in done) / number:.1f}",
            f"{sum(each.lost_s for each, _ in done) / number / 60:.0f} min",
            f"{missed} of {len(self.journeys)}",
        ]


HEADINGS = ("", "useful share", "cost / oracle's", "moves", "lost", "deadlines missed")


def compare(trace: Trace, starts: Sequence[int], hours: float, move: Move) -> Iterator[Row]:
    """Yield the lines of the table: `choose_place` for each deadline and without one, and then the baselines."""
    work_s = hours * HOUR_S
    least = {start: find_least_costs(trace, start, work_s, move) for start in starts}
    cases = [(start, number) for number in range(len(FACTORS)) for start in starts]
    costs = [least[start][number] for start, number in cases]
    limits = [FACTORS[number] * work_s for _, number in cases]

    def row(name: str, seen: Trace, make: Callable[[float | None], Policy], every: Sequence[int]) -> Row:
        """Return a line for the cases with the given numbers. Policies that ignore the deadline run once per start."""
        journeys = [travel(seen, cases[case][0], Journey(work_s), move, make(limits[case])) for case in every]
        return Row(name, journeys, [costs[case] for case in every], [limits[case] for case in every])

    def baseline(name: str, seen: Trace, policy: Policy) -> Row:
        journeys = {start: travel(seen, start, Journey(work_s), move, policy) for start in starts}
        return Row(name, [journeys[start] for start, _ in cases], costs, limits)

    every = range(len(cases))
    mine = row("choose_place", trace, lambda limit: choosing(trace, move, limit), every)
    for number, factor in enumerate(FACTORS):
        part = slice(number * len(starts), (number + 1) * len(starts))
        yield Row(f"choose_place, deadline {factor} x", mine.journeys[part], mine.least[part], mine.deadlines[part])
    yield Row("choose_place, all deadlines", mine.journeys, mine.least, mine.deadlines)
    last = range((len(FACTORS) - 1) * len(starts), len(cases))
    yield row("choose_place, no deadline", trace, lambda _: choosing(trace, move, None), last)
    yield baseline("cheapest zone first", trace, cheapest_first(trace))
    elastic = [baseline(f"elastic in {zone}", trace, lambda *_, zone=zone: zone) for zone in trace.zones[:-1]]
    yield min(elastic, key=_rank)
    for zone in trace.zones:
        yield baseline(f"fixed in {zone}", only_full(trace), lambda *_, zone=zone: zone)


def _rank(row: Row) -> float:
    """Return the product of cost and time, which is lowest in the best single zone."""
    return sum(each.cost for each in row.journeys) * sum(each.end_s for each in row.journeys)


def main(words: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.spot_places", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with the capacity and the prices")
    parser.add_argument("--starts", type=int, default=200, help="number of random starts; default: 200")
    parser.add_argument("--hours", type=float, default=24.0, help="hours of work with all nodes; default: 24")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="connections of 90 MB/s; default: 8")
    parser.add_argument("--part", default="0..1", help="part of the trace in which runs start, such as 0.5..1")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    trace = read_trace(args.folder)
    move = plan_move(STATE_BYTES, CONNECTION_BYTES_PER_S * args.connections, EGRESS_PER_GB, trace.step_s)
    first, last = (float(bound) for bound in args.part.split(".."))
    window = math.ceil(args.hours * HOUR_S * FACTORS[-1] / trace.step_s)
    latest = max(int(first * len(trace.nodes)) + 1, int(last * len(trace.nodes)) - window)
    random_ = random.Random(args.seed)
    starts = [random_.randrange(int(first * len(trace.nodes)), latest) for _ in range(args.starts)]
    lines = [list(HEADINGS), *(row.cells() for row in compare(trace, starts, args.hours, move))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
