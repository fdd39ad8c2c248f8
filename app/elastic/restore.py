"""The state that a worker group goes on from: out of a node's shared memory, a checkpoint, or INIT_FROM."""

import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from app.checkpoint.files import load_state
from app.checkpoint.memory import LoadedSnapshot, MemorySnapshot, as_bytes
from app.checkpoint.sharded import is_sharded, load_model, load_whole
from app.checkpoint.snapshot import in_buffer
from app.elastic.claim import Start
from app.errors import NotFoundError, SettingsError, shorten
from app.parallel import gather_objects
from app.run import Run, open_run
from app.run.attempts import read_attempts
from app.run.checkpoints import Checkpoint, find_newest_good
from app.settings import Settings
from app.storage import open_storage
from app.storage.base import retry_storage


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
    "Under fsdp, in place of `model` and `optimizer`: each worker reads its part once the model is sharded."


def load_start(
    run: Run,
    settings: Settings,
    start: Start,
    found: LoadedSnapshot | None,
    group: dist.ProcessGroup,
    warn: Callable[[str], Any],
) -> State:
    """The state to go on from, on every rank; `found` is this node's snapshot. All workers call this together."""
    if start.snapshot:
        return _load_snapshot(start.snapshot, start.snapshot_rank, found, group)
    if not start.checkpoint:
        return State()
    checkpoint, limit_s = start.checkpoint, settings.storage_timeout_s
    return retry_storage(lambda: _load_checkpoint(run, checkpoint, settings), limit_s, "reading a checkpoint", warn)


def _load_snapshot(chosen: MemorySnapshot, rank: int, found: LoadedSnapshot | None, group: dist.ProcessGroup) -> State:
    """The chosen snapshot, on every rank: `rank` broadcasts it if another node lacks it."""
    mine = found.held if found else None
    same = mine is not None and (mine.attempt, mine.step, mine.crc32) == (chosen.attempt, chosen.step, chosen.crc32)
    data = found.data if found and same else torch.empty(chosen.size, dtype=torch.uint8)
    rest = [found.rest if found and same else {}]
    if not all(gather_objects(same, group)):
        dist.broadcast(data, rank, group=group)
        dist.broadcast_object_list(rest, rank, group=group)
    if zlib.crc32(as_bytes(data)) != chosen.crc32:
        raise RuntimeError("the copy of the state that came from another node is not the one that was marked there")
    state = in_buffer(rest[0]["structure"], as_bytes(data))
    return State(
        model=state["model"],
        optimizer=state["optimizer"],
        evaluated=chosen.evaluated,
        metrics=rest[0]["about"]["metrics"],
        taken=chosen.time,
        tier="memory",
        ledger=tuple(rest[0]["ledger"]),
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
    """The state_dict that INIT_FROM names: of another run's newest good checkpoint, or of a file."""
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
