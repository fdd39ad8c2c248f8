"""Tests of a finished run: its output, its files, and how a changed or damaged copy continues."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from sunspot.errors import ConflictError
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.audit import AuditWriter, read_audit
from sunspot.run.checkpoints import in_lineage, list_checkpoints, write_manifest
from sunspot.run.history import iter_rank_records, read_journal
from sunspot.run.logs import rank_stream, read_stream
from tests.harness.finished_run import GO_ON, ROWS, STEPS, TEST_ROWS, FinishedRun, driver_output
from tests.harness.program import Program
from tests.harness.training import assert_audit_clean, assert_complete, audit, the_run, weights


def test_a_finished_run_prints_its_result_and_writes_a_report(finished_run: FinishedRun) -> None:
    run, out = finished_run.run, finished_run.output
    assert f"succeeded at step {STEPS} of {STEPS}" in out
    assert "test_accuracy" in out
    weights_at = f"{run.location}/checkpoints/{finished_run.newest.name}/model.pt"
    assert f"  weights: {weights_at}\n  report: {run.location}/report.html" in out
    page = run.storage.read(run.key("report.html")).decode()
    assert "Succeeded" in page
    assert "Each rank over the whole run" in page
    assert "report: " in driver_output(run).decode(), "what was shipped of the output has it, too"
    for attempt, rank in itertools.product((1, 2), (0, 1)):
        assert (
            f"attempt {attempt}: rank {rank} of 2 on cpu of " in read_stream(run, rank_stream(attempt, rank)).decode()
        )


def test_the_history_of_a_finished_run_contains_every_rank(finished_run: FinishedRun) -> None:
    records = read_journal(finished_run.run, "metrics")
    ranks = iter_rank_records(finished_run.run, lineage(read_attempts(finished_run.run)))
    assert [sum(rows) for rows in zip(*(record["ranks"]["rows"] for record in ranks), strict=True)] == [ROWS, ROWS]
    assert sum(record["steps"] for record in records) == STEPS
    rates = ("learning_rate", "rows_per_s", "step_time_median_s", "step_time_p95_s", "data_wait_s")
    for name in ("loss", "accuracy", *rates):
        assert records[-1][name] >= 0, name
    right = records[-1]["test_accuracy"] * TEST_ROWS
    assert 0 <= right <= TEST_ROWS
    assert right == pytest.approx(round(right)), "each row counted once"


def test_a_finished_run_does_not_train_again_and_rejects_changed_settings(
    program: Program, copied_run: FinishedRun, capfd: pytest.CaptureFixture[str]
) -> None:
    program.run(**copied_run.settings)
    assert f"already finished at step {STEPS}" in capfd.readouterr().out
    assert len(read_attempts(copied_run.run)) == 2
    with pytest.raises(ConflictError, match="SUNSPOT_SEED: 0 -> 1"):
        program.run(**copied_run.settings, SEED=1)


@pytest.mark.slow
def test_a_finished_run_continues_from_an_intact_checkpoint_if_epochs_are_added(
    program: Program, copied_run: FinishedRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run, damaged = copied_run.run, copied_run.newest
    before = in_lineage(list_checkpoints(run), lineage(read_attempts(run)))[-2]
    path = copied_run.directory(damaged) / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    program.run(**{**copied_run.settings, **GO_ON}, EPOCHS=3, CHECKPOINTS_TO_KEEP=1)
    assert f"skipped {damaged.name}" in capfd.readouterr().out
    assert read_attempts(run)[-1].starts_from == before.name
    assert copied_run.newest.step == 3 * STEPS // 2
    assert_audit_clean(program)


@pytest.mark.slow
def test_a_new_run_can_start_from_the_weights_of_a_finished_run(program: Program, copied_run: FinishedRun) -> None:
    begun = {"RUN_NAME": "warm", "INIT_FROM": "run:run", "MAX_STEPS": 1, "LEARNING_RATE": 1e-9}
    program.run(**{**copied_run.settings, **GO_ON, **begun})
    before, after = weights(copied_run.run), weights(the_run(program, "warm"))
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


@pytest.mark.slow
def test_a_skipped_evaluation_runs_when_the_run_starts_again(program: Program, copied_run: FinishedRun) -> None:
    run, before = copied_run.run, copied_run.newest
    metrics = {name: value for name, value in before.metrics.items() if not name.startswith("test_")}
    write_manifest(run, replace(before, metrics=metrics, evaluated=False))
    program.run(**{**copied_run.settings, **GO_ON})
    after = copied_run.newest
    assert (after.step, after.attempt, after.evaluated) == (before.step, 3, True)
    assert after.metrics["test_accuracy"] == pytest.approx(before.metrics["test_accuracy"])
    assert after.metrics["loss"] == before.metrics["loss"]
    assert_complete(run)
    assert_audit_clean(program)


def test_the_audit_fails_if_a_row_was_consumed_twice(copied_run: FinishedRun) -> None:
    """One step's rows are recorded twice, which shows that the check itself can fail."""
    run = copied_run.run
    first, second = read_attempts(run)
    table = pa.concat_tables(read_audit(run, lineage([first, second])))

    def write(table: pa.Table) -> None:
        run.storage.delete_many([entry.key for entry in run.storage.list(run.key("audit"))])
        for attempt, begin, end in ((first, 0, second.step), (second, second.step, STEPS)):
            its = pc.and_(pc.greater(table["step"], begin), pc.less_equal(table["step"], end))
            AuditWriter(run, attempt.label).write(begin + 1, end, table.filter(its))

    write(table)
    assert audit(copied_run.storage) == 0
    others, repeated = table.filter(pc.not_equal(table["step"], 2)), table.filter(pc.equal(table["step"], 1))
    again = repeated.set_column(0, "step", pa.array([2] * len(repeated), pa.int32()))
    write(pa.concat_tables([others, again]))
    assert audit(copied_run.storage) == 7
