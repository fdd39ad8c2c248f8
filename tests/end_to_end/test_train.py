"""Tests of complete runs on real Ray workers, which check the consumed rows and how runs resume."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from sunspot.cli import main as sunspot
from sunspot.errors import DataError
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.checkpoints import in_lineage, list_checkpoints
from sunspot.run.history import read_journal
from sunspot.storage import open_storage
from tests.harness import s3
from tests.harness.clouds import BUCKETS
from tests.harness.program import Program
from tests.harness.s3 import FaultProxy
from tests.harness.training import (
    MakeData,
    assert_audit_clean,
    kill_all,
    newest,
    the_run,
    wait_for_step,
    weights,
)

LONG = {"GLOBAL_BATCH_SIZE": 50, "EPOCHS": 2, "CHECKPOINT_EVERY_STEPS": 20}


@pytest.mark.slow
@pytest.mark.parametrize(("loader", "worlds"), [("torch", (2, 1)), ("ray", (2, 1, 3))], ids=["torch", "ray"])
def test_a_killed_run_resumes_at_a_different_world_size(
    loader: str, worlds: tuple[int, ...], program: Program, make_data: MakeData
) -> None:
    # The data fill three shuffle windows. A single row is left over and joins the last step.
    # Resume from storage, as if the nodes were gone, too.
    settings = {**LONG, "DATASET": make_data(20_001, row_group=1000), "LOADER": loader, "SNAPSHOT_COST": 0}
    run = the_run(program)
    *killed, last = worlds
    for workers, step in zip(killed, (60, 500), strict=False):
        process = program.start(**settings, NUM_WORKERS=workers)
        wait_for_step(run, step, process)
        kill_all(process)
    program.run(**settings, NUM_WORKERS=last)
    assert newest(run).step == 800
    assert tuple(attempt.metadata.world_size for attempt in read_attempts(run)) == worlds
    assert_audit_clean(program)
    history = read_journal(run, "metrics", lineage(read_attempts(run)))
    assert sum(record["steps"] for record in history) == 800
    assert sum(record["rows"] for record in history) == 40_002


@pytest.mark.slow
def test_a_resumed_run_ends_with_exactly_the_weights_of_an_uninterrupted_run(
    program: Program, make_data: MakeData
) -> None:
    settings = {
        "DATASET": make_data(1000, test_rows=100),
        "GLOBAL_BATCH_SIZE": 32,
        "EPOCHS": 2,
        "TASK": "tests.tasks.batch_norm",
    }
    program.run(**settings, RUN_NAME="whole")
    program.run(**settings, RUN_NAME="parts", CHECKPOINT_EVERY_STEPS=10, CHECKPOINTS_TO_KEEP=99)
    # Return to the middle of the first epoch by deleting everything later.
    whole, parts = the_run(program, "whole"), the_run(program, "parts")
    for checkpoint in list_checkpoints(parts):
        if checkpoint.step > 30:
            parts.storage.delete(parts.key("checkpoints", checkpoint.name, "manifest.json"))
    assert newest(parts).step == 30
    program.run(**settings, RUN_NAME="parts")
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(parts)[name]), name


@pytest.mark.slow
def test_the_error_for_bad_rows_names_the_rows(program: Program, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    Image.new("L", (8, 8), 200).save(buffer, "png")
    good = buffer.getvalue()
    table = pa.table({"image": [good, good[:20], good, good], "label": [0, 1, 0, 1]})
    pq.write_table(table, tmp_path / "broken.parquet")
    with pytest.raises(DataError, match=r"broken\.parquet.*row 1"):
        program.run(DATASET=tmp_path / "broken.parquet", GLOBAL_BATCH_SIZE=2, LOADER="ray")


def test_a_killed_run_in_s3_resumes_with_fewer_workers_from_an_intact_checkpoint(
    program: Program, make_data: MakeData, s3_proxy: FaultProxy, s3_bucket: str, tmp_path: Path
) -> None:
    """Storage fails occasionally, the newest checkpoint is damaged, and one of two nodes is gone."""

    def of_a_checkpoint(method: str) -> Callable[[s3.Request], bool]:
        return lambda request: request.method == method and "/checkpoints/" in request.path

    s3_proxy.on(of_a_checkpoint("PUT"), s3.answer(503, "SlowDown"), times=6)
    s3_proxy.on(of_a_checkpoint("GET"), s3.cut_body(1000), times=2)
    program.settings["STORAGE_PATH"] = f"s3://{s3_bucket}/runs"
    run = the_run(program)
    first_is_there = tmp_path / "first"
    is_killed = tmp_path / "killed"
    settings = {
        **LONG,
        "EPOCHS": 1,
        "DATASET": make_data(7_001, row_group=1000),
        "SNAPSHOT_COST": 0,
        "TASK": "tests.tasks.waiting",
        "TASK_ARGS": json.dumps({"50": str(first_is_there), "100": str(is_killed)}),
    }
    process = program.start(**settings, NUM_WORKERS=2)
    wait_for_step(run, 20, process)
    first_is_there.touch()
    wait_for_step(run, 100, process)
    kill_all(process)
    is_killed.touch()
    *_, whole, damaged = in_lineage(list_checkpoints(run), lineage(read_attempts(run)))
    assert damaged.step == 100
    key = run.key("checkpoints", damaged.name, "optimizer.pt")
    content = bytearray(run.storage.read(key))
    content[len(content) // 2] ^= 1
    run.storage.write(key, bytes(content))

    process = program.start(**settings, NUM_WORKERS=1)
    output = process.communicate(timeout=250)[0]
    assert process.returncode == 0, output
    assert f"skipped {damaged.name}" in output
    first, second = read_attempts(run)
    assert (first.metadata.world_size, second.metadata.world_size) == (2, 1)
    assert second.starts_from == whole.name
    assert newest(run).step == 140
    assert_audit_clean(program)
    history = read_journal(run, "metrics", lineage([first, second]))
    assert sum(record["steps"] for record in history) == 140
    assert sum(record["rows"] for record in history) == 7_001


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_killed_run_resumes_from_google_and_azure_storage(
    scheme: str, program: Program, make_data: MakeData, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"{scheme}://{request.getfixturevalue(BUCKETS[scheme])}"
    bucket, is_killed = open_storage(url), tmp_path / "killed"
    bucket.write("data/part.parquet", Path(make_data(20_001, row_group=1000), "part.parquet").read_bytes())
    program.settings["STORAGE_PATH"] = f"{url}/runs"
    waiting = {"TASK": "tests.tasks.waiting", "TASK_ARGS": json.dumps({"100": str(is_killed)})}
    settings = {**LONG, **waiting, "DATASET": f"{url}/data", "SNAPSHOT_COST": 0}
    run = the_run(program)
    process = program.start(**settings, NUM_WORKERS=2)
    wait_for_step(run, 100, process)
    kill_all(process)
    is_killed.touch()

    process = program.start(**settings, NUM_WORKERS=1)
    output = process.communicate(timeout=250)[0]
    assert process.returncode == 0, output
    assert [attempt.metadata.world_size for attempt in read_attempts(run)] == [2, 1]
    assert newest(run).step == 800
    assert_audit_clean(program)
    for words in (["checkpoints", "verify", "run"], ["list"], ["delete", "run", "--yes"]):
        with pytest.raises(SystemExit) as ended:
            sunspot([*words, "--storage", f"{url}/runs"])
        assert ended.value.code == 0
    assert bucket.list("runs") == []
    assert bucket.list_unfinished("runs") == []
