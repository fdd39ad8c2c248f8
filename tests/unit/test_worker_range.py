"""Tests that the number of workers fills whole replicas of the model (PARALLEL=hsdp)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.errors import SettingsError
from sunspot.ray_internals.coordinator import without_surplus, workers_in
from sunspot.settings import Settings, WorkerRange, choose_shard_degree, load_settings, parse_workers

RANGES = st.tuples(st.integers(1, 99), st.integers(0, 99)).map(lambda ends: WorkerRange(ends[0], sum(ends)))


@given(RANGES, st.integers(1, 20), st.integers(0, 200))
def test_every_group_size_is_a_whole_number_of_replicas(workers: WorkerRange, degree: int, room: int) -> None:
    whole = workers.in_multiples_of(degree)
    assert whole.in_multiples_of(degree) == whole
    assert 1 <= whole.least <= whole.most
    assert whole.least % degree == whole.most % degree == whole.fit(room) % degree == 0
    assert room - degree < whole.fit(room) <= room or whole.fit(room) == whole.most <= room
    if workers.least % degree == workers.most % degree == 0:
        assert str(whole) == str(workers)
        assert whole.replicas == WorkerRange(workers.least // degree, workers.most // degree)


@pytest.mark.parametrize(
    ("workers", "given", "rooms", "degree"),
    [
        ("8..32", 0, [8, 8], 8),
        ("8..32", 4, [8, 8], 4),
        ("16..32", 16, [8, 8], 16),
        ("4", 2, [3, 5], 2),
        ("2", 0, [8], 2),
        ("1", 0, [1], 1),
        ("3", 1, [1, 1, 1], 1),
    ],
)
def test_a_replica_fills_a_node_unless_shard_degree_is_set(
    workers: str, given: int, rooms: list[int], degree: int
) -> None:
    assert choose_shard_degree(parse_workers(workers), given, rooms) == degree


@pytest.mark.parametrize(
    ("workers", "given", "rooms", "said"),
    [
        ("12", 0, [8, 8], r"NUM_WORKERS=12: each node has room for 8 workers, and .* such as 8, or set"),
        ("6..30", 8, [], r"NUM_WORKERS=6\.\.30: SUNSPOT_SHARD_DEGREE=8, .* use multiples of 8, such as 8\.\.24, or"),
        ("4", 8, [], r"such as 8, or set a different SUNSPOT_SHARD_DEGREE"),
        ("4", 0, [4, 2, 2], r"different numbers of workers \(2, 4\); set SUNSPOT_SHARD_DEGREE"),
        ("4", 0, [], r"no node has room for a worker yet; set SUNSPOT_SHARD_DEGREE"),
        ("4", 0, [1, 1, 1, 1], r"each node has room for 1 worker, so each .* can span several nodes, or .*=ddp"),
        ("1..4", 0, [4], r"NUM_WORKERS=1\.\.4 allows a single worker, so each worker would hold the whole model"),
    ],
)
def test_the_error_for_incomplete_replicas_says_how_to_fix_it(
    workers: str, given: int, rooms: list[int], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        choose_shard_degree(parse_workers(workers), given, rooms)


def test_num_workers_must_be_a_multiple_of_shard_degree() -> None:
    given = {"PARALLEL": "hsdp", "SHARD_DEGREE": "4", "NUM_WORKERS": "6"}
    with pytest.raises(
        SettingsError, match=r"2 problems in the settings:\n  SUNSPOT_NUM_WORKERS=6: .*\n  SUNSPOT_TASKS"
    ):
        load_settings({**given, "TASKS": "mnist"})
    assert load_settings({**given, "NUM_WORKERS": "4..8"}).worker_multiple == 4
    assert load_settings({**given, "PARALLEL": "fsdp"}).worker_multiple == 1, "SHARD_DEGREE has no effect"
    assert Settings(parallel="hsdp").worker_multiple == 1, "not chosen yet"


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 8))
def test_only_resources_for_whole_replicas_are_offered_to_ray(rooms: list[int], multiple: int) -> None:
    per_worker = {"CPU": 0.5, "GPU": 1.0}
    reserved = {str(node): {"CPU": 64.0, "GPU": float(room)} for node, room in enumerate(rooms)}
    offered = [workers_in(there, per_worker) for there in without_surplus(reserved, per_worker, multiple).values()]
    assert sum(offered) == sum(rooms) - sum(rooms) % multiple
    assert all(left <= room for left, room in zip(offered, rooms, strict=True))
