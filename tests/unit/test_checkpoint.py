"""Tests for checkpoints: the copy, commits despite kills and faults, and which checkpoints are kept."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import sunspot.checkpoint.commit
import sunspot.checkpoint.files
import sunspot.checkpoint.parts
import sunspot.checkpoint.snapshot
import sunspot.elastic.restore
import sunspot.storage.limits
import sunspot.storage.local
from sunspot.checkpoint import CheckpointManager, SavedObjects, versions
from sunspot.checkpoint.commit import CheckpointCommitter, CommitCoordinator
from sunspot.checkpoint.files import load_state, unpack, upload_state
from sunspot.checkpoint.memory import Use
from sunspot.checkpoint.node_state import NodeState
from sunspot.checkpoint.parts import ShardWriter, load_model, read_indexes
from sunspot.checkpoint.pieces import INDEX
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.elastic.restore import load_start, read_init
from sunspot.errors import ConflictError, DamageError, SettingsError, StorageError, SupersededError
from sunspot.parallel.collectives import WorkerPlace
from sunspot.parallel.sharding import TensorSlice
from sunspot.plan import Plan
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt, checkpoint_name, claim, lineage, read_attempts
from sunspot.run.checkpoints import (
    MANIFEST,
    Checkpoint,
    delete_checkpoint,
    expired,
    find_faults,
    find_newest_good,
    in_lineage,
    list_checkpoints,
    list_directories,
)
from sunspot.run.history import Journals, read_journal
from sunspot.settings import Settings
from sunspot.storage.base import Writer
from sunspot.storage.limits import CURRENT_DEADLINE
from sunspot.storage.local import LocalStorage
from sunspot.tasks import Task
from sunspot.train.learning_rates import LearningRates, set_options
from tests.harness import REPOSITORY, s3
from tests.harness.constants import SetConstants
from tests.harness.logs import keep_warnings
from tests.harness.process_group import in_processes
from tests.harness.s3 import FaultProxy
from tests.harness.waiting import wait_until


class Trainee:
    """A model with checkpoints that are saved without a worker group."""

    def __init__(
        self,
        run: Run,
        number: int = 1,
        owner: str = "me",
        start: Checkpoint | None = None,
        model: torch.nn.Module | None = None,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.run = run
        self.warnings = keep_warnings()
        self.attempt = Attempt(number, owner, start.name if start else None, start.step if start else 0)
        assert claim(run, read_attempts(run), self.attempt)
        self.model = model or torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.journals = Journals(run, number)
        plan = Plan(Settings(**settings), EmptySource((1, 40), 10), None, Steps(1000, 10), 100)
        self.checkpoints = CheckpointManager(
            run,
            self.attempt,
            plan,
            SavedObjects(self.model, self.optimizer),
            journals=self.journals,
        )
        self.step = self.attempt.step

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.model(torch.randn(8, 40)).square().sum().backward()
            self.checkpoints.wait_for_copy()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.checkpoints.took_step(self.step, None)

    def save(self, loss: float = 1.0) -> None:
        self.checkpoints.save(self.step, {"loss": loss})

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def set_storage_timeout(trainee: Trainee, seconds: float) -> None:
    """Set the storage timeout for later operations. Earlier operations had the default."""
    committer = trainee.checkpoints._committer
    committer._settings = Settings(storage_timeout_s=seconds)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(str(tmp_path), "run")


def newest(run: Run) -> Checkpoint | None:
    return find_newest_good(run, read_attempts(run))[0]


def test_a_checkpoint_contains_the_state_of_its_step_even_if_training_continues(run: Run) -> None:
    trainee = Trainee(run)
    trainee.train(3)
    expected = trainee.state()
    trainee.save()
    trainee.train(2)  # training continues at once
    trainee.checkpoints.close(finished=True)
    checkpoint = newest(run)
    assert (checkpoint.step, checkpoint.epoch, sorted(checkpoint.files)) == (
        3,
        1,
        ["extra_state.pt", "model.pt", "optimizer.pt"],
    )
    stored = load_state(run, checkpoint, "model.pt")
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    optimizer = torch.optim.Adam(trainee.model.parameters())
    optimizer.load_state_dict(load_state(run, checkpoint, "optimizer.pt"))
    extra_state = load_state(run, checkpoint, "extra_state.pt")
    assert (extra_state["step"], extra_state["epoch"]) == (3, 1)
    assert extra_state["loader"] == {"name": "torch", "rows": 1000, "batch": 10}
    assert extra_state["rng"] == {"seed": 0, "step": 3}
    assert extra_state["settings"] == Settings().environment()
    assert extra_state["data"] == {"shape": [1, 40], "classes": 10, "class_names": [], "scales": False}
    assert sorted(extra_state["versions"]) == ["numpy", "python", "ray", "torch"]


def test_a_learning_rate_computed_with_numpy_is_restored(run: Run) -> None:
    trainee = Trainee(run)
    module = SimpleNamespace(schedule=lambda step, total_steps: 0.5 * (1 + np.cos(np.pi * step / total_steps)))
    task = Task(module, Settings())
    plan = Plan(Settings(), EmptySource((1, 40), 10), None, Steps(1000, 10), 100)
    rates = LearningRates(plan, task, trainee.optimizer)
    set_options(trainee.optimizer, rates.at(1, 3))
    trainee.train()
    trainee.save()
    trainee.checkpoints.close(finished=True)
    assert load_state(run, newest(run), "optimizer.pt")["param_groups"][0]["lr"] == pytest.approx(0.75e-3)


def test_a_file_that_cannot_be_memory_mapped_is_read_without_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")

    def refuse(*_: Any) -> Any:
        raise RuntimeError("unable to mmap: Cannot allocate memory (12)")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    assert unpack(str(tmp_path / "model.pt"))["weight"].tolist() == [1, 1, 1]


class Counting(torch.nn.Linear):
    """A layer with an additional value besides its weights."""

    seen: Any = 3

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def put_in_group(trainee: Trainee, value: Any) -> None:
    trainee.optimizer.param_groups[0]["lr"] = value


def put_in_state(trainee: Trainee, value: Any) -> None:
    trainee.optimizer.state[next(trainee.model.parameters())]["memory"] = [{"seen": value}]


def put_in_model(trainee: Trainee, value: Any) -> None:
    trainee.model.seen = value


@pytest.mark.parametrize("value", [np.float64(0.1), Path("of"), lambda: 0], ids=["number", "object", "function"])
@pytest.mark.parametrize(
    ("put", "key"),
    [
        (put_in_group, r"optimizer\.param_groups\.0\.lr"),
        (put_in_state, r"optimizer\.state\.0\.memory\.0\.seen"),
        (put_in_model, r"model\._extra_state\.seen"),
    ],
)
def test_a_state_that_a_restart_could_not_load_is_rejected(
    put: Callable[[Trainee, Any], None], key: str, value: Any, run: Run
) -> None:
    """The state is rejected in the first step or, if the invalid value appears later, before the commit."""
    trainee = Trainee(run, model=Counting(40, 40))
    trainee.model(torch.randn(8, 40)).sum().backward()
    put(trainee, value)
    refusal = rf"SUNSPOT_TASK=\S+: {key} is a {type(value).__module__}\..*use a tensor, a plain Python number"
    with pytest.raises(SettingsError, match=refusal):
        trainee.checkpoints.took_step(1, None)
    put(trainee, 0.1)
    trainee.checkpoints.took_step(1, None)
    put(trainee, value)
    trainee.save()
    with pytest.raises(SettingsError, match=refusal):
        trainee.checkpoints.drain()
    assert list_checkpoints(run) == []


def test_an_intact_file_that_cannot_be_loaded_is_not_reported_as_damaged(run: Run) -> None:
    state = {"lr": np.float64(0.1)}
    files = {f"{kind}.pt": upload_state(run, "first", f"{kind}.pt", state) for kind in ("model", "optimizer")}
    checkpoint = Checkpoint("first", 1, 1, 10, 10, 1, files=files)
    node = NodeState(run, None, ["node"])
    assert node.read(checkpoint) == []
    for load in (lambda: load_state(run, checkpoint, "optimizer.pt"), lambda: node.load(checkpoint)):
        with pytest.raises(ConflictError, match=r"\.pt was not loaded, .*SUNSPOT_INIT_FROM=run:run\)$"):
            load()


class Positive(torch.nn.Linear):
    """A layer that keeps its weights positive, which PyTorch's version counter does not notice."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(min=0)
        return super().forward(rows)


def test_weights_that_a_forward_pass_changes_through_their_data_attribute_are_copied_immediately(run: Run) -> None:
    trainee = Trainee(run, model=Positive(40, 40))
    trainee.train(2)
    assert trainee.checkpoints._optimizer_only.ids == {id(trainee.model.bias)}


def test_the_next_step_waits_until_the_state_has_been_copied(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters do not change during the copy. Batch norm's averages are copied first, because they may change."""
    import sunspot.checkpoint.snapshot as module

    go, copy = threading.Event(), module.copy
    monkeypatch.setattr(module, "copy", lambda *arguments: go.wait(30) and copy(*arguments))
    trainee = Trainee(run)
    trainee.train(2)
    assert trainee.checkpoints._optimizer_only.ids == {id(parameter) for parameter in trainee.model.parameters()}
    expected = trainee.state()
    trainee.save()
    trainee.model(torch.randn(8, 40)).sum().backward()  # changes the averages
    threading.Timer(0.2, go.set).start()
    trainee.train()
    trainee.checkpoints.close(finished=True)
    stored = load_state(run, newest(run), "model.pt")
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("changes", [False, True])
def test_a_commit_is_dropped_at_once_if_the_weights_change_during_the_copy(
    run: Run, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    """The next step can take minutes or hang. A change in progress at the end of the copy is noticed later."""
    trainee = Trainee(run)
    trainee.train(2)
    write_history = CheckpointCommitter._write_history

    def change_meanwhile(committer: CheckpointCommitter) -> None:
        if changes:
            with torch.no_grad():
                trainee.model[0].weight.clamp_(-0.01, 0.01)
        write_history(committer)

    monkeypatch.setattr(CheckpointCommitter, "_write_history", change_meanwhile)
    trainee.save()
    assert trainee.checkpoints.drain(timeout_s=20) != changes, "a change means that nothing was committed"
    assert bool(list_checkpoints(run)) != changes
    assert not list_directories(run) or not changes, "no file of it is left"
    assert any("checkpoint dropped at step 2" in warning for warning in trainee.warnings) == changes


class WithTeacher(torch.nn.Module):
    """A student and a teacher. The forward pass moves the teacher toward the student."""

    def __init__(self, frozen: bool = False, clamped: bool = False) -> None:
        super().__init__()
        self.student = torch.nn.Linear(40, 40)
        self.teacher = torch.nn.Linear(40, 40)
        self.teacher.requires_grad_(not frozen)
        self.clamped = clamped

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.clamped:
            with torch.no_grad():
                self.student.weight.clamp_(-0.05, 0.05)
        for mine, students in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data.lerp_(students.data, 0.1)  # past autograd, as is common
        with torch.no_grad():
            aim = self.teacher(rows)
        return self.student(rows) - aim


@pytest.mark.parametrize("model", [WithTeacher(), WithTeacher(frozen=True), WithTeacher(clamped=True)])
def test_parameters_that_the_forward_pass_changes_are_copied_intact(
    model: WithTeacher, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sunspot.checkpoint.snapshot as module

    go, copy = threading.Event(), module.copy
    monkeypatch.setattr(module, "copy", lambda *arguments: go.wait(30) and copy(*arguments))
    trainee = Trainee(run, model=model)
    trainee.train(2)
    trainee.model(torch.randn(8, 40)).sum().backward()
    trainee.optimizer.step()
    expected = trainee.state()
    trainee.save()
    trainee.model(torch.randn(8, 40))
    go.set()
    trainee.train()
    trainee.checkpoints.close(finished=True)
    stored = load_state(run, newest(run), "model.pt")
    assert [name for name, tensor in expected.items() if not torch.equal(stored[name], tensor)] == []


def test_a_newer_snapshot_replaces_a_waiting_snapshot_if_storage_is_slow(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = Trainee(run, checkpoints_to_keep=9)
    go, begun = threading.Event(), threading.Event()
    commit = CheckpointCommitter._commit

    def slow_commit(committer: CheckpointCommitter, snapshot: Any) -> None:
        begun.set()
        go.wait(30)
        commit(committer, snapshot)

    monkeypatch.setattr(CheckpointCommitter, "_commit", slow_commit)
    for _ in range(5):
        trainee.train()
        trainee.save()
        assert begun.wait(10)
    go.set()
    trainee.checkpoints.close(finished=True)
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [1, 5]
    assert not [find_faults(run, checkpoint) for checkpoint in list_checkpoints(run) if find_faults(run, checkpoint)]
    assert len(trainee.checkpoints._snapshots._memory._slots) <= 4


def test_killing_a_process_at_any_point_of_a_commit_loses_nothing(tmp_path: Path) -> None:
    memory = Path("/dev/shm")  # every file is synced, which takes most of the time on a disk
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        command = [sys.executable, "-m", "tests.harness.commit_points", folder]
        answer = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=250)
    points = json.loads(answer.stdout)
    died = [point["died"] for point in points]
    assert died[-1] is None, "the last process is not killed"
    assert points[-1]["newest"] == 3
    for word in ("upload", "middle", "reading back", "write run/checkpoints", "delete", "write run/metrics"):
        assert any(word in where for where in died[:-1]), f"no process was killed at {word}"
    for point in points:
        assert not point["bad"], point
        assert point["newest"] == max(point["committed"]), point
    steps = [point["newest"] for point in points]
    assert steps == sorted(steps), "a later kill leaves a newer checkpoint"


def test_a_retry_does_not_rewrite_a_committed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    """The response to the manifest's write is lost."""

    class Forgetful(LocalStorage):
        lost = False

        def write(self, key: str, data: bytes) -> None:
            super().write(key, data)
            if key.endswith("manifest.json") and not self.lost:
                self.lost = True
                raise StorageError("the answer was lost")

    set_constants(sunspot.storage.limits, BACKOFF_S=(0.01,))
    run = Run(Forgetful(str(tmp_path)), "run")
    trainee = Trainee(run)
    trainee.train()
    written = Mock(wraps=run.storage.writer)
    monkeypatch.setattr(run.storage, "writer", written)
    trainee.save()
    assert trainee.checkpoints.drain(20)
    assert newest(run).step == 1
    assert sorted(call.args[0].rpartition("/")[2] for call in written.call_args_list) == sorted(newest(run).files)


@pytest.mark.parametrize(
    ("last", "steps"), [("upload_state", [1]), ("expired", [1, 2])], ids=["before its manifest", "before it deletes"]
)
def test_a_superseded_process_neither_commits_nor_deletes_checkpoints(
    last: str, steps: list[int], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Trainee(run, checkpoints_to_keep=1)
    old.train()
    old.save(loss=2)
    old.checkpoints.drain()
    start = newest(run)
    module = sunspot.checkpoint.files if last == "upload_state" else sunspot.checkpoint.commit
    act = getattr(module, last)
    taken: list[Trainee] = []
    at_once = threading.Lock()

    def late(*arguments: Any) -> Any:
        with at_once:  # files are uploaded by several threads
            taken.append(taken[0] if taken else Trainee(run, 2, "another", start=start))
        return act(*arguments)

    monkeypatch.setattr(module, last, late)
    old.train()
    old.save(loss=1)
    with pytest.raises(SupersededError):
        old.checkpoints.close(finished=True)
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == steps


def test_a_loop_that_never_waits_for_copies_still_raises_commit_errors(run: Run) -> None:
    """A loop that does not use torch's optimizers might not call `wait_for_copy`."""
    old = Trainee(run)
    old.train()
    Trainee(run, 2, "another")
    old.save()
    with pytest.raises(SupersededError):
        old.checkpoints.drain(20)
    with pytest.raises(SupersededError):
        old.checkpoints.took_step(2, None)


def test_the_next_commit_fails_if_the_run_was_deleted_during_cleanup(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(run: Run) -> list[Attempt]:
        for entry in run.storage.list(run.key("attempts")):
            run.storage.delete(entry.key)
        return read_attempts(run)

    trainee = Trainee(run)
    run.storage.write(run.key("checkpoints", "step-00000007-attempt-0001", "model.pt"), b"half")
    monkeypatch.setattr(sunspot.checkpoint.commit, "read_attempts", late)
    trainee.train()
    trainee.save()
    assert trainee.checkpoints.drain(20)
    trainee.train()
    trainee.save()
    with pytest.raises(SupersededError):
        trainee.checkpoints.drain(20)


def test_the_next_attempt_removes_files_of_killed_attempts(run: Run) -> None:
    """An upload of a step after the newest commit is kept for a day, because it might still be completed."""

    def leave(attempt: Attempt, step: int, age_s: float = 0) -> str:
        name = checkpoint_name(step, attempt.number, attempt.nonce)
        key = run.key("checkpoints", name, "model.pt")
        run.storage.write(key, b"the only file")
        os.utime(run.storage.locate(key), times=(time.time() - age_s,) * 2)
        return name

    for number in (1, 2, 3):
        trainee = Trainee(run, number, f"job-{number}", start=newest(run))
        trainee.train(2)
        trainee.save()
        trainee.checkpoints.close(finished=True)
        leave(trainee.attempt, 50 + number)
    leave(trainee.attempt, 5)
    trainee = Trainee(run, 4, "job-4", start=newest(run))
    may_count, aged = leave(trainee.attempt, 60), leave(trainee.attempt, 61, age_s=25 * 3600)
    trainee.train()
    trainee.save()
    trainee.checkpoints.close(finished=True)
    assert aged not in list_directories(run)
    assert [name for name, files in list_directories(run).items() if MANIFEST not in files] == [may_count]


def test_a_manifest_written_late_by_the_previous_owner_is_ignored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old owner is superseded after its check, but before it writes its manifest."""
    import sunspot.checkpoint.commit as module

    old = Trainee(run)
    old.train()
    old.save()
    old.checkpoints.drain()
    start = newest(run)
    write_manifest = module.write_manifest
    taken = []

    def late(run: Run, checkpoint: Checkpoint) -> None:
        if not taken:
            taken.append(Trainee(run, 2, "another", start=start))
        write_manifest(run, checkpoint)

    monkeypatch.setattr(module, "write_manifest", late)
    old.train(5)
    old.save()
    with pytest.raises(SupersededError):
        old.checkpoints.close(finished=True)
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [1, 6]
    assert newest(run) == start


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_infinity=False)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(["min", "max"]),
)
def test_the_best_and_the_newest_checkpoints_are_kept(values: list[float | None], keep: int, order: str) -> None:
    checkpoints = [
        Checkpoint(str(step), step, 1, 100, 100, 1, {} if value is None else {"loss": value})
        for step, value in enumerate(values, 1)
    ]
    gone = expired(checkpoints, keep, "loss", order)
    kept = [checkpoint for checkpoint in checkpoints if checkpoint not in gone]
    assert checkpoints[-1] in kept
    assert min(keep, len(checkpoints)) <= len(kept) <= keep + 1
    sign = 1 if order == "min" else -1

    def known(some: list[Checkpoint]) -> list[float]:
        return [
            sign * c.metrics["loss"] for c in some if "loss" in c.metrics and c.metrics["loss"] == c.metrics["loss"]
        ]

    best = [checkpoint for checkpoint in kept if checkpoint is not checkpoints[-1] or len(kept) == keep]
    if known(gone):
        assert max(known(best), default=float("-inf")) <= min(known(gone)) or len(known(best)) < len(best)


# --------------------------------------------------------------------------------------------------- a state in parts


class SlowStorage(LocalStorage):
    """A storage location that rejects or delays the files of some steps until `let_go` is set."""

    steps: tuple[int, ...] = ()
    refuses = False

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.let_go = threading.Event()
        self.reached = threading.Event()
        self.waited_in_vain = False

    @contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        self.reached.set()
        if any(f"step-{step:08d}" in key for step in self.steps) and not self.let_go.is_set():
            if self.refuses:
                raise StorageError("503 SlowDown")
            self.waited_in_vain |= not self.let_go.wait(10)
        with super().writer(key) as writer:
            yield writer


class Rank(NamedTuple):
    """One of two ranks, with its part of a state and possibly slow storage."""

    storage: SlowStorage
    checkpoints: CheckpointManager
    weight: torch.nn.Parameter

    def save(self, step: int) -> None:
        self.checkpoints.wait_for_copy()
        self.weight.data.fill_(step)
        self.checkpoints.took_step(step, None)
        self.checkpoints.save(step, {"loss": 1.0})


@pytest.fixture
def two_ranks(tmp_path: Path, set_constants: SetConstants) -> Callable[[Callable[[Rank, int], Any]], list[Any]]:
    """Return a function that runs `act` on two ranks and returns both results."""
    versions()  # imports Ray here, because that takes seconds in each child
    run, attempt = open_run(str(tmp_path), "run"), Attempt(1, "me", None, 0)
    assert claim(run, [], attempt)
    set_constants(sunspot.checkpoint.parts, POLL_EVERY_S=0.05)
    set_constants(sunspot.storage.limits, BACKOFF_S=(0.05,))

    def play(act: Callable[[Rank, int], Any], **settings: Any) -> list[Any]:
        def work(group: dist.ProcessGroup) -> Any:
            rank, storage = dist.get_rank(), SlowStorage(str(tmp_path))
            model = torch.nn.Linear(2, 3, bias=False)
            sunspot.checkpoint.snapshot.find_slices = lambda _: [TensorSlice((6, 2), (3 * rank, 0))]
            plan = Plan(
                Settings(parallel="fsdp", checkpoints_to_keep=9, **settings),
                EmptySource((2,), 3),
                None,
                Steps(1000, 10),
                100,
            )
            checkpoints = CheckpointManager(
                Run(storage, "run"),
                attempt,
                plan,
                SavedObjects(model, torch.optim.SGD(model.parameters())),
                place=WorkerPlace(group, rank, 2),
            )
            return act(Rank(storage, checkpoints, model.weight), rank)

        return in_processes(tmp_path, 2, work)

    return play


def assert_whole(run: Run, steps: list[int]) -> None:
    """Assert that exactly these steps are committed, with the right values, and that no other files are left."""
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == steps
    assert len(list_directories(run)) == len(steps)
    for checkpoint in list_checkpoints(run):
        assert not find_faults(run, checkpoint)
        assert set(load_model(run, checkpoint)["weight"].flatten().tolist()) == {float(checkpoint.step)}


@pytest.mark.parametrize("slow", [0, 1])
def test_saving_shards_does_not_wait_for_the_previous_commit(slow: int, run: Run, two_ranks: Any) -> None:
    """The newest snapshot wins on all ranks, because it must be committed before a notice ends."""

    def act(rank: Rank, number: int) -> bool:
        rank.storage.steps = (1,) if number == slow else ()
        rank.save(1)
        assert rank.storage.reached.wait(10)
        for step in (2, 3, 4):
            rank.save(step)
        rank.storage.let_go.set()
        rank.checkpoints.close(finished=True)
        return rank.storage.waited_in_vain

    assert two_ranks(act) == [False, False]
    assert_whole(run, [1, 4])


@pytest.mark.parametrize("refused", [0, 1])
def test_training_steps_do_not_wait_for_shards_that_storage_rejects(refused: int, run: Run, two_ranks: Any) -> None:
    def act(rank: Rank, number: int) -> None:
        rank.storage.steps = (1, 2) if number == refused else ()
        rank.storage.refuses = True
        rank.save(1)
        assert rank.storage.reached.wait(10)
        for step in (2, 3):
            rank.save(step)
        rank.storage.let_go.set()
        rank.checkpoints.close(finished=True)

    two_ranks(act)
    assert list_checkpoints(run)[-1].step == 3
    assert not [find_faults(run, checkpoint) for checkpoint in list_checkpoints(run) if find_faults(run, checkpoint)]


def test_fast_and_slow_ranks_commit_the_same_checkpoints(run: Run, two_ranks: Any) -> None:
    def act(rank: Rank, number: int) -> None:
        pace = random.Random(number)
        write = ShardWriter.files
        ShardWriter.files = lambda *given: time.sleep(pace.random() / 20) or write(*given)
        for step in range(1, 16):
            time.sleep(pace.random() / 40)
            rank.save(step)
        rank.checkpoints.close(finished=True)

    two_ranks(act)
    steps = [checkpoint.step for checkpoint in list_checkpoints(run)]
    assert len(steps) > 1
    assert steps[-1] == 15
    assert_whole(run, steps)


def recorded(asked: list[str], request: Callable[..., Any]) -> Callable[..., Any]:
    """Return a storage request that adds its file's name to `asked`."""
    return lambda key, *more: asked.append(key.rpartition("/")[2]) or request(key, *more)


@pytest.mark.parametrize("how", ["fsdp", "ddp", "as INIT_FROM"])
def test_one_rank_reads_the_shard_indexes_for_all_ranks(how: Any, run: Run, two_ranks: Any) -> None:
    """Each rank that wrote the checkpoint has an index, so 64 ranks would otherwise make 4,096 requests."""

    def act(rank: Rank, number: int) -> set[str]:
        rank.save(1)
        rank.checkpoints.close(finished=True)
        dist.barrier()
        opened = list[str]()
        world = dist.group.WORLD
        its_run = Run(rank.storage, "run")
        rank.storage.open = recorded(opened, rank.storage.open)
        assert world
        if how == "as INIT_FROM":
            sunspot.elastic.restore._init_run = lambda _: its_run
            weight = read_init(Settings(init_from="run:run"), world)["weight"]
        else:
            start: Any = SimpleNamespace(checkpoint=list_checkpoints(run)[0], copy=None)
            state = load_start(its_run, Settings(parallel=how), start, Mock(), world)
            model = torch.nn.Linear(2, 6, bias=False)
            if state.load_parts:
                state.load_parts(model, torch.optim.SGD(model.parameters()))
            weight = model.weight if state.load_parts else state.model["weight"]
        assert weight.tolist() == [[1.0, 1.0]] * 6
        return {file for file in opened if file.startswith(("part-", "extra"))}

    assert two_ranks(act) == [{"extra_state.pt", "part-00000.json", "part-00001.json"}, set()]


def test_one_rank_checks_all_shards_of_the_last_checkpoint(run: Run, two_ranks: Any) -> None:
    """Only ranks that write a safetensors file read all parts, because there can be more ranks than files."""

    def act(rank: Rank, number: int) -> list[str]:
        asked = list[str]()
        rank.storage.steps = (100,) if number == 0 else ()
        rank.storage.list = recorded(asked, rank.storage.list)
        rank.storage.open = recorded(asked, rank.storage.open)
        threading.Timer(0.5, rank.storage.let_go.set).start()
        rank.save(100)
        rank.checkpoints.close(finished=True)
        return [key for key in asked if key.startswith(("step-", "part-"))]

    first, second = two_ranks(act, weights="safetensors")
    assert second == ["step-00000100-attempt-0001", "part-00000.json"]
    assert set(first) == {*second, "part-00001.json"}
    assert_whole(run, [100])


def test_a_shard_that_changed_after_it_was_written_is_not_committed(run: Run) -> None:
    """A rank writes no piece of a tensor with fewer rows than ranks."""
    one, none = torch.ones(1, 2), torch.empty(0, 2)
    state: Any = {"model": {"own": one, "none": none}, "optimizer": {"state": {}, "param_groups": []}}
    places = [TensorSlice((2, 2), (1, 0)), TensorSlice((1, 2), (1, 0))]
    name = checkpoint_name(1, 1)
    snapshot: Any = Mock(manifest=Checkpoint(name, 1, 1, 9, 9, 1), state=state, places=places)
    for rank in (0, 1):
        writer = ShardWriter(run, WorkerPlace(None, rank, 2), [], Settings(), CommitCoordinator())
        writer._write_once(name, INDEX, functools.partial(writer.write_part, snapshot))
    _, pieces = read_indexes(run, name, 2)
    assert [piece.name for piece in pieces if piece.file.startswith("__1")] == ["model.own"]
    key = run.key("checkpoints", name, "__1_0.distcp")
    run.storage.write(key, run.storage.read(key))
    with pytest.raises(DamageError, match=r"__1_0\.distcp has changed since it was written"):
        read_indexes(run, name, 2)


# ---------------------------------------------------------------------------------------------------- directory faults


class Obstacle:
    """A system function that fails for a file, or hangs until `let_go` is set."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._function, self._file = function, file
        self.error: OSError | None = None
        self.closed = False
        self.let_go = threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        places = [os.readlink(f"/proc/self/fd/{each}") if type(each) is int else str(each) for each in arguments]
        if self.closed and CURRENT_DEADLINE.get() and self._file in " ".join(places):
            if self.error:
                raise self.error
            self.let_go.wait(60)
        return self._function(*arguments, **options)


@pytest.mark.parametrize(
    ("function", "file"),
    [("scandir", "attempts"), ("open", "model.pt"), ("fsync", ""), ("replace", "model.pt"), ("replace", "manifest")],
)
def test_a_hung_file_system_ends_the_run_promptly_and_damages_nothing(
    function: str, file: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = Trainee(run)
    trainee.train()
    trainee.save()
    trainee.checkpoints.drain()
    set_storage_timeout(trainee, 0.3)
    module: Any = sunspot.storage.local if function == "open" else os
    obstacle = Obstacle(getattr(module, function, open), file)
    monkeypatch.setattr(module, function, obstacle, raising=False)
    obstacle.closed = True
    trainee.train()
    trainee.save()
    began = time.monotonic()
    with pytest.raises(
        StorageError, match=r"no checkpoint could be committed .*run/.*: no answer from storage for 0 s"
    ):
        trainee.checkpoints.drain(20)
    assert time.monotonic() - began < 10
    with pytest.raises(StorageError):
        trainee.train()
    held = [slot for slot in trainee.checkpoints._snapshots._memory._slots if Use.UPLOADING in slot.uses]
    assert len(held) == 1, "an upload that hangs may still read it"
    obstacle.let_go.set()
    for thread in threading.enumerate():
        if thread.name == "storage":
            thread.join(20)  # the abandoned work may still run
    committed = list_checkpoints(run)
    assert [find_faults(run, checkpoint) for checkpoint in committed] == [[]] * len(committed)
    assert [checkpoint.step for checkpoint in committed] == ([1, 2] if file in ("attempts", "manifest") else [1])
    assert run.storage.list_unfinished("run") == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EIO])
def test_a_failing_file_system_is_reported_once_and_training_continues(
    number: int, run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    set_constants(sunspot.storage.limits, BACKOFF_S=(0.01,))
    trainee = Trainee(run)

    def events() -> list[Any]:
        trainee.journals.events.flush()
        return read_journal(run, "events")

    obstacle = Obstacle(open, "model.pt")
    obstacle.error = OSError(number, os.strerror(number))
    monkeypatch.setattr(sunspot.storage.local, "open", obstacle, raising=False)
    obstacle.closed = True
    trainee.train()
    trainee.save()
    assert not trainee.checkpoints.drain(0.2)
    wait_until(events, seconds=20)
    trainee.train(3)
    obstacle.closed = False
    trainee.save()
    trainee.checkpoints.close(finished=True)
    assert newest(run).step == 4
    failed, regained = events()
    assert (failed["event"], failed["step"], regained["event"]) == ("commit failed", 1, "commits go on")
    fix = "free space" if number == errno.ENOSPC else "check that SUNSPOT_STORAGE_PATH can be read and written"
    assert f"model.pt: {os.strerror(number)}; {fix}" in failed["detail"]


def test_a_run_ends_and_writes_nothing_if_its_directory_is_removed(run: Run, tmp_path: Path) -> None:
    trainee = Trainee(run)
    trainee.train()
    trainee.save()
    trainee.checkpoints.drain()
    shutil.rmtree(tmp_path / "run")
    trainee.train()
    trainee.save()
    with pytest.raises(SupersededError, match="was deleted while attempt 1 trained"):
        trainee.checkpoints.drain(20)
    assert list(tmp_path.iterdir()) == []


def test_setting_the_clock_back_does_not_affect_commits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trainee, now = Trainee(run, checkpoints_to_keep=1), time.time
    for step in range(1, 5):
        if step == 3:
            monkeypatch.setattr(time, "time", lambda: now() - 3600)
        trainee.train()
        trainee.save(loss=step)
        assert trainee.checkpoints.drain(20)
        assert newest(run).step == step
    trainee.checkpoints.close(finished=True)
    assert trainee.warnings == []


# ------------------------------------------------------------------------------------------------------------ S3 faults


@pytest.fixture
def s3_run(s3_proxy: FaultProxy, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants) -> Run:
    """Return a run in S3 behind the proxy. Its checkpoints are uploaded in several parts."""
    from sunspot.storage import bucket
    from sunspot.storage import bucket as storage

    set_constants(bucket, PART=5 << 20)
    limits = {"CONNECT_TIMEOUT_S": 1, "READ_TIMEOUT_S": 0.5, "REQUEST_TRIES": 2}
    for name, value in limits.items():
        monkeypatch.setattr(storage, name, value)
    set_constants(sunspot.storage.limits, BACKOFF_S=(0.1,))
    return open_run(f"s3://{s3_bucket}/runs", "run")


def large_trainee(run: Run, **settings: Any) -> Trainee:
    """Return a trainee with a model.pt of 12 MB, which is uploaded in three parts."""
    trainee = Trainee(run, **settings)
    trainee.model.register_buffer("ballast", torch.randn(3_000_000))
    return trainee


FAULTS = {
    "503 on UploadPart": ("UploadPart", s3.answer(503, "SlowDown")),
    "403 on UploadPart": ("UploadPart", s3.answer(403, "AccessDenied")),
    "404 on UploadPart": ("UploadPart", s3.answer(404, "NoSuchBucket")),
    "507 on UploadPart": ("UploadPart", s3.answer(507, "XMinioStorageFull")),
    "503 on Complete": ("CompleteMultipartUpload", s3.answer(503, "SlowDown")),
    "403 on Complete": ("CompleteMultipartUpload", s3.answer(403, "AccessDenied")),
    "error in a 200 of Complete": ("CompleteMultipartUpload", s3.answer(200, "InternalError")),
    "reset on UploadPart": ("UploadPart", s3.reset),
    "reset on PutObject": ("PutObject", s3.reset),
    "cut body on reading back": ("GetObject", s3.cut_body(1000)),
    "stalled UploadPart": ("UploadPart", s3.stall),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_temporary_storage_fault_does_not_end_the_run(fault: str, s3_run: Run, s3_proxy: FaultProxy) -> None:
    trainee = large_trainee(s3_run)
    trainee.train()
    operation, act = FAULTS[fault]
    s3_proxy.on(operation, act, times=5)
    trainee.save()
    trainee.checkpoints.close(finished=True)
    checkpoint = newest(s3_run)
    assert checkpoint.step == 1
    assert trainee.warnings, "the user was warned"
    trainee.journals.events.flush()
    assert [event["event"] for event in read_journal(s3_run, "events")] == ["commit failed", "commits go on"]


KINDS_OF_FAULTS = ("503 on UploadPart", "403 on Complete", "error in a 200 of Complete", "reset on PutObject")
KINDS_OF_FAULTS += ("cut body on reading back", "stalled UploadPart")

LASTING_FAULTS = {name: FAULTS[name] for name in KINDS_OF_FAULTS} | {
    "trickling GetObject": ("GetObject", s3.trickle),
    "trickling ListObjects": ("ListObjects", s3.trickle),
}


@pytest.mark.parametrize("fault", LASTING_FAULTS)
def test_the_error_for_a_permanent_storage_fault_names_the_object(
    fault: str, s3_run: Run, s3_proxy: FaultProxy
) -> None:
    trainee = large_trainee(s3_run)
    trainee.train()
    trainee.save()
    trainee.checkpoints.drain()
    set_storage_timeout(trainee, 1)
    operation, act = LASTING_FAULTS[fault]
    s3_proxy.on(operation, act)
    trainee.train()
    trainee.save()
    with pytest.raises(
        StorageError, match=r"no checkpoint could be committed for .*SUNSPOT_STORAGE_TIMEOUT_S=1.*s3://.*/run/"
    ):
        trainee.checkpoints.drain(20)
    s3_proxy.clear()
    assert newest(s3_run).step == 1
    assert [
        find_faults(s3_run, checkpoint)
        for checkpoint in in_lineage(list_checkpoints(s3_run), lineage(read_attempts(s3_run)))
    ] == [[]]


def test_files_verified_by_storage_are_not_read_back(s3_run: Run, s3_proxy: FaultProxy) -> None:
    """Only the file's existence is checked, because even an acknowledged upload can be lost."""

    def lose(handler: Any, request: s3.Request) -> None:
        answer = handler.ask_server(request)
        _, bucket, key = request.path.split("/", 2)
        s3.plain_client().delete_object(Bucket=bucket, Key=key)
        handler.reply(*answer)

    for operation in ("TryPart", "UploadPart"):
        s3_proxy.on(operation, s3.refuse_damage)
    s3_proxy.on("CompleteMultipartUpload", lose, times=1)
    trainee = large_trainee(s3_run)
    trainee.train()
    trainee.save()
    trainee.checkpoints.close(finished=True)
    assert not [request for request in s3_proxy.seen("GetObject") if request.path.endswith("model.pt")]
    assert find_faults(s3_run, newest(s3_run)) == []
    assert "model.pt was written, but it is now missing or truncated" in trainee.warnings[0]


def test_files_not_verified_by_storage_are_read_back(s3_run: Run, s3_proxy: FaultProxy) -> None:
    s3_proxy.on("UploadPart", s3.damage(then=s3.pass_on), times=1)
    trainee = large_trainee(s3_run)
    trainee.train()
    trainee.save()
    trainee.checkpoints.close(finished=True)
    assert find_faults(s3_run, newest(s3_run)) == []
    assert "model.pt: the bytes read back differ" in trainee.warnings[0]


def test_a_checkpoint_of_many_files_is_deleted_in_three_requests(s3_run: Run, s3_proxy: FaultProxy) -> None:
    """The requests delete the manifest, list the other files, and delete these. 64 ranks write 193 files."""
    files = [MANIFEST, *(f"__{number}_0.distcp" for number in range(20))]
    for file in files:
        s3_run.storage.write(s3_run.key("checkpoints", "step-00000001-attempt-0001", file), b"content")
    before = len(s3_proxy.requests)
    delete_checkpoint(s3_run, "step-00000001-attempt-0001")
    assert len(s3_proxy.requests) - before == 3
    assert not s3_run.storage.list(s3_run.key("checkpoints"))


def test_a_file_is_verified_when_it_is_loaded(run: Run) -> None:
    trainee = Trainee(run)
    trainee.train()
    trainee.save()
    trainee.checkpoints.close(finished=True)
    checkpoint = newest(run)
    path = Path(run.storage.locate(run.key("checkpoints", checkpoint.name, "model.pt")))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamageError, match=r"model\.pt"):
        load_state(run, checkpoint, "model.pt")
