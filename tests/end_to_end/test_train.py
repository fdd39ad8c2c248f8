"""Whole runs of the training program on real Ray workers: what they consume, and how they go on."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pytest
import torch
from PIL import Image

from app.errors import ConflictError, DataError, SettingsError
from app.run import open_run
from app.run.attempts import lineage, read_attempts
from app.run.checkpoints import in_lineage, list_checkpoints
from app.run.history import read_audit, read_journal
from app.settings import Settings
from app.train.setup import refuse_small_micro_batches
from app.train.trainer import try_storage
from submitter.cli import main as sunspot
from tests.harness import s3
from tests.harness.program import Program
from tests.harness.s3 import FaultProxy
from tests.harness.training import (
    MakeData,
    assert_audit_clean,
    consumed,
    kill_all,
    losses,
    newest,
    the_run,
    wait_for_step,
    weights,
    worker_processes,
)


def test_steps_do_not_depend_on_the_number_of_workers(program: Program, make_data: MakeData) -> None:
    # 123 rows in batches of 20: the seventh step of an epoch has 3 rows, enough for one worker only.
    data = make_data(123)
    settings = {"DATASET": data, "GLOBAL_BATCH_SIZE": 20, "MAX_STEPS": 30, "EPOCHS": 9, "CHECKPOINT_EVERY_STEPS": 1}
    for workers in (1, 2, 3):
        program.run(
            **settings, RUN_NAME=f"world-{workers}", NUM_WORKERS=workers, MICRO_BATCH_SIZE=0 if workers == 1 else 4
        )
    one, two, three = (the_run(program, f"world-{workers}") for workers in (1, 2, 3))
    assert len(consumed(one)) == 30
    for other in (two, three):
        assert {step: sorted(rows) for step, rows in consumed(other).items()} == {
            step: sorted(rows) for step, rows in consumed(one).items()
        }
        assert losses(other) == pytest.approx(losses(one), rel=1e-5)
    assert losses(one)[-1] < losses(one)[0] / 2


LOADERS = ["torch", pytest.param("ray", marks=pytest.mark.slow)]
LONG = {"GLOBAL_BATCH_SIZE": 50, "EPOCHS": 2, "CHECKPOINT_EVERY_STEPS": 20}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_run_goes_on_after_the_loss_of_a_worker(loader: str, program: Program, make_data: MakeData) -> None:
    settings = {**LONG, "DATASET": make_data(20_000, row_group=1000), "LOADER": loader}
    process = program.start(**settings)
    run = the_run(program)
    wait_for_step(run, 60, process)
    worker_processes()[-1].kill()
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    assert len(read_attempts(run)) == 2
    assert newest(run).step == 800
    assert_audit_clean(program)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_killed_run_goes_on_at_another_world_size(loader: str, program: Program, make_data: MakeData) -> None:
    # Three windows of the shuffle; a single row is left over, and joins the last step.
    # From storage, as if their nodes were gone too.
    settings = {**LONG, "DATASET": make_data(20_001, row_group=1000), "LOADER": loader, "SNAPSHOT_COST": 0}
    run = the_run(program)
    for workers, step in [(2, 60), (1, 500)]:
        process = program.start(**settings, NUM_WORKERS=workers)
        wait_for_step(run, step, process)
        kill_all(process)
    program.run(**settings, NUM_WORKERS=3)
    assert newest(run).step == 800
    worlds = [attempt.metadata["world_size"] for attempt in read_attempts(run)]
    assert worlds == [2, 1, 3]
    assert_audit_clean(program)
    history = read_journal(run, "metrics", lineage(read_attempts(run)))
    assert sum(record["steps"] for record in history) == 800
    assert sum(record["rows"] for record in history) == 40_002


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(program: Program, make_data: MakeData) -> None:
    settings = {
        "DATASET": make_data(1000, test_rows=100),
        "GLOBAL_BATCH_SIZE": 32,
        "EPOCHS": 2,
        "TASK": "tests.tasks.batch_norm",
    }
    program.run(**settings, RUN_NAME="whole")
    program.run(**settings, RUN_NAME="parts", CHECKPOINT_EVERY_STEPS=10, CHECKPOINTS_TO_KEEP=99)
    # Back to the middle of the first epoch: everything later goes.
    whole, parts = the_run(program, "whole"), the_run(program, "parts")
    for checkpoint in list_checkpoints(parts):
        if checkpoint.step > 30:
            parts.storage.delete(parts.key("checkpoints", checkpoint.name, "manifest.json"))
    assert newest(parts).step == 30
    program.run(**settings, RUN_NAME="parts")
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(parts)[name]), name


def test_a_finished_run_says_so(program: Program, make_data: MakeData, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {"DATASET": make_data(100, test_rows=50), "GLOBAL_BATCH_SIZE": 20, "EPOCHS": 1}
    program.run(**settings)
    out = capfd.readouterr().out
    run = the_run(program)
    assert "succeeded at step 5 of 5" in out
    assert "test_accuracy" in out
    assert (
        f"  weights: {run.location}/checkpoints/{newest(run).name}/model.pt\n  report: {run.location}/report.html"
        in out
    )
    page = run.storage.read(run.key("report.html")).decode()
    assert "Succeeded" in page
    assert "Each rank over the whole run" in page
    [log] = [entry.key for entry in run.storage.list(run.key("logs")) if "/driver-" in entry.key]
    assert "report: " in run.storage.read(log).decode(), "what was shipped of the output has it, too"
    program.run(**settings)
    assert "already finished at step 5" in capfd.readouterr().out
    assert len(read_attempts(the_run(program))) == 1

    with pytest.raises(ConflictError, match="SUNSPOT_SEED: 0 -> 1"):
        program.run(**settings, SEED=1)
    program.run(**{**settings, "EPOCHS": 2}, CHECKPOINTS_TO_KEEP=1)
    assert newest(the_run(program)).step == 10

    warm = {"RUN_NAME": "warm", "INIT_FROM": "run:run", "MAX_STEPS": 1, "LEARNING_RATE": 1e-9, "PRECISION": "bf16"}
    program.run(**settings, **warm)
    begun, went_on = weights(the_run(program)), weights(the_run(program, "warm"))
    assert all(torch.allclose(begun[name], went_on[name], atol=1e-6) for name in begun)


DAMAGES = {
    "truncated": lambda folder: os.truncate(folder / "model.pt", 100),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a flipped byte": lambda folder: _flip(folder / "optimizer.pt"),
    "manifest emptied": lambda folder: (folder / "manifest.json").write_text(""),
}


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_checkpoints_are_skipped(
    program: Program, make_data: MakeData, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"DATASET": make_data(200), "GLOBAL_BATCH_SIZE": 20, "CHECKPOINT_EVERY_STEPS": 5}
    program.run(**settings, EPOCHS=1)
    run = the_run(program)
    for epochs, (damage, do) in enumerate(DAMAGES.items(), 2):
        good = newest(run)
        before = in_lineage(list_checkpoints(run), lineage(read_attempts(run)))[-2]
        do(Path(run.storage.locate(run.key("checkpoints", good.name))))
        capfd.readouterr()
        program.run(**settings, EPOCHS=epochs)
        assert f"skipped {good.name}" in capfd.readouterr().out, damage
        assert read_attempts(run)[-1].starts_from == before.name, damage
        assert newest(run).step == 10 * epochs
    assert_audit_clean(program)


def test_a_newer_process_takes_the_run_over(program: Program, make_data: MakeData) -> None:
    settings = {
        "TASK": "tests.tasks.slow",
        "DATASET": make_data(1000),
        "GLOBAL_BATCH_SIZE": 20,
        "EPOCHS": 1000,
        "CHECKPOINT_EVERY_STEPS": 20,
        "NUM_WORKERS": 1,
    }
    first = program.start(**settings)
    run = the_run(program)
    wait_for_step(run, 20, first)
    second = program.start(**settings)
    output = first.communicate(timeout=200)[0]
    assert first.returncode == 6, output
    assert "owns the run" in output
    wait_for_step(run, newest(run).step + 20, second)
    kill_all(second)
    owners = [attempt.owner for attempt in read_attempts(run)]
    assert len(owners) == len(set(owners)) == 2, "the first one came back"
    assert newest(run).attempt == 2
    assert_audit_clean(program)


def test_bad_rows_end_the_run_with_their_name(program: Program, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    Image.new("L", (8, 8), 200).save(buffer, "png")
    good = buffer.getvalue()
    table = pa.table({"image": [good, good[:20], good, good], "label": [0, 1, 0, 1]})
    pq.write_table(table, tmp_path / "broken.parquet")
    with pytest.raises(DataError, match=r"broken\.parquet.*row 1"):
        program.run(DATASET=tmp_path / "broken.parquet", GLOBAL_BATCH_SIZE=2, LOADER="ray")


def test_every_rank_is_in_the_metric_history(program: Program, make_data: MakeData) -> None:
    program.run(DATASET=make_data(300, test_rows=31), GLOBAL_BATCH_SIZE=30, EPOCHS=1, NUM_WORKERS="1..3", LOADER="ray")
    [record] = read_journal(the_run(program), "metrics")
    assert [numbers["rows"] for numbers in record["ranks"]] == [100, 100, 100]
    assert record["steps"] == 10
    for name in (
        "loss",
        "accuracy",
        "learning_rate",
        "rows_per_s",
        "step_time_median_s",
        "step_time_p95_s",
        "data_wait_s",
    ):
        assert record[name] >= 0, name
    assert 0 <= record["test_accuracy"] <= 1
    assert record["test_accuracy"] * 31 == pytest.approx(round(record["test_accuracy"] * 31)), (
        "31 rows, each counted once"
    )


def test_a_run_in_s3_outlives_its_faults(
    program: Program, make_data: MakeData, s3_proxy: FaultProxy, s3_bucket: str
) -> None:
    def of_a_checkpoint(method: str) -> Callable[[s3.Request], bool]:
        return lambda request: request.method == method and "/checkpoints/" in request.path

    s3_proxy.on(of_a_checkpoint("PUT"), s3.answer(503, "SlowDown"), times=6)
    s3_proxy.on(of_a_checkpoint("GET"), s3.cut_body(1000), times=2)
    # A Ray of its own, as its workers get their AWS environment from the process that starts it.
    program.ray_address = ""
    storage = f"s3://{s3_bucket}/runs"
    process = program.start(
        DATASET=make_data(1000), GLOBAL_BATCH_SIZE=20, EPOCHS=1, STORAGE_PATH=storage, RESOURCES_PER_WORKER=""
    )
    output = process.communicate(timeout=250)[0]
    assert process.returncode == 0, output
    program.settings["STORAGE_PATH"] = storage
    assert newest(the_run(program)).step == 50
    assert_audit_clean(program)


def test_small_micro_batches_are_refused_with_batch_norm() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for rows, refused in [(1, True), (2, True), (3, False), (0, False)]:
        settings = Settings(micro_batch_size=rows)
        with pytest.raises(SettingsError, match="batch norm") if refused else contextlib.nullcontext():
            refuse_small_micro_batches(model, settings)
        refuse_small_micro_batches(model[0], settings)


def test_a_node_that_does_not_see_the_storage_is_found(tmp_path: Path) -> None:
    run = open_run(str(tmp_path / "here"), "run")
    run.storage.write(run.key("probe"), b"content")
    assert try_storage(str(tmp_path / "here"), "run", run.key("probe"), b"content") == ""
    assert "not found" in try_storage(str(tmp_path / "there"), "run", run.key("probe"), b"content")
    assert "something else" in try_storage(str(tmp_path / "here"), "run", run.key("probe"), b"other")


def test_the_audit_sees_a_repeated_row(program: Program, make_data: MakeData) -> None:
    """The check itself can fail: one step's rows are recorded twice."""
    program.run(DATASET=make_data(100), GLOBAL_BATCH_SIZE=20, EPOCHS=1)
    run = the_run(program)
    [table] = read_audit(run, lineage(read_attempts(run)))
    from app.run.history import write_audit

    doubled = table.filter(pc.not_equal(table["step"], 2))
    first = table.filter(pc.equal(table["step"], 1))
    import pyarrow as pa

    write_audit(
        run, 1, 1, 5, pa.concat_tables([doubled, first.set_column(0, "step", pa.array([2] * len(first), pa.int32()))])
    )
    with pytest.raises(SystemExit) as ended:
        sunspot(["audit", "run", "--storage", program.settings["STORAGE_PATH"]])
    assert ended.value.code == 7
