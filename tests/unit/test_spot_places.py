"""Tests of the simulated choice of places, on a small trace."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from scripts import spot_places
from scripts.spot_places import Journey, Trace, choosing, compare, find_least_costs, read_trace, travel
from sunspot.places.choice import HOUR_S, plan_move

PRICES = {"dear": 40.0, "steady": 12.0, "wild": 10.0}

HOURS = 6.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two days: a place that always has nodes, one that seldom loses them, and one that changes often."""
    folder = tmp_path_factory.mktemp("trace")
    chance = random.Random(0)
    steady = wild = 4
    with (folder / "capacity.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["minute", *PRICES])
        for step in range(288):
            steady = chance.choice([0, 4, 4, 4]) if chance.random() < 0.03 else steady
            wild = chance.randrange(5) if chance.random() < 0.3 else wild
            rows.writerow([10 * step, 4, steady, wild])
    with (folder / "prices.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("zone", "price of 8 GPUs"), *PRICES.items()])
    return folder


def test_the_chosen_places_meet_every_deadline_at_half_the_price_of_the_reliable_place(folder: Path) -> None:
    trace = read_trace(folder)
    starts = random.Random(1).sample(range(150), 8)
    move = plan_move(1e9, 100e6, 0.05, trace.step_s)

    lines = {line.name: line.cells() for line in compare(trace, starts, HOURS, move)}

    _, share, cost, moves, _, missed = lines["choose_place, all deadlines"]
    assert missed == "0 of 40"
    assert float(cost) < float(lines["fixed in dear"][2]) / 2
    assert float(moves) < 4
    assert int(share.rstrip("%")) > 60
    assert lines["fixed in wild"][-1] != "0 of 40"


def test_no_simulated_run_is_cheaper_than_the_oracle(folder: Path) -> None:
    trace = read_trace(folder)
    move = plan_move(1e9, 100e6, 0.05, trace.step_s)
    for start in range(0, 150, 30):
        least = find_least_costs(trace, start, HOURS * HOUR_S, move)
        for factor, cost in zip(spot_places.FACTORS, least, strict=True):
            journey = travel(
                trace, start, Journey(HOURS * HOUR_S), move, choosing(trace, move, factor * HOURS * HOUR_S)
            )
            assert journey.done
            assert journey.cost >= cost * (1 - 1e-9)
        assert least == sorted(least, reverse=True)


def test_the_choice_of_a_place_does_not_depend_on_the_future(folder: Path) -> None:
    trace = read_trace(folder)
    now = 20

    def choices(future: int) -> list[str]:
        """Return the choices until now if the two cheap places have `future` nodes afterwards."""
        nodes = trace.nodes.copy()
        nodes[now:, 1:3] = future
        changed = Trace(trace.zones, nodes, trace.prices, trace.step_s, trace.wanted)
        move = plan_move(1e9, 100e6, 0.05, trace.step_s)
        policy = choosing(changed, move, 3 * HOURS * HOUR_S)
        chosen: list[str] = []

        def record(journey: Journey, time: float) -> str:
            chosen.append(policy(journey, time))
            return chosen[-1]

        travel(changed, 0, Journey(HOURS * HOUR_S), move, record)
        return chosen

    assert choices(future=0)[:now] == choices(future=4)[:now]
    assert choices(future=0) != choices(future=4)


def test_the_simulation_prints_a_table_of_costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert spot_places.main([str(folder), "--starts", "1", "--hours", "2"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == ""
    assert "cost / oracle's" in lines[0]
    assert lines[1].startswith("choose_place, deadline 1.2 x")
