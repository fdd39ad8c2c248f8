"""Where a worker group starts: the next attempt, and the newest good state among storage and the nodes' memory."""

from __future__ import annotations

import io
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist

from app.checkpoint.commit import versions
from app.checkpoint.files import load_state
from app.checkpoint.memory import LoadedSnapshot, MemorySnapshot, as_bytes, find_heartbeats, find_snapshot
from app.checkpoint.sharded import is_sharded, load_model, load_whole
from app.checkpoint.snapshot import in_buffer
from app.errors import ConflictError, NotFoundError, SettingsError, shorten
from app.run import Run, open_run
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
from app.run.status import Status, read_status, refuse_if_deleted
from app.settings import Settings
from app.storage import open_storage
from app.storage.base import retry_storage


class Machine(NamedTuple):
    """What a rank has to say of where it is."""

    host: str
    node: str
    "Ray's id of the node."
    held: MemorySnapshot | None
    heartbeats: list[tuple[int, int, float]]


@dataclass(frozen=True)
class Start:
    """Where a worker group starts; the same on every rank."""

    attempt: Attempt
    before: list[Attempt]
    "The attempts of the run so far, oldest first."
    checkpoint: Checkpoint | None
    "The one in storage, unless `held` is newer."
    held: MemorySnapshot | None
    "The copy in shared memory."
    source: int
    "The lowest rank on whose machine `held` lies."
    nodes: dict[int, str]
    "Ray's id of each rank's node."
    heartbeats: list[tuple[int, int, float]]
    "The last steps that processes before are known to have taken: attempt, step, seconds since the epoch."
    events: list[dict[str, Any]]
    "Of the attempts so far."
    status: Status | None


@dataclass(frozen=True)
class State:
    """The training state that a worker group goes on from; empty at the beginning."""

    model: Any = None
    optimizer: Any = None
    evaluated: bool = True
    metrics: dict[str, Any] = field(default_factory=dict)
    taken: float | None = None
    "When its last step had been taken, in seconds since the epoch."
    tier: str = "beginning"
    ledger: tuple[Any, ...] = ()
    "Windows of consumed rows that are not in storage yet."
    parts: Checkpoint | None = None
    "Under fsdp, in place of `model` and `optimizer`: each worker reads what it holds of them, once they are spread."


def agree_on_start(
    run: Run, owner: str, settings: Settings, group: dist.ProcessGroup, warn: Callable[[str], Any]
) -> tuple[Start | None, LoadedSnapshot | None]:
    """Claim the next attempt, from the newest good state that storage or any node has; all workers call this together.

    Also returns what this rank's machine holds. None instead of a start when this job may not train on. Raises
    `StorageError` when storage refuses for longer than `storage_timeout_s`.
    """
    found = find_snapshot(run.location) if settings.snapshot_cost else None
    node = ray.get_runtime_context().get_node_id()
    mine = Machine(socket.gethostname(), node, found.held if found else None, find_heartbeats(run.location))
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    chosen: list[Start | None] = [None]
    if dist.get_rank(group) == 0:
        chosen[0] = retry_storage(
            lambda: begin_attempt(run, owner, settings, everyone),
            settings.storage_timeout_s,
            "beginning an attempt",
            warn,
        )
    dist.broadcast_object_list(chosen, src=0, group=group)
    return chosen[0], found


def load_start(
    run: Run,
    settings: Settings,
    start: Start,
    found: LoadedSnapshot | None,
    group: dist.ProcessGroup,
    warn: Callable[[str], Any],
) -> State:
    """The state to go on from, on every rank; all workers call this together."""
    if start.held:
        return _load_held(start, found, group)
    if not start.checkpoint:
        return State()
    checkpoint = start.checkpoint
    return retry_storage(
        lambda: _load_checkpoint(run, checkpoint, settings), settings.storage_timeout_s, "reading a checkpoint", warn
    )


def begin_attempt(run: Run, owner: str, settings: Settings, machines: list[Machine]) -> Start | None:
    """Claim the next attempt, given what each rank's machine holds; None when this job may not train on."""
    held = [machine.held for machine in machines]
    for _ in range(CLAIM_TRIES):
        attempts = read_attempts(run)
        try:
            refuse_if_superseded(attempts, owner)
            refuse_if_deleted(run)
        except ConflictError:
            return None
        if attempts and attempts[-1].owner == owner and read_error(run, attempts[-1].number):
            return None
        source, in_memory = choose_held(attempts, held)
        checkpoint: Checkpoint | None = None
        skipped: tuple[str, ...] = ()
        if not in_memory or newest_committed(run, attempts) >= in_memory.step + in_memory.evaluated:
            checkpoint, skipped = find_newest_good(run, attempts)
            if in_memory and (not checkpoint or checkpoint.step < in_memory.step):
                checkpoint = None  # what looked newer by its name is damaged
            else:
                in_memory = None
        origin = in_memory or checkpoint
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
                "tier": "memory" if in_memory else "storage" if checkpoint else "beginning",
                "settings": settings.environment(),
                "versions": versions(),
            },
        )
        if claim(run, attempts, attempt):
            return Start(
                attempt=attempt,
                before=attempts,
                checkpoint=checkpoint,
                held=in_memory,
                source=source,
                nodes={rank: machine.node for rank, machine in enumerate(machines)},
                heartbeats=[beat for machine in machines for beat in machine.heartbeats],
                events=read_journal(run, "events"),
                status=read_status(run),
            )
    raise ConflictError(f"{run.location}: {CLAIM_TRIES} claims lost in a row to other processes that train this run")


def choose_held(attempts: list[Attempt], held: list[MemorySnapshot | None]) -> tuple[int, MemorySnapshot | None]:
    """The newest copy that leads to the newest attempt, with the lowest rank whose machine has it.

    A copy by an attempt that was superseded does not lead there, however far it went.
    """
    spans = lineage(attempts)
    candidates = [
        (copy.step, copy.evaluated, -rank)
        for rank, copy in enumerate(held)
        if copy and leads_to_newest(checkpoint_name(copy.step, copy.attempt), spans)
    ]
    rank = -max(candidates)[2] if candidates else 0
    return rank, held[rank] if candidates else None


def newest_committed(run: Run, attempts: list[Attempt]) -> int:
    """The step of the newest checkpoint by its name alone, whole or not; -1 without any."""
    spans = lineage(attempts)
    names = [name for name, files in list_directories(run).items() if MANIFEST in files]
    return max((step_of(name) for name in names if leads_to_newest(name, spans)), default=-1)


def _load_held(start: Start, found: LoadedSnapshot | None, group: dist.ProcessGroup) -> State:
    """The copy in shared memory, on every rank: those whose machine does not have it get it from one that does."""
    chosen = start.held
    assert chosen
    mine = found.held if found else None
    same = mine is not None and (mine.attempt, mine.step, mine.crc32) == (chosen.attempt, chosen.step, chosen.crc32)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, same, group=group)
    data = found.data if found and same else torch.empty(chosen.size, dtype=torch.uint8)
    rest = [found.rest if found and same else {}]
    if not all(everyone):
        dist.broadcast(data, start.source, group=group)
        dist.broadcast_object_list(rest, start.source, group=group)
    if zlib.crc32(as_bytes(data)) != chosen.crc32:
        raise RuntimeError("the copy of the state that came from another node is not the one that was marked there")
    beside = rest[0]
    state = in_buffer(beside["structure"], as_bytes(data))
    return State(
        model=state["model"],
        optimizer=state["optimizer"],
        evaluated=chosen.evaluated,
        metrics=beside["about"]["metrics"],
        taken=chosen.time,
        tier="memory",
        ledger=tuple(beside["ledger"]),
    )


def _load_checkpoint(run: Run, checkpoint: Checkpoint, settings: Settings) -> State:
    state: dict[str, Any]
    if not is_sharded(checkpoint):
        state = {kind: load_state(run, checkpoint, f"{kind}.pt") for kind in ("model", "optimizer")}
    elif settings.parallel == "fsdp":
        state = {"parts": checkpoint}
    else:
        state = load_whole(run, checkpoint)
    return State(
        **state,
        evaluated=checkpoint.evaluated,
        metrics=checkpoint.metrics,
        taken=checkpoint.metrics.get("time", checkpoint.time),
        tier="storage",
    )


def read_init(settings: Settings) -> Any:
    """The state_dict that INIT_FROM names: another run's newest good checkpoint, or a file."""
    wanted = settings.init_from
    if wanted.startswith("run:"):
        other = open_run(settings.storage_path, wanted.removeprefix("run:"))
        checkpoint, _ = find_newest_good(other, read_attempts(other))
        if not checkpoint:
            raise SettingsError(f"SUNSPOT_INIT_FROM={wanted}: {other.location} has no good checkpoint")
        return load_model(other, checkpoint)
    folder, _, file = wanted.rpartition("/")
    try:
        content = open_storage(folder or ".").read(file)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except NotFoundError as error:
        raise SettingsError(f"SUNSPOT_INIT_FROM={wanted}: no such file") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise SettingsError(
            f"SUNSPOT_INIT_FROM={wanted}: not a state_dict saved by torch.save: {shorten(error)}"
        ) from error
