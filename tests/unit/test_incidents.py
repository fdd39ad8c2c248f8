"""Tests of receipts, which record what each worker group start cost, and of a run's goodput."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.run.attempts import Attempt, Metadata
from sunspot.run.incidents import (
    Cause,
    Receipt,
    describe_receipt,
    display_event,
    find_gaps,
    goodput,
    read_receipts,
    worker_seconds,
)


def attempt(number: int, time: float, workers: int = 2) -> Attempt:
    return Attempt(number, "job", None, 0, time=time, metadata=Metadata(world_size=workers, tier="storage"))


def receipt(number: int, left: float, first_step: float, **fields: Any) -> Receipt:
    given = {"since": number - 1, "cause": Cause.NODE_LOST, "detail": "", "noticed": None, "restarted": left}
    given |= {"save_began": None, "committed": None, "step": 10, "last_step": 10, "tier": "memory"}
    return Receipt(
        attempt=number, left=left, first_step=first_step, **{**given, "world_before": 2, "world_after": 2, **fields}
    )


# -------------------------------------------------------------------------------------------------------- one receipt


@pytest.mark.parametrize(
    ("cause", "shown"),
    [
        (Cause.BEGIN, "started"),
        (Cause.RESUMED, "started"),
        (Cause.TAKEN_OVER, "started"),
        (Cause.NODE_LOST, "recovered"),
        (Cause.JOINED, "recovered"),
    ],
)
def test_only_receipts_of_incidents_are_displayed_as_recoveries(cause: Cause, shown: str) -> None:
    event = receipt(1, 10, 20, cause=cause).record()
    assert event["event"] == "recovered", "readers recognize a receipt by this name"
    named = display_event(json.loads(json.dumps(event)))
    assert named == {**event, "event": shown}
    assert [each.cause for each in read_receipts([named])] == [cause], "a renamed receipt can still be read"


def test_a_receipt_can_be_read_back_from_its_event() -> None:
    written = receipt(2, 10, 20, cause=Cause.PREEMPTED, noticed=12.0, last_step=14, detail="node a goes")
    event = json.loads(json.dumps(written.record()))
    assert (event["event"], event["time"], event["attempt"], event["step"]) == ("recovered", 20, 2, 10)
    [read] = read_receipts([{"event": "hung", "attempt": 1}, {**event, "of a later version": 1}])
    assert read == written
    assert (read.replayed, read.recovery_s) == (4, 8.0)
    assert read.phases == {"first step": 8.0}, "no other phase was observed"


@pytest.mark.parametrize("change", [{"cause": "of a later version"}, {"cause": None}, {"first_step": ...}])
def test_invalid_receipts_are_skipped(change: dict[str, Any]) -> None:
    event = {**receipt(2, 10, 20).record(), **change}
    broken = {name: value for name, value in event.items() if value is not ...}
    assert [r.attempt for r in read_receipts([receipt(3, 30, 40).record(), broken, receipt(1, 0, 1).record()])] == [
        1,
        3,
    ]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"cause": Cause.PREEMPTED, "detail": "node a goes", "noticed": 12.0, "world_after": 1},
            "preempted (node a goes): first step 8.0 s after the notice, 0 steps replayed, 2 -> 1 worker, "
            "0 worker-seconds lost, from memory",
        ),
        (
            {"noticed": 11.0, "last_step": 11, "worker_seconds_lost": 19.7, "tier": "storage"},
            "node lost: first step 9.0 s after the loss, 1 step replayed, 2 workers, 20 worker-seconds lost, "
            "from storage",
        ),
        (
            {"noticed": 11.0, "launched": 12.5, "up": 15.25, "formed": 16.0, "loaded": 18.0},
            "node lost: first step 9.0 s after the loss (old group gone 1.5 s, processes up 4.2 s, group formed 5.0 s, "
            "state there 7.0 s), 0 steps replayed, 2 workers, 0 worker-seconds lost, from memory",
        ),
        (
            {"cause": Cause.WORKER_LOST, "noticed": 18.0, "formed": 18.5, "tier": "in place", "world_after": 1},
            "worker lost: first step 10.0 s after the last step that counts (group formed 8.5 s), 0 steps replayed, "
            "2 -> 1 worker, 0 worker-seconds lost, in place",
        ),
        (
            {"cause": Cause.DRIVER_LOST},
            "driver lost: first step 10.0 s after the last step that counts, 0 steps replayed, 2 workers, "
            "0 worker-seconds lost, from memory",
        ),
        (
            {"cause": Cause.DRIVER_LOST, "last_step": 13, "at_least": True},
            "driver lost: first step 10.0 s after the last step that counts, at least 3 steps replayed, 2 workers, "
            "0 worker-seconds lost, from memory",
        ),
        (
            {"cause": Cause.DRIVER_LOST, "at_least": True},
            "driver lost: first step 10.0 s after the last step that counts, an unknown number of steps replayed, "
            "2 workers, 0 worker-seconds lost, from memory",
        ),
        (
            {"cause": Cause.BEGIN, "world_before": 0, "tier": "beginning", "restarted": 15.0},
            "begin: first step 5.0 s after the start, 0 steps replayed, 2 workers, 0 worker-seconds lost, "
            "from the beginning",
        ),
    ],
)
def test_a_receipt_is_described_in_one_line(fields: dict[str, Any], line: str) -> None:
    assert describe_receipt(receipt(2, 10, 20, **fields)) == line


# ------------------------------------------------------------------------------------------------------------- goodput


def test_goodput_counts_the_time_lost_to_an_incident() -> None:
    attempts = [attempt(1, 100, workers=3), attempt(2, 150, workers=2)]
    begin = receipt(1, 100, 110, cause=Cause.BEGIN)
    # There are 3 workers for 50 s and 2 for 50 s. 3 of them lose 10 s, then 3 lose 5 s and 2 lose 15 s.
    assert goodput(attempts, [begin, receipt(2, 145, 165)], 200) == pytest.approx(1 - (30 + 15 + 30) / 250)


def test_goodput_is_none_without_receipts_or_elapsed_time() -> None:
    assert goodput([], [], 100) is None
    assert goodput([attempt(1, 100)], [], 200) is None, "without a receipt nothing was measured"
    begun = [receipt(1, 100, 110)]
    assert goodput([attempt(1, 100)], begun, 100) is None, "no time has passed"
    attempts = [attempt(1, 100), attempt(2, 150), attempt(3, 160)]
    assert goodput(attempts, begun, 200) == pytest.approx(0.4), "no worker has taken a step since attempt 2 was claimed"


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([(10, 20), (30, 40), (0, 50)], 0.5), ([(0, 30), (20, 50), (50, 60)], 0.4), ([(20, 50), (0, 30)], 0.5)],
    ids=["within another", "in part", "in part, the later one first"],
)
def test_time_covered_by_two_incidents_is_counted_once(losses: list[tuple[int, int]], expected: float) -> None:
    receipts = [receipt(number, *loss) for number, loss in enumerate(losses, 1)]
    attempts = [attempt(one.attempt, 0) for one in receipts]
    assert goodput(attempts, receipts, 100) == pytest.approx(expected)


def test_goodput_excludes_the_time_between_the_end_of_a_run_and_its_resumption() -> None:
    attempts = [attempt(1, 0), attempt(2, 1000)]
    receipts = [receipt(1, 0, 10), receipt(2, 100, 1010, cause=Cause.RESUMED, paused_s=890)]
    assert goodput(attempts, receipts, 1100) == pytest.approx(1 - (10 + 20) / (100 + 110))


def test_steps_that_were_lost_twice_are_counted_once() -> None:
    """Attempt 2 continues from memory. Then all nodes are lost, and attempt 3 continues from an older checkpoint."""
    attempts = [attempt(1, 0), attempt(2, 60), attempt(3, 80)]
    receipts = [receipt(1, 0, 0), receipt(2, 55, 65), receipt(3, 40, 90)]
    assert goodput(attempts, receipts, 100) == pytest.approx(0.5)


moments = st.integers(0, 60)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Attempt], list[Receipt]]:
    """Return attempts, oldest first, and receipts for some of them."""
    claims = sorted(draw(st.lists(moments, min_size=1, max_size=8)))
    attempts = [attempt(n, claimed, draw(st.integers(0, 4))) for n, claimed in enumerate(claims, 1)]
    chosen = [a for a in attempts if draw(st.booleans())] or attempts[-1:]
    ends = {a.number: int(a.time) + draw(moments) for a in chosen}
    return attempts, [receipt(n, draw(st.integers(0, end)), end) for n, end in ends.items()]


@given(histories(), moments)
def test_goodput_counts_every_second_of_every_worker_once(
    history: tuple[list[Attempt], list[Receipt]], end: int
) -> None:
    """The expected fraction is computed second by second."""
    attempts, receipts = history
    tail = min((a.time for a in attempts if a.number > receipts[-1].attempt), default=end)

    def lost(second: int) -> bool:
        return second >= tail or any(r.left <= second < r.first_step for r in receipts)

    total = useful = 0
    for second in range(int(min(tail, *(r.left for r in receipts))) if receipts else 0, end):
        owner = [a for a in attempts if a.time <= second]
        workers = owner[-1].metadata.world_size if owner else 0
        total += workers
        useful += 0 if lost(second) else workers
    found = goodput(attempts, receipts, end)
    assert found == (pytest.approx(useful / total) if total else None)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 9)), max_size=6),
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e5)), max_size=6),
    st.floats(0, 1e6),
)
def test_goodput_is_between_0_and_1_despite_clock_skew(
    begun: list[tuple[float, int]], cost: list[tuple[float, float, float]], end: float
) -> None:
    attempts = [attempt(n, claimed, size) for n, (claimed, size) in enumerate(begun, 1)]
    receipts = [receipt(n, left, first, paused_s=paused) for n, (left, first, paused) in enumerate(cost, 1)]
    found = goodput(attempts, receipts, end)
    assert found is None or 0 <= found <= 1


def test_workers_are_not_counted_twice_despite_clock_skew() -> None:
    assert worker_seconds([attempt(1, 0), attempt(2, 30), attempt(3, 20)], 0, 40) == 80


# ---------------------------------------------------------------------------------------------------------------- gaps


@pytest.mark.parametrize(
    ("chain", "stepped", "missing"),
    [
        ({}, [], []),
        ({}, [1], [1]),
        ({1: 0}, [1], []),
        ({1: 0, 2: 1, 3: 2}, [1, 2, 3], []),
        ({1: 0, 4: 1}, [1, 4], []),
        ({1: 0, 4: 3}, [1, 4], [3]),
        ({2: 1}, [2], [1]),
        ({1: 0, 4: 1}, [1, 2, 4], [2]),
        ({1: 0, 2: 1}, [1, 2, 3], [3]),
    ],
    ids=[
        *("nothing began", "none", "the first", "all", "lost before a first step", "a link is missing"),
        *("the first is missing", "a checkpoint without a receipt", "the newest is missing"),
    ],
)
def test_attempts_without_a_receipt_are_reported_if_they_took_steps(
    chain: dict[int, int], stepped: list[int], missing: list[int]
) -> None:
    receipts = [receipt(number, 0, 1, since=since) for number, since in chain.items()]
    expected = [f"attempt {number} took steps, but has no receipt" for number in missing]
    assert find_gaps(receipts, stepped) == expected
