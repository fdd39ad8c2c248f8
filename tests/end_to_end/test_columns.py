"""Tests of complete runs on declared columns: both loaders, any number of workers, and unusable rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sunspot.errors import DataError
from tests.harness.program import Program
from tests.harness.training import consumed, losses, the_run

LINEAR = {"TASK": "tests.tasks.table", "GLOBAL_BATCH_SIZE": 20, "EPOCHS": 2, "LEARNING_RATE": 0.03}


def write_numbers(folder: Path, rows: int, **changed: Any) -> str:
    """Write two files of rows with five numbers and a label that is a linear function of them."""
    random = np.random.default_rng(0)
    size, place = random.normal(size=rows), random.normal(size=(rows, 2, 2))
    columns = {"size": size, "place": place.tolist(), "label": size + place.sum(axis=(1, 2)), **changed}
    folder.mkdir()
    table = pa.table(columns)
    for number, part in enumerate((table[: rows // 3], table[rows // 3 :])):
        pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=16)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["torch", "ray"])
def test_steps_do_not_depend_on_the_number_of_workers(loader: str, program: Program, tmp_path: Path) -> None:
    # The last step of an epoch has 3 rows, enough for only one worker.
    settings = {**LINEAR, "DATASET": write_numbers(tmp_path / "data", 123), "LOADER": loader}
    for workers in (1, 2, 3):
        program.run(**settings, RUN_NAME=f"world-{workers}", NUM_WORKERS=workers, CHECKPOINT_EVERY_STEPS=1)
    one, two, three = (the_run(program, f"world-{workers}") for workers in (1, 2, 3))
    assert len(consumed(one)) == 14
    for other in (two, three):
        assert {step: sorted(rows) for step, rows in consumed(other).items()} == {
            step: sorted(rows) for step, rows in consumed(one).items()
        }
        assert losses(other) == pytest.approx(losses(one), rel=1e-5)
    assert losses(one)[-1] < losses(one)[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["torch", "ray"])
def test_the_error_for_an_unusable_row_names_the_row(loader: str, program: Program, tmp_path: Path) -> None:
    sizes = np.ones(60)
    sizes[50] = np.nan
    data = write_numbers(tmp_path / "data", 60, size=sizes)
    with pytest.raises(DataError, match=r"part-1\.parquet, row 30: size has the value nan,"):
        program.run(**LINEAR, DATASET=data, LOADER=loader)
