"""Tests of a worker's start, from its group to its first step, and of the problems found on the way."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

import sunspot.train.worker
from sunspot.background import Background
from sunspot.data.order import Steps
from sunspot.elastic.claim import StartPoint
from sunspot.elastic.control import ControlChannel
from sunspot.elastic.messages import Command, Incident
from sunspot.elastic.receipts import Phases
from sunspot.elastic.restore import TrainingState
from sunspot.errors import SettingsError
from sunspot.parallel.collectives import WorkerPlace
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.run import Claimant, Run, open_run
from sunspot.run.attempts import Attempt, Metadata
from sunspot.run.history import Journal, read_journal
from sunspot.run.logs import rank_stream, read_stream
from sunspot.settings import JobContext, Settings
from sunspot.storage.local import LocalStorage
from sunspot.train import joining, loop
from sunspot.train.build import refuse_small_micro_batches
from sunspot.train.evaluate import leaves_out_evaluation
from sunspot.train.joining import WorkerConfig, WorkerSetup, build_worker, set_tf32
from sunspot.train.loop import train_in_group
from sunspot.train.probe import probe_here
from sunspot.train.start_report import describe_unused_tf32, open_journals, record_left_out
from sunspot.train.worker import DEADLINE_MARGIN_S, DRAIN_S, GroupStart, Worker
from tests.harness.constants import SetConstants
from tests.harness.control import LocalControl
from tests.harness.process_group import in_processes


def test_small_micro_batches_are_rejected_if_the_model_has_batch_norm() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for rows, refused in [(1, True), (2, True), (3, False), (0, False)]:
        settings = Settings(micro_batch_size=rows)
        with pytest.raises(SettingsError, match="batch norm") if refused else contextlib.nullcontext():
            refuse_small_micro_batches(model, settings)
        refuse_small_micro_batches(model[0], settings)


def test_changed_library_versions_are_recorded_as_an_event(tmp_path: Path, warned: list[str]) -> None:
    def events(*before: dict[str, str]) -> list[tuple[str, str]]:
        run = open_run(str(tmp_path / uuid.uuid4().hex), "run")
        versions = [*before, {"numpy": "2.4.6", "torch": "2.9.0", "ray": "2.60.0"}]
        attempts = [Attempt(n, "me", None, 0, metadata=Metadata(versions=v)) for n, v in enumerate(versions, start=1)]
        start = StartPoint(attempts[-1], attempts[:-1])
        open_journals(run, start).events.flush()
        return [(record["event"], record["detail"]) for record in read_journal(run, "events")]

    same = {"numpy": "2.4.6", "torch": "2.9.0", "ray": "2.60.0"}
    assert events() == events(same) == events({"numpy": "2.4.6"}) == events({"numpy": "1"}, same) == []
    assert not warned
    other = {**same, "numpy": "2.3.0", "ray": "2.50.0"}
    assert events(same, other) == [("versions changed", "numpy: 2.3.0 -> 2.4.6, ray: 2.50.0 -> 2.60.0")]
    assert warned == ["versions changed since attempt 2: numpy: 2.3.0 -> 2.4.6, ray: 2.50.0 -> 2.60.0"]


@pytest.mark.parametrize(
    ("before", "total", "left_out"),
    [
        ([0], 100, False),
        ([0, 20], 100, False),
        ([0, 20, 20], 100, True),
        ([20, 20, 10], 100, False),
        ([20] * 9, 20, False),
    ],
)
def test_an_evaluation_that_is_always_interrupted_does_not_stop_the_training(
    before: list[int], total: int, left_out: bool, tmp_path: Path
) -> None:
    """Only the last evaluation is repeated without limit, because no step has to wait for it."""
    attempts = [Attempt(number, "me", None, step) for number, step in enumerate(before, start=1)]
    start = StartPoint(Attempt(9, "me", None, 20), attempts)
    assert leaves_out_evaluation(start, total) == left_out


def test_an_evaluation_interrupted_by_joining_workers_does_not_count_as_failed() -> None:
    def attempt(number: int, *processes: str) -> Attempt:
        return Attempt(number, "me", None, 20, metadata=Metadata(processes=processes))

    joined = [attempt(1, "a"), attempt(2, "a", "b"), attempt(3, "a", "b", "c")]
    assert not leaves_out_evaluation(StartPoint(attempt(4, "a", "b", "c", "d"), joined), 100)
    lost = [attempt(1, "a", "b", "c"), attempt(2, "a", "b")]
    assert leaves_out_evaluation(StartPoint(attempt(3, "a"), lost), 100)


@pytest.mark.parametrize(
    ("tier", "step", "stale", "again"),
    [("memory", 10, 0, True), ("memory", 9, 0, False), ("memory", 9, 2, True), ("storage", 10, 2, False)],
)
def test_a_final_state_that_may_exist_only_in_memory_is_evaluated_again_and_saved(
    tier: str, step: int, stale: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state's commit was lost, and no further step would save the state."""
    begun: list[GroupStart] = []
    for name in ("CheckpointManager", "Telemetry", "CommandPoller", "await_device_memory", "build_learner"):
        monkeypatch.setattr(joining, name, MagicMock())
    monkeypatch.setattr(joining, "Worker", lambda _, group_start, *others: begun.append(group_start))
    plan: Any = SimpleNamespace(settings=Settings(early_stop_evaluations=2), total_steps=10)
    start: Any = StartPoint(Attempt(2, "me", None, step))
    nothing: Any = None
    place = WorkerPlace(rank=1, nodes=["node", "node"])
    setup = WorkerSetup(plan, nothing, start, place, None, cast(Any, Watched()), nothing, nothing)
    build_worker(setup, TrainingState(tier=tier, metrics={"evaluations_since_best": stale}), Phases())
    assert begun[0].evaluated is not again


def test_a_skipped_evaluation_is_recorded_as_an_event(tmp_path: Path, warned: list[str]) -> None:
    run = open_run(str(tmp_path), "run")
    events = Journal(run, "events", 1)
    record_left_out(20, events)
    events.flush()
    [event] = read_journal(run, "events")
    assert (event["event"], event["step"], [event["detail"]]) == ("evaluation left out", 20, warned)
    assert "step 20 is not evaluated" in warned[0]


@pytest.mark.parametrize("rounded", [True, False])
def test_tf32_is_set_for_matrix_products_and_convolutions(rounded: bool) -> None:
    """Torch uses TF32 for convolutions by default."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_tf32(rounded)
        assert (torch.get_float32_matmul_precision() == "high", torch.backends.cudnn.allow_tf32) == (rounded, rounded)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("precision", "device", "supported", "library", "warned"),
    [
        ("fp32", "cuda", True, False, True),
        ("tf32", "cuda", True, False, False),
        ("bf16", "cuda", True, False, False),
        ("fp32", "cuda", False, False, False),
        ("fp32", "cpu", True, False, False),
        ("fp32", "cuda", True, True, False),
    ],
)
def test_fp32_matrix_products_on_a_gpu_that_supports_tf32_are_reported(
    precision: str, device: str, supported: bool, library: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_tf32_supported", lambda: supported)
    learner: Any = SimpleNamespace(
        plan=SimpleNamespace(settings=Settings(precision=precision)),
        task=SimpleNamespace(library_loop=library),
        place=WorkerPlace(device=torch.device(device)),
    )
    assert ("SUNSPOT_PRECISION=fp32" in describe_unused_tf32(learner)) is warned


@pytest.mark.parametrize(("ahead_s", "limit_s"), [(0, 29), (-3600, 30), (3600, 0)])
def test_setting_the_clock_back_does_not_extend_a_notice_period(ahead_s: float, limit_s: float) -> None:
    command = Command(restart=True, deadline=time.time() + 30 - ahead_s)  # by the clock of the driver's node
    plan = SimpleNamespace(settings=Settings(job=JobContext(notice_s=30)))
    worker: Any = SimpleNamespace(commands=SimpleNamespace(poll=lambda: command), learner=SimpleNamespace(plan=plan))
    assert Worker._drain_limit_s(worker) == pytest.approx(limit_s, abs=0.5)


@pytest.mark.parametrize(("moves", "limit_s"), [(False, DRAIN_S), (True, None)])
def test_the_state_is_in_storage_before_the_nodes_are_released(moves: bool, limit_s: float | None) -> None:
    command = Command(restart=True, moves=moves)
    worker: Any = SimpleNamespace(
        commands=SimpleNamespace(poll=lambda: command), checkpoints=SimpleNamespace(in_memory=True)
    )
    assert Worker._drain_limit_s(worker) == limit_s


def test_a_node_that_cannot_read_the_storage_is_reported(tmp_path: Path) -> None:
    run = open_run(str(tmp_path / "here"), "run")
    run.storage.write(run.key("probe"), b"content")
    assert probe_here(str(tmp_path / "here"), "run", run.key("probe"), b"content") == ""
    assert "not found" in probe_here(str(tmp_path / "there"), "run", run.key("probe"), b"content")
    assert "does not read" in probe_here(str(tmp_path / "here"), "run", run.key("probe"), b"other")


class Watched:
    """A watchdog that records whether it would end this process."""

    entered = paused_now = False

    def __enter__(self) -> Watched:
        self.entered = True
        return self

    def __exit__(self, *_: object) -> None: ...

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.paused_now = True
        yield
        self.paused_now = False

    step = 0

    def claimed(self, attempt: Attempt) -> None: ...

    def heartbeat(self) -> None: ...


def anything(*_: object, **__: object) -> Any:
    return SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1, gauges=None)


def test_reading_rows_and_building_a_model_do_not_count_as_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, paused = Watched(), dict[str, bool]()

    def takes_long(name: str) -> Any:
        return lambda *_: paused.update({name: watched.paused_now}) or MagicMock()

    for name in ("CheckpointManager", "Telemetry", "CommandPoller", "Worker", "open_journals"):
        monkeypatch.setattr(joining, name, anything)
    monkeypatch.setattr(joining, "Reporter", MagicMock())
    monkeypatch.setattr(joining, "report_rates", MagicMock())
    slow = ("await_device_memory", "build_learner")
    for name in slow:
        monkeypatch.setattr(joining, name, takes_long(name))
    plan: Any = SimpleNamespace(settings=Settings(), source=None, total_steps=10)
    start: Any = SimpleNamespace(attempt=Attempt(1, "me", None, 0), before=(), nodes={0: "node"})
    nothing: Any = None
    place = WorkerPlace(device=torch.device("cuda"), nodes=["node"])
    setup = WorkerSetup(plan, anything(), start, place, None, cast(Any, watched), nothing, nothing)
    build_worker(setup, TrainingState(), Phases())
    assert paused == dict.fromkeys(slow, True)
    assert next(iter(paused)) == "await_device_memory", "workers wait before they allocate memory"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    """Return the configuration of a worker that joins the run without Ray and without a group."""
    names = ("quiet_ray_train", "launch_time", "show_claim", "first_status")
    for name in names:
        monkeypatch.setattr(joining, name, anything)
    monkeypatch.setattr("sunspot.train.loop.record_end", anything)
    monkeypatch.setattr(WorkerConfig, "claimant", lambda _: SimpleNamespace(run=anything()))
    monkeypatch.setattr(joining, "first_incident", lambda _: Incident())
    monkeypatch.setattr(joining, "open_memory", lambda *_: None)
    monkeypatch.setattr(joining, "Watchdog", lambda *_: Watched())
    monkeypatch.setattr("torch.distributed.new_group", lambda *_, **__: None)
    monkeypatch.setattr("torch.distributed.barrier", anything)
    monkeypatch.setattr("ray.train.get_context", anything)
    monkeypatch.setattr("ray.train.torch.get_device", lambda: torch.device("cpu"))
    plan: Any = SimpleNamespace(settings=Settings())
    return WorkerConfig(plan, "me", "", LocalControl(), threads=1, collective_timeout_s=300)


@pytest.mark.parametrize("copy", [None, "a copy in a node's memory"])
def test_a_node_counts_as_hung_if_it_freezes_while_a_group_starts(
    copy: Any, config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node can freeze while the group agrees on the start, sends copies, or reads from storage."""
    watched, seen = Watched(), list[bool]()

    def load_start(*_: object) -> Any:
        seen.append(watched.entered and not watched.paused_now)
        raise SettingsError("far enough")

    def agree_on_start(*_: object) -> Any:
        seen.append(watched.entered and not watched.paused_now)
        return StartPoint(Attempt(1, "me", None, 0), copy=copy), anything()

    monkeypatch.setattr(joining, "agree_on_start", agree_on_start)
    monkeypatch.setattr(joining, "shipped_worker_output", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(joining, "Watchdog", lambda *_: watched)
    monkeypatch.setattr(joining, "load_start", load_start)
    with pytest.raises(SettingsError):
        train_in_group(config)
    assert seen == [True, True]


def test_the_warnings_of_a_worker_reach_the_driver(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def agree_on_start(*_: object) -> Any:
        logging.getLogger("sunspot.storage").warning("no answer from storage for 31 s")
        raise SettingsError("far enough")

    monkeypatch.setattr(joining, "agree_on_start", agree_on_start)
    with pytest.raises(SettingsError):
        train_in_group(config)
    logging.getLogger("sunspot.storage").warning("after the run")
    assert config.control.call(ControlChannel.fetch_news).lines == ["warning: no answer from storage for 31 s"]
    assert "warning: no answer from storage for 31 s\n" in capsys.readouterr().out, (
        "the worker's own log has the warning, too"
    )


class SlowStorage(LocalStorage):
    """A storage location with slow writes."""

    def __init__(self, root: Path, write_s: float) -> None:
        super().__init__(str(root))
        self._write_s = write_s

    def write(self, key: str, data: bytes) -> None:
        time.sleep(self._write_s)
        super().write(key, data)


def make_worker(left_s: float | None, group: Any, reporter: Any, outputs: contextlib.ExitStack) -> Worker:
    """Return a worker of a group that restarts, with `left_s` seconds of a notice left."""
    deadline = None if left_s is None else time.time() + DEADLINE_MARGIN_S + left_s
    commands = MagicMock(poll=lambda: Command(restart=True, deadline=deadline))
    place = WorkerPlace(group)
    plan = SimpleNamespace(settings=Settings(job=JobContext(notice_s=60)), steps=Steps(8, 2))
    learner: Any = MagicMock(place=place, plan=plan, model=torch.nn.Identity())
    watchdog: Any = Watched()
    begun = GroupStart(0, True, {})
    return Worker(learner, begun, MagicMock(), commands, watchdog, MagicMock(), reporter, outputs)


def test_the_last_output_lines_and_metrics_are_stored_before_a_restart(
    config: WorkerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    """Ray kills all workers as soon as one of them has ended."""
    run = Run(SlowStorage(tmp_path, 0.3), "run")
    journal, start = Journal(run, "metrics", 1), StartPoint(Attempt(1, "me", None, 0))
    reporter: Any = SimpleNamespace(drain=anything, publisher=Background(60, journal.flush), end=anything)

    def make_this_worker(setup: WorkerSetup, *_: object) -> Worker:
        return make_worker(10, None, reporter, setup.outputs)

    monkeypatch.setattr(joining, "build_worker", make_this_worker)
    monkeypatch.setattr(WorkerConfig, "claimant", lambda _: Claimant(run, "me"))
    monkeypatch.setattr(joining, "agree_on_start", lambda *_: (start, anything()))
    monkeypatch.setattr(joining, "load_start", lambda *_: TrainingState())
    set_constants(sunspot.train.worker, EXIT_AFTER_S=1e6)
    stored: list[Any] = []

    def train(worker: Worker) -> None:
        os.write(1, b"the last line\n")
        journal.append({"step": 7})
        try:
            worker.restart_group()
        finally:
            stored.extend([read_stream(run, rank_stream(1, 0)), read_journal(run, "metrics")])

    monkeypatch.setattr(loop, "train", train)
    with pytest.raises(GroupRestartError):
        train_in_group(config)
    [text, metrics] = stored
    assert b"the last line\n" in text
    assert text.decode().endswith(f"{GroupRestartError()}\n")
    assert [record["step"] for record in metrics] == [7]


@pytest.mark.parametrize(("write_s", "left_s"), [(1, 30), (60, 1)])
def test_workers_exit_once_all_output_is_stored_or_the_notice_period_is_over(
    write_s: float, left_s: float, tmp_path: Path, set_constants: SetConstants
) -> None:
    """Only rank 0 knows about the notice, and the output of rank 1 takes a long time to store."""
    set_constants(sunspot.train.worker, EXIT_AFTER_S=1e6)

    def act(group: dist.ProcessGroup) -> float:
        began, rank = time.monotonic(), dist.get_rank(group)
        outputs = contextlib.ExitStack()
        worker = make_worker(None if rank else left_s, group, None, outputs)
        if rank == 1:
            outputs.callback(time.sleep, write_s)
        with pytest.raises(GroupRestartError):
            worker.restart_group()
        return time.monotonic() - began

    for took_s in in_processes(tmp_path, 2, act):
        assert 1 - 0.3 <= took_s < 10
