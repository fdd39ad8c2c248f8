"""Tests that copies in shared memory are complete or ignored, and that the next process finds them."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sunspot.checkpoint.memory_files
import sunspot.checkpoint.snapshot
from sunspot.checkpoint.manager import CheckpointManager, SnapshotInterval
from sunspot.checkpoint.memory import MAX_SLOTS, NodeMemory, Slot
from sunspot.checkpoint.memory_files import (
    STALE_S,
    as_bytes,
    find_heartbeats,
    find_parts,
    find_snapshot,
    list_snapshots,
)
from sunspot.checkpoint.part_exchange import PartExchange
from sunspot.checkpoint.snapshot import OptimizerOnlyParameters, SavedObjects, Snapshot, Snapshots
from sunspot.checkpoint.tensors import in_buffer, map_tensors, size_of, tensors_in
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.plan import Plan
from sunspot.run import open_run
from sunspot.run.attempts import Attempt, checkpoint_name
from sunspot.run.checkpoints import Checkpoint
from sunspot.settings import Settings
from tests.harness.constants import SetConstants
from tests.harness.logs import keep_warnings

RUN = "s3://bucket/runs/run"


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, set_constants: SetConstants) -> Iterator[Path]:
    set_constants(sunspot.checkpoint.memory_files, SHARED_MEMORY=tmp_path)
    return tmp_path


class Trainee:
    """A model with a state that is copied without a worker group."""

    def __init__(self, number: int = 1, device: str = "cpu") -> None:
        torch.manual_seed(number)
        self.warnings = keep_warnings()
        self.memory = NodeMemory(RUN)
        self.number = number
        self.device = device
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5)).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.snapshots = self.make_snapshots()

    def make_snapshots(self, exchange: Any = None, sums: Any = None) -> Snapshots:
        optimizer_only = OptimizerOnlyParameters(self.optimizer)
        optimizer_only.ids = {id(parameter) for parameter in self.model.parameters()}
        return Snapshots(self.memory, SavedObjects(self.model, self.optimizer), optimizer_only, exchange, sums)

    def train(self) -> None:
        self.model(torch.randn(8, 7, device=self.device)).square().sum().backward()
        self.snapshots.wait_for_copy()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def take(self, step: int, for_storage: bool = False, evaluated: bool = True) -> Snapshot | None:
        """Take a snapshot, after waiting for a slot that is being created."""
        snapshot = self.try_to_take(step, for_storage, evaluated)
        making = self.memory._making
        if not snapshot and making:
            making.result()
            snapshot = self.try_to_take(step, for_storage, evaluated)
        return snapshot

    def try_to_take(self, step: int, for_storage: bool = False, evaluated: bool = True) -> Snapshot | None:
        name = checkpoint_name(step, self.number)
        return self.snapshots.take(
            Checkpoint(name, step, 1, 100, 100, self.number, {"loss": 0.5}, evaluated=evaluated),
            [(1, 1, step, [])],
            {"step": step} if for_storage else None,
            needed=for_storage,
        )

    def state(self) -> Any:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return map_tensors(state, lambda tensor: tensor.cpu().clone())

    def die(self) -> None:
        """Leave the same files behind as a killed process."""
        self.snapshots.wait_until_complete()
        making = self.memory._making
        if making:  # a killed process makes no slot after its death
            making.result()
        self.memory._lock.close()


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(tensors_in(one), tensors_in(other), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_copy_contains_the_state_at_the_time_when_it_was_made(device: str) -> None:
    trainee = Trainee(device=device)
    trainee.train()
    expected = trainee.state()
    if device == "cuda":  # keep its queue busy for longer than the CPU takes to fill it
        large = torch.zeros(8192, 8192, device=device)
        for _ in range(20):
            large = large @ large
    trainee.take(3, evaluated=False)
    trainee.train()
    trainee.snapshots.wait_until_complete()
    found = find_snapshot(RUN)
    sidecar = found.sidecar
    assert (found.snapshot.attempt, found.snapshot.step, found.snapshot.evaluated) == (1, 3, False)
    assert sidecar.ledger == [(1, 1, 3, [])]
    assert sidecar.manifest_fields["metrics"] == {"loss": 0.5}
    assert_same(in_buffer(sidecar.structure, as_bytes(found.data)), expected)
    assert find_snapshot("s3://bucket/runs/another") is None


def test_the_newest_copy_is_kept_until_a_newer_copy_is_complete() -> None:
    first = Trainee(1)
    for step in (1, 2, 3):
        first.train()
        first.take(step)
        first.snapshots.wait_until_complete()
    first.die()

    second = Trainee(2)
    assert second.memory.directory == first.memory.directory
    held = find_snapshot(RUN)
    assert (held[0].attempt, held[0].step) == (1, 3)
    second.train()
    second.take(4)
    second.snapshots.wait_until_complete()
    held = find_snapshot(RUN)
    assert (held[0].attempt, held[0].step) == (2, 4)
    assert second.memory.directory
    assert len(list(second.memory.directory.glob("slot-*.json"))) == 1


def test_a_copy_is_dropped_if_collectives_were_aborted_before_it_was_complete() -> None:
    """The copy's step may be undone. A copy for storage is kept, because its gradient sums are complete."""
    trainee = Trainee()
    trainee.snapshots = trainee.make_snapshots(sums=SimpleNamespace(aborted=False))
    trainee.train()
    assert trainee.take(1)
    trainee.snapshots.wait_until_complete()
    trainee.snapshots = trainee.make_snapshots(sums=SimpleNamespace(aborted=True))
    assert trainee.take(2)
    trainee.snapshots.wait_until_complete()
    assert find_snapshot(RUN).snapshot.step == 1
    assert trainee.take(3, for_storage=True)
    trainee.die()
    assert find_snapshot(RUN).snapshot.step == 3


def test_the_directory_of_a_running_process_is_not_removed() -> None:
    one, other = Trainee(1), Trainee(2)
    assert one.memory.directory != other.memory.directory
    for trainee in (one, other):
        trainee.train()
        trainee.take(1)
        trainee.snapshots.wait_until_complete()
    assert one.memory.directory
    assert list(one.memory.directory.glob("slot-*.json"))
    one.die()
    other.take(2)  # only a process's first copy removes other directories
    Trainee(3).die()
    third = Trainee(3)
    third.train()
    third.take(5)
    third.snapshots.wait_until_complete()
    assert not list(one.memory.directory.glob("slot-*.json")) or third.memory.directory == one.memory.directory


@pytest.mark.parametrize("aged", ["the directory", "the copies"])
def test_copies_of_other_runs_are_removed_after_a_day(aged: str, shared_memory: Path) -> None:
    """A run's directory is kept as long as its newest file is recent."""
    other = Trainee()
    other.train()
    other.take(1)
    other.die()
    assert other.memory.directory
    run = other.memory.directory.parent
    run = run.rename(run.with_name("another"))
    for path in (run, *run.rglob("*")) if aged == "the copies" else (run, run / "0"):
        os.utime(path, (time.time() - STALE_S - 60,) * 2)
    trainee = Trainee()
    trainee.train()
    trainee.take(1)
    trainee.snapshots.wait_until_complete()
    assert run.exists() == (aged == "the directory")


def test_an_incomplete_copy_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = Trainee()
    trainee.train()
    for step in (0, 1):
        trainee.take(step)
        trainee.snapshots.wait_until_complete()
    go, copy = threading.Event(), sunspot.checkpoint.snapshot.copy

    def late_copy(*arguments: Any) -> None:
        go.wait(10)
        copy(*arguments)

    monkeypatch.setattr(sunspot.checkpoint.snapshot, "copy", late_copy)
    trainee.take(2)
    assert trainee.memory.directory
    assert [held.step for held in list_snapshots(trainee.memory.directory)] == [1], (
        "the slot of step 0 is used for step 2"
    )
    go.set()
    trainee.snapshots.wait_until_complete()
    found = find_snapshot(RUN)
    assert found[0].step == 2


def test_training_does_not_wait_for_the_checksum_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = Trainee()
    mark = Slot.mark
    go = threading.Event()
    monkeypatch.setattr(Slot, "mark", lambda *arguments: (go.wait(20), mark(*arguments)))
    trainee.train()
    assert trainee.take(1)
    trainee.train()
    assert trainee.take(2) is None, "and it does not take the memory of a third copy"
    trainee.train()
    go.set()
    trainee.snapshots.wait_until_complete()
    assert trainee.take(3)
    trainee.snapshots.wait_until_complete()
    found = find_snapshot(RUN)
    assert found[0].step == 3


def test_memory_is_reserved_in_the_background_without_delaying_training(monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = Trainee()
    reserve = os.posix_fallocate
    go = threading.Event()
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: (go.wait(20), reserve(*arguments)))
    trainee.train()
    for step in (1, 2):
        assert trainee.try_to_take(step) is None
        trainee.train()
    assert trainee.snapshots.spent_s == 0
    go.set()
    assert trainee.take(3)


def test_memory_for_required_copies_is_reserved_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = Trainee()
    reserve = os.posix_fallocate
    reserving = list[bool]()

    def note(*arguments: Any) -> None:
        reserving.append(threading.current_thread() is threading.main_thread())
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", note)
    trainee.train()
    trainee.snapshots.reserve()
    held = [trainee.take(step, for_storage=True) for step in (1, 2, 3)]
    assert all(held)
    assert len(reserving) >= len(held)
    assert not any(reserving), "each slot is made in a thread, before it is needed"


def test_copy_slots_are_limited_and_never_overwritten_while_in_use() -> None:
    trainee = Trainee()
    trainee.train()
    held: list[Snapshot] = []
    for step in range(1, 20):
        snapshot = trainee.take(step, for_storage=step in (3, 5))
        if snapshot and step in (3, 5):
            held.append(snapshot)
            expected = trainee.state()
        if step == 15:  # even slow copies include one after step 5
            trainee.snapshots.wait_until_complete()
        trainee.train()
    trainee.snapshots.wait_until_complete()
    assert len(trainee.memory._slots) <= MAX_SLOTS
    assert_same(held[-1].state, expected)
    found = find_snapshot(RUN)
    assert 5 < found[0].step <= 19, "a copy may be skipped while all slots are busy"
    trainee.take(20, for_storage=True)
    trainee.snapshots.wait_until_complete()
    found = find_snapshot(RUN)
    assert found[0].step == 20, "a copy that is needed is never skipped"
    for snapshot in held:
        snapshot.release()


@pytest.mark.parametrize("suffix", [".json", ".sidecar", ".data"])
def test_an_intact_copy_is_used_instead_of_a_damaged_copy(suffix: str, shared_memory: Path) -> None:
    trainee, other = Trainee(), Trainee(2)
    for each, step in ((trainee, 3), (other, 7)):
        each.train()
        each.take(step)
        each.snapshots.wait_until_complete()
    whole, path = sorted(marker.with_suffix(suffix) for marker in shared_memory.rglob("slot-*.json"))
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
    for changed in (b"", b"{}", content[:middle], content[:-2], flipped, whole.read_bytes()):
        path.write_bytes(changed)
        found = find_snapshot(RUN)
        assert found.snapshot.step == 3, changed[:300]
    path.unlink()
    path.write_bytes(content)
    found = find_snapshot(RUN)
    assert found.snapshot.step == 7


def test_checkpoints_are_saved_even_if_shared_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sunspot.checkpoint.memory_files, "memory_left", lambda: 1000)
    trainee = Trainee()
    trainee.train()
    assert trainee.take(1) is None
    assert "copying to shared memory is paused" in trainee.warnings[0]
    snapshot = trainee.take(2, for_storage=True)
    snapshot.copied.result()
    assert_same(snapshot.state, trainee.state())
    assert not trainee.memory.shared
    assert find_snapshot(RUN) is None
    assert len(trainee.warnings) == 1


def test_each_attempt_can_use_the_same_amount_of_memory_for_copies(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous process's copy is replaced, so it does not reduce the available memory."""

    def free() -> int:
        return round(size / 0.23) - sum(file.stat().st_size for file in shared_memory.rglob("*.data"))

    monkeypatch.setattr(sunspot.checkpoint.memory_files, "memory_left", free)
    for attempt in range(1, 5):
        trainee = Trainee(attempt)
        trainee.train()
        size = size_of(trainee.state())
        assert trainee.take(attempt), trainee.warnings
        trainee.die()
        found = find_snapshot(RUN)
        assert found.snapshot.step == attempt


@pytest.mark.parametrize("for_storage", [False, True])
@pytest.mark.parametrize("slots", [0, 1])
def test_the_old_copy_is_kept_while_memory_is_full(
    slots: int, for_storage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `slots` slots fit into memory at first."""
    first = Trainee()
    first.train()
    first.take(1)
    first.die()

    trainee = Trainee(2)
    reserve = os.posix_fallocate
    room = [True] * slots

    def reserve_if_there_is_room(*arguments: Any) -> None:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room.pop()
        reserve(*arguments)

    def copy(step: int) -> int:
        """Return the step that a loss would go back to."""
        trainee.train()
        snapshot = trainee.take(step, for_storage)
        if snapshot:
            snapshot.release()
        trainee.snapshots.wait_until_complete()
        found = find_snapshot(RUN)
        return found.snapshot.step

    monkeypatch.setattr(os, "posix_fallocate", reserve_if_there_is_room)
    assert [copy(step) for step in (2, 3, 4)] == [1 + slots] * 3
    assert not trainee.memory.shared, "it does not look for room in each step"
    room += [True] * MAX_SLOTS
    trainee.memory._paused_until = time.monotonic()
    assert [copy(step) for step in (8, 9)] == [8, 9]
    [lost, regained] = trainee.warnings
    assert lost.startswith("copying to shared memory is paused: No space left on device")
    assert regained == "copying to shared memory has resumed at step 8"


def test_the_copy_of_a_smaller_state_is_kept_until_the_larger_copy_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state grows if layers are added or unfrozen during training."""
    trainee = Trainee()
    go = threading.Event()
    copy = sunspot.checkpoint.snapshot.copy
    for step in (1, 2, 3):
        trainee.train()
        trainee.take(step)
        trainee.snapshots.wait_until_complete()
    trainee.model.append(torch.nn.Linear(5, 50))
    monkeypatch.setattr(sunspot.checkpoint.snapshot, "copy", lambda *arguments: (go.wait(10), copy(*arguments))[1])
    assert trainee.take(4)
    found = find_snapshot(RUN)
    assert found.snapshot.step == 3
    go.set()
    trainee.snapshots.wait_until_complete()
    for step in (5, 6, 7):
        trainee.train()
        assert trainee.take(step)
        trainee.snapshots.wait_until_complete()
    assert trainee.memory.directory
    sizes = {file.stat().st_size for file in trainee.memory.directory.glob("*.data")}
    assert sizes == {trainee.snapshots.size}, "the smaller copies take no memory"


def test_a_copy_that_cannot_be_marked_as_complete_does_not_affect_the_older_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainee = Trainee()
    write_bytes = Path.write_bytes
    full = threading.Event()

    def write_if_there_is_room(path: Path, data: Any) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_bytes(path, data)

    def copy(step: int) -> int:
        """Return the step that a loss would go back to."""
        trainee.train()
        snapshot = trainee.take(step, for_storage=step % 2 == 0)
        if snapshot:
            snapshot.release()
        trainee.snapshots.wait_until_complete()
        found = find_snapshot(RUN)
        return found[0].step

    monkeypatch.setattr(Path, "write_bytes", write_if_there_is_room)
    assert copy(1) == 1
    full.set()
    assert [copy(step) for step in range(2, 8)] == [1] * 6
    full.clear()
    assert copy(8) == 8
    [lost, regained] = trainee.warnings
    assert "the copy at step 2 is not kept in shared memory: " in lost
    assert "No space left on device" in lost
    assert regained == "copying to shared memory has resumed at step 8"
    assert len(trainee.memory._slots) <= MAX_SLOTS


def test_a_heartbeat_that_does_not_fit_in_memory_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)  # without it, the first write would be a SIGBUS
    trainee = Trainee()
    trainee.memory.heartbeat(1, 41)
    assert find_heartbeats(RUN) == []
    [warning] = trainee.warnings
    assert "No space left on device" in warning


def test_the_user_is_told_once_if_cuda_cannot_pin_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cudart:
        asked = 0

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            self.asked += 1
            return 2

        def cudaGetErrorString(self, error: int) -> str:
            return f"error {error}: out of memory"

    cudart, trainee = Cudart(), Trainee()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    for slot in (Slot(64, None), Slot(64, None)):
        trainee.memory.pin(slot, torch.device("cuda"))
        trainee.memory.pin(slot, torch.device("cuda"))
    assert cudart.asked == 2
    [warning] = trainee.warnings
    assert "because their memory is not pinned: error 2: out of memory" in warning


def test_a_copy_is_dropped_if_a_weight_changes_while_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are clamped after some steps, although only the optimizer changed them in the second step."""
    trainee = Trainee()
    copy = sunspot.checkpoint.snapshot.copy
    change = threading.Event()

    def clamp() -> None:
        with torch.no_grad():
            trainee.model[0].weight.clamp_(-0.01, 0.01)

    def copy_half_then_the_rest(pairs: Any, mark: Any) -> Any:
        half = len(pairs) // 2
        copy(pairs[:half], mark)
        if change.is_set():
            clamp()
        return copy(pairs[half:], mark)

    def take(step: int) -> bool:
        """Take a snapshot, and return True if it would be committed."""
        snapshot = trainee.take(step, for_storage=True)
        trainee.train()
        trainee.snapshots.wait_until_complete()
        snapshot.release()
        return not snapshot.torn

    monkeypatch.setattr(sunspot.checkpoint.snapshot, "copy", copy_half_then_the_rest)
    trainee.train()
    assert take(1)
    change.set()
    assert not take(2)
    found = find_snapshot(RUN)
    assert found.snapshot.step == 1, "the copy in memory does not count either"
    expected = trainee.state()
    assert take(3), "the tensor that changed is copied at once now"
    found = find_snapshot(RUN)
    assert found.snapshot.step == 3
    assert_same(in_buffer(found.sidecar.structure, as_bytes(found.data)), expected)
    [lost, regained] = trainee.warnings
    assert "the copy at step 2 is not kept in shared memory: weights changed while they were being copied" in lost
    assert regained == "copying to shared memory has resumed at step 3"


def test_training_does_not_wait_for_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA is mocked. The pages of a slot that is created at once are not locked yet."""
    trainee = Trainee()
    go = threading.Event()
    streams = list[Any]()
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or Mock())
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Mock(device=device))
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    monkeypatch.setattr(sunspot.checkpoint.snapshot, "mark_queue", lambda _: Mock(device=device))
    monkeypatch.setattr(Slot, "pin", lambda slot: go.wait(10))
    trainee.train()
    began = time.monotonic()
    assert trainee.take(1, for_storage=True)
    trainee.snapshots.wait_for_copy()
    assert time.monotonic() - began < 8
    go.set()
    trainee.snapshots._queue_wait = None  # mocks cannot measure time
    assert trainee.take(2, for_storage=True)
    trainee.snapshots.wait_for_copy()
    assert streams == [device], "one stream for all copies"


class Exchange(PartExchange):
    """An exchange with a single neighbor. The test chooses its responses."""

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory
        self._rank = 1
        self._parts = 2
        self._failure = ""
        self.cost_s = 0.0
        self.answers: list[bool | RuntimeError] = []

    def agree_to_copy(self, has_slot: bool) -> bool:
        return has_slot

    def back_up(self, *_: Any) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer


class Part(Trainee):
    """A trainee with one of two parts of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange = Exchange(self.memory)
        self.snapshots = self.make_snapshots(self.exchange)

    def copy(self, step: int, answer: bool | RuntimeError) -> set[int]:
        """Copy the part at `step`, and return the steps of all existing copies."""
        self.exchange.answers.append(answer)
        self.train()
        assert self.take(step)
        self.snapshots.wait_until_complete()
        return {held.step for held in find_parts(RUN)}


def test_a_shard_is_kept_until_all_workers_have_a_newer_shard() -> None:
    part = Part()
    assert part.copy(1, True) == {1}
    for step in (2, 3, 4):
        assert part.copy(step, False) == {1, step}, "the other workers have step 1, but maybe no newer one"
    assert part.copy(5, True) == {1, 5}
    assert part.copy(6, True) == {5, 6}
    assert {(held.part, held.parts) for held in find_parts(RUN)} == {(1, 2)}
    assert find_snapshot(RUN) is None, "a part is not a whole state"
    [lost, regained] = part.warnings
    assert "the copy at step 2 is not kept in shared memory: a worker could not keep its part" in lost
    assert regained == "copying to shared memory has resumed at step 5"


def test_a_worker_that_lost_its_neighbor_keeps_its_copies() -> None:
    part = Part()
    part.copy(1, True)
    assert part.copy(2, RuntimeError("Connection closed by peer")) == {1, 2}
    assert part.memory.shared, "the next group can make copies at once"
    assert not part.warnings
    snapshot = part.take(3, for_storage=True)
    snapshot.copied.result()
    assert 1 in {held.step for held in find_parts(RUN)}


def test_the_next_process_keeps_the_shards_from_which_its_group_resumes() -> None:
    part = Part()
    for step in (1, 2, 3):
        part.copy(step, True)
    part.die()
    later = Part()
    assert {held.step for held in find_parts(RUN)} == {2, 3}, "another worker may lack the newest one"
    later.memory.keep_parts_of(checkpoint_name(2, 1))
    assert {held.step for held in find_parts(RUN)} == {2}
    assert later.copy(4, False) == {2, 4}
    assert later.copy(5, True) == {5}


def test_a_process_keeps_the_shards_from_which_its_next_group_resumes() -> None:
    """The part of a lost worker only exists as a neighbor's copy."""
    part = Part()
    part.copy(1, True)
    memory = part.memory
    kept = memory.make_peer_slot(4, [])
    held = next(held for held in find_parts(RUN) if held.step == 1)
    kept.map[:] = b"part"
    assert kept.accept_copy(
        replace(held, part=0, crc32=zlib.crc32(b"part"), size=4, sidecar_crc32=zlib.crc32(b"")), b""
    )
    part.copy(2, False)
    memory.keep_parts_of(checkpoint_name(1, 1))
    assert {(held.part, held.step) for held in find_parts(RUN)} == {(0, 1), (1, 1)}
    assert memory.make_peer_slot(4, []).file != kept.file
    assert part.copy(3, False) >= {1}
    assert 4 in part.copy(4, True)
    assert kept.file
    assert not kept.file.exists(), "no process resumes from it again"


@pytest.mark.parametrize("kind", ["another user's", "a link"])
def test_a_directory_of_another_user_is_never_used(
    kind: str, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user could create a directory with this name, and put weights there."""
    planted = Trainee()
    planted.train()
    assert planted.take(3)
    planted.snapshots.wait_until_complete()
    folder = shared_memory / f"sunspot-{os.getuid()}"
    if kind == "a link":
        elsewhere = folder.rename(shared_memory / "elsewhere")
        folder.symlink_to(elsewhere)
    else:
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        folder.rename(shared_memory / f"sunspot-{user + 1}")
    assert find_snapshot(RUN) is None
    assert find_heartbeats(RUN) == []
    trainee = Trainee()
    assert not trainee.memory.shared
    assert "belongs to another user" in trainee.warnings[0]


def test_only_the_user_of_a_run_can_read_its_copies(shared_memory: Path) -> None:
    folder = shared_memory / f"sunspot-{os.getuid()}"
    folder.mkdir(mode=0o755)  # the mode that earlier versions used
    assert Trainee().memory.shared
    assert folder.stat().st_mode & 0o777 == 0o700


def test_heartbeats_in_shared_memory_outlive_their_process() -> None:
    trainee = Trainee()
    trainee.memory.heartbeat(1, 41)
    trainee.memory.heartbeat(1, 42)
    trainee.die()
    successor = Trainee(2)
    [heartbeat] = find_heartbeats(RUN)
    assert heartbeat[:2] == (1, 42)
    successor.memory.heartbeat(2, 43)
    [heartbeat] = find_heartbeats(RUN)
    assert heartbeat[:2] == (2, 43)


def test_the_heartbeat_contains_the_newest_step_that_was_counted(tmp_path: Path) -> None:
    """The GPU may still cancel a step that was taken, but not counted."""
    run = open_run(str(tmp_path), "run")
    plan = Plan(Settings(), EmptySource((1, 40), 10), None, Steps(1000, 10), 100)
    model = torch.nn.Linear(2, 2)
    saved = SavedObjects(model, torch.optim.SGD(model.parameters()))
    checkpoints = CheckpointManager(run, Attempt(1, "me", None, 0), plan, saved, memory=NodeMemory(RUN))
    checkpoints.count_step(1)
    checkpoints.took_step(1, None)
    checkpoints.took_step(2, None)
    assert [heartbeat.step for heartbeat in find_heartbeats(RUN)] == [1]
    checkpoints.count_step(2)
    assert [heartbeat.step for heartbeat in find_heartbeats(RUN)] == [2]


def _train_and_kill_yourself(root: str) -> None:
    torch.set_num_threads(1)  # before two threads use torch, as in `fork_ranks`
    sunspot.checkpoint.memory_files.SHARED_MEMORY = Path(root)
    trainee = Trainee()
    trainee.train()
    trainee.take(7)
    trainee.snapshots.wait_until_complete()
    trainee.memory.heartbeat(1, 8)
    os.kill(os.getpid(), 9)


def test_a_copy_outlives_sigkill(shared_memory: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_train_and_kill_yourself, args=(str(shared_memory),))
    process.start()
    process.join(240)
    assert process.exitcode == -9
    found = find_snapshot(RUN)
    assert found[0].step == 7
    Trainee(2).memory.remove()
    assert find_snapshot(RUN) is None


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])


@given(st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), dtypes), max_size=8), st.integers(0, 99))
def test_tensors_of_any_shape_and_type_can_be_restored_from_a_memory_slot(
    shapes: list[tuple[list[int], torch.dtype]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 2, shape, generator=generator).to(dtype) for shape, dtype in shapes]
    state = {"a": tensors[:3], "b": {7: tuple(tensors[3:]), "number": 1.5, "none": None}}
    buffer = bytearray(max(1, size_of(state)))
    placed = in_buffer(state, buffer)
    for target, source in zip(tensors_in(placed), tensors_in(state), strict=True):
        target.copy_(source)
    assert_same(in_buffer(state, buffer), state)
    assert placed["b"]["number"] == 1.5
    json.dumps(sorted(placed))


@given(st.floats(1e-5, 10), st.floats(1e-4, 10), st.sampled_from([0.01, 0.05, 0.5]))
def test_the_snapshot_interval_is_as_short_as_its_cost_limit_allows(
    cost: float, step_time: float, fraction: float
) -> None:
    pace = SnapshotInterval(fraction, 0)
    assert not SnapshotInterval(0, 0).due(1, step_time, deque([cost]))
    taken = [step for step in range(1, 5000) if pace.due(step, step_time, deque([cost] if step > 1 else []))]
    assert pace.cost <= fraction * (1 + 1e-9)  # an exact quotient may be rounded up
    if pace.every > 1:
        assert cost / ((pace.every - 1) * step_time) > fraction * (1 - 1e-9)
    gaps = {later - earlier for earlier, later in itertools.pairwise(taken)}
    assert gaps <= {pace.every}
