"""Tests for the workers' reports about steps, on the terminal and in storage."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

import sunspot.observe.progress
import sunspot.train.worker
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.elastic.claim import PastRecords, StartPoint
from sunspot.elastic.messages import Command, Incident
from sunspot.elastic.receipts import Phases
from sunspot.elastic.restore import TrainingState
from sunspot.errors import SupersededError
from sunspot.observe.metrics import MetricWindow, RecentMeans
from sunspot.observe.progress import Lines, News, Progress, epoch_line
from sunspot.parallel.collectives import WorkerPlace
from sunspot.parallel.decisions import StepActions
from sunspot.plan import Plan
from sunspot.run import open_run
from sunspot.run.attempts import Attempt, checkpoint_name, lineage
from sunspot.run.history import Journals, iter_rank_records, newest_record, read_journal
from sunspot.run.incidents import Cause, read_receipts
from sunspot.run.status import RunState, read_status
from sunspot.settings import Settings
from sunspot.train.reporter import Reporter, first_status
from sunspot.train.worker import GroupStart, Step, Worker
from tests.harness.constants import SetConstants
from tests.harness.control import LocalControl
from tests.harness.runs import begin, consumed, record_audit, start


def make_worker(plan: Plan, group: dist.ProcessGroup, *own: Any) -> Worker:
    """Return a single worker. `own` contains its checkpoints, commands, telemetry and reporter."""
    place = WorkerPlace(group)
    learner: Any = MagicMock(plan=plan, place=place, model=torch.nn.Identity())
    checkpoints, commands, telemetry, reporter = own
    begun = GroupStart(0, True, {})
    return Worker(learner, begun, checkpoints, commands, MagicMock(), telemetry, reporter, ExitStack())


def take_last_step(reporter: Reporter) -> None:
    reporter._finishing(12)


@pytest.mark.parametrize("name", ["loss", "generator_loss"])
def test_each_report_adds_a_record_and_the_numbers_of_each_rank(
    name: str, group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve steps are reported in three epochs. A task's own loop can log losses of any name."""
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(sunspot.train.worker.ray.train, "report", reported.append)
    run = begin(open_run(str(tmp_path), "run"))
    attempt = start(run, "job", world_size=1, tier="beginning")
    for first in (1, 4):  # segments that an earlier process did not merge
        record_audit(run, Attempt(0, "job", None, 0), consumed(first, first + 2))
    plan = Plan(Settings(), EmptySource((2,), 8), None, Steps(8, 2), 12)
    begun = StartPoint(attempt, nodes={0: "node"})
    checkpoints = MagicMock(newest=None, commit_s=None, interval_steps=0, save_every_s=60.0, memory_summary="")
    checkpoints.due.return_value = StepActions()
    journals = Journals(run, 1)
    control = LocalControl()
    control.channel.add_incident_facts(Incident(Cause.BEGIN))
    control.channel.add_left_out(["node a left out: GPU 3 cannot be used"])
    control.channel.explain_loss("out of memory: 2.90 of 3.00 GiB in use on a")
    reporter = Reporter(run, plan, begun, TrainingState(), control, journals, checkpoints, Phases())
    reporter.announce()
    telemetry = MagicMock()
    commands: Any = SimpleNamespace(poll=Command)
    worker = make_worker(plan, group, checkpoints, commands, telemetry, reporter)
    with reporter.publisher:
        for step in range(1, 13):
            worker.finish_step(Step(step, {}, 2, 0.0, 0.125, [{name: torch.tensor([step, step + 1.0])}], 0.1, 0.25))
        reporter.end()
        reporter.saved_last_step()
    spans = lineage([attempt])
    records = read_journal(run, "metrics", spans)
    assert [(record["step"], record["steps"], record[name]) for record in records] == [
        (4, 4, 3),
        (8, 4, 7),
        (12, 4, 11),
    ]
    assert not any("ranks" in record for record in records)
    assert newest_record(run, spans) == records[-1]
    events = {event["event"]: event for event in read_journal(run, "events", spans)}
    assert events["node left out"]["detail"] == "node a left out: GPU 3 cannot be used"
    assert events["out of memory"]["detail"] == "out of memory: 2.90 of 3.00 GiB in use on a"
    assert events["node left out"]["time"] == pytest.approx(time.time(), abs=100)
    assert {**reported[0], "attempt": 1} == records[0]
    ranks = list(iter_rank_records(run, spans))
    assert [(record["step"], record["ranks"]["rows"], record["ranks"]["steps_s"]) for record in ranks] == [
        *((4, [8], [1.0]), (8, [8], [1.0]), (12, [8], [1.0]))
    ]
    assert [call.args[0]["data_wait_s"] for call in telemetry.report.call_args_list] == [0.5, 0.5, 0.5]
    [receipt] = read_receipts(read_journal(run, "events"))
    assert receipt.attempt == 1
    status = read_status(run)
    assert (status.state, status.step, status.saved) == (RunState.FINISHING, 12, True)
    assert not first_status(replace(begun, past=PastRecords(status=status)), plan).saved
    assert status.loss == (11.0 if name == "loss" else None)
    line = Lines(12, 4).describe(control.channel.fetch_news().progress)
    assert "  1 worker starts at the beginning" in control.heard("log")
    assert line == f"step 12/12{'  loss 11.0000' if name == 'loss' else ''}  checkpoint at 0"
    assert len(run.storage.list(run.key("audit"))) == 1


@pytest.mark.parametrize(
    ("change", "state", "saved"),
    [(Reporter.saved_last_step, RunState.RUNNING, True), (take_last_step, RunState.FINISHING, False)],
)
def test_the_status_thread_does_not_undo_changes_of_the_training_thread(
    change: Callable[[Reporter], None], state: RunState, saved: bool, tmp_path: Path
) -> None:
    """The training thread changes the status while the other thread adds the newest checkpoint to it."""
    run = begin(open_run(str(tmp_path), "run"))
    begun = StartPoint(start(run, "job", world_size=1, tier="beginning"), nodes={0: "node"})

    class Newest:
        time = 5.0

        @property
        def name(self) -> str:
            change(reporter)
            return checkpoint_name(8, 1, begun.attempt.nonce)

    checkpoints = MagicMock(newest=Newest(), commit_s=None)
    plan = Plan(Settings(), EmptySource((2,), 8), None, Steps(8, 2), 12)
    journals = Journals(run, 1)
    reporter = Reporter(run, plan, begun, TrainingState(), LocalControl(), journals, checkpoints, Phases())
    reporter.publish()
    checkpoints.newest = SimpleNamespace(name=checkpoint_name(8, 1, begun.attempt.nonce), time=5.0)
    reporter.publish()
    status = read_status(run)
    assert (status.state, status.saved, status.checkpoint) == (state, saved, checkpoints.newest.name)


def test_loss_values_and_failures_are_the_same_in_every_output(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a report at step 3, the window that ends with the epoch of four steps contains a single step."""
    monkeypatch.setattr(sunspot.train.worker.ray.train, "report", lambda _: None)
    run = begin(open_run(str(tmp_path), "run"))
    attempt = start(run, "job", world_size=1, tier="beginning")
    plan = Plan(Settings(), EmptySource((2,), 8), None, Steps(8, 2), 4)
    begun = StartPoint(attempt, nodes={0: "node", 1: "other"})
    monkeypatch.setattr(sunspot.train.reporter, "own_log", lambda: tmp_path / "nccl")
    (tmp_path / "nccl").write_text("node:1:2 [0] NCCL INFO Using network Socket\n")
    checkpoints = MagicMock(newest=None, commit_s=None, interval_steps=0, save_every_s=60.0, memory_summary="")
    journals = Journals(run, 1)
    control = LocalControl()
    control.channel.add_incident_facts(Incident(Cause.WORKER_FAILED, "rank 0: KeyError: 'weights'"))
    reporter = Reporter(run, plan, begun, TrainingState(), control, journals, checkpoints, Phases())
    reporter.announce()
    worker = make_worker(plan, group, checkpoints, MagicMock(), MagicMock(), reporter)
    agree = MagicMock()
    monkeypatch.setattr(worker, "_decisions", MagicMock(agree=agree))
    with reporter.publisher:
        for step in range(1, 5):
            agree.return_value = StepActions(report=step == 3)
            worker.finish_step(Step(step, {}, 2, 0.0, 0.125, [{"loss": torch.tensor([step, step + 1.0])}], 0.1, 0.25))
    assert [(one["step"], one["loss"]) for one in read_journal(run, "metrics")] == [(3, 2.5), (4, 4.5)]
    status = read_status(run)
    shown = [status.loss, control.heard("add_metrics")[-1]["loss"], checkpoints.save.call_args.args[1]["loss"]]
    assert shown == [3.0, 3.0, 3.0], "the mean of the epoch's rows"
    assert status.warning == "its workers were restarted after worker failed (rank 0: KeyError: 'weights')"
    assert control.heard("log").count("  between nodes, NCCL uses Socket") == 1


def test_a_nan_loss_is_reported_when_it_begins_and_ends(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss is NaN in steps 3 and 4 of 8. Every second step ends an epoch and a window."""
    monkeypatch.setattr(sunspot.train.worker.ray.train, "report", lambda _: None)
    run = begin(open_run(str(tmp_path), "run"))
    attempt = start(run, "job", world_size=1, tier="beginning")
    plan = Plan(Settings(), EmptySource((2,), 8), None, Steps(4, 2), 8)
    checkpoints = MagicMock(newest=None, commit_s=None, interval_steps=0, save_every_s=60.0, memory_summary="")
    control = LocalControl()
    control.channel.add_incident_facts(Incident(Cause.BEGIN))
    begun = StartPoint(attempt, nodes={0: "node"})
    reporter = Reporter(run, plan, begun, TrainingState(), control, Journals(run, 1), checkpoints, Phases())
    reporter.announce()
    worker = make_worker(plan, group, checkpoints, MagicMock(), MagicMock(), reporter)
    monkeypatch.setattr(worker, "_decisions", MagicMock(agree=lambda _: StepActions()))
    since, windows = [], []
    with reporter.publisher:
        for step in range(1, 9):
            values = {"loss": torch.tensor([math.nan if step in (3, 4) else 1.0]), "hits": torch.tensor([math.inf])}
            worker.finish_step(Step(step, {}, 2, 0.0, 0.125, [values], 0.1, 0.25))
            since.append(reporter._status.nan_since)
            windows.append(reporter.gauges().values["nan_windows"])
    assert since == [0, 0, 0, 3, 3, 0, 0, 0]
    assert windows == [0, 0, 0, 1, 1, 0, 0, 0]
    told = [(event["event"], event["step"]) for event in read_journal(run, "events") if "finite" in event["event"]]
    assert told == [("metric not finite", 2), ("loss not finite", 4), ("loss finite again", 6)]
    said = [record.message for record in caplog.records]
    assert said == [
        "hits: the mean over the steps 1 to 2 is not finite; the loss of step 2 is finite",
        "the loss has been NaN or infinite since step 3, in 1 window of metrics in a row",
        "the loss is finite again in the steps 5 to 6",
    ]
    records = read_journal(run, "metrics")
    assert [record.get("nan_since") for record in records] == [None, 3, None, None]


@pytest.mark.parametrize("another", [True, False], ids=["another driver", "the next group of this driver"])
def test_a_loop_ends_once_another_driver_owns_the_run(another: bool, tmp_path: Path) -> None:
    """Some loops rarely commit, and the thread that writes the status ignores errors."""
    run = begin(open_run(str(tmp_path), "run"))
    attempt = start(run, "job", world_size=1, tier="beginning", driver="mine")
    plan = Plan(Settings(), EmptySource((2,), 8), None, Steps(8, 2), 12)
    begun = StartPoint(attempt, nodes={0: "node"})
    checkpoints = MagicMock(newest=None, commit_s=None)
    reporter = Reporter(run, plan, begun, TrainingState(), LocalControl(), Journals(run, 1), checkpoints, Phases())
    reporter.announce()
    reporter.heartbeat()
    start(run, "other job" if another else "job", driver="theirs" if another else "mine")
    with pytest.raises(SupersededError):
        reporter.publish()
    with pytest.raises(SupersededError) if another else nullcontext():
        reporter.heartbeat()


def test_the_line_printed_after_an_epoch_shows_the_metrics_of_the_task(group: dist.ProcessGroup) -> None:
    window = MetricWindow(group, torch.device("cpu"), RecentMeans(10, {}))
    window.add_step([{"loss": torch.tensor([1.0, 2.0]), "top2": torch.tensor([0.0, 1.0])}], 0.1, data_wait=0.0)
    line = epoch_line({**window.close(5, 1, 0.1), **window.recent.newest, "test_mae": 3e-5, "attempt": 1})
    assert (
        line.partition(" rows/s")[0].rsplit("  ", 1)[0] == "epoch 1  step 5  loss 1.5000  test_mae 3e-05  top2 0.5000"
    )


def test_the_last_step_of_a_lost_rank_is_not_shown_as_progress(
    capsys: pytest.CaptureFixture[str], set_constants: SetConstants
) -> None:
    set_constants(sunspot.observe.progress, PLAIN_EVERY_S=0.0)
    steps = [Progress(1, step, 0.5, time=float(step)) for step in (1, 2, 3)]
    lines: list[list[str]] = [[], ["rank 1: lost"], [], []]
    screen = Lines(10, 5)
    for number, said in zip((0, 1, 1, 2), lines, strict=True):
        screen.update(News(steps[number], [], said))
    assert [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "step 1/10",
        "rank 1: lost",
        "step 3/10",
    ]


def test_the_speed_is_not_computed_across_two_worker_groups() -> None:
    """After a loss, the next group might already be past the lost step when it is first observed."""
    lines = Lines(60, 60)
    states = [(1, 31, 100.0), (1, 41, 105.0), (2, 42, 145.0), (2, 46, 147.0)]
    shown = [lines.describe(Progress(attempt, step, 0.5, time=time)) for attempt, step, time in states]
    assert [re.findall("[0-9.]+ steps/s", text) for text in shown] == [[], ["2.0 steps/s"], [], ["2.0 steps/s"]]


def test_a_plain_progress_line_is_printed_only_if_the_progress_has_changed(
    capsys: pytest.CaptureFixture[str], set_constants: SetConstants
) -> None:
    set_constants(sunspot.observe.progress, PLAIN_EVERY_S=0.0)
    lines, trains = Lines(10, 5), Progress(1, 5, 0.5, time=1.0)
    evaluates = replace(trains, doing="evaluating 2000 rows")
    for newest in (trains, trains, evaluates, evaluates):
        lines.show(newest)
    assert capsys.readouterr().out.splitlines() == [
        "step 5/10  loss 0.5000  checkpoint at 0",
        "step 5/10  evaluating 2000 rows",
    ]
