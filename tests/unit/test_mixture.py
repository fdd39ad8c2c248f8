"""Tests of mixtures: the order of their rows, their sources, their audit, and runs that are killed and resumed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sunspot.data.held_out import RowSubset
from sunspot.data.mixed_source import MixedSource, order_of
from sunspot.data.order import RunOrder, Steps, mixed_order
from sunspot.data.ray_loader import RoundPlanner, RoundReader
from sunspot.data.source import rows_in
from sunspot.data.task_rows import open_rows_of_task
from sunspot.data.torch_loader import cut_shares
from sunspot.errors import ConflictError, DataError, SettingsError
from sunspot.plan import Plan, make_plan, with_absolute_paths
from sunspot.run import open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.epochs import EpochLayout, find_layout
from sunspot.run.identity import Identity, Rows, SourceRows, record_identity
from sunspot.run.seen import look, read_details
from sunspot.settings import IDENTITY, Settings, load_settings
from sunspot.settings.mixture import count_by_source, parse_mixture
from sunspot.submitter.proof import Epoch, count_rows, find_wrong_steps, prove
from sunspot.tasks import load_task
from sunspot.train.driver import identify_rows
from tests.harness.loop import train_group
from tests.harness.training import consumed, newest
from tests.harness.training import weights as weights_of

mixtures = st.lists(st.tuples(st.integers(1, 99), st.integers(1, 40)), min_size=1, max_size=4)
"""The weight and the number of rows of each source."""


# ------------------------------------------------------------------------------------------------------------- DATASET


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("a:0.7,b:0.3", [("a", 7), ("b", 3)]),
        ("s3://one/x:.25, s3://two/y:0.5", [("s3://one/x", 1), ("s3://two/y", 2)]),
        ("s3://bucket/run:7:1,sample:2", [("s3://bucket/run:7", 1), ("sample", 2)]),
        ('["a:1", "b:1", "c:2"]', [("a", 1), ("b", 1), ("c", 2)]),
        ("a:0.7", []),
        ("/data/a,b", []),
    ],
)
def test_the_weight_of_each_source_follows_its_last_colon(dataset: str, expected: list[tuple[str, int]]) -> None:
    assert [
        (each.location, each.weight) for each in parse_mixture(load_settings({"DATASET": dataset}).dataset)
    ] == expected


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (
            "a:0.7,b",
            "the source 'b' of the mixture has no weight above 0 after its last colon; use the form SOURCE:WEIGHT",
        ),
        ("a:0,b:1", "the source 'a:0' of the mixture has no weight above 0"),
        ("s3://one/x,s3://two/y", "the source 's3://one/x' of the mixture has no weight above 0"),
        ("a:1,a:2", "the mixture contains a twice; list it once"),
        ("a:0.33333333333,b:0.66666666667", "have too many digits; round them to six decimals"),
    ],
)
def test_the_error_for_an_ambiguous_mixture_includes_the_fix(dataset: str, reason: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load_settings({"DATASET": dataset})
    assert f"SUNSPOT_DATASET={dataset}: " in str(raised.value)
    assert reason in str(raised.value)


def test_local_sources_of_a_mixture_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = with_absolute_paths(Settings(dataset="a:0.70,s3://b/c:0.2,sample:0.1"))
    assert settings.dataset == f"{tmp_path}/a:0.70,s3://b/c:0.2,sample:0.1"


# --------------------------------------------------------------------------------------------------------------- order


@given(st.lists(st.integers(1, 99), min_size=1, max_size=6), st.integers(0, 10**12))
def test_every_part_of_a_mixture_contains_rows_of_each_source_in_proportion_to_its_weight(
    weights: list[int], first: int
) -> None:
    positions = np.arange(first, first + 300)
    counts = np.stack(count_by_source(weights, positions))
    shares = np.array(weights)[:, None] * positions / sum(weights)
    assert (counts.sum(axis=0) == positions).all()
    assert set(np.diff(counts).ravel().tolist()) <= {0, 1}
    assert np.abs(counts - shares).max() < len(weights) + 1e-3
    assert count_by_source(weights, first + 7) == counts[:, 7].tolist()


def order_by_definition(order: RunOrder, epochs: int) -> list[int]:
    """Return the row IDs of the run's first epochs, one position at a time."""
    passes = [order_of_passes(order, source, epochs) for source in range(len(order.orders))]
    ids = []
    before = [0] * len(passes)
    for position in range(epochs * order.rows):
        after = order.count(position + 1)
        [source] = [number for number in range(len(passes)) if after[number] > before[number]]
        ids.append(passes[source][before[source]])
        before = after
    return ids


def order_of_passes(order: RunOrder, source: int, epochs: int) -> list[int]:
    """Return the row IDs that a source gives in the run's first epochs, pass by pass."""
    each = order.orders[source]
    starts = order.starts[source] + np.cumsum([0, *each.row_groups])
    ids: list[int] = []
    number = 0
    while len(ids) < order.count(epochs * order.rows)[source]:
        number += 1
        begin = len(ids)
        for window in each.windows(number):
            rows = np.concatenate([np.arange(each.row_groups[group]) + starts[group] for group in window.groups])
            ids += rows[each.permutation(number, window)].tolist()
        assert sorted(ids[begin:]) == list(range(starts[0], starts[-1])), "each pass takes each row once"
    return ids


@given(mixtures, st.integers(0, 9))
def test_each_pass_through_a_source_takes_each_row_once(mixture: list[tuple[int, int]], seed: int) -> None:
    order = mixed_order("torch", [[rows] for _, rows in mixture], tuple(weight for weight, _ in mixture), seed)
    ids = [row for epoch in (1, 2, 3) for row in order.row_ids(epoch, np.int32).tolist()]
    assert ids == order_by_definition(order, 3)


def test_sources_of_the_same_size_are_shuffled_differently_in_every_pass() -> None:
    order = mixed_order("torch", [[50]] * 3, (1, 1, 1), 0)
    passes = [np.array(order_of_passes(order, source, 3)) - order.starts[source] for source in range(3)]
    assert len({tuple(rows[begin : begin + 50]) for rows in passes for begin in (0, 50, 100)}) == 9


@dataclass
class Numbers:
    """A `Source` whose rows have a `value` of twice their ID. IDs are counted over all sources."""

    row_groups: tuple[int, ...]
    first: int = 0
    fingerprint: str = "numbers"
    shape: tuple[int, ...] = (1,)
    classes: int = 0
    reads: list[int] = field(default_factory=list)

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        self.reads.append(group)
        rows = np.arange(self.row_groups[group]) if rows is None else rows
        return {"value": 2 * (self.first + sum(self.row_groups[:group]) + rows[:, None])}

    def where(self, group: int, row: int) -> str:
        return f"row {row} of group {group} from {self.first}"


def join(groups: list[list[int]], weights: tuple[int, ...]) -> MixedSource:
    starts = np.cumsum([0, *map(sum, groups)]).tolist()
    sources = [Numbers(tuple(each), first) for each, first in zip(groups, starts, strict=False)]
    names = ",".join(f"{name}:{weight}" for name, weight in zip("abcd", weights, strict=False))
    return MixedSource.join(sources, parse_mixture(names))


@given(
    st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=2, max_size=3),
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
    st.integers(2, 30),
    st.integers(1, 5),
    st.integers(1, 60),
    st.data(),
)
def test_the_torch_and_ray_loaders_give_each_worker_its_rows_of_a_mixture(
    groups: list[list[int]], weights: list[int], batch: int, world_size: int, round_rows: int, data: st.DataObject
) -> None:
    source = join(groups, tuple(weights[: len(groups)]))
    steps = Steps(rows_in(source), batch)
    total = 3 * steps.per_epoch - 1
    start = data.draw(st.integers(0, total - 1))
    order = order_of(source, "ray", 7)
    planner = RoundPlanner(order, steps, total, round_rows)
    reader = RoundReader(source, order, steps, world_size, steps.workers(world_size))
    streams: list[list[int]] = [[] for _ in range(world_size)]
    for planned in planner(pa.table({"step": [start]})):
        for rank, part in enumerate(reader(planned)):
            assert part["value"][0].tolist() == [[2 * row] for row in part["row"][0].tolist()]
            streams[rank] += part["row"][0].tolist()

    def share(ids: list[int], step: int, rank: int) -> list[int]:
        epoch, in_epoch = divmod(step, steps.per_epoch)
        return ids[epoch * order.rows :][slice(*steps.share(in_epoch, world_size, rank))]

    ids = order_by_definition(order, 3)
    expected = [[row for step in range(start, total) for row in share(ids, step, rank)] for rank in range(world_size)]
    assert streams == expected

    in_memory = order_of(source, "torch", 7)
    cut = cut_shares(in_memory.row_ids(2), steps, world_size, 0)
    ids = order_by_definition(in_memory, 2)
    assert [rows.tolist() for rows in cut] == [share(ids, steps.per_epoch + step, 0) for step in range(steps.per_epoch)]


def test_a_mixture_of_a_billion_rows_is_planned_in_seconds_from_any_step() -> None:
    groups = [[10_000] * number for number in (70_000, 29_000, 1000)]
    began = time.process_time()
    order = mixed_order("ray", groups, (6, 3, 1), 0)
    order.checksum()
    steps = Steps(order.rows, 4096)
    assert order.rows == 10**9
    planned = RoundPlanner(order, steps, 3 * steps.per_epoch, 10_000)(pa.table({"step": [2 * steps.per_epoch + 5]}))
    first = next(planned).to_pylist()[0]
    assert (first["epoch"], first["first"]) == (3, 5 * 4096)
    assert {visit["pass"] for visit in first["visits"]} == {2, 3, 21}, "the smallest source is in its 21st pass"
    assert time.process_time() - began < 15


# --------------------------------------------------------------------------------------------------------------- audit


def record(layout: EpochLayout, order: RunOrder, steps: int, ranks: int = 2) -> pa.Table:
    """Return the audit records of the first steps, rank by rank as workers gather them."""
    ids = order_by_definition(order, 1 + steps // layout.steps_per_epoch)
    taken = []
    for step in range(1, steps + 1):
        rows = ids[layout.position(step - 1) : layout.position(step)]
        half = len(rows) // ranks
        taken += [(0, step, row) for row in rows[:half]] + [(1, step, row) for row in rows[half:]]
    rank, step, row = zip(*sorted(taken, key=lambda each: each[:2]), strict=True)
    return pa.table({"step": pa.array(step, pa.int32()), "rank": pa.array(rank, pa.int32()), "row": pa.array(row)})


LAYOUT = EpochLayout(20, 4, 5, (SourceRows("a", 12, 3), SourceRows("b", 8, 1)))
ORDER = mixed_order("torch", [[12], [8]], (3, 1), 5)


def test_the_audit_counts_each_pass_through_each_source() -> None:
    consumed = record(LAYOUT, ORDER, 8)
    assert list(count_rows([consumed], LAYOUT, 8)) == [
        Epoch(1, 12, 0, 0, True, "a"),
        Epoch(2, 12, 0, 0, True, "a"),
        Epoch(3, 6, 0, 0, False, "a"),
        Epoch(1, 8, 0, 0, True, "b"),
        Epoch(2, 2, 0, 0, False, "b"),
    ]
    assert find_wrong_steps([consumed], LAYOUT, 8) == []


def test_the_audit_finds_a_row_that_a_pass_repeats_even_if_the_next_pass_misses_it() -> None:
    """Each row is still consumed as often as expected over both passes."""
    consumed = record(LAYOUT, ORDER, 8).to_pylist()
    mine = [place for place, each in sorted(enumerate(consumed), key=lambda it: (it[1]["step"], it[1]["rank"], it[0]))]
    rows_of_a = [place for place in mine if consumed[place]["row"] < 12]
    first, later = rows_of_a[3], rows_of_a[14]
    assert consumed[first]["row"] != consumed[later]["row"]
    consumed[first]["row"], consumed[later]["row"] = consumed[later]["row"], consumed[first]["row"]
    table = pa.Table.from_pylist(consumed, schema=record(LAYOUT, ORDER, 8).schema)
    found = {(each.source, each.epoch): (each.missing, each.repeated) for each in count_rows([table], LAYOUT, 8)}
    assert found["a", 1] == found["a", 2] == (1, 1)
    assert found["b", 1] == (0, 0)


def test_an_identity_without_rows_or_with_an_empty_source_has_no_epoch_layout() -> None:
    settings = {"SUNSPOT_GLOBAL_BATCH_SIZE": "5"}
    rows = Rows("", 20, 4, "", "", LAYOUT.sources)
    assert find_layout(Identity(settings, rows)) == LAYOUT
    assert find_layout(Identity(settings, replace(rows, sources=(SourceRows("a", 0, 1),)))) is None
    assert find_layout(Identity(settings, replace(rows, rows=0))) is None


def test_the_audit_finds_a_row_of_the_wrong_source() -> None:
    consumed = record(LAYOUT, ORDER, 8).to_pylist()
    consumed[0]["row"] = 19 if consumed[0]["row"] < 12 else 0
    table = pa.Table.from_pylist(consumed, schema=record(LAYOUT, ORDER, 8).schema)
    lines = find_wrong_steps([table], LAYOUT, 8)
    assert len(lines) == 2
    assert {line.split(" of ")[1].split()[0] for line in lines} == {"a", "b"}


# ---------------------------------------------------------------------------------------------------- opening and runs


def write_source(path: Path, rows: int, first: int = 0, **more: list[int]) -> str:
    """Write rows for the task `tests.tasks.table`, whose `size` is unique over all sources."""
    numbers = np.arange(first, first + float(rows))
    columns = {"size": numbers / 100, "place": [[[number / 50] * 2] * 2 for number in numbers], "label": numbers / 20}
    pq.write_table(pa.table(columns | more), path, row_group_size=7)
    return str(path)


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    """The value of DATASET for three sources of 40, 25 and 11 rows."""
    sizes = {"a": (40, 0), "b": (25, 100), "c": (11, 200)}
    paths = [write_source(tmp_path / f"{name}.parquet", *size) for name, size in sizes.items()]
    return ",".join(f"{path}:{weight}" for path, weight in zip(paths, (0.5, 0.3, 0.2), strict=True))


def table_settings(dataset: str, **more: Any) -> Settings:
    return load_settings({"TASK": "tests.tasks.table", "DATASET": dataset, **more})


def plan_of(settings: Settings) -> Plan:
    plan = make_plan(settings, load_task(settings))
    return Plan(settings, plan.source, None, plan.steps, plan.total_steps, plan.reasons, plan.order)


@pytest.mark.parametrize("loader", ["torch", "ray"])
def test_the_plan_of_a_mixture_shows_its_sources(mixture: str, loader: str) -> None:
    plan = plan_of(table_settings(mixture, LOADER=loader, GLOBAL_BATCH_SIZE="8", EPOCHS="2"))
    lines = [reason for reason in plan.reasons if reason.startswith("mixture")]
    assert plan.steps.rows == 76
    assert lines[0].startswith("mixture: 0.5 of each step from ")
    assert [line.partition(", ")[2] for line in lines] == [
        "40 rows, 1.9 epochs in all",
        "25 rows, 1.8 epochs in all",
        "11 rows, 2.82 epochs in all",
    ]
    other = plan_of(table_settings(mixture.replace("0.5", "0.6"), LOADER=loader))
    assert other.order != plan.order
    assert identify_rows(other).data != identify_rows(plan).data


def test_a_changed_weight_is_refused_with_an_explanation(mixture: str, tmp_path: Path) -> None:
    run = open_run(str(tmp_path / "runs"), "run")
    settings = table_settings(mixture)
    record_identity(run, settings.environment(), IDENTITY, identify_rows(plan_of(settings)))
    record_identity(run, settings.environment(), IDENTITY, identify_rows(plan_of(settings)))
    changed = table_settings(mixture.replace("0.5", "0.6"))
    with pytest.raises(ConflictError) as raised:
        record_identity(run, changed.environment(), IDENTITY, identify_rows(plan_of(changed)))
    assert "cannot continue with a different task, or with different data, mixture weights" in str(raised.value)
    assert "SUNSPOT_INIT_FROM=run:run" in str(raised.value)
    assert raised.value.exit_code == 6


def test_held_out_rows_of_a_mixture_come_from_each_source(mixture: str, tmp_path: Path) -> None:
    settings = table_settings(mixture, TEST_SHARE="0.2")
    train, test = open_rows_of_task(settings, load_task(settings))
    assert isinstance(train, MixedSource)
    assert isinstance(test, MixedSource)
    assert [rows_in(each) for each in train.sources] == [32, 20, 9]
    assert [rows_in(each) for each in test.sources] == [8, 5, 2]
    assert all(isinstance(each, RowSubset) for each in (*train.sources, *test.sources))
    assert plan_of(settings).reasons[0].endswith("15 held-out rows (SUNSPOT_TEST_SHARE=0.2 of the data)")
    given = table_settings(mixture, TEST_SHARE="0.2", TEST_DATASET=write_source(tmp_path / "test.parquet", 13, 300))
    train, test = open_rows_of_task(given, load_task(given))
    assert test
    assert (rows_in(train), rows_in(test)) == (76, 13)


def test_incompatible_sources_are_rejected(mixture: str, tmp_path: Path) -> None:
    images = load_settings({"DATASET": "sample:1,mnist:1", "TASK": "sunspot.tasks.trees"})
    with pytest.raises(SettingsError, match="trees cannot train on a mixture"):
        open_rows_of_task(images, load_task(images))
    twin = tmp_path / "twin"
    twin.mkdir()
    write_source(twin / "a.parquet", 40)
    twice = table_settings(f"{mixture},{twin / 'a.parquet'}:1")
    with pytest.raises(DataError, match=r"the sources .*/a\.parquet and .*twin/a\.parquet have the same rows"):
        open_rows_of_task(twice, load_task(twice))


def write_images(path: Path, labels: list[Any]) -> str:
    """Write an image of 4 x 4 pixels for each label. Their pixels are unique to the path."""
    pixels = np.random.default_rng(list(path.name.encode())).integers(0, 256, (len(labels), 4, 4), np.uint8)
    pq.write_table(pa.table({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(pixels), "label": labels}), path)
    return str(path)


def test_sources_of_a_mixture_need_the_same_classes(tmp_path: Path) -> None:
    for name, classes in (("a", ["cat", "dog"]), ("b", ["dog", "cat", "cat"]), ("c", ["fox", "cat"])):
        write_images(tmp_path / f"{name}.parquet", classes)
    settings = load_settings({"DATASET": f"{tmp_path}/a.parquet:1,{tmp_path}/b.parquet:1"})
    train, _ = open_rows_of_task(settings, load_task(settings))
    assert isinstance(train, MixedSource)
    assert train.class_names == ("cat", "dog")
    assert [train.read(group)["label"].tolist() for group in range(2)] == [[0, 1], [1, 0, 0]]
    other = load_settings({"DATASET": f"{tmp_path}/a.parquet:1,{tmp_path}/c.parquet:1"})
    with pytest.raises(DataError, match=r"c\.parquet has .* class names cat, fox, but .*a\.parquet has .* cat, dog;"):
        open_rows_of_task(other, load_task(other))


def test_a_source_can_lack_some_numeric_classes(tmp_path: Path) -> None:
    paths = [
        write_images(tmp_path / name, labels) for name, labels in (("a.parquet", [0, 1, 2]), ("b.parquet", [0, 1]))
    ]
    test = write_images(tmp_path / "test.parquet", [2, 0])
    settings = load_settings({"DATASET": f"{paths[0]}:1,{paths[1]}:1", "TEST_DATASET": test})
    train, found = open_rows_of_task(settings, load_task(settings))
    assert found
    assert (train.classes, rows_in(train), rows_in(found)) == (3, 5, 2)


def test_a_killed_run_on_a_mixture_resumes_at_the_next_row_of_each_source(mixture: str, tmp_path: Path) -> None:
    def plan_in(folder: str, batch: str = "8") -> Plan:
        given = {"GLOBAL_BATCH_SIZE": batch, "AUDIT": "true", "CHECKPOINT_EVERY_STEPS": "3", "CHECKPOINT_EVERY_S": "0"}
        return plan_of(
            table_settings(mixture, STORAGE_PATH=str(tmp_path / folder), EPOCHS="3", RUN_NAME="run", **given)
        )

    for ranks, killed_at in ((2, 8), (3, 17), (1, 0)):
        train_group(plan_in("broken"), ranks, killed_at=killed_at)
    train_group(plan_in("whole"), 2)
    run, whole = (open_run(str(tmp_path / name), "run") for name in ("broken", "whole"))
    assert [attempt.step for attempt in read_attempts(run)] == [0, 6, 15]
    assert newest(run).step == 30
    assert {step: sorted(rows) for step, rows in consumed(run).items()} == {
        step: sorted(rows) for step, rows in consumed(whole).items()
    }
    for name, tensor in weights_of(run).items():
        torch.testing.assert_close(tensor, weights_of(whole)[name], rtol=0, atol=1e-5)
    proof = prove(run)
    assert proof.wrong_rows == []
    assert {(each.missing, each.repeated) for each in proof.epochs} == {(0, 0)}
    taken = [sum(each.rows for each in proof.epochs if each.source.endswith(f"{name}.parquet")) for name in "abc"]
    assert taken == [114, 68, 46]
    shown = read_details(look(run)).sources
    assert [(each.rows, round(each.epochs, 2)) for each in shown] == [(40, 2.85), (25, 2.72), (11, 4.18)]
