"""Tests of the choice of a place from prices, experiences, the deadline and the budget."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.places.choice import (
    HOUR_S,
    USUAL_PACE,
    Choice,
    Goal,
    Move,
    Offer,
    Situation,
    choose_place,
    plan_move,
)
from sunspot.places.experience import Experience, Sighting, learn

OFFERS = [Offer("cheap", 10.0), Offer("middle", 14.0), Offer("on-demand", 50.0, on_demand=True)]

NOW = 1_000_000.0


def seen(share: float, ago_s: float = 0.0) -> Experience:
    return Experience(NOW - ago_s, share, share)


def choose(known: dict[str, Experience], goal: Goal | None = None, **situation: Any) -> Choice:
    return choose_place(OFFERS, known, Situation(NOW, **situation), goal or Goal())


shares = st.floats(0, 1)

experiences = st.builds(
    lambda share, average, ago_s: Experience(NOW - ago_s, share, average), shares, shares, st.floats(0, 1e6)
)

known_places = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), experiences)

offers = st.lists(
    st.builds(Offer, st.sampled_from(["a", "b", "c", "d"]), st.none() | st.floats(0.01, 1000), st.booleans()),
    min_size=1,
    unique_by=lambda offer: offer.place,
)

situations = st.builds(
    Situation,
    now=st.just(NOW),
    place=st.sampled_from(["", "a", "b", "gone"]),
    work_s=st.none() | st.floats(1, 1e6),
    move=st.builds(Move, start_s=st.floats(1, 3600), pause_s=st.floats(1, 7200), cost=st.floats(0, 100)),
)

goals = st.builds(Goal, deadline=st.none() | st.floats(NOW - 1e5, NOW + 3e6), budget=st.none() | st.floats(0.01, 1e6))


@given(offers, known_places, situations, goals)
def test_the_chosen_place_is_one_of_the_offers_and_the_choice_has_a_reason(
    offers: list[Offer], known: dict[str, Experience], situation: Situation, goal: Goal
) -> None:
    choice = choose_place(offers, known, situation, goal)

    assert choice.place in {offer.place for offer in offers}
    assert choice.reason


@given(offers, known_places, situations, goals)
def test_a_run_that_has_just_moved_does_not_move_again(
    offers: list[Offer], known: dict[str, Experience], situation: Situation, goal: Goal
) -> None:
    chosen = choose_place(offers, known, situation, goal).place
    there = Situation(situation.now, chosen, situation.work_s, situation.move)

    assert choose_place(offers, known, there, goal).place == chosen


@given(offers, known_places, situations, goals)
def test_a_run_never_moves_to_a_place_that_is_worse_in_every_respect(
    offers: list[Offer], known: dict[str, Experience], situation: Situation, goal: Goal
) -> None:
    here = Offer("here", min(offer.price or 0.0 for offer in offers), on_demand=True)
    choice = choose_place([here, *offers], known, Situation(NOW, "here", situation.work_s, situation.move), goal)

    assert choice.place == "here"


@given(experiences, st.floats(0, 1e5), st.floats(0, 1e5))
def test_a_shortage_of_nodes_is_forgotten_over_time(experience: Experience, first_s: float, more_s: float) -> None:
    sooner = experience.expect(NOW + first_s)
    later = experience.expect(NOW + first_s + more_s)

    assert 0 <= sooner <= later <= 1
    assert experience.expect(NOW + 1e6) == pytest.approx(1)


@given(st.lists(st.builds(Sighting, st.just("a"), st.floats(0, 1e6), shares), min_size=1))
def test_experience_with_a_place_does_not_depend_on_the_order_of_the_observations(sightings: list[Sighting]) -> None:
    distinct = list({each.time: each for each in sightings}.values())

    assert learn(distinct) == learn(distinct[::-1])
    assert 0 <= learn(distinct)["a"].average <= 1


@pytest.mark.parametrize("pace", [1.0, 0.5])
def test_a_run_immediately_leaves_a_place_that_lost_its_nodes(pace: float) -> None:
    known = learn([*(Sighting("cheap", NOW - 600 * ago, 1.0) for ago in range(1, 50)), Sighting("cheap", NOW, 0.0)])
    deadline = NOW + 100 * HOUR_S

    assert choose(known, Goal(deadline), place="cheap", work_s=pace * 90 * HOUR_S).place == "middle"


def test_a_place_whose_nodes_come_and_go_is_avoided_even_while_it_has_nodes() -> None:
    known = learn(Sighting("cheap", NOW - 600 * ago, float(ago % 2 == 0)) for ago in range(20))

    assert known["cheap"].share == 1.0
    assert choose(known, place="cheap").place == "middle"


def test_without_experience_a_run_tries_the_cheapest_place() -> None:
    choice = choose({})

    assert choice.place == "cheap"
    assert (
        choice.reason
        == "the cheapest place (10.00 an hour) that can provide 90% of the nodes; no run has been there yet"
    )


def test_a_place_that_failed_is_tried_again_later() -> None:
    places = [choose({"cheap": seen(0.0, ago_s)}).place for ago_s in (0, HOUR_S, 24 * HOUR_S)]

    assert places == ["middle", "middle", "cheap"]


def test_a_run_without_a_deadline_avoids_places_that_cost_several_times_the_lowest_price() -> None:
    choice = choose({"cheap": seen(0.0), "middle": seen(0.3)})

    assert choice.place == "middle"
    assert choice.reason == (
        f"no place is expected to have {USUAL_PACE:.0%} of the nodes; this one is expected to have the most, 30%"
    )


def test_a_run_with_a_distant_deadline_stays_in_a_cheap_place_with_few_nodes() -> None:
    known = {"cheap": seen(0.5), "middle": seen(1.0)}
    work_s = 10 * HOUR_S

    assert choose(known, Goal(NOW + 30 * HOUR_S), place="cheap", work_s=work_s).place == "cheap"
    assert choose(known, Goal(NOW + 13 * HOUR_S), place="cheap", work_s=work_s).place == "middle"


def test_a_run_falls_back_to_on_demand_nodes_in_time_to_meet_the_deadline() -> None:
    move = Move(start_s=600, pause_s=300)
    known = {"cheap": seen(1.0), "middle": seen(1.0)}
    work_s = 10 * HOUR_S
    spare_s = 2 * move.start_s + move.pause_s

    after = choose(known, Goal(NOW + work_s + spare_s - 1), place="cheap", work_s=work_s, move=move)
    before = choose(known, Goal(NOW + work_s + spare_s + 1), place="cheap", work_s=work_s, move=move)

    assert (before.place, after.place) == ("cheap", "on-demand")
    assert after.reason == "the deadline leaves only 24 min of spare time, so the run needs on-demand nodes"
    assert not after.warning


def test_a_run_in_a_hurry_avoids_a_place_where_on_demand_nodes_are_sold_out() -> None:
    offers = [Offer("sold-out", 30.0, on_demand=True), Offer("on-demand", 50.0, on_demand=True), Offer("spot", 10.0)]
    known = {"sold-out": seen(0.0), "spot": seen(1.0)}

    choice = choose_place(offers, known, Situation(NOW, "spot", work_s=HOUR_S), Goal(NOW + 1.1 * HOUR_S))

    assert choice.place == "on-demand"


def test_a_run_is_warned_of_a_deadline_that_no_place_meets() -> None:
    choice = choose({}, Goal(NOW + 5 * HOUR_S), work_s=10 * HOUR_S)

    assert choice == Choice("on-demand", choice.reason, "the deadline will be missed by at least 5 h")


def test_a_run_avoids_places_that_exceed_its_budget() -> None:
    known = {"cheap": seen(0.0), "middle": seen(0.2)}
    goal = Goal(deadline=NOW + 11 * HOUR_S, budget=200.0)

    assert choose(known, goal, work_s=10 * HOUR_S).place == "middle"


def test_the_cheapest_place_is_chosen_with_a_warning_if_no_place_fits_the_budget() -> None:
    choice = choose({"cheap": seen(0.0)}, Goal(budget=50.0), work_s=10 * HOUR_S)

    assert (choice.place, choice.warning) == ("cheap", "the budget will be spent before the work is done")


def test_no_place_is_chosen_when_the_budget_is_spent() -> None:
    assert choose({}, Goal(budget=0.0)) == Choice("", "the budget is spent")


def test_a_run_does_not_move_if_the_move_costs_more_than_it_saves() -> None:
    known = {"cheap": seen(1.0), "middle": seen(1.0)}

    assert choose(known, place="middle", move=Move(cost=1.0)).place == "cheap"
    assert choose(known, place="middle", move=Move(cost=5.0)).place == "middle"
    assert choose(known, place="middle", move=Move(pause_s=0.5 * HOUR_S)).place == "middle"


def test_a_place_without_a_price_counts_as_the_most_expensive() -> None:
    offers = [Offer("unknown"), Offer("cheap", 10.0), Offer("dear", 12.0)]

    assert choose_place(offers, {"cheap": seen(0.0)}, Situation(NOW)).place in ("unknown", "dear")
    assert choose_place(offers, {}, Situation(NOW)).place == "cheap"


def test_the_cost_of_a_move_includes_the_time_and_traffic_for_moving_the_state() -> None:
    move = plan_move(state_bytes=90e9, bytes_per_s=90e6, price_per_gb=0.02)

    assert math.isclose(move.pause_s, 60 + 2 * 1000)
    assert math.isclose(move.cost, 1.8)
