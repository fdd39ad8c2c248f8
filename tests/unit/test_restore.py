"""Tests of which state a worker group starts from, in storage or in the nodes' memory, and of a restart's cost."""

from __future__ import annotations

import importlib.util
import os
import pickle
import pkgutil
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sunspot.checkpoint.memory_files
import sunspot.elastic.claim
import sunspot.elastic.restore
import sunspot.run.attempts
from sunspot.checkpoint.memory import NodeMemory
from sunspot.checkpoint.memory_files import Heartbeat, MemorySnapshot, Sidecar, find_snapshot
from sunspot.checkpoint.node_state import NodeParts, NodeState, PartCopy
from sunspot.checkpoint.tensors import in_buffer, map_tensors, size_of
from sunspot.elastic.claim import CheckpointLoaders, LocalState, PastRecords, StartPoint, begin_attempt
from sunspot.elastic.copies import ChosenCopy, NodeInventory, choose_copy, choose_parts
from sunspot.elastic.messages import Incident
from sunspot.elastic.receipts import Phases, complete_step, first_incident, make_receipt
from sunspot.elastic.restore import TrainingState, choose_init, load_init, load_start, read_init
from sunspot.errors import ConflictError, DamageError, SettingsError, StorageError, SupersededError
from sunspot.run import Claimant, Run, open_run
from sunspot.run.attempts import (
    IN_PLACE,
    Attempt,
    Metadata,
    checkpoint_name,
    ensure_owner,
    lineage,
    read_attempts,
    read_error,
)
from sunspot.run.checkpoints import (
    Checkpoint,
    delete_checkpoint,
    find_faults,
    find_newest_good,
    read_manifest,
    write_manifest,
)
from sunspot.run.incidents import Cause, Receipt, describe_receipt
from sunspot.run.overview import LOST_AFTER_S
from sunspot.run.status import RunState, Status, write_status
from sunspot.settings import Settings
from sunspot.storage.limits import retry_storage
from sunspot.storage.local import LocalStorage
from sunspot.train.reporter import warn_of_notice
from tests.harness.constants import SetConstants
from tests.harness.runs import begin, commit, consumed, record_audit, report, start

SETTINGS = Settings(global_batch_size=5)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path), "run"))


def copy(attempt: int, step: int, evaluated: bool = True, crc32: int = 1, nonce: str = "") -> MemorySnapshot:
    return MemorySnapshot(attempt, step, evaluated, 0.0, 100, crc32, "file", nonce)


def machines(*copies: MemorySnapshot | None) -> list[NodeInventory]:
    return [NodeInventory(f"host-{rank}", f"node-{rank}", copy, []) for rank, copy in enumerate(copies)]


def begin_start(run: Run, *copies: MemorySnapshot | None) -> StartPoint:
    found = begin_attempt(Claimant(run, "me"), SETTINGS, machines(*(copies or [None])))
    assert found
    return found


def test_a_group_starts_from_the_newest_state_in_storage_or_memory(run: Run) -> None:
    first = start(run, "me")
    commit(run, first, 5)
    found = begin_start(run, None, copy(1, 7), copy(1, 9))
    assert (found.attempt.step, found.attempt.starts_from, found.copy and found.copy.rank) == (
        9,
        checkpoint_name(9, 1),
        2,
    )
    assert found.attempt.metadata.tier == "memory"
    assert found.checkpoint is None
    assert read_attempts(run)[-1] == found.attempt
    # The steps of the second attempt before its own first copy are lost, but the copy from which it started counts.
    found = begin_start(run, copy(1, 9), None)
    assert (found.attempt.number, found.attempt.step, found.copy and found.copy.rank) == (3, 9, 0)
    found = begin_start(run, None)
    assert (found.attempt.step, found.attempt.metadata.tier) == (5, "storage")
    # From here on, step 9 of the first attempt is outside the lineage.
    found = begin_start(run, copy(1, 9))
    assert (found.attempt.step, found.copy) == (5, None)


def part(number: int, of: int, step: int, file: str = "file") -> MemorySnapshot:
    return replace(copy(1, step), part=number, parts=of, file=file)


def holders(*nodes: tuple[MemorySnapshot, ...]) -> list[NodeInventory]:
    return [NodeInventory("host", f"node-{rank}", None, [], parts) for rank, parts in enumerate(nodes)]


OLD, NEW = [[part(number, 2, step) for number in range(2)] for step in (7, 9)]
LEFT = [(*OLD, NEW[0]), (NEW[1],), (NEW[0],)]


@pytest.mark.parametrize(
    ("nodes", "damaged", "step", "ranks"),
    [
        pytest.param([(*OLD, NEW[0]), (OLD[1],)], [], 7, [0, 1], id="part 1 of the newest is missing"),
        pytest.param(LEFT, [], 9, [0, 1], id="the newest"),
        pytest.param(LEFT, [0], 9, [2, 1], id="one of two copies is damaged"),
        pytest.param(LEFT, [0, 2], 7, [0, 0], id="both copies are damaged"),
        pytest.param(LEFT, [1], 7, [0, 0], id="the only copy is damaged"),
        pytest.param([(OLD[0], NEW[0]), (NEW[0],)], [], 5, [], id="only storage is complete"),
    ],
)
def test_a_sharded_state_can_be_used_if_every_shard_exists(
    nodes: list[tuple[MemorySnapshot, ...]], damaged: list[int], step: int, ranks: list[int], run: Run
) -> None:
    """`damaged` names the ranks that find their parts of the newest state damaged."""
    commit(run, start(run, "me"), 5)

    def read(parts: Sequence[PartCopy]) -> list[PartCopy]:
        assert not read_attempts(run)[-1].chosen, "not before it is known to be whole"
        return [each for each in parts if each.rank in damaged and each.snapshot.step == 9]

    found = begin_attempt(Claimant(run, "me"), SETTINGS, holders(*nodes), loaders=CheckpointLoaders(load_parts=read))
    assert (found.attempt.step, found.attempt.starts_from) == (step, checkpoint_name(step, 1))
    assert found.attempt.metadata.tier == ("memory" if ranks else "storage")
    parts = found.copy.parts if found.copy else ()
    assert [each.rank for each in parts] == ranks
    assert {each.snapshot.step for each in parts} <= {step}


def test_a_group_starts_from_the_newer_of_an_unsharded_and_a_sharded_state(run: Run) -> None:
    attempts = [start(run, "me")]
    for whole, expected in [(8, (1, 9, 1)), (9, (0, 9, 0)), (10, (0, 10, 0))]:
        machines = [NodeInventory("a", "a", copy(1, whole), []), NodeInventory("b", "b", None, [], (part(0, 1, 9),))]
        chosen = choose_copy(attempts, machines)
        assert (chosen.rank, chosen.snapshot.step, len(chosen.parts)) == expected


@given(st.data(), st.integers(1, 4), st.lists(st.sampled_from("abc"), min_size=1, max_size=5))
def test_a_group_starts_from_the_newest_complete_sharded_state(
    data: st.DataObject, parts: int, nodes: list[str]
) -> None:
    each = st.tuples(st.integers(1, 3), st.integers(0, parts - 1), st.sampled_from(nodes))
    left = data.draw(st.sets(each, max_size=20))
    machines = [
        NodeInventory(
            node, node, None, [], tuple(part(p, parts, s, f"{s}-{p}") for s, p, n in sorted(left) if n == node)
        )
        if nodes.index(node) == rank
        else NodeInventory(node, node, None, [])
        for rank, node in enumerate(nodes)
    ]
    whole = [step for step in (1, 2, 3) if {p for s, p, _ in left if s == step} == set(range(parts))]
    chosen = choose_parts([Attempt(1, "me", None, 0)], machines)
    assert [each.snapshot.part for each in chosen] == (list(range(parts)) if whole else [])
    assert {each.snapshot.step for each in chosen} == set(whole[-1:])
    assert all((each.snapshot.step, each.snapshot.part, nodes[each.rank]) in left for each in chosen)


def test_a_copy_left_by_a_superseded_attempt_is_ignored(run: Run) -> None:
    first = start(run, "other")
    commit(run, first, 5)
    start(run, "me", checkpoint_name(5, 1))
    assert choose_copy(read_attempts(run), machines(copy(1, 8), None)) is None
    assert choose_copy(read_attempts(run), machines(copy(1, 8), copy(2, 6))) == ChosenCopy(1, copy(2, 6))


def test_an_older_copy_in_memory_is_used_if_the_checkpoint_is_damaged(run: Run) -> None:
    first = start(run, "me")
    commit(run, first, 5)
    name = commit(run, first, 10).name
    Path(run.storage.locate(run.key("checkpoints", name, "model.pt"))).write_bytes(b"")
    found = begin_start(run, copy(1, 8))
    assert (found.attempt.step, found.attempt.metadata.tier) == (8, "memory")
    assert name in found.attempt.skipped[0]


def test_all_ranks_skip_a_checkpoint_that_any_rank_finds_damaged(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 reads wrong bytes from the newest checkpoint, and this rank (0) reads them from the previous one."""
    first = start(run, "me")
    names = [commit(run, first, step).name for step in (5, 10, 15)]
    reads: list[str] = []

    def read(checkpoint: Checkpoint) -> list[str]:
        assert not read_attempts(run)[-1].chosen, "not before it is known to be whole"
        reads.append(checkpoint.name)
        return ["model.pt is missing"] if checkpoint.step == 10 else []

    def gather(mine: list[str], group: Any) -> list[list[str]]:
        return [mine, ["optimizer.pt has 1 bytes instead of 2"] if reads[-1] == names[2] else []]

    monkeypatch.setattr("sunspot.elastic.claim.gather_objects", gather)
    found = begin_attempt(Claimant(run, "me"), SETTINGS, machines(None, None), loaders=CheckpointLoaders(read))
    assert found
    assert reads == names[::-1]
    assert (found.attempt.step, found.checkpoint and found.checkpoint.name) == (5, names[0])
    assert found.attempt.skipped == (
        f"{names[2]}: damaged, optimizer.pt has 1 bytes instead of 2",
        f"{names[1]}: damaged, model.pt is missing",
    )
    assert read_attempts(run)[-1] == found.attempt


def test_starting_an_attempt_does_not_read_checkpoint_files(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(run, start(run, "me"), 5)
    opened: list[str] = []
    monkeypatch.setattr(LocalStorage, "digest", lambda *arguments: opened.append(arguments[1]) or (0, ""))
    found = begin_attempt(Claimant(run, "me"), SETTINGS, machines(None), loaders=CheckpointLoaders(lambda _: []))
    assert found.attempt.step == 5
    assert opened == []


def test_a_checkpoint_is_preferred_to_a_copy_in_memory_that_was_not_evaluated(run: Run) -> None:
    commit(run, start(run, "me"), 5)
    assert begin_start(run, copy(1, 5, evaluated=False)).copy is None
    assert begin_start(run, copy(1, 5, evaluated=True)).copy


def test_the_starting_checkpoint_of_a_run_is_not_deleted_while_it_is_verified(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous owner commits and deletes expired checkpoints while its successor reads the newest one."""
    first = start(run, "other")
    base = commit(run, first, 5)
    digest = LocalStorage.digest

    def interrupted(*arguments: Any) -> tuple[int, str]:
        monkeypatch.setattr(LocalStorage, "digest", digest)
        with suppress(SupersededError):
            ensure_owner(run, first)
            commit(run, first, 10)
            ensure_owner(run, first)
            delete_checkpoint(run, base.name)
        return digest(*arguments)

    monkeypatch.setattr(LocalStorage, "digest", interrupted)
    found = begin_start(run)
    assert found.attempt.starts_from
    checkpoint = read_manifest(run, found.attempt.starts_from)
    assert checkpoint
    assert find_faults(run, checkpoint) == []


def test_a_process_that_dies_before_choosing_its_starting_checkpoint_costs_no_steps(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(run, start(run, "other"), 5)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sunspot.elastic.claim.record_start", die)
        with pytest.raises(KeyboardInterrupt):
            begin_start(run)
    claimed = read_attempts(run)[-1]
    assert (claimed.number, claimed.chosen) == (2, False)
    assert [span.attempt for span in lineage(read_attempts(run))] == [1]
    found = begin_start(run)
    assert (found.attempt.number, found.attempt.step, found.attempt.chosen) == (3, 5, True)
    assert [span.attempt for span in lineage(read_attempts(run))] == [3, 1]


def test_a_copy_from_a_deleted_run_with_the_same_name_is_ignored(run: Run) -> None:
    first = begin_start(run).attempt
    ours = copy(1, 3, nonce=first.nonce)
    assert begin_start(run, copy(1, 500, nonce="00000000"), ours).copy == ChosenCopy(1, ours)
    assert begin_start(run, copy(1, 500)).copy is None


def test_a_process_of_a_deleted_run_cannot_change_a_new_run_with_the_same_name(run: Run) -> None:
    old = begin_start(run).attempt
    kept = commit(run, old, 5)
    for entry in run.storage.list(run.key("attempts")):
        run.storage.delete(entry.key)
    new = begin_start(run).attempt
    assert (new.number, new.step) == (old.number, 0), "a checkpoint of the deleted run does not count"
    with pytest.raises(SupersededError, match="was deleted while attempt 1"):
        ensure_owner(run, old)
    ensure_owner(run, new)
    assert commit(run, new, 5).name != kept.name, "late files of the old process lie beside the new one's"


def test_a_claim_fails_if_the_run_was_started_over_with_different_settings(run: Run) -> None:
    """The process was frozen between comparing its settings and its claim."""
    with pytest.raises(ConflictError, match="SUNSPOT_GLOBAL_BATCH_SIZE: 5 -> 7"):
        begin_attempt(Claimant(run, "me"), Settings(global_batch_size=7), machines(None))
    assert not read_attempts(run)[-1].chosen


def damaged_run(run: Run) -> str:
    """Damage both checkpoints of a run, and return the name of the newest."""
    first = start(run, "me")
    names = [commit(run, first, step).name for step in (5, 10)]
    for name in names:
        Path(run.storage.locate(run.key("checkpoints", name, "model.pt"))).write_bytes(b"")
    return names[-1]


def test_a_run_without_an_intact_checkpoint_is_not_started_over(run: Run) -> None:
    newest = damaged_run(run)
    with pytest.raises(
        DamageError, match=rf"no intact checkpoint left(?s:.)*damaged(?s:.)*damaged(?s:.)*ACCEPT=loss-of-{newest}"
    ):
        begin_start(run)
    assert [attempt.chosen for attempt in read_attempts(run)] == [True, False]
    assert isinstance(read_error(run, 2), DamageError), "a retry of the job ends at once"
    assert begin_attempt(Claimant(run, "me"), SETTINGS, machines(None)) is None
    with pytest.raises(DamageError, match="no intact checkpoint left"):
        begin_attempt(Claimant(run, "you"), Settings(global_batch_size=5, accept="loss-of-another"), machines(None))


def test_a_checkpoint_that_is_being_deleted_is_not_reported_as_damaged(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion removes files while they are read, and it also removes the claim."""
    damaged_run(run)
    find = sunspot.elastic.claim.find_newest_good

    def find_while_deleted(*words: Any, **more: Any) -> Any:
        run.storage.delete(run.key("attempts", "0002.json"))
        return find(*words, **more)

    monkeypatch.setattr("sunspot.elastic.claim.find_newest_good", find_while_deleted)
    assert begin_attempt(Claimant(run, "me"), SETTINGS, machines(None)) is None
    assert read_error(run, 2) is None


def test_a_restored_state_includes_its_pending_evaluation_and_rows(run: Run) -> None:
    """The evaluation was never made, and storage does not have the rows yet."""
    checkpoint = replace(commit(run, start(run, "me"), 5), evaluated=False)
    write_manifest(run, checkpoint)
    node: Any = SimpleNamespace(load=lambda checkpoint: {}, close=lambda: None)
    group: Any = None
    restored = load_start(run, Settings(), begin_start(run), LocalState(None, node, NodeParts(None, ["me"])), group)
    assert not restored.evaluated

    sidecar = Sidecar(None, {"metrics": {}, "total_steps": 10}, [], [(6, 7, "rows")], [])
    held: Any = SimpleNamespace(describe=lambda: sidecar, load=None)
    in_memory = replace(a_start(at(2, 0.0)), copy=ChosenCopy(0, copy(1, 7), [PartCopy(0, copy(1, 7))]))
    restored = load_start(run, Settings(), in_memory, LocalState(None, node, held), group)
    assert restored.ledger == ((6, 7, "rows"),)


def test_a_run_with_damaged_checkpoints_continues_from_memory(run: Run) -> None:
    damaged_run(run)
    found = begin_start(run, None, copy(1, 8))
    assert (found.attempt.step, found.attempt.metadata.tier) == (8, "memory")


def test_a_run_is_started_over_if_the_loss_of_its_checkpoints_is_accepted(run: Run) -> None:
    newest = damaged_run(run)
    found = begin_attempt(
        Claimant(run, "me"), Settings(global_batch_size=5, accept=f"loss-of-{newest}"), machines(None)
    )
    assert (found.attempt.step, found.attempt.starts_from) == (0, None)
    assert newest in found.attempt.skipped[0]
    assert begin_start(run).attempt.number == 3, (
        "the lost checkpoints are outside the lineage, so a retry needs no consent"
    )


def test_the_removal_of_the_last_checkpoint_is_detected(run: Run) -> None:
    name = commit(run, start(run, "me"), 5).name
    assert begin_start(run).attempt.starts_from == name
    delete_checkpoint(run, name)
    with pytest.raises(DamageError, match=f"{name}: gone, attempt 2 started from it(?s:.)*ACCEPT=loss-of-{name}"):
        begin_attempt(Claimant(run, "you"), SETTINGS, machines(None))
    found = begin_attempt(
        Claimant(run, "they"), Settings(global_batch_size=5, accept=f"loss-of-{name}"), machines(None)
    )
    assert found.attempt.starts_from is None
    assert begin_attempt(Claimant(run, "they"), SETTINGS, machines(None)), "consent is needed only once"


def test_a_checkpoint_that_was_never_committed_is_not_reported_as_lost(run: Run) -> None:
    name = commit(run, start(run, "me"), 5).name
    run.storage.delete(run.key("checkpoints", name, "manifest.json"))
    assert begin_start(run).attempt.step == 0


def test_a_failed_claim_is_retried_with_the_next_number(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = sunspot.run.attempts.claim

    def lose(*arguments: Any) -> bool:
        monkeypatch.setattr(sunspot.run.attempts, "claim", claim)
        start(run, "other")
        return claim(*arguments)

    monkeypatch.setattr(sunspot.run.attempts, "claim", lose)
    assert begin_start(run).attempt.number == 2


def test_no_start_is_recorded_in_a_run_that_is_being_deleted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LocalStorage.create

    def create_late(storage: LocalStorage, key: str, data: bytes) -> bool:
        if "-start-" in key:
            run.storage.delete_many([entry.key for entry in run.storage.list(run.key("attempts"))])
        return create(storage, key, data)

    monkeypatch.setattr(LocalStorage, "create", create_late)
    assert begin_attempt(Claimant(run, "me"), SETTINGS, machines(None)) is None
    assert run.storage.list(run.key("attempts")) == []


def test_an_evaluation_repeated_by_the_next_attempt_belongs_to_the_lineage(run: Run) -> None:
    base = commit(run, start(run, "me"), 5)
    evaluated = commit(run, start(run, "me", base.name), 5)
    newest, _ = find_newest_good(run, read_attempts(run))
    assert newest.name == evaluated.name


@pytest.mark.parametrize("tier", ["memory", "storage"])
def test_a_state_loaded_from_memory_or_storage_has_its_metrics_and_pending_work(
    tier: str, run: Run, tmp_path: Path, set_constants: SetConstants
) -> None:
    """A state in memory also has the rows that no audit in storage contains."""
    set_constants(sunspot.checkpoint.memory_files, SHARED_MEMORY=tmp_path)
    first = start(run, "me")
    values = {"model": {"weight": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": []}}
    name = checkpoint_name(7, 1, first.nonce)
    metrics = {"loss": 0.5}
    windows = ((1, 1, 7, [3]),)
    manifest = Checkpoint(name, 7, 1, 10, 10, 1, metrics, evaluated=False)
    if tier == "memory":
        structure = map_tensors(values, lambda tensor: torch.empty_like(tensor, device="meta"))
        memory = NodeMemory(run.location)
        slot = memory.free_slot(size_of(structure), needed=True)
        in_buffer(structure, slot.map)["model"]["weight"].fill_(1)
        sidecar = Sidecar(structure, {"metrics": metrics, "total_steps": 10}, [None], list(windows), [])
        memory.complete(slot, manifest, sidecar.to_bytes())
    else:
        files = {}
        for kind, value in values.items():
            with run.storage.writer(run.key("checkpoints", name, f"{kind}.pt")) as writer:
                torch.save(value, writer)  # it needs only write()
            files[f"{kind}.pt"] = {"size": writer.size, "sha256": writer.sha256}
        write_manifest(run, replace(manifest, files=files))
    found, node = find_snapshot(run.location), NodeState(run, None, ["node"])
    chosen = begin_attempt(
        Claimant(run, "me"), SETTINGS, machines(found and found.snapshot), loaders=CheckpointLoaders(node.read)
    )
    assert chosen
    state = load_start(
        run, Settings(), chosen, LocalState(found, node, NodeParts(None, ["node"])), None
    )  # a single worker
    assert state.model["weight"].tolist() == [1, 1]
    assert (state.tier, state.evaluated, state.metrics) == (tier, False, metrics)
    assert state.ledger == (windows if tier == "memory" else ())


@pytest.mark.parametrize(
    ("ends", "step"),
    [
        pytest.param("before a step", 5, id="crashes"),
        pytest.param("after a step", 9, id="took a step"),
        pytest.param("with its node", 9, id="lost a node"),
    ],
)
def test_a_copy_in_memory_is_skipped_after_two_groups_took_no_step_from_it(ends: str, step: int, run: Run) -> None:
    commit(run, start(run, "me"), 5)
    nodes = machines(copy(1, 9), None)
    heartbeats = []
    for number in (2, 3):
        found = begin_attempt(Claimant(run, "me"), SETTINGS, nodes)
        assert (found.attempt.number, found.attempt.step) == (number, 9), "a single group may have been unlucky"
        if ends == "after a step":
            heartbeats = [Heartbeat(number, 10, 0.0)]
        if ends == "with its node":
            nodes[1] = nodes[1]._replace(host=f"new-{number}")
        nodes[0] = nodes[0]._replace(heartbeats=heartbeats)
    found = begin_attempt(Claimant(run, "me"), SETTINGS, nodes)
    assert found.attempt.step == step
    passed_over = f"{checkpoint_name(9, 1)} in memory: the last two groups that started from it took no step"
    assert found.attempt.skipped == ((passed_over,) if step == 5 else ())


def at(number: int, time: float, world_size: int = 2, step: int = 0) -> Attempt:
    return Attempt(number, "me", None, step, time=time, metadata=Metadata(world_size=world_size))


def a_start(attempt: Attempt, *before: Attempt, receipts: Sequence[Receipt] = ()) -> StartPoint:
    return StartPoint(attempt, before, past=PastRecords([Heartbeat(1, 14, 99.0)], receipts))


def test_a_receipt_records_the_cost_of_a_restart() -> None:
    begin_receipt = Receipt(1, 0, Cause.BEGIN, "", None, None, None, 10, 12, 10, 0, 0, "beginning", 0, 2)
    now = a_start(at(2, 105, 1, step=12), at(1, 10), receipts=[replace(begin_receipt, attempt=1)])
    incident = Incident(Cause.PREEMPTED, "node x", noticed=100.0, committed=101.0, last_step=13)
    receipt = make_receipt(now, TrainingState(taken=98.0, tier="memory"), incident, first_step=110.0)
    assert (receipt.since, receipt.cause, receipt.replayed) == (1, Cause.PREEMPTED, 2)
    assert receipt.recovery_s == 10
    assert receipt.worker_seconds_lost == pytest.approx(2 * 7 + 1 * 5)


def test_a_pause_does_not_count_as_lost_time() -> None:
    ended = Status(RunState.FAILED, "me", time=50.0, step=14)
    now = replace(a_start(claimed_by("new", at(2, 1000, step=14)), at(1, 10)), past=PastRecords(other=ended))
    incident = first_incident(now)
    assert incident.cause is Cause.RESUMED
    receipt = make_receipt(now, TrainingState(taken=40.0), incident, 1010.0)
    assert receipt.paused_s == 950
    assert receipt.worker_seconds_lost == pytest.approx(2 * 10 + 2 * 10)


def test_the_time_until_a_lost_run_is_started_again_counts_as_a_pause() -> None:
    """The run's nodes are gone by that time, unless the operator has only replaced the head."""
    lost = Status(RunState.RUNNING, "before", time=50.0, step=14)
    now = replace(a_start(claimed_by("new", at(2, 9000, step=14)), at(1, 10)), past=PastRecords(other=lost))
    receipt = make_receipt(now, TrainingState(taken=40.0), first_incident(now), 9010.0)
    assert (receipt.cause, receipt.paused_s) == (Cause.DRIVER_LOST, 9000 - 50 - LOST_AFTER_S)
    replaced = replace(now, past=PastRecords(other=replace(lost, owner=now.attempt.owner)))
    assert make_receipt(replaced, TrainingState(taken=40.0), first_incident(replaced), 9010.0).paused_s == 0


def claimed_by(driver: str, attempt: Attempt) -> Attempt:
    return replace(attempt, metadata=replace(attempt.metadata, driver=driver))


@pytest.mark.parametrize(
    ("last_status", "of", "cause", "detail"),
    [
        (60.0, "old-1", Cause.TAKEN_OVER, "by new-2, from old-1 at step 20"),
        (40.0, "old-1", Cause.DRIVER_LOST, "the previous driver wrote no status after step 20"),
        (
            48.0,
            "old-1@sunspot/b",
            Cause.TAKEN_OVER,
            "by new-2, from old-1 in namespace sunspot of cluster b at step 20",
        ),
        (40.0, "old-1@sunspot/b", Cause.DRIVER_LOST, "the previous driver wrote no status after step 20"),
        (60.0, "new-2", Cause.DRIVER_LOST, "the previous driver wrote no status after step 20"),
        (None, "old-1", Cause.DRIVER_LOST, "the previous driver wrote no status"),
    ],
    ids=[
        "still trains",
        "frozen",
        "trains elsewhere",
        "frozen elsewhere",
        "the same job, whose workers survive its driver",
        "left no status",
    ],
)
def test_taking_over_a_live_run_is_not_recorded_as_a_lost_driver(
    last_status: float | None, of: str, cause: Cause, detail: str, run: Run
) -> None:
    """The new driver begins at 50 s, while the group of the first start takes step 20, and claims the run at 70 s."""
    write_status(run, Status(RunState.STARTING, "new-2", began=50.0, attempt=1, driver="2" * 8))
    if last_status is not None:
        write_status(run, Status(RunState.RUNNING, of, step=20, attempt=1, driver="1" * 8))
    for status in run.storage.list(run.key("status")):
        moment = 65.0 if "2" * 8 in status.key else last_status or 0.0
        os.utime(Path(run.storage.locate(status.key)), (moment, moment))
    start(run, of, at=10.0, world_size=2, driver="1" * 8, tier="beginning")
    commit(run, read_attempts(run)[0], 15)
    found = begin_attempt(Claimant(run, "new-2", "2" * 8), SETTINGS, machines(None, None))
    now = replace(found, attempt=replace(found.attempt, time=70.0))
    incident = first_incident(now)
    assert (incident.cause, incident.detail) == (cause, detail)
    phases = Phases(launched=52.0, up=58.0, formed=66.0, loaded=72.0)
    receipt = make_receipt(now, TrainingState(taken=62.0), incident, 75.0, phases)
    assert receipt.replayed == (5 if last_status else 0)
    assert all(at >= 0 for at in receipt.phases.values()), "the processes began before the last step of the old group"
    assert ("first step 5.0 s after the start" in describe_receipt(receipt)) == (cause is Cause.TAKEN_OVER)
    later = replace(now, before=[*now.before, now.attempt], attempt=claimed_by("2" * 8, at(3, 90)))
    assert first_incident(later) == Incident(), "the previous group was this driver's, so the cause is known"


def test_an_incident_shows_the_last_saved_step_instead_of_the_step_in_an_older_status(run: Run) -> None:
    first = start(run, "old-1", at=10.0, world_size=2, driver="1" * 8, tier="beginning")
    write_status(run, Status(RunState.FAILED, "old-1", step=827, attempt=1, driver="1" * 8))
    commit(run, first, 846)
    again = begin_attempt(Claimant(run, "new-2", "2" * 8), SETTINGS, machines(None, None))
    incident = first_incident(again)
    assert (incident.cause, incident.last_step) == (Cause.RESUMED, 846)
    assert incident.detail == "the previous driver ended at step 846: failed"


ENDS: dict[str, dict[str, Any]] = {
    "success of an older version": {"state": RunState.SUCCEEDED},
    "a stop of an older version": {"state": RunState.STOPPED},
    "an interruption of an older version": {"state": RunState.STOPPED, "reason": "interrupted: step 36 of 90 is kept"},
    "a stop before a driver's first step": {"state": RunState.STOPPED, "heartbeat": None},
    "an interruption without a save": {"state": RunState.STOPPED, "reason": "interrupted; the same command resumes it"},
    "a stop after a step that was not saved": {"state": RunState.STOPPED, "step": 35},
}
"""Fields of a run's last status if `saved` is not set."""


@pytest.mark.parametrize(
    ("evidence", "replayed"),
    [
        ("an incomplete checkpoint", "at least 3 steps"),
        ("an incomplete checkpoint, but no status", "at least 3 steps"),
        ("a metric record", "at least 2 steps"),
        ("an audit file", "at least 4 steps"),
        ("a later attempt that took no step", "at least 1 step"),
        ("nothing", "an unknown number of steps"),
        ("a heartbeat", "5 steps"),
        ("a save at the end", "0 steps"),
        ("success of an older version", "0 steps"),
        ("a stop of an older version", "0 steps"),
        ("an interruption of an older version", "0 steps"),
        ("a stop before a driver's first step", "an unknown number of steps"),
        ("an interruption without a save", "an unknown number of steps"),
        ("a stop after a step that was not saved", "an unknown number of steps"),
        ("a checkpoint of a deleted run", "an unknown number of steps"),
    ],
)
def test_a_receipt_counts_the_steps_that_were_provably_taken(evidence: str, replayed: str, run: Run) -> None:
    """All processes of a run are lost, and another driver continues from its newest checkpoint, at step 36."""
    lost = start(run, "old-1", world_size=2, driver="1" * 8, tier="beginning")
    commit(run, lost, 36)
    status = Status(RunState.RUNNING, "old-1", step=36, attempt=1, driver="1" * 8)
    nodes = machines(None)
    if evidence.startswith("an incomplete checkpoint"):
        run.storage.write(run.key("checkpoints", checkpoint_name(39, 1, lost.nonce), "model.pt"), b"model")
    elif evidence == "a metric record":
        report(run, lost, {"step": 37, "time": 1.0}, {"step": 38, "time": 2.0})
    elif evidence == "an audit file":
        record_audit(run, lost, consumed(1, 40))
    elif evidence == "a later attempt that took no step":
        commit(run, lost, 37)
        start(run, "old-1", checkpoint_name(37, 1, lost.nonce), driver="1" * 8)
        delete_checkpoint(run, checkpoint_name(37, 1, lost.nonce))
    elif evidence == "a heartbeat":
        nodes = [nodes[0]._replace(heartbeats=[Heartbeat(1, 41, 0.0)])]
    elif evidence == "a save at the end":
        status = replace(status, state=RunState.STOPPED, saved=True)
    elif evidence in ENDS:
        status = replace(status, checkpoint=checkpoint_name(36, 1, lost.nonce), **{"heartbeat": 1.0, **ENDS[evidence]})
    elif evidence == "a checkpoint of a deleted run":
        run.storage.write(run.key("checkpoints", checkpoint_name(39, 1, "0" * 8), "model.pt"), b"model")
    if "no status" not in evidence:
        write_status(run, status)
    now = begin_attempt(Claimant(run, "new-2", "2" * 8), SETTINGS, nodes)
    assert now
    assert now.attempt.step == 36
    receipt = make_receipt(now, TrainingState(taken=40.0, tier="storage"), first_incident(now), time.time())
    assert f", {replayed} replayed, " in describe_receipt(receipt)


def test_the_number_of_repeated_steps_is_exact_if_survivors_continue_in_place() -> None:
    now = replace(a_start(at(2, 105, step=36), at(1, 10)), past=PastRecords())
    incident = Incident(Cause.WORKER_LOST, last_step=36)
    for tier, at_least in ((IN_PLACE, False), ("memory", True)):
        assert make_receipt(now, TrainingState(taken=98.0, tier=tier), incident, 110.0).at_least == at_least


def test_the_first_start_of_a_run_is_not_an_incident(run: Run) -> None:
    assert first_incident(begin_start(run)) == Incident(Cause.BEGIN)


def test_the_user_is_warned_if_a_save_takes_longer_than_the_preemption_notice() -> None:
    assert "takes 30 s to commit, but a notice leaves 27 s" in warn_of_notice(30.0, 27)
    assert warn_of_notice(25.0, 27), "the notice takes time to arrive"
    for save_s, notice_s in [(10.0, 27), (None, 27), (30.0, 0)]:
        assert not warn_of_notice(save_s, notice_s)


def test_storage_retries_end_after_the_timeout(set_constants: SetConstants, warned: list[str]) -> None:
    import sunspot.storage.limits

    set_constants(sunspot.storage.limits, BACKOFF_S=(0.01,))
    answers = iter([StorageError("503"), StorageError("503"), "here"])

    def act() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert retry_storage(5, "reading", act) == "here"
    assert len(warned) == 2

    def refuse() -> str:
        raise StorageError("403 AccessDenied")

    with pytest.raises(StorageError, match=r"reading: storage has failed for .* \(SUNSPOT_STORAGE_TIMEOUT_S=0\.05\)"):
        retry_storage(0.05, "reading", refuse)


def test_functions_named_in_the_elastic_package_docstring_are_callable() -> None:
    names = re.findall(r"^ ?\d+\. (\w+(?:\.\w+)+)", sunspot.elastic.__doc__ or "", re.MULTILINE)
    assert len(names) == 9 + 10
    for name in names:
        package = (
            "sunspot.elastic" if importlib.util.find_spec(f"sunspot.elastic.{name.partition('.')[0]}") else "sunspot"
        )
        assert callable(pkgutil.resolve_name(f"{package}.{name}")), name


class Harmful:
    """An object with a pickle that creates a file when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.touch, (self.proof,)


@pytest.mark.parametrize("kind", ["a pickle", "a pickle in torch's form", "a list", "text", "nothing"])
def test_a_file_without_weights_is_rejected_and_runs_no_code(kind: str, tmp_path: Path) -> None:
    path, proof = tmp_path / "weights.pt", tmp_path / "proof"
    match kind:
        case "a pickle":
            path.write_bytes(pickle.dumps(Harmful(proof)))
        case "a pickle in torch's form":
            torch.save({"weight": Harmful(proof)}, path)
        case "a list":
            torch.save([torch.zeros(1)], path)
        case "text":
            path.write_text("weights")
        case "nothing":
            path.touch()
    with pytest.raises(SettingsError, match=r"SUNSPOT_INIT_FROM=.*weights\.pt.*use a state_dict") as refused:
        read_init(Settings(init_from=str(path)), None)
    assert not proof.exists()
    assert "weights_only" not in str(refused.value), "torch's advice would run the code"


def test_a_path_in_the_init_from_setting_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(2)}, "weights.pt")
    assert read_init(Settings(init_from="weights.pt"), None)["weight"].tolist() == [1, 1]
    with pytest.raises(SettingsError, match="no such file"):
        read_init(Settings(init_from="other.pt"), None)


def test_all_ranks_load_the_checkpoint_that_rank_0_chose_from_a_live_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run commits a newer checkpoint between the times at which two ranks read it."""
    other = open_run(str(tmp_path), "other")
    commit_weights(other, 1)
    settings = Settings(storage_path=str(tmp_path), init_from="run:other")
    chosen: list[Checkpoint | str] = []

    def broadcast_from_rank0(group: Any, choose: Callable[[], Checkpoint | str]) -> Checkpoint | str:
        if not chosen:
            chosen.append(choose())
            commit_weights(other, 2)
        return chosen[0]

    monkeypatch.setattr(sunspot.elastic.restore, "broadcast_from_rank0", broadcast_from_rank0)
    ranks = [read_init(settings, None)["weight"].item() for _ in range(2)]
    assert ranks == [1, 1]


def test_a_file_that_changes_while_ranks_read_it_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    settings = Settings(init_from=str(file))
    with pytest.raises(SettingsError, match=r"weights\.pt: no such file"):
        read_init(settings, None)
    torch.save({"weight": torch.ones(1)}, file)
    chosen = choose_init(settings)
    assert load_init(settings, chosen)["weight"].item() == 1
    torch.save({"weight": torch.zeros(1)}, file)
    with pytest.raises(ConflictError, match=r"weights\.pt was replaced while it was being read"):
        load_init(settings, chosen)


def commit_weights(run: Run, step: int) -> None:
    """Commit a checkpoint with its step as the only weight."""
    attempts = read_attempts(run)
    attempt = attempts[-1] if attempts else start(run, "another")
    name = checkpoint_name(step, attempt.number, attempt.nonce)
    with run.storage.writer(run.key("checkpoints", name, "model.pt")) as writer:
        torch.save({"weight": torch.tensor(step)}, writer)  # it needs only write()
    files = {"model.pt": {"size": writer.size, "sha256": writer.sha256}}
    write_manifest(run, Checkpoint(name, step, 1, 10, 10, attempt.number, files=files))


@pytest.mark.parametrize(
    ("steps", "complete"),
    [
        ({(0, 1): [7, 6]}, 7),
        ({(0, 2): [7, 6], (1, 2): [6]}, 6),
        ({(0, 2): [7, 6], (1, 2): [7, 6]}, 7),
        ({(0, 2): [7]}, 0),
        ({(0, 2): [7], (1, 2): [7], (0, 1): [5]}, 7),
        ({}, 0),
    ],
    ids=["ddp", "one shard lacks the step", "all shards have the step", "unknown shard", "two layouts", "no heartbeat"],
)
def test_a_step_is_complete_if_workers_of_all_shards_have_taken_the_step(
    steps: dict[tuple[int, int], list[int]], complete: int
) -> None:
    heartbeats = [Heartbeat(3, step, 0.0, shard, shards) for (shard, shards), taken in steps.items() for step in taken]
    assert complete_step(heartbeats) == complete
