"""The start of a worker group: its ranks agree on the newest good state, and rank 0 claims the next attempt from it."""

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import ray
import torch.distributed as dist

from sunspot.background import start_thread
from sunspot.checkpoint import versions
from sunspot.checkpoint.memory_files import LoadedSnapshot, find_heartbeats, find_parts, find_snapshot
from sunspot.checkpoint.node_state import NodeParts, NodeState, PartCopy
from sunspot.elastic.copies import (
    ChosenCopy,
    LiveState,
    NodeInventory,
    SurvivingState,
    choose_copy,
    choose_live,
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
    PassedOver,
    Unusable,
    find_faults,
    find_faults_in_listing,
    find_newest_good,
    leads_to_newest,
    list_directories,
)
from sunspot.run.history import read_journal
from sunspot.run.identity import refuse_other_settings
from sunspot.run.incidents import Receipt, read_receipts
from sunspot.run.status import Status, read_status
from sunspot.settings import PREFIX, Settings, accepts
from sunspot.storage.base import Entry
from sunspot.storage.limits import retry_storage

Result = TypeVar("Result")

PROCESS_NONCE = new_nonce()
"""Of this module in this process, and in those that are forked from it."""

NODE_GROUP = "RAY_NODE_TYPE_NAME"
"""Variable with the group of a pod, from which Ray makes a node's label ray.io/node-group."""


class CheckpointLoaders(NamedTuple):
    """Functions that read the checkpoints and copies from which a group may start."""

    checkpoint: Callable[[Checkpoint], list[str]] | None = None
    "Loads a checkpoint on this rank and returns its faults. If it is None, every byte is compared with the manifest."
    parts: Callable[[Sequence[PartCopy]], list[PartCopy]] = lambda parts: []
    "Reads the copies of parts that this rank needs, and returns the damaged ones."
    copies: Callable[[list[NodeInventory]], list[NodeInventory]] = lambda inventories: inventories
    "Adds the copies in memory to the inventories. All workers call it together if no live state can be used."


DEFAULT_LOADERS = CheckpointLoaders()


class LocalState(NamedTuple):
    """The state that a rank found on its node, and what it has read of the start that was chosen."""

    snapshot: LoadedSnapshot | None
    state: NodeState
    parts: NodeParts


@dataclass(frozen=True)
class PastRecords:
    """The attempts so far, as storage and the nodes tell of them."""

    heartbeats: Sequence[tuple[int, int, float]] = ()
    "The last steps that earlier processes are known to have taken: attempt, step, seconds since the epoch."
    receipts: Sequence[Receipt] = ()
    status: Status | None = None
    "Of this start of the driver."
    other: Status | None = None
    "Of who trained before, as it stood at the claim."


@dataclass(frozen=True)
class StartPoint:
    """The point that a worker group starts from; the same on every rank."""

    attempt: Attempt
    before: Sequence[Attempt] = ()
    "The attempts of the run so far, oldest first."
    checkpoint: Checkpoint | None = None
    "In storage; None if `copy` is newer."
    copy: ChosenCopy | None = None
    "In shared memory."
    live: SurvivingState | None = None
    "In the processes that train on; then there is neither a checkpoint nor a copy."
    nodes: dict[int, str] = field(default_factory=dict)
    "Ray's id of each rank's node."
    past: PastRecords = PastRecords()


def process_name() -> str:
    """Tell this process apart from all others, also from one of the same number in a pod of the same name."""
    return f"{PROCESS_NONCE}-{os.getpid()}"


def agree_on_start(
    claimant: Claimant, settings: Settings, group: dist.ProcessGroup, live: LiveState | None = None
) -> tuple[StartPoint | None, LocalState]:
    """Claim the next attempt, from the newest good state in storage or on any node; all workers call this together.

    `live` is what this process has trained. Also returns what this rank found and read. The start is None when this job
    may not train on. Raises like `begin_attempt`.
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
        found = run_on_all_ranks(group, lambda: find_snapshot(location) if state.reads else None)  # which reads it
        held = found.held if found else None
        parts_here = find_parts(location) if state.reads and settings.parallel == "fsdp" else ()
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
    """Claim the next attempt, given what is on each rank's node, and choose its start; None if this job may not train.

    This looks for a live state first. If a live state can be used, the copies in memory are not needed. Otherwise a
    checkpoint is chosen by its manifest and the listing, and the `loaders` that load it find out whether it is intact.
    If any rank finds a checkpoint or a copy of a part damaged, all ranks pass over it. All workers of `group` (None: a
    worker alone) call this together. Rank 0 raises `StorageError` if storage refuses for longer than
    `storage_timeout_s`, `ConflictError` if the run was begun again with other settings meanwhile, and `DamageError`
    like `refuse_to_start_over`.
    """
    run, limit_s = claimant.run, settings.storage_timeout_s

    def on_rank_0(act: Callable[[], Result]) -> Result | None:
        def act_as_owner() -> Result | None:
            with contextlib.suppress(SupersededError):
                return retry_storage(act, limit_s, "beginning an attempt")
            return None

        return broadcast_from_rank0(group, act_as_owner)

    def record_choice(start: StartPoint) -> StartPoint:
        ensure_owner(run, start.attempt)  # to read it may have taken long
        record_start(run, start.attempt)
        return start

    def find_damage(checkpoint: Checkpoint) -> list[str]:
        read = loaders.checkpoint or functools.partial(find_faults, run)
        return retry_storage(lambda: read(checkpoint), limit_s, "reading a checkpoint")

    if start := on_rank_0(lambda: claim_in_place(claimant, settings, inventories)):
        return start
    inventories = loaders.copies(inventories)
    claimed = on_rank_0(lambda: claim_attempt(claimant, settings, inventories))
    damaged: dict[str, list[str]] = {}
    while claimed:
        start = on_rank_0(functools.partial(choose_start, run, claimed, inventories, damaged))
        if start and (checkpoint := start.checkpoint):
            seen = run_on_all_ranks(group, functools.partial(find_damage, checkpoint))
            if faults := [fault for faults in gather_objects(seen, group) for fault in faults]:
                damaged[checkpoint.name] = list(dict.fromkeys(faults))
                continue
        elif start and start.copy and start.copy.parts:
            mine = run_on_all_ranks(group, functools.partial(loaders.parts, start.copy.parts))
            if faulty := [copy for copies in gather_objects(mine, group) for copy in copies]:
                inventories = exclude_damaged_parts(inventories, faulty)
                continue
        return on_rank_0(functools.partial(record_choice, start)) if start else None
    return None


def claim_in_place(claimant: Claimant, settings: Settings, inventories: list[NodeInventory]) -> StartPoint | None:
    """Claim the next attempt for workers that go on with their state; None when none has one, or they may not train on.

    They wait for it in the middle of a step, so what it needs for their receipt is read beside. Raises
    `SupersededError`.
    """
    if not any(inventory.live for inventory in inventories):
        return None
    run = claimant.run

    def make(before: list[Attempt]) -> Attempt | None:
        if not choose_live(before, inventories) or claimant.given_up.is_set():
            return None
        # The group before was of this driver, too, and has recorded which ones it found.
        return make_attempt(claimant, settings, inventories, before, before[-1].metadata.after)

    receipts = start_thread(lambda: read_receipts(read_journal(run, "events")), "read-receipts")
    status = start_thread(lambda: read_status(run, claimant.driver), "read-status")
    claimed = claim_next(run, make)
    if not claimed:
        return None
    *before, attempt = claimed
    live = choose_live(before, inventories)
    if not live:
        raise SupersededError(f"{run.location}: the group that this process trained in does not count any more")
    attempt = attempt.starting_from(live.checkpoint, IN_PLACE)
    record_start(run, attempt)
    past = PastRecords(heartbeats_in(inventories), receipts.result(), status.result())
    return StartPoint(attempt, attempts_with_start(before), live=live, nodes=nodes_in(inventories), past=past)


def claim_attempt(claimant: Claimant, settings: Settings, inventories: list[NodeInventory]) -> list[Attempt]:
    """Claim the next attempt, whose start is not chosen yet, like `claim_next`; nothing when this job may not train on.

    Raises `ConflictError` when the run was begun anew with other settings meanwhile, `SupersededError` when it was
    deleted while these workers trained.
    """
    run = claimant.run
    status = read_status(run, claimant.driver) if claimant.driver else None
    trained = {label_of(inventory.live.checkpoint) for inventory in inventories if inventory.live}

    def make(before: list[Attempt]) -> Attempt | None:
        if not trained <= {attempt.label for attempt in before}:
            raise SupersededError(f"{run.location} was deleted while these workers trained; they have ended")
        if claimant.given_up.is_set() or fatal_error(claimant, before):
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
    """Make the attempt that follows those `before`, which chooses its start; `after` are older drivers' starts."""
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
    """Choose where the attempt starts that was claimed as the last of these, given the faults of checkpoints read.

    From here on only this attempt commits or deletes; requests in flight may still land, but never as the newest
    checkpoint listed now. Raises `SupersededError`, or `DamageError` like `refuse_to_start_over`.
    """

    def inspect(checkpoint: Checkpoint, listed: Mapping[str, Entry]) -> list[str]:
        return damaged.get(checkpoint.name) or find_faults_in_listing(checkpoint, listed)

    *before, attempt = claimed
    left, crashing = exclude_crashing_copy(inventories, before)
    copy = choose_copy(before, left)
    checkpoint: Checkpoint | None = None
    passed_over: tuple[PassedOver, ...] = ()
    if not copy or newest_committed(run, before) >= copy.snapshot.step + copy.snapshot.evaluated:
        checkpoint, passed_over = find_newest_good(run, before, inspect=inspect)
        if copy and (not checkpoint or checkpoint.step < copy.snapshot.step):
            checkpoint = None  # what looked newer by its name is damaged
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
        ensure_owner(run, attempt)  # while a run is deleted, its checkpoints look damaged
        try:
            refuse_to_start_over(run, before, passed_over, attempt.metadata.settings)
        except DamageError as error:
            record_error(run, attempt.number, error)  # a retry of this job finds nothing else
            raise
        chosen = attempt.starting_from(None, "beginning", skipped)
    past = PastRecords(
        heartbeats=heartbeats_in(inventories),
        receipts=read_receipts(read_journal(run, "events")),
        status=read_status(run, attempt.driver),
        other=read_status(run, other_than=attempt.driver),
    )
    return StartPoint(chosen, attempts_with_start(before), checkpoint, copy, nodes=nodes_in(inventories), past=past)


def attempts_with_start(attempts: list[Attempt]) -> list[Attempt]:
    """Return those that have chosen where they start."""
    return [attempt for attempt in attempts if attempt.chosen]


def heartbeats_in(inventories: Sequence[NodeInventory]) -> list[tuple[int, int, float]]:
    """Return the last steps that earlier processes of these nodes are known to have taken (`PastRecords`)."""
    return [heartbeat for inventory in inventories for heartbeat in inventory.heartbeats]


def nodes_in(inventories: Sequence[NodeInventory]) -> dict[int, str]:
    """Return Ray's id of each rank's node."""
    return {rank: inventory.node for rank, inventory in enumerate(inventories)}


def refuse_to_start_over(
    run: Run, attempts: list[Attempt], passed_over: Sequence[PassedOver], environment: Mapping[str, str]
) -> None:
    """Raise `DamageError` when a run without a good state once had checkpoints, unless ACCEPT names their loss.

    `passed_over` is what `find_newest_good` names, and `environment` has the settings by variable.
    """
    lost = [each for each in passed_over if each.kind is Unusable.DAMAGED] or find_lost_start(attempts)
    if not lost or accepts(environment, consent := f"loss-of-{lost[0].name}"):
        return
    lines = "\n".join(f"  {each}" for each in lost)
    raise DamageError(
        f"{run.location} has no whole checkpoint any more, and no node a copy in memory, so there is nothing to go on "
        f"from:\n{lines}\nput back the files of one as they were, or choose another {PREFIX}RUN_NAME. To give them up, "
        f"and begin this run anew, set {PREFIX}ACCEPT={consent}"
    )


def find_lost_start(attempts: list[Attempt]) -> list[PassedOver]:
    """Find the checkpoint that the lineage last started from, if any: one as new is always kept, but none is there."""
    counted = {span.label for span in lineage(attempts)}
    began = [attempt for attempt in attempts if attempt.label in counted and attempt.metadata.tier == "storage"]
    return [
        PassedOver(attempt.starts_from, Unusable.GONE, f"attempt {attempt.number} started from it")
        for attempt in began[-1:]
        if attempt.starts_from
    ]


def newest_committed(run: Run, attempts: list[Attempt]) -> int:
    """Return the step of the newest checkpoint by its name alone, damaged or not; -1 without any."""
    spans = lineage(attempts)
    names = [name for name, files in list_directories(run).items() if MANIFEST in files]
    return max((step_of(name) for name in names if leads_to_newest(name, spans)), default=-1)
