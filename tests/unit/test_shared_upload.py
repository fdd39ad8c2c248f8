"""A state that several nodes upload: each sends its share, whatever becomes of the others."""

from __future__ import annotations

import io
import zlib
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import sunspot.checkpoint.shared_upload
from sunspot.checkpoint import CheckpointManager, NodeMemory
from sunspot.checkpoint.files import load_state
from sunspot.checkpoint.layout import Layout, crc32_of, layout_from_json, layout_to_json, read_spans
from sunspot.checkpoint.shared_upload import SharedWriter, ShareSender
from sunspot.checkpoint.slots import Slot
from sunspot.checkpoint.snapshot import ChangeWatch, Snapshot, in_buffer, size_of, tensors_in
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.errors import StorageError
from sunspot.plan import Plan
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt, claim
from sunspot.run.checkpoints import Checkpoint, find_faults, list_checkpoints
from sunspot.settings import Settings
from sunspot.storage import parts
from sunspot.storage.s3_upload import MultipartUpload
from tests.harness import s3
from tests.harness.process_group import in_processes
from tests.harness.s3 import FaultProxy
from tests.harness.waiting import wait_until

PART = 64 << 10


def snapshot_of(name: str = "step-000000000001-0001-a", seed: int = 0) -> Snapshot:
    """A copy as one node has it: its model.pt has four parts, its optimizer.pt three."""
    generator = torch.Generator().manual_seed(seed)
    source = {
        "model": {"a": torch.randn(50_001, generator=generator), "empty": torch.empty(0), "b": torch.arange(10)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": torch.randn(40_000, generator=generator)}}},
    }
    source["model"]["c"] = torch.randn(10_000, generator=generator)
    slot = Slot(size_of(source), None)
    state = in_buffer(source, slot.map)
    for target, tensor in zip(tensors_in(state), tensors_in(source), strict=True):
        target.copy_(tensor)
    slot.uploading = True
    copied: Future[bool] = Future()
    copied.set_result(True)
    return Snapshot(Checkpoint(name, 1, 1, 10, 10, 1), {"step": 1}, state, slot, copied, ChangeWatch(()), [])


class Node:
    """A rank that sends its share."""

    def __init__(self, run: Run, rank: int, limit_s: float = 60) -> None:
        self.warnings: list[str] = []
        self.sender = ShareSender(open_run(run.location.rpartition("/")[0], "run"), rank, limit_s, self.warnings.append)


@pytest.fixture
def run(s3_proxy: FaultProxy, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(parts, "PART", PART)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(sunspot.checkpoint.shared_upload, "LEAST_BYTES", 1)
    monkeypatch.setattr(sunspot.checkpoint.shared_upload, "POLL_EVERY_S", 0.02)
    return open_run(f"s3://{s3_bucket}", "run")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Who has sent each part, and its number: the object of rank 0 began the upload, or a token names it."""
    seen: list[tuple[str, int]] = []
    send = MultipartUpload.send

    def note(self: MultipartUpload, number: int, body: bytearray) -> Any:
        part = send(self, number, body)
        seen.append(("rank 0" if self._verifies else "helper", number))
        return part

    monkeypatch.setattr(MultipartUpload, "send", note)
    return seen


def assert_whole(run: Run, snapshot: Snapshot, files: dict[str, Any]) -> None:
    checkpoint = Checkpoint(snapshot.manifest.name, 1, 1, 10, 10, 1, files=files)
    for kind in ("model", "optimizer"):
        loaded = load_state(run, checkpoint, f"{kind}.pt")
        expected = tensors_in(snapshot.state[kind])
        assert all(torch.equal(one, other) for one, other in zip(tensors_in(loaded), expected, strict=True))
    listed = {entry.key.rpartition("/")[2] for entry in run.storage.list(run.key("checkpoints"))}
    assert listed == {"model.pt", "optimizer.pt", "extra_state.pt"}
    assert not s3.leftover_uploads(run.storage.bucket)  # type: ignore[attr-defined]


def test_a_layout_is_what_torch_save_writes() -> None:
    snapshot, file = snapshot_of(), io.BytesIO()
    torch.save(snapshot.state, file)
    layout = Layout(snapshot.state, snapshot.slot)
    assert layout.size == len(file.getvalue())
    for part_size in (PART, 9_973):
        parts = layout.cut(lambda number, size=part_size: size + number)
        again = [layout_from_json(layout_to_json(part)) for part in parts]
        contents = [read_spans(part, snapshot.slot) for part in again]
        assert [len(content) for content in contents[:-1]] == [part_size + n for n in range(1, len(parts))]
        assert b"".join(contents) == file.getvalue()
        assert crc32_of(parts[1], snapshot.slot) == zlib.crc32(contents[1])
    assert sum(len(span) for span in layout.spans if isinstance(span, bytes)) < 5000


def test_each_node_sends_its_share(run: Run, s3_proxy: FaultProxy, sent: list[tuple[str, int]]) -> None:
    for name in ("TryPart", "UploadPart"):
        s3_proxy.on(name, s3.refuse_damage)
    mine, theirs = snapshot_of(), snapshot_of()
    nodes = [Node(run, rank) for rank in (2, 5)]
    warnings: list[str] = []
    writer = SharedWriter([2, 5], warnings.append)
    for node in nodes:
        node.sender.offer(theirs)
    files = writer(run, mine)
    assert not [read for read in s3_proxy.seen("GetObject") if read.path.endswith(".pt") and "extra" not in read.path]
    assert_whole(run, mine, files)
    assert sorted(sent) == sorted([("rank 0", n) for n in (1, 4, 1)] + [("helper", n) for n in (2, 3, 2, 3)])
    assert not warnings
    wait_until(lambda: not theirs.slot.uploading)


def test_parts_of_a_node_that_is_gone_are_sent_by_rank_0(
    run: Run, sent: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sunspot.checkpoint.shared_upload, "LATE_S", 0.3)
    warnings: list[str] = []
    writer = SharedWriter([1], warnings.append)
    first = snapshot_of()
    assert_whole(run, first, writer(run, first))
    assert {who for who, _ in sent} == {"rank 0"}
    assert "rank 1 has not sent its parts in time" in warnings[0]
    run.storage.delete_many([entry.key for entry in run.storage.list("run")])
    second = snapshot_of("step-000000000002-0001-a")
    assert_whole(run, second, writer(run, second))
    assert len(warnings) == 1, "it is not asked again"


def test_a_node_that_dies_on_the_way_costs_no_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, sent: list[tuple[str, int]]
) -> None:
    monkeypatch.setattr(sunspot.checkpoint.shared_upload, "LATE_S", 0.3)
    send = MultipartUpload.send

    def send_one(self: MultipartUpload, number: int, body: bytearray) -> Any:
        if not self._verifies and number > 2:
            raise StorageError("gone")
        return send(self, number, body)

    monkeypatch.setattr(MultipartUpload, "send", send_one)
    node, mine, warnings = Node(run, 1), snapshot_of(), list[str]()
    theirs = snapshot_of()
    node.sender.offer(theirs)
    assert_whole(run, mine, SharedWriter([1], warnings.append)(run, mine))
    assert ("helper", 2) in sent
    assert ("rank 0", 4) in sent
    assert "has not sent its parts in time" in warnings[0]
    wait_until(lambda: not theirs.slot.uploading)
    assert "was not sent: gone" in node.warnings[0]


def test_a_part_that_is_not_that_of_rank_0_is_refused(run: Run, sent: list[tuple[str, int]]) -> None:
    mine, theirs, warnings = snapshot_of(), snapshot_of(), list[str]()
    theirs.slot.map[PART + 1000] ^= 1
    Node(run, 1).sender.offer(theirs)
    assert_whole(run, mine, SharedWriter([1], warnings.append)(run, mine))
    assert ("helper", 2) in sent
    assert ("rank 0", 2) in sent
    assert "rank 1 sent other bytes than rank 0 has" in warnings[0]


def test_a_second_try_is_made_by_rank_0_alone(run: Run, s3_proxy: FaultProxy, sent: list[tuple[str, int]]) -> None:
    s3_proxy.on("CompleteMultipartUpload", s3.answer(403, "AccessDenied"), times=1)
    mine, theirs = snapshot_of(), snapshot_of()
    writer = SharedWriter([1], print)
    Node(run, 1).sender.offer(theirs)
    with pytest.raises(StorageError, match="AccessDenied"):
        writer(run, mine)
    assert not s3.leftover_uploads(run.storage.bucket)  # type: ignore[attr-defined]
    del sent[:]
    assert_whole(run, mine, writer(run, mine))
    assert {who for who, _ in sent} == {"rank 0"}


def test_a_sender_holds_what_rank_0_commits_and_the_newest(run: Run) -> None:
    node = Node(run, 1)
    copies = [snapshot_of(f"step-{n}") for n in range(4)]
    for copy in copies:
        node.sender.offer(copy)
    assert [copy.slot.uploading for copy in copies] == [True, False, False, True]
    mine = snapshot_of("step-3")
    assert_whole(run, mine, SharedWriter([1], print)(run, mine))
    wait_until(lambda: not any(copy.slot.uploading for copy in copies))
    late = Node(run, 1, limit_s=0.1)
    late.sender.offer(first := snapshot_of("step-4"))
    wait_until(lambda: not first.slot.uploading)


def test_a_worker_group_uploads_together(run: Run, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.Adam(model.parameters())

    def act(group: Any) -> tuple[list[str], bool]:
        rank, warnings = group.rank(), list[str]()
        here, attempt = open_run(run.location.rpartition("/")[0], "run"), Attempt(1, "me", None, 0)
        assert rank or claim(here, [], attempt)
        checkpoints = CheckpointManager(
            here,
            attempt,
            Plan(Settings(), EmptySource((1, 40), 10), None, Steps(1000, 10), 100),
            model,
            optimizer,
            group=group,
            rank=rank,
            world_size=2,
            memory=NodeMemory(here.location, warnings.append),
            warn=warnings.append,
        )
        model(torch.ones(1, 200)).sum().backward()
        checkpoints.wait_for_copy()
        optimizer.step()
        checkpoints.took_step(1, None)
        checkpoints.save(1, {"loss": 1.0})
        checkpoints.wait_for_copy()
        checkpoints.close(finished=True)
        return warnings, checkpoints.newest is not None

    assert in_processes(tmp_path, 2, act) == [([], True), ([], False)]
    written = {each.path.rpartition("/")[2] for each in s3_proxy.seen("PutObject")}
    assert {"share-00001.json", "sent-00001.json"} <= written
    (checkpoint,) = list_checkpoints(run)
    assert find_faults(run, checkpoint) == []
    assert set(checkpoint.files) == {"model.pt", "optimizer.pt", "extra_state.pt"}
