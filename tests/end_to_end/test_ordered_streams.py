"""Tests of killed and resumed runs on data that usually stream without an order: tar shards and Iceberg tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from sunspot.run.attempts import read_attempts
from tests.harness.iceberg import write_iceberg
from tests.harness.program import Program
from tests.harness.shards import image_rows, write_parquet, write_shards
from tests.harness.training import assert_audit_clean, consumed, kill_all, newest, the_run, wait_for_step, weights


@pytest.mark.slow
@pytest.mark.parametrize(("write", "loader"), [(write_shards, "ray"), (write_iceberg, "torch")])
def test_a_killed_run_on_tar_shards_or_iceberg_takes_the_same_steps_as_on_parquet(
    write: Callable[[Path, pa.Table, int], str], loader: str, program: Program, tmp_path: Path
) -> None:
    rows = image_rows(1500)
    settings = {"LOADER": loader, "GLOBAL_BATCH_SIZE": 20, "EPOCHS": 6, "CHECKPOINT_EVERY_STEPS": 20}
    settings |= {"DATASET": write(tmp_path / "streams", rows, 3), "SNAPSHOT_COST": 0}
    process = program.start(**settings, NUM_WORKERS=2)
    wait_for_step(the_run(program), 60, process)
    kill_all(process)
    program.run(**settings, NUM_WORKERS=1)
    assert_audit_clean(program)

    settings["DATASET"] = write_parquet(tmp_path / "parquet", rows, files=3, group=2048)
    program.run(**settings, NUM_WORKERS=2, RUN_NAME="whole")
    run, whole = the_run(program), the_run(program, "whole")
    assert [attempt.metadata.world_size for attempt in read_attempts(run)] == [2, 1]
    assert newest(run).step == newest(whole).step == 450
    assert {step: sorted(ids) for step, ids in consumed(run).items()} == {
        step: sorted(ids) for step, ids in consumed(whole).items()
    }
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=0, atol=1e-5)
