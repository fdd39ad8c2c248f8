"""The start of a worker group: its ranks agree on the newest good state, and rank 0 claims the next attempt from it."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
import torch.distributed as dist

from app.checkpoint import versions
from app.checkpoint.memory import LoadedSnapshot, MemorySnapshot, find_heartbeats, find_snapshot
from app.errors import ConflictError
from app.parallel import gather_objects
from app.run import Run
from app.run.attempts import (
    CLAIM_TRIES,
    Attempt,
    checkpoint_name,
    claim,
    lineage,
    read_attempts,
    read_error,
    refuse_if_superseded,
    step_of,
)
from app.run.checkpoints import MANIFEST, Checkpoint, find_newest_good, leads_to_newest, list_directories
from app.run.history import read_journal
from app.run.incidents import TIER
from app.run.status import Status, read_status, refuse_if_deleted
from app.settings import Settings
from app.storage.base import retry_storage


class Machine(NamedTuple):
    """What a rank knows of its node."""

    host: str
    node: str
    "Ray's id of the node."
    snapshot: MemorySnapshot | None
    heartbeats: list[tuple[int, int, float]]


@dataclass(frozen=True)
class Start:
    """Where a worker group starts; the same on every rank."""

    attempt: Attempt
    before: list[Attempt]
    "The attempts of the run so far, oldest first."
    checkpoint: Checkpoint | None
    "In storage; None if `snapshot` is newer."
    snapshot: MemorySnapshot | None
    "In shared memory."
    snapshot_rank: int
    "The lowest rank whose node has `snapshot`."
    nodes: dict[int, str]
    "Ray's id of each rank's node."
    heartbeats: list[tuple[int, int, float]]
    "The last steps that earlier processes are known to have taken: attempt, step, seconds since the epoch."
    events: list[dict[str, Any]]
    "Of the attempts so far."
    status: Status | None


def agree_on_start(
    run: Run, owner: str, settings: Settings, group: dist.ProcessGroup, warn: Callable[[str], Any]
) -> tuple[Start | None, LoadedSnapshot | None]:
    """Claim the next attempt, from the newest good state in storage or on any node; all workers call this together.

    Also returns the snapshot of this rank's node. The start is None when this job may not train on. Raises
    `StorageError` when storage refuses for longer than `storage_timeout_s`.
    """
    found = find_snapshot(run.location) if settings.snapshot_cost else None
    node = ray.get_runtime_context().get_node_id()
    mine = Machine(socket.gethostname(), node, found.held if found else None, find_heartbeats(run.location))
    machines = gather_objects(mine, group)
    chosen: list[Start | None] = [None]
    if dist.get_rank(group) == 0:
        chosen[0] = retry_storage(
            lambda: begin_attempt(run, owner, settings, machines),
            settings.storage_timeout_s,
            "beginning an attempt",
            warn,
        )
    dist.broadcast_object_list(chosen, src=0, group=group)
    return chosen[0], found


def begin_attempt(run: Run, owner: str, settings: Settings, machines: list[Machine]) -> Start | None:
    """Claim the next attempt, given each rank's machine; None when this job may not train on."""
    for _ in range(CLAIM_TRIES):
        attempts = read_attempts(run)
        try:
            refuse_if_superseded(attempts, owner)
            refuse_if_deleted(run)
        except ConflictError:
            return None
        if attempts and attempts[-1].owner == owner and read_error(run, attempts[-1].number):
            return None
        rank, snapshot = choose_snapshot(attempts, [machine.snapshot for machine in machines])
        checkpoint: Checkpoint | None = None
        skipped: tuple[str, ...] = ()
        if not snapshot or newest_committed(run, attempts) >= snapshot.step + snapshot.evaluated:
            checkpoint, skipped = find_newest_good(run, attempts)
            if snapshot and (not checkpoint or checkpoint.step < snapshot.step):
                checkpoint = None  # what looked newer by its name is damaged
            else:
                snapshot = None
        origin = snapshot or checkpoint
        attempt = Attempt(
            number=attempts[-1].number + 1 if attempts else 1,
            owner=owner,
            starts_from=checkpoint_name(origin.step, origin.attempt) if origin else None,
            step=origin.step if origin else 0,
            skipped=skipped,
            metadata={
                "host": machines[0].host,
                "nodes": {str(rank): machine.host for rank, machine in enumerate(machines)},
                "world_size": len(machines),
                TIER: "memory" if snapshot else "storage" if checkpoint else "beginning",
                "settings": settings.environment(),
                "versions": versions(),
            },
        )
        if claim(run, attempts, attempt):
            return Start(
                attempt=attempt,
                before=attempts,
                checkpoint=checkpoint,
                snapshot=snapshot,
                snapshot_rank=rank,
                nodes={rank: machine.node for rank, machine in enumerate(machines)},
                heartbeats=[heartbeat for machine in machines for heartbeat in machine.heartbeats],
                events=read_journal(run, "events"),
                status=read_status(run),
            )
    raise ConflictError(f"{run.location}: {CLAIM_TRIES} claims lost in a row to other processes that train this run")


def choose_snapshot(
    attempts: list[Attempt], snapshots: list[MemorySnapshot | None]
) -> tuple[int, MemorySnapshot | None]:
    """The newest of the ranks' snapshots in the lineage of the newest attempt, and the lowest rank that has it.

    A snapshot of a superseded attempt is not in that lineage, however far it went.
    """
    spans = lineage(attempts)
    candidates = [
        (snapshot.step, snapshot.evaluated, -rank)
        for rank, snapshot in enumerate(snapshots)
        if snapshot and leads_to_newest(checkpoint_name(snapshot.step, snapshot.attempt), spans)
    ]
    rank = -max(candidates)[2] if candidates else 0
    return rank, snapshots[rank] if candidates else None


def newest_committed(run: Run, attempts: list[Attempt]) -> int:
    """The step of the newest checkpoint by its name alone, damaged or not; -1 without any."""
    spans = lineage(attempts)
    names = [name for name, files in list_directories(run).items() if MANIFEST in files]
    return max((step_of(name) for name in names if leads_to_newest(name, spans)), default=-1)
