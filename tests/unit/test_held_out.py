"""Tests for TEST_SHARE: which rows are held out, and that they are the same everywhere."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.data.held_out import RowSubset, count_held_out, draw_rows, hold_out
from sunspot.data.source import ModelData, read_rows, rows_in
from sunspot.errors import ConflictError, DataError
from sunspot.plan import make_plan
from sunspot.predict.batch import choose_rows
from sunspot.predict.classifier import ModelCheckpoint
from sunspot.run import Run
from sunspot.run.identity import record_identity
from sunspot.settings import IDENTITY, load_settings
from sunspot.tasks import load_task
from sunspot.train.driver import identify_rows
from tests.harness.datasets import everything
from tests.harness.threads import load_in_threads

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 2)


@dataclass(frozen=True)
class Numbers:
    """A `Source` with the row number as its only column."""

    row_groups: tuple[int, ...]
    shape: tuple[int, ...] = (1,)
    classes: int = 0
    fingerprint: str = "layout-content"
    class_names: tuple[str, ...] = ("a", "b")
    notes: tuple[str, ...] = ("a note",)

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        positions = np.arange(self.row_groups[group]) if rows is None else rows
        return {"number": sum(self.row_groups[:group]) + positions}

    def where(self, group: int, row: int) -> str:
        return f"row {row} of group {group}"


@given(SIZES, st.floats(0.01, 0.99), st.integers(0, 3))
def test_each_row_is_either_a_training_row_or_held_out(sizes: list[int], share: float, seed: int) -> None:
    whole = Numbers(tuple(sizes))
    train, test = hold_out(whole, share, seed)
    assert rows_in(test) == min(max(1, round(share * sum(sizes))), sum(sizes) - 2)
    numbers = [everything(part)["number"].tolist() for part in (train, test)]
    assert sorted(numbers[0] + numbers[1]) == list(range(sum(sizes)))
    for part, all_numbers in zip((train, test), numbers, strict=True):
        assert read_rows(part, 0, rows_in(part))["number"].tolist() == all_numbers
        assert [len(part.read(group)["number"]) for group in range(len(sizes))] == list(part.row_groups)


def test_the_same_rows_are_held_out_by_every_version() -> None:
    assert draw_rows(0, 0, 10, 3)[0].tolist() == [4, 8, 9]
    assert draw_rows(1, 0, 10, 3)[0].tolist() == [0, 1, 5]
    assert draw_rows(0, 1, 10, 3)[0].tolist() == [0, 4, 6]
    assert count_held_out((1,) * 12, 0.25, 0) == (0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1)


def test_the_same_fraction_of_each_group_is_held_out() -> None:
    assert set(count_held_out((100,) * 50, 0.1, 0)) == {10}
    single = count_held_out((1,) * 1000, 0.1, 0)
    assert len({place % 10 for place in np.flatnonzero(single)}) == 10


def test_a_subset_has_the_attributes_and_the_row_descriptions_of_its_source() -> None:
    train, test = (pickle.loads(pickle.dumps(part)) for part in hold_out(Numbers((10, 10)), 0.2, seed=0))
    assert train.class_names == ("a", "b")
    assert (train.notes, test.notes) == (("a note",), ())
    with pytest.raises(AttributeError, match="scales"):
        _ = train.scales
    row = int(draw_rows(0, 1, 10, 2)[0][0])
    assert test.where(1, 0) == f"row {row} of group 1"
    prints = {part.fingerprint for seed in (0, 1) for part in hold_out(Numbers((10, 10)), 0.2, seed)}
    assert len(prints) == 4
    assert all(each.endswith("-content") for each in prints)


def test_row_groups_without_remaining_rows_are_not_read() -> None:
    class NoEmptyReads(Numbers):
        def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
            assert rows is None or len(rows), "some readers cannot read zero rows"
            return super().read(group, rows)

    parts = hold_out(NoEmptyReads((1,) * 8), 0.5, seed=0)
    for loaded in load_in_threads(list(parts), ("a", "a")):
        assert sorted(int(number) for rows in loaded for number in rows["number"]) == list(range(8))
    assert len(read_rows(parts[0], 0, 4)["number"]) == 4


def test_a_test_share_that_leaves_too_few_training_rows_is_rejected() -> None:
    with pytest.raises(
        DataError, match=r"TEST_SHARE=0\.5: the dataset has only 2 rows, and at least 2 must remain for training"
    ):
        hold_out(Numbers((2,)), 0.5, seed=0)


def write_table(path: Path, first: int = 0) -> str:
    """Write 40 rows for the task `tests.tasks.table`."""
    numbers = np.arange(first, first + 40.0)
    columns = {"size": numbers, "place": [[[number] * 2] * 2 for number in numbers], "label": numbers}
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return str(path)


@pytest.mark.parametrize("loader", ["torch", "ray"])
def test_held_out_rows_of_files_are_evaluated(tmp_path: Path, loader: str) -> None:
    write_table(tmp_path / "rows.parquet")
    given = {"TASK": "tests.tasks.table", "DATASET": str(tmp_path / "rows.parquet"), "LOADER": loader}
    settings = load_settings({**given, "TEST_SHARE": "0.25"})
    plan = make_plan(settings, load_task(settings))
    assert isinstance(plan.test, RowSubset)
    assert (plan.steps.rows, rows_in(plan.test)) == (30, 10)
    assert "30 training rows" in plan.reasons[0]
    assert plan.reasons[0].endswith("10 held-out rows (SUNSPOT_TEST_SHARE=0.25 of the data)")
    without = load_settings(given)
    assert (
        "set SUNSPOT_TEST_DATASET, or hold out a tenth of the rows with SUNSPOT_TEST_SHARE=0.1"
        in (make_plan(without, load_task(without)).reasons[0])
    )


def test_held_out_rows_of_a_dataset_take_precedence_over_the_test_share() -> None:
    settings = load_settings({"TEST_SHARE": "0.5"})
    plan = make_plan(settings, load_task(settings))
    assert plan.reasons[0].endswith("2000 held-out rows (from the data; SUNSPOT_TEST_SHARE=0.5 has no effect)")
    assert plan.steps.rows == 12_000


def test_the_test_share_of_a_run_cannot_change(run: Run) -> None:
    environment = load_settings({"TEST_SHARE": "0.1"}).environment()
    record_identity(run, environment, IDENTITY)
    record_identity(run, environment, IDENTITY)
    with pytest.raises(ConflictError, match=r"SUNSPOT_TEST_SHARE: 0\.1 -> 0\.2"):
        record_identity(run, load_settings({"TEST_SHARE": "0.2"}).environment(), IDENTITY)


def test_predict_uses_the_same_held_out_rows(run: Run, tmp_path: Path) -> None:
    dataset = write_table(tmp_path / "rows.parquet")
    settings = load_settings({"TASK": "tests.tasks.table", "DATASET": dataset, "TEST_SHARE": "0.25"})
    plan = make_plan(settings, load_task(settings))
    record_identity(run, settings.environment(), IDENTITY, identify_rows(plan))
    checkpoint: Any = SimpleNamespace(name="newest")
    model = ModelCheckpoint(run, checkpoint, settings, ModelData.of(plan.source), ())
    found, split = choose_rows(settings, model, None)
    assert plan.test
    assert (split, everything(found)["size"].tolist()) == ("test", everything(plan.test)["size"].tolist())
    assert rows_in(choose_rows(settings, model, "train")[0]) == 30
    other = settings.model_copy(update={"dataset": write_table(tmp_path / "other.parquet", first=40)})
    found, split = choose_rows(other, model, None)
    assert (split, rows_in(found)) == ("train", 40)
