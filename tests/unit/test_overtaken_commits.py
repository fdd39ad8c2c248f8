"""Tests that commits continue after the end of their group, as long as they count."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import sunspot.checkpoint.commit
import sunspot.checkpoint.memory_files
from sunspot.checkpoint import CheckpointCommitter, CheckpointManager, NodeMemory, SavedObjects
from sunspot.checkpoint.memory import MAX_SLOTS, Use
from sunspot.checkpoint.memory_files import list_snapshots
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.errors import SupersededError
from sunspot.parallel.collectives import WorkerPlace
from sunspot.parallel.sum_guard import SumGuard
from sunspot.plan import Plan
from sunspot.run import Run, open_run
from sunspot.run.attempts import IN_PLACE, Attempt, Metadata, checkpoint_name, claim, new_nonce, read_attempts
from sunspot.run.checkpoints import ABANDONED_S, MANIFEST, Checkpoint, find_faults, list_checkpoints, list_directories
from sunspot.settings import Settings
from sunspot.storage.limits import refuse_if_given_up
from tests.harness.constants import SetConstants
from tests.harness.waiting import wait_until


class Survivor:
    """A process that is rank 0 of consecutive groups, and saves once in each group."""

    def __init__(self, run: Run, memory: NodeMemory, process: str = "p", **settings: Any) -> None:
        self.run = run
        self.memory = memory
        self.process = process
        self.plan = Plan(Settings(**settings), EmptySource((1, 4), 2), None, Steps(10**6, 10), 10**5)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.committer: CheckpointCommitter | None = None
        self.checkpoints: CheckpointManager | None = None
        self.step = 0

    def form_group(
        self, start: str | None = None, tier: str = IN_PLACE, committed: float | None = None, others: str = "another"
    ) -> None:
        """Begin the next attempt together with the process `others`, from the checkpoint `start` or in place."""
        self.leave()
        attempts = read_attempts(self.run)
        start = start or (self.checkpoints.name_at(self.step) if self.checkpoints else None)
        number = len(attempts) + 1
        metadata = Metadata(processes=(self.process, others))
        attempt = Attempt(number, "job", None, 0, metadata=metadata, nonce=new_nonce())
        attempt = attempt.starting_from(start, tier if start else "beginning")
        assert claim(self.run, attempts, attempt)
        saved = SavedObjects(self.model, self.optimizer)
        self.checkpoints = CheckpointManager(self.run, attempt, self.plan, saved, memory=self.memory)
        self.checkpoints.continue_commits(self.committer, [*attempts, attempt], committed)
        self.step = attempt.step

    def leave(self) -> None:
        if self.checkpoints:
            self.checkpoints.leave_group(self.step)
            self.committer = self.checkpoints.committer

    def take_step(self, save: bool = True) -> None:
        assert self.checkpoints
        self.checkpoints.wait_for_copy()
        self.step += 1
        self.checkpoints.took_step(self.step, None)
        if save:
            self.checkpoints.save(self.step, {"loss": 1.0})

    def is_due(self) -> bool:
        assert self.checkpoints
        return self.checkpoints.due(self.step, 0.1).save


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Create a directory in shared memory, because syncing each write to disk is slow."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def run(folder: Path) -> Run:
    return open_run(str(folder), "run")


@pytest.fixture
def memory(folder: Path, set_constants: SetConstants) -> Iterator[NodeMemory]:
    set_constants(sunspot.checkpoint.memory_files, SHARED_MEMORY=folder)
    memory = NodeMemory("somewhere/run")
    yield memory
    memory.remove()


class SlowStorage:
    """A storage location that delays uploads until `go` is called, and counts the uploads in progress."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = list[str]()
        self.under_way = 0
        self.most = 0
        self._permits = threading.Semaphore(0)
        self._lock = threading.Lock()
        upload = sunspot.checkpoint.files.WholeStateWriter.files

        def slow_upload(writer: Any, snapshot: Any) -> Any:
            with self._lock:
                self.under_way += 1
                self.most = max(self.most, self.under_way)
            self.begun.append(snapshot.manifest.name)
            assert self._permits.acquire(timeout=30)
            try:
                return upload(writer, snapshot)
            finally:
                with self._lock:
                    self.under_way -= 1

        monkeypatch.setattr(sunspot.checkpoint.files.WholeStateWriter, "files", slow_upload)

    def go(self) -> None:
        self._permits.release()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> SlowStorage:
    return SlowStorage(monkeypatch)


def wait_for_commit(survivor: Survivor) -> None:
    assert survivor.checkpoints
    survivor.checkpoints.drain(30)


def incomplete(run: Run) -> list[str]:
    return [name for name, files in list_directories(run).items() if MANIFEST not in files]


def test_commits_in_progress_are_completed_after_their_group_ends(
    run: Run, memory: NodeMemory, storage: SlowStorage
) -> None:
    survivor = Survivor(run, memory, checkpoints_to_keep=99)
    survivor.form_group()
    for change in range(20):
        survivor.take_step()
        wait_until(lambda change=change: len(storage.begun) == change + 1)
        survivor.form_group()
        storage.go()
        assert len(memory._slots) <= MAX_SLOTS
    survivor.take_step()
    storage.go()
    wait_for_commit(survivor)
    committed = list_checkpoints(run)
    assert [checkpoint.step for checkpoint in committed] == list(range(1, 22))
    assert not any(find_faults(run, checkpoint) for checkpoint in committed)
    assert not incomplete(run)
    assert storage.most == 1, "a group's first upload waits for the previous group's upload"


def test_an_upload_that_outlasts_ten_groups_does_not_need_additional_memory_slots(
    run: Run, memory: NodeMemory, storage: SlowStorage
) -> None:
    survivor = Survivor(run, memory)
    for _ in range(10):
        survivor.form_group()
        survivor.take_step()
        wait_until(lambda: storage.begun)
        survivor.take_step(save=False)
    assert len(memory._slots) <= MAX_SLOTS
    assert [slot for slot in memory._slots if not slot.file] == []
    storage.go()
    storage.go()
    wait_for_commit(survivor)
    assert len(storage.begun) == 2, "the newest snapshot replaced those that waited"
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [1, survivor.step - 1]
    assert not incomplete(run)


def test_a_late_commit_deletes_expired_checkpoints(run: Run, memory: NodeMemory, storage: SlowStorage) -> None:
    survivor = Survivor(run, memory, checkpoints_to_keep=1)
    survivor.form_group()
    survivor.take_step()
    storage.go()
    wait_for_commit(survivor)
    survivor.take_step()
    wait_until(lambda: len(storage.begun) == 2)
    survivor.form_group()
    storage.go()
    wait_until(lambda: [checkpoint.step for checkpoint in list_checkpoints(run)] == [2])


@pytest.mark.parametrize("overtaken", ["by an older start", "by another process", "by another job", "without a part"])
def test_a_superseded_commit_leaves_no_files(
    overtaken: str, run: Run, memory: NodeMemory, storage: SlowStorage
) -> None:
    survivor = Survivor(run, memory, checkpoints_to_keep=9)
    survivor.form_group()
    survivor.take_step()
    storage.go()
    wait_for_commit(survivor)
    first = list_checkpoints(run)[0].name
    survivor.take_step()
    wait_until(lambda: len(storage.begun) == 2)
    if overtaken == "by an older start":
        survivor.form_group(first, "storage")
    elif overtaken == "without a part":
        assert survivor.checkpoints
        survivor.checkpoints._committer._coordinator.in_parts = True
        survivor.form_group(others="the replacement of a lost process")
    else:
        attempts = read_attempts(run)
        assert survivor.checkpoints
        newer = Attempt(2, "job", None, 0, metadata=Metadata(processes=("another",)), nonce=new_nonce())
        newer = newer.starting_from(survivor.checkpoints.name_at(survivor.step), IN_PLACE)
        newer = replace(newer, owner="other") if overtaken == "by another job" else newer
        assert claim(run, [] if newer.owner != "job" else attempts, newer)
        survivor.leave()
    storage.go()
    assert survivor.committer
    survivor.committer._thread.join(20)
    assert isinstance(survivor.committer._error, SupersededError)
    assert list(list_directories(run)) == [first]


def test_a_stopped_commit_uploads_no_further_parts(
    run: Run, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor = Survivor(run, memory)
    survivor.form_group()
    begun, go = threading.Event(), threading.Event()
    sizes: list[int] = []

    def files(writer: Any, snapshot: Any) -> Any:
        def write(storage: Any) -> None:
            storage.write(b"x" * 100)
            begun.set()
            go.wait(20)
            for _ in range(100):
                storage.write(b"x" * (1 << 20))
                sizes.append(storage.size)

        return {"model.pt": sunspot.checkpoint.files.upload(run, snapshot.manifest.name, "model.pt", write)}

    monkeypatch.setattr(sunspot.checkpoint.files.WholeStateWriter, "files", files)
    survivor.take_step()
    assert begun.wait(10)
    survivor.form_group("step-00000000-attempt-0001-00000000", "storage")
    go.set()
    assert survivor.committer
    survivor.committer._thread.join(20)
    assert isinstance(survivor.committer._error, SupersededError)
    assert sum(sizes) < 1 << 20
    assert not list_directories(run)


def test_the_next_commit_removes_the_unfinished_upload_of_a_lost_rank_0(run: Run, memory: NodeMemory) -> None:
    lost = Survivor(run, memory)
    lost.form_group()
    lost.take_step(save=False)
    assert lost.checkpoints
    name = lost.checkpoints.name_at(1)
    run.storage.write(run.key("checkpoints", name, "model.pt"), b"half of it")
    other = Survivor(run, NodeMemory(None), process="q")
    other.form_group(name)
    other.take_step()
    wait_for_commit(other)
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [2]
    assert not incomplete(run)


def test_a_late_manifest_is_removed_if_its_checkpoint_files_were_already_removed(run: Run, memory: NodeMemory) -> None:
    survivor = Survivor(run, memory, checkpoints_to_keep=9)
    survivor.form_group()
    survivor.take_step(save=False)
    assert survivor.checkpoints
    name = survivor.checkpoints.name_at(1)
    late = Checkpoint(name, 1, 1, 10, 10**6, 1, {"loss": 0.0}, {"model.pt": {"size": 4, "sha256": "0" * 64}})
    sunspot.checkpoint.commit.write_manifest(run, late)
    survivor.take_step()
    wait_for_commit(survivor)
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [2]


@pytest.mark.parametrize(("age_s", "due"), [(0.0, False), (59.0, False), (61.0, True)])
@pytest.mark.parametrize("knows_by", ["its own commit", "the status"])
def test_the_next_group_saves_if_the_newest_checkpoint_is_older_than_the_interval(
    age_s: float, due: bool, knows_by: str, run: Run, memory: NodeMemory
) -> None:
    survivor = Survivor(run, memory, checkpoint_every_s=60.0)
    survivor.form_group()
    survivor.take_step(save=knows_by == "its own commit")
    wait_for_commit(survivor)
    survivor.leave()
    if survivor.committer:
        survivor.committer.begun_at -= age_s
    survivor.form_group(committed=time.time() - age_s if knows_by == "the status" else None)
    assert survivor.is_due() == due


def test_a_process_that_becomes_rank_0_again_takes_the_commits_of_other_ranks_into_account(
    run: Run, memory: NodeMemory
) -> None:
    survivor = Survivor(run, memory, checkpoint_every_s=60.0)
    survivor.form_group()
    survivor.take_step()
    wait_for_commit(survivor)
    survivor.leave()
    assert survivor.committer
    survivor.committer.begun_at -= 100.0
    survivor.form_group(committed=time.time() - 10.0)
    assert not survivor.is_due()


def test_a_commit_of_shards_is_stopped_when_its_group_ends(run: Run) -> None:
    """The other ranks may no longer add their shards. Waiting for them would block the next group's commits."""
    attempt = Attempt(1, "job", None, 0, nonce=new_nonce())
    assert claim(run, [], attempt)
    coordinator, snapshot = Mock(leads=True, in_parts=True), Mock(torn=False, state={}, extra_state={})
    snapshot.manifest.configure_mock(step=4, name=checkpoint_name(4, attempt.number, attempt.nonce))
    coordinator.replaces_newest.return_value, coordinator.last_step.return_value = False, math.inf
    waiting = threading.Event()

    def await_shards(_: Any) -> None:
        waiting.set()
        while True:
            refuse_if_given_up("a shard")
            time.sleep(0.01)

    committer = CheckpointCommitter(run, attempt, Settings(), Mock(files=await_shards), coordinator, None, None)
    committer.commit(snapshot)
    assert waiting.wait(10)
    committer.abandon()
    wait_until(lambda: not committer.busy)
    snapshot.release.assert_called_once_with()
    assert committer.stop_if_overtaken([attempt]), "the interval to the next commit does not begin with this commit"


def test_file_ages_are_measured_by_the_storage_clock(
    run: Run, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with a fast clock must not consider another process's upload abandoned."""
    survivor = Survivor(run, memory)
    survivor.form_group()
    run.storage.write(run.key("checkpoints", checkpoint_name(9, 1, new_nonce()), "model.pt"), b"on its way")
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 2 * ABANDONED_S)
    survivor.take_step()
    wait_for_commit(survivor)
    assert len(list_directories(run)) == 2


def test_a_group_without_a_known_commit_saves_immediately(run: Run, memory: NodeMemory) -> None:
    survivor = Survivor(run, memory)
    survivor.form_group()
    survivor.take_step(save=False)
    survivor.form_group()
    assert survivor.committer is None
    assert survivor.is_due()


def test_no_copy_is_kept_of_buffers_from_an_aborted_collective(run: Run, memory: NodeMemory, group: Any) -> None:
    """An aborted NCCL broadcast ends without an error, so its partial result would be marked as complete."""
    model = torch.nn.BatchNorm1d(4)
    saved = SavedObjects(model, torch.optim.SGD(model.parameters(), 0.1))
    plan = Plan(Settings(), EmptySource((1, 4), 2), None, Steps(100, 10), 10)
    attempt = Attempt(1, "job", None, 0)
    sums = SumGuard(torch.device("cpu"), Mock)
    checkpoints = CheckpointManager(run, attempt, plan, saved, place=WorkerPlace(group, sums=sums), memory=memory)
    checkpoints.save(1, {}, to_storage=False, needed=True)
    checkpoints.leave_group(1)
    assert memory.newest
    sums.trip()
    checkpoints.save(2, {}, to_storage=False, needed=True)
    checkpoints.leave_group(2)
    assert [copy.step for copy in list_snapshots(memory.directory)] == [1]


def test_a_required_copy_in_memory_waits_until_the_previous_copy_is_complete(run: Run, memory: NodeMemory) -> None:
    """The newest copy must be that of the last step, from which all workers resume under FSDP."""
    survivor = Survivor(run, memory)
    survivor.form_group()
    survivor.take_step(save=False)
    assert memory._making
    memory._making.result()
    go = threading.Event()
    complete, steps = memory.complete, list[int]()

    def slow_complete(slot: Any, manifest: Checkpoint, *more: Any) -> None:
        go.wait(20)
        complete(slot, manifest, *more)
        steps.append(manifest.step)

    memory.complete = slow_complete  # type: ignore[method-assign]
    assert survivor.checkpoints
    survivor.checkpoints.save(1, {}, to_storage=False)
    survivor.take_step(save=False)
    survivor.checkpoints.save(2, {}, to_storage=False)
    threading.Timer(0.2, go.set).start()
    survivor.checkpoints.save(2, {}, to_storage=False, needed=True)
    survivor.checkpoints.close(finished=False)
    assert steps == [1, 2]
    assert any(Use.NEWEST in slot.uses for slot in memory._slots)
