"""Tests that parts of a sharded state only count if they are on two nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import sunspot.checkpoint.memory_files
import sunspot.checkpoint.node_state
import sunspot.checkpoint.part_exchange
from sunspot.checkpoint.memory import NodeMemory, Slot
from sunspot.checkpoint.memory_files import LoadedSnapshot, MemorySnapshot, Sidecar, list_snapshots
from sunspot.checkpoint.node_state import NodeState
from sunspot.checkpoint.part_exchange import PartExchange, find_backup_ranks
from sunspot.machine.shared_pages import Pages
from sunspot.run import open_run
from sunspot.run.attempts import checkpoint_name
from sunspot.run.checkpoints import Checkpoint
from tests.harness.constants import SetConstants
from tests.harness.process_group import in_processes

SIZES = [2500, 700, 1000]
"""The sizes of the parts in bytes. A message has at most a thousand bytes."""


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.integers(1, 12))
def test_losing_any_node_loses_no_shard_of_the_state(nodes: list[str], parts: int) -> None:
    backups = find_backup_ranks(nodes, parts)
    for lost in set(nodes) if len(set(nodes)) > 1 else ():
        kept = {rank % parts for rank, backup in enumerate(backups) if nodes[rank] != lost or nodes[backup] != lost}
        assert kept == {rank % parts for rank in range(len(nodes))}
    if len(set(nodes)) == 1:
        assert backups == list(range(len(nodes)))


def test_copies_are_spread_over_the_ranks_of_a_node() -> None:
    assert find_backup_ranks(["a", "a", "b", "b", "c", "c"], 6) == [2, 3, 4, 5, 0, 1]
    assert find_backup_ranks(["a", "b", "b", "b"], 4) == [1, 0, 0, 0]


def test_a_shard_is_not_sent_if_another_replica_has_it_on_another_node() -> None:
    assert find_backup_ranks(["a", "a", "b", "b"], 2) == [0, 1, 2, 3]
    assert find_backup_ranks(["a", "b", "a", "b"], 2) == [1, 0, 3, 2], "both replicas' shards are on the same node"


class Worker(NodeMemory):
    """One of three workers on separate nodes. `room` is False if it has no memory for a neighbor's part."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None)
        world = dist.group.WORLD
        assert world
        self.rank = dist.get_rank()
        self.room = True
        self.folder = folder / str(self.rank)
        self.folder.mkdir()
        self.exchange = PartExchange(self, ["a", "b", "c"], world, 3)
        self.own = [Slot(SIZES[self.rank], self.folder / f"slot-{number}.data") for number in range(2)]

    def make_peer_slot(self, size: int, others: Sequence[Slot]) -> Slot:
        if not self.room:
            raise OSError("no room")
        return Slot(size, self.folder / f"peer-{len(others)}.data")

    def share(self, step: int, own: bool = True) -> bool:
        slot = self.own[step % 2]
        slot.unmark()
        slot.map[:] = bytes([16 * step + self.rank]) * slot.size
        manifest = Checkpoint(checkpoint_name(step, 1), step, 1, 10, 10, 1)
        sidecar = f"sidecar {self.rank}".encode()
        marked = slot.mark(manifest, sidecar, part=self.rank, parts=3)[0] if own else None
        return self.exchange.back_up(slot, marked, sidecar)

    def held(self) -> set[tuple[int, int, int, str]]:
        """Return the step, the part, the value of all bytes and the sidecar of each copy."""

        def describe(held: MemorySnapshot) -> tuple[int, int, int, str]:
            content = Path(held.file).read_bytes()
            [value] = set(content)
            assert len(content) == SIZES[held.part]
            return held.step, held.part, value, Path(held.file).with_suffix(".sidecar").read_text()

        return {describe(held) for held in list_snapshots(self.folder)}


def expected(step: int, *parts: int) -> set[tuple[int, int, int, str]]:
    return {(step, part, 16 * step + part, f"sidecar {part}") for part in parts}


@pytest.fixture
def small_messages(set_constants: SetConstants) -> None:
    set_constants(sunspot.checkpoint.part_exchange, CHUNK=1000)


def test_a_copy_is_complete_when_all_shards_are_on_two_nodes(tmp_path: Path, small_messages: None) -> None:
    def act(group: Any) -> None:
        worker = Worker(tmp_path)
        rank, peer = worker.rank, (worker.rank - 1) % 3
        worker.room = rank != 2
        assert not worker.share(1), "rank 2 has no room"
        assert worker.held() == expected(1, rank)
        worker.room = True
        assert worker.share(2)
        assert worker.held() == expected(2, rank, peer) | expected(1, rank)
        assert not worker.share(3, own=rank != 0), "rank 0 could not mark its own"
        assert worker.held() >= expected(2, rank, peer)
        assert worker.share(4)
        assert worker.share(5)
        assert worker.held() == expected(5, rank, peer) | expected(4, rank, peer)
        assert worker._copies == 4

    in_processes(tmp_path, 3, act)


def test_losing_a_neighbor_ends_the_exchange_of_copies_but_keeps_existing_copies(tmp_path: Path) -> None:
    def act(group: Any) -> str:
        worker = Worker(tmp_path)
        assert worker.share(1)
        if worker.rank == 1:
            return "died"
        with pytest.raises(RuntimeError):
            worker.share(2)
        assert worker.held() >= expected(1, worker.rank, (worker.rank - 1) % 3)
        return "ended"

    assert in_processes(tmp_path, 3, act) == ["ended", "died", "ended"]


def test_a_group_that_survives_a_failed_exchange_of_copies_makes_no_further_copies(
    group: dist.ProcessGroup, tmp_path: Path, set_constants: SetConstants
) -> None:
    set_constants(sunspot.checkpoint.memory_files, SHARED_MEMORY=tmp_path)
    memory = NodeMemory("run")
    exchange = PartExchange(memory, ["a"], group, 1)
    slot = Mock(mark=Mock(side_effect=RuntimeError("Connection closed by peer")))
    exchange.complete(slot, Checkpoint(checkpoint_name(1, 1), 1, 1, 10, 10, 1), b"")
    assert memory.shared, "if the failure has ended the group, the next group makes copies at once"
    exchange.agree_to_copy(True)
    assert not memory.shared


def test_a_shard_damaged_in_transit_does_not_count_as_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_copy = Slot.accept_copy

    def spoil(slot: Slot, snapshot: MemorySnapshot, sidecar: bytes) -> bool:
        if (snapshot.part, snapshot.step) == (0, 2):
            slot.map[5:6] = b"x"
        return accept_copy(slot, snapshot, sidecar)

    monkeypatch.setattr(Slot, "accept_copy", spoil)

    def act(group: Any) -> None:
        worker = Worker(tmp_path)
        peer = (worker.rank - 1) % 3
        assert worker.share(1)
        assert not worker.share(2)
        assert worker.held() >= expected(1, worker.rank, peer)
        assert (worker.held() >= expected(2, peer)) == (peer != 0)

    in_processes(tmp_path, 3, act)


def test_a_node_that_freezes_during_a_transfer_does_not_block_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    set_constants(sunspot.checkpoint.node_state, TIMEOUT_S=0.5)
    chosen, ended = MemorySnapshot(1, 7, True, 0.0, 100, 0, "file", ""), tmp_path / "ended"

    def freeze(*_: Any, **__: Any) -> None:
        until = time.monotonic() + 15
        while not ended.exists() and time.monotonic() < until:
            time.sleep(0.05)
        raise RuntimeError("it thawed")

    def act(group: Any) -> bool:
        if dist.get_rank() == 0:
            monkeypatch.setattr(dist, "isend", freeze)
        node, pages = NodeState(open_run(str(tmp_path), "run"), group, ["a", "b"]), Pages(100)
        found = LoadedSnapshot(chosen, Sidecar({}, {}, [], [], []), pages)
        with pytest.raises(RuntimeError):
            node.share(chosen, 0, found if dist.get_rank() == 0 else None)
        if dist.get_rank() == 1:
            ended.touch()
        return ended.exists()

    assert in_processes(tmp_path, 2, act) == [True, True]
