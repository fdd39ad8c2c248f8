"""Chooses the state that a worker group starts from, and claims an attempt for the group.

The group's ranks agree on the newest intact state. Rank 0 claims the attempt.
"""

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import ray
import torch.distributed as dist

from sunspot.background import start_thread
from sunspot.checkpoint import versions
from sunspot.checkpoint.memory_files import Heartbeat, LoadedSnapshot, find_heartbeats, find_parts, find_snapshot
from sunspot.checkpoint.node_state import NodeParts, NodeState, PartCopy
from sunspot.elastic.copies import (
    ChosenCopy,
    LiveState,
    NodeInventory,
    SurvivingState,
    choose_copy,
    exclude_crashing_copy,
    exclude_damaged_parts,
)
from sunspot.errors import DamageError, SupersededError
from sunspot.parallel.collectives import broadcast_from_rank0, gather_objects, run_on_all_ranks
from sunspot.run import Claimant, Run
from sunspot.run.attempts import (
    IN_PLACE,
    Attempt,
    Metadata,
    attempt_of,
    attempts_with_start,
    claim_next,
    ensure_owner,
    fatal_error,
    label_of,
    lineage,
    new_nonce,
    next_number,
    record_error,
    record_start,
    step_of,
)
from sunspot.run.checkpoints import (
    MANIFEST,
    Checkpoint,
    SkippedCheckpoint,
    Unusable,
    find_faults,
    find_faults_in_listing,
    find_newest_good,
    leads_to_newest,
    list_directories,
)
from sunspot.run.handover import take_over_from
from sunspot.run.history import read_journal
from sunspot.run.identity import refuse_other_settings
from sunspot.run.incidents import Receipt, read_receipts
from sunspot.run.last_step import find_last_step
from sunspot.run.status import RunState, Status, read_status
from sunspot.settings import PREFIX, Settings, accepts
from sunspot.storage.base import Entry
from sunspot.storage.limits import retry_storage

Result = TypeVar("Result")

PROCESS_NONCE = new_nonce()
"""Random name of this process, shared by processes forked from it."""

REASONS_AFTER_SAVE = ("stopped by ", "interrupted: ")
"""Beginnings of a status's reason if the run stopped after a save. After `sunspot stop`, there is no reason."""

NODE_GROUP = "RAY_NODE_TYPE_NAME"
"""Environment variable that names a pod's node group. Ray copies it to the node label ray.io/node-group."""


class CheckpointLoaders(NamedTuple):
    """Functions that load the checkpoints and in-memory copies from which a group can start."""

    load: Callable[[Checkpoint], list[str]] | None = None
    """Function that loads a checkpoint on this rank and returns its faults, or None to verify every byte against the
    manifest."""
    load_parts: Callable[[Sequence[PartCopy]], list[PartCopy]] = lambda parts: []
    "Function that reads the copies of shards that this rank needs, and returns the damaged ones."
    add_copies: Callable[[list[NodeInventory]], list[NodeInventory]] = lambda inventories: inventories
    """Function that adds the in-memory copies to the inventories. All workers call it together if no live state can be
    used."""


DEFAULT_LOADERS = CheckpointLoaders()


class LocalState(NamedTuple):
    """The copy that a rank found on its node, and the rank's readers, which keep the data that they have read."""

    snapshot: LoadedSnapshot | None
    state: NodeState
    parts: NodeParts


@dataclass(frozen=True)
class PastRecords:
    """Records of the run's earlier attempts, from storage and from the nodes."""

    heartbeats: Sequence[Heartbeat] = ()
    "Heartbeats of earlier processes on the nodes."
    receipts: Sequence[Receipt] = ()
    status: Status | None = None
    "The status that this driver has written."
    other: Status | None = None
    "The previous job's status at the time of the claim."
    last_step: int = 0
    "The last step that, according to storage, the attempt of the newest receipt or a later attempt has taken."

    @property
    def since(self) -> int:
        """The attempt of the newest receipt, or 0 if there is no receipt."""
        return max((receipt.attempt for receipt in self.receipts), default=0)

    def knows_end_of(self, attempt: Attempt) -> bool:
        """Return True if the last step of an earlier attempt is known exactly.

        The last step is known if there is a heartbeat of `attempt` or of a later attempt, or if a status proves that
        one of these attempts ended with a save (`ended_saved`).
        """
        saved = [status.attempt for status in (self.status, self.other) if status and ended_saved(status)]
        return any(number >= attempt.number for number in (*saved, *(each.attempt for each in self.heartbeats)))


@dataclass(frozen=True)
class StartPoint:
    """The state from which a worker group starts. It is the same on every rank."""

    attempt: Attempt
    before: Sequence[Attempt] = ()
    "Earlier attempts of the run, oldest first."
    checkpoint: Checkpoint | None = None
    "The checkpoint in storage, or None if `copy` is newer."
    copy: ChosenCopy | None = None
    "Copy in shared memory."
    live: SurvivingState | None = None
    "The surviving processes' state. If it is set, `checkpoint` and `copy` are None."
    nodes: dict[int, str] = field(default_factory=dict)
    "Ray's node id by rank."
    past: PastRecords = PastRecords()


def ended_saved(status: Status) -> bool:
    """Return True if a status proves that the workers of its attempt ended after their last step was committed.

    Older versions did not record `Status.saved`. Their statuses prove the same only if the run succeeded, or if it was
    stopped after a heartbeat, at the step of its newest checkpoint. The heartbeat is required because without it, the
    driver may have stopped before its workers took a step.
    """
    if status.saved or status.state is RunState.SUCCEEDED:
        return True
    stopped = status.state is RunState.STOPPED and (not status.reason or status.reason.startswith(REASONS_AFTER_SAVE))
    return (
        stopped
        and status.heartbeat is not None
        and status.checkpoint is not None
        and step_of(status.checkpoint) == status.step
    )


def process_name() -> str:
    """Return a name that is unique to this process, even if another pod has the same host name and process id."""
    return f"{PROCESS_NONCE}-{os.getpid()}"


def agree_on_start(
    claimant: Claimant, settings: Settings, group: dist.ProcessGroup, live: LiveState | None = None
) -> tuple[StartPoint | None, LocalState]:
    """Claim the next attempt, and choose the state that it starts from.

    All workers call this together. `live` is the state that this process has kept from the previous group. If the
    workers have a usable live state, it is chosen. Otherwise, the newest intact state in storage or on any node is
    chosen.

    The first result is the start point, or None if this job may no longer train the run. The second result is the state
    that this rank found on its node. Raises the same errors as `begin_attempt`.
    """
    location = claimant.run.location
    node = ray.get_runtime_context().get_node_id()
    nodes = gather_objects(node, group)
    state, parts = NodeState(claimant.run, group, nodes), NodeParts(group, nodes)
    inventory = NodeInventory(
        host=socket.gethostname(),
        node=node,
        snapshot=None,
        heartbeats=find_heartbeats(location),
        live=live,
        group=os.environ.get(NODE_GROUP, ""),
        process=process_name(),
    )
    found: LoadedSnapshot | None = None

    def find_copies(inventories: list[NodeInventory]) -> list[NodeInventory]:
        nonlocal found
        if not settings.snapshot_cost:
            return inventories
        found = run_on_all_ranks(group, lambda: find_snapshot(location) if state.reads else None)  # reads the copy
        held = found.snapshot if found else None
        parts_here = find_parts(location) if state.reads and settings.sharded else ()
        return gather_objects(inventory._replace(snapshot=held, parts=parts_here), group)

    loaders = CheckpointLoaders(state.read, parts.read, find_copies)
    start = begin_attempt(claimant, settings, gather_objects(inventory, group), loaders, group)
    return start, LocalState(found, state, parts)


def begin_attempt(
    claimant: Claimant,
    settings: Settings,
    inventories: list[NodeInventory],
    loaders: CheckpointLoaders = DEFAULT_LOADERS,
    group: dist.ProcessGroup | None = None,
) -> StartPoint | None:
    """Claim the next attempt and choose its start point, given the inventory of each rank's node.

    Returns None if this job may no longer train the run. All workers of `group` call this together. `group` is None for
    a single worker.

    If the workers have a usable live state, it is used, and no in-memory copy is read. Otherwise, `choose_start`
    chooses an in-memory copy or a checkpoint. The `loaders` then check that a chosen checkpoint or the chosen copies of
    shards are intact. If any rank finds damage, all ranks skip the damaged data, and rank 0 chooses again.

    Rank 0 raises `StorageError` if storage fails for longer than `storage_timeout_s`, `ConflictError` if the run has
    been started over with other settings, and `DamageError` if `refuse_to_start_over` raises it.
    """
    run, limit_s = claimant.run, settings.storage_timeout_s

    def on_rank_0(act: Callable[[], Result]) -> Result | None:
        def act_as_owner() -> Result | None:
            with contextlib.suppress(SupersededError):
                return retry_storage(limit_s, "beginning an attempt", act)
            return None

        return broadcast_from_rank0(group, act_as_owner)

    def record_choice(start: StartPoint) -> StartPoint:
        ensure_owner(run, start.attempt)  # because reading the state can take long
        record_start(run, start.attempt)
        return start

    def find_damage(checkpoint: Checkpoint) -> list[str]:
        read = loaders.load or functools.partial(find_faults, run)
        return retry_storage(limit_s, "reading a checkpoint", read, checkpoint)

    start = on_rank_0(lambda: claim_in_place(claimant, settings, inventories))
    if start:
        return start
    inventories = loaders.add_copies(inventories)
    claimed = on_rank_0(lambda: claim_attempt(claimant, settings, inventories))
    damaged: dict[str, list[str]] = {}
    while claimed:
        start = on_rank_0(functools.partial(choose_start, run, claimed, inventories, damaged))
        if start and start.checkpoint:
            checkpoint = start.checkpoint
            own_faults = run_on_all_ranks(group, functools.partial(find_damage, checkpoint))
            faults = [fault for faults in gather_objects(own_faults, group) for fault in faults]
            if faults:
                damaged[checkpoint.name] = list(dict.fromkeys(faults))
                continue
        elif start and start.copy and start.copy.parts:
            own_damaged = run_on_all_ranks(group, functools.partial(loaders.load_parts, start.copy.parts))
            damaged_parts = [copy for copies in gather_objects(own_damaged, group) for copy in copies]
            if damaged_parts:
                inventories = exclude_damaged_parts(inventories, damaged_parts)
                continue
        return on_rank_0(functools.partial(record_choice, start)) if start else None
    return None


def claim_in_place(claimant: Claimant, settings: Settings, inventories: list[NodeInventory]) -> StartPoint | None:
    """Claim the next attempt for workers that continue with their live state.

    Returns None if no worker has a usable state, or if the workers may no longer train the run. Raises
    `SupersededError` if another group has replaced this one. `begin_attempt` treats this error like None, and tries to
    claim an attempt that starts from a copy or a checkpoint. The workers are waiting to repeat a step, so the records
    for the receipt are read in other threads to save time.
    """
    if not any(inventory.live for inventory in inventories):
        return None
    run = claimant.run

    def make(before: list[Attempt]) -> Attempt | None:
        if not choose_live(before, inventories) or claimant.cancelled.is_set():
            return None
        # The previous group had the same driver, and has already recorded earlier driver starts.
        return make_attempt(claimant, settings, inventories, before, before[-1].metadata.after)

    receipts = start_thread(lambda: read_receipts(read_journal(run, "events")), "read-receipts")
    status = start_thread(lambda: read_status(run, claimant.driver), "read-status")
    claimed = claim_next(run, make)
    if not claimed:
        return None
    *before, attempt = claimed
    live = choose_live(before, inventories)
    if not live:
        raise SupersededError(f"{run.location}: another worker group has replaced the group of this process")
    attempt = attempt.starting_from(live.checkpoint, IN_PLACE)
    record_start(run, attempt)
    past = PastRecords(heartbeats_in(inventories), receipts.result(), status.result())
    return StartPoint(attempt, attempts_with_start(before), live=live, nodes=nodes_in(inventories), past=past)


def choose_live(attempts: list[Attempt], inventories: Sequence[NodeInventory]) -> SurvivingState | None:
    """Return the newest live state among the survivors, or None if the survivors do not have all shards of a state.

    The survivors' states differ by at most one step, because some survivors may have completed their step before the
    loss. The state of a process that missed a group is ignored, because the other processes may have trained without
    that process, and may have deleted the checkpoint that contains its state. A process's shard is ignored, too, if the
    process's new rank needs a different shard.
    """
    spans = lineage(attempts)
    live = {
        rank: inventory.live
        for rank, inventory in enumerate(inventories)
        if inventory.live
        and inventory.live.shard == rank % inventory.live.shards
        and leads_to_newest(inventory.live.checkpoint, spans)
        and was_in_every_group(inventory, attempts)
    }
    for step in sorted({step_of(state.checkpoint) for state in live.values()}, reverse=True):
        ranks = [rank for rank, state in live.items() if step_of(state.checkpoint) == step]
        ranks.sort(key=lambda rank: live[rank].evaluated)
        first = live[ranks[0]]
        if {live[rank].shard for rank in ranks} == set(range(first.shards)):
            return SurvivingState(first.checkpoint, first.evaluated, tuple(ranks), first.shards)
    return None


def was_in_every_group(inventory: NodeInventory, attempts: list[Attempt]) -> bool:
    """Return True if a survivor was in every group since its last step, so that it has missed no step."""
    assert inventory.live
    last = attempt_of(inventory.live.checkpoint)
    since = [attempt for attempt in attempts if attempt.number > last and attempt.chosen]
    return all(inventory.process in attempt.metadata.processes for attempt in since)


def claim_attempt(claimant: Claimant, settings: Settings, inventories: list[NodeInventory]) -> list[Attempt]:
    """Claim the next attempt, but do not choose its start point yet.

    Returns all attempts with the claimed attempt last, or an empty list if this job may no longer train the run. Raises
    `ConflictError` if the run has been started over with other settings, and `SupersededError` if the run was deleted
    while these workers were training.

    If the run is moving here from another place, the claim waits until the driver there has saved a checkpoint and
    exited (`run.handover`).
    """
    run = claimant.run
    if settings.job.moves_from:
        take_over_from(run, settings.job.moves_from, claimant.owner)
    status = read_status(run, claimant.driver) if claimant.driver else None
    trained = {label_of(inventory.live.checkpoint) for inventory in inventories if inventory.live}

    def make(before: list[Attempt]) -> Attempt | None:
        if not trained <= {attempt.label for attempt in before}:
            raise SupersededError(f"{run.location} was deleted while these workers were training")
        if claimant.cancelled.is_set() or fatal_error(claimant, before):
            return None
        return make_attempt(claimant, settings, inventories, before, status.after if status else ())

    claimed = claim_next(run, make)
    if claimed:
        refuse_other_settings(run, settings.environment(), ())
    return claimed


def make_attempt(
    claimant: Claimant,
    settings: Settings,
    inventories: list[NodeInventory],
    before: list[Attempt],
    after: tuple[str, ...],
) -> Attempt:
    """Return the attempt that follows the attempts in `before`. Its start point is not chosen yet.

    `after` contains the IDs of the drivers that began before this driver.
    """
    metadata = Metadata(
        settings=settings.environment(),
        versions=versions(),
        host=inventories[0].host,
        nodes={str(rank): inventory.host for rank, inventory in enumerate(inventories)},
        processes=tuple(inventory.process for inventory in inventories),
        groups={inventory.host: inventory.group for inventory in inventories if inventory.group},
        world_size=len(inventories),
        driver=claimant.driver,
        after=after,
    )
    number = next_number(before)
    return Attempt(number, claimant.owner, None, 0, metadata=metadata, nonce=new_nonce(), chosen=False)


def choose_start(
    run: Run, claimed: Sequence[Attempt], inventories: list[NodeInventory], damaged: Mapping[str, list[str]]
) -> StartPoint:
    """Choose the state that an attempt starts from.

    `claimed` contains all attempts, with the newly claimed attempt last. `damaged` maps checkpoint names to faults.
    After the claim, only the claimed attempt commits or deletes checkpoints. Requests from earlier attempts may still
    complete, but cannot produce a checkpoint newer than the ones listed now. Raises `SupersededError` if another
    attempt has been claimed since, and `DamageError` if `refuse_to_start_over` raises it.
    """

    def inspect(checkpoint: Checkpoint, listed: Mapping[str, Entry]) -> list[str]:
        return damaged.get(checkpoint.name) or find_faults_in_listing(checkpoint, listed)

    *before, attempt = claimed
    left, crashing = exclude_crashing_copy(inventories, before)
    copy = choose_copy(before, left)
    checkpoint: Checkpoint | None = None
    passed_over: tuple[SkippedCheckpoint, ...] = ()
    if not copy or newest_committed(run, before) >= copy.snapshot.step + copy.snapshot.evaluated:
        checkpoint, passed_over = find_newest_good(run, before, inspect=inspect)
        if copy and (not checkpoint or checkpoint.step < copy.snapshot.step):
            checkpoint = None  # the checkpoint with the newer name is damaged
        else:
            copy = None
    skipped = tuple(str(each) for each in passed_over)
    if crashing:
        skipped = (f"{crashing} in memory: the last two groups that started from it took no step", *skipped)
    if copy:
        chosen = attempt.starting_from(copy.snapshot.checkpoint, "memory", skipped)
    elif checkpoint:
        chosen = attempt.starting_from(checkpoint.name, "storage", skipped)
    else:
        ensure_owner(run, attempt)  # because checkpoints look damaged while a run is being deleted
        try:
            refuse_to_start_over(run, before, passed_over, attempt.metadata.settings)
        except DamageError as error:
            record_error(run, attempt.number, error)  # a retry of this job would fail in the same way
            raise
        chosen = attempt.starting_from(None, "beginning", skipped)
    past = PastRecords(
        heartbeats=heartbeats_in(inventories),
        receipts=read_receipts(read_journal(run, "events")),
        status=read_status(run, attempt.driver),
        other=read_status(run, other_than=attempt.driver),
    )
    started = attempts_with_start(before)
    last_step = find_last_step(run, [earlier for earlier in started if earlier.number >= past.since])
    past = replace(past, last_step=last_step)
    return StartPoint(chosen, started, checkpoint, copy, nodes=nodes_in(inventories), past=past)


def heartbeats_in(inventories: Sequence[NodeInventory]) -> list[Heartbeat]:
    """Return the heartbeats of earlier processes on these nodes."""
    return [heartbeat for inventory in inventories for heartbeat in inventory.heartbeats]


def nodes_in(inventories: Sequence[NodeInventory]) -> dict[int, str]:
    """Return the Ray node ID for each rank."""
    return {rank: inventory.node for rank, inventory in enumerate(inventories)}


def refuse_to_start_over(
    run: Run, attempts: list[Attempt], passed_over: Sequence[SkippedCheckpoint], environment: Mapping[str, str]
) -> None:
    """Raise `DamageError` if a run had checkpoints but has no intact state left, unless ACCEPT allows their loss.

    `passed_over` lists the checkpoints that `find_newest_good` skipped. `environment` contains the run's settings as
    environment variables.
    """
    lost = [each for each in passed_over if each.kind is Unusable.DAMAGED] or find_lost_start(attempts)
    if not lost:
        return
    consent = f"loss-of-{lost[0].name}"
    if accepts(environment, consent):
        return
    lines = "\n".join(f"  {each}" for each in lost)
    raise DamageError(
        f"{run.location} has no intact checkpoint left, and no node has a copy in memory, so training cannot continue:"
        f"\n{lines}\nrestore the files of a checkpoint, or choose another {PREFIX}RUN_NAME. To abandon these "
        f"checkpoints and start the run over, set {PREFIX}ACCEPT={consent}"
    )


def find_lost_start(attempts: list[Attempt]) -> list[SkippedCheckpoint]:
    """Return a list with the checkpoint from which the current lineage last started, or an empty list.

    Call this if storage has no checkpoint. The files of the returned checkpoint have then been lost, because retention
    always keeps this checkpoint or a newer one.
    """
    counted = {span.label for span in lineage(attempts)}
    began = [attempt for attempt in attempts if attempt.label in counted and attempt.metadata.tier == "storage"]
    return [
        SkippedCheckpoint(attempt.starts_from, Unusable.GONE, f"attempt {attempt.number} started from it")
        for attempt in began[-1:]
        if attempt.starts_from
    ]


def newest_committed(run: Run, attempts: list[Attempt]) -> int:
    """Return the step of the lineage's newest committed checkpoint, even if it is damaged, or -1 if none exists."""
    spans = lineage(attempts)
    names = [name for name, files in list_directories(run).items() if MANIFEST in files]
    return max((step_of(name) for name in names if leads_to_newest(name, spans)), default=-1)
