"""Brings the state that a worker group goes on from: of survivors, a node's memory, a checkpoint, or INIT_FROM."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from sunspot.checkpoint.files import read_weights
from sunspot.checkpoint.memory_files import as_bytes
from sunspot.checkpoint.parts import Contents, is_sharded, load_model, load_parts, load_whole, read_contents
from sunspot.checkpoint.snapshot import SavedObjects
from sunspot.checkpoint.tensors import in_buffer, map_tensors, size_of, tensors_in
from sunspot.elastic.claim import LocalState, StartPoint
from sunspot.elastic.copies import ChosenCopy, SurvivingState
from sunspot.errors import ConflictError, NotFoundError, SettingsError
from sunspot.parallel.collectives import WorkerPlace, broadcast_from_rank0, gather_objects, run_on_all_ranks
from sunspot.run import Run, open_run
from sunspot.run.attempts import IN_PLACE, read_attempts
from sunspot.run.checkpoints import Checkpoint, find_newest_good
from sunspot.run.overview import describe_absence
from sunspot.settings import Settings
from sunspot.storage import Storage, open_storage
from sunspot.storage.limits import retry_storage

SEND_LIMIT_S = 120
"""How long one tensor may be on its way; the loss of either side ends that sooner."""


@dataclass(frozen=True)
class TrainingState:
    """The training state that a worker group goes on from; at the beginning the weights of INIT_FROM, or nothing."""

    model: Any = None
    optimizer: Any = None
    evaluated: bool = True
    metrics: dict[str, Any] = field(default_factory=dict)
    taken: float | None = None
    "When its last step had been taken, in seconds since the epoch."
    tier: str = "beginning"
    total_steps: int = 0
    "Of the whole run, as it was planned then; 0: not known."
    ledger: tuple[Any, ...] = ()
    "Windows of consumed rows that are not in storage yet."
    load_parts: Callable[[nn.Module, Optimizer], None] | None = None
    "Under fsdp, in place of `model` and `optimizer`: loads each worker's part into what is sharded, on all together."


@dataclass(frozen=True)
class StateMetadata:
    """What goes with the tensors of a state that is in use."""

    metrics: dict[str, Any]
    "Those that a checkpoint of it would have."
    taken: float
    "When its last step had been taken, in seconds since the epoch."
    ledger: Sequence[Any]
    "Windows of consumed rows that may not be in storage yet."


def hand_over(
    place: WorkerPlace,
    holders: SurvivingState,
    saved: SavedObjects | None,
    position: StateMetadata | None,
    total_steps: int,
) -> TrainingState:
    """Return the state to go on from, on all workers of the group, which call this together.

    SurvivingState have it already, with what is `saved`, and so get no tensors. The others receive these from the first
    holder, whose `position` is that of all: what a lost member ended on some of them alone may differ.
    """
    assert place.group
    source, rank = holders.ranks[0], place.rank
    state = saved.with_average(saved.state()) if saved and rank == source else None
    structure = map_tensors(state, lambda tensor: torch.empty_like(tensor, device="meta"))
    structure, position = gather_objects((structure, position) if rank == source else None, place.group)[source]
    assert position
    known = TrainingState(
        evaluated=holders.evaluated,
        metrics=position.metrics,
        taken=position.taken,
        tier=IN_PLACE,
        total_steps=total_steps,
        ledger=tuple(position.ledger),
    )
    lacking = [other for other in range(place.world_size) if other not in holders.ranks]
    work: list[Any] = []
    if rank == source:
        own = [tensor.detach().cpu().contiguous() for tensor in tensors_in(state)]
        sends = [(tag, tensor, other) for tag, tensor in enumerate(own) if tensor.numel() for other in lacking]
        work = [dist.isend(tensor, other, place.group, tag) for tag, tensor, other in sends]
    elif rank in lacking:
        # Each part has memory of its own, as the optimizer keeps what it gets. All wait: nothing is set to zero first.
        parts = structure.items()
        received = {name: in_buffer(part, np.empty(max(1, size_of(part)), np.uint8)) for name, part in parts}
        targets = [(tag, tensor) for tag, tensor in enumerate(tensors_in(received)) if tensor.numel()]
        work = [dist.irecv(tensor, source, place.group, tag) for tag, tensor in targets]
        known = TrainingState(**{**vars(known), **received})
    for each in work:
        each.wait(timedelta(seconds=SEND_LIMIT_S))
    return known


def load_start(
    run: Run,
    settings: Settings,
    start: StartPoint,
    found: LocalState,
    group: dist.ProcessGroup | None,
) -> TrainingState:
    """Load the state to go on from, given what `agree_on_start` returned. All workers call this together."""
    if not start.checkpoint:
        found.state.close()  # of one that was damaged
    if start.copy:
        return _load_copy(start.copy, found)
    if not start.checkpoint:
        return TrainingState(model=read_init(settings, group)) if settings.init_from else TrainingState()
    checkpoint = start.checkpoint
    state = _load_sharded(run, settings, checkpoint, group) if is_sharded(checkpoint) else found.state.load(checkpoint)
    return TrainingState(
        **state,
        evaluated=checkpoint.evaluated,
        metrics=checkpoint.metrics,
        taken=checkpoint.metrics.get("time", checkpoint.time),
        tier="storage",
        total_steps=checkpoint.total_steps,
    )


def _load_sharded(
    run: Run, settings: Settings, checkpoint: Checkpoint, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Load a checkpoint in parts, on every rank; rank 0 alone reads what they hold, a request for each part."""

    def patiently(read: Callable[[], Any]) -> Any:
        return retry_storage(read, settings.storage_timeout_s, "reading a checkpoint")

    contents = broadcast_from_rank0(group, lambda: patiently(lambda: read_contents(run, checkpoint)))

    def load(*into: Any) -> None:
        run_on_all_ranks(group, lambda: patiently(lambda: load_parts(run, checkpoint, contents, *into)))

    if settings.parallel == "fsdp":
        return {"load_parts": load}
    return run_on_all_ranks(group, lambda: patiently(lambda: load_whole(run, checkpoint, contents)))


def _load_copy(copy: ChosenCopy, found: LocalState) -> TrainingState:
    """Load the chosen copy, on every rank."""
    chosen = copy.snapshot
    if copy.parts:
        sidecar = found.parts.describe()
        state: dict[str, Any] = {"load_parts": found.parts.load}
    else:
        data, sidecar = found.state.share(chosen, copy.rank, found.snapshot)
        state = in_buffer(sidecar.structure, as_bytes(data))
    return TrainingState(
        **state,
        evaluated=chosen.evaluated,
        metrics=sidecar.manifest_fields["metrics"],
        taken=chosen.time,
        tier="memory",
        total_steps=sidecar.manifest_fields["total_steps"],
        ledger=tuple(sidecar.ledger),
    )


def read_init(settings: Settings, group: dist.ProcessGroup | None) -> Any:
    """Read the state_dict that INIT_FROM names: of another run's newest good checkpoint, or of a file.

    All workers call this together, and get the same one: rank 0 chooses. Raises `SettingsError`, or `ConflictError`
    when it was replaced while they read it.
    """
    limit_s, what = settings.storage_timeout_s, f"reading SUNSPOT_INIT_FROM={settings.init_from}"
    chosen = broadcast_from_rank0(group, lambda: retry_storage(lambda: choose_init(settings), limit_s, what))
    return run_on_all_ranks(group, lambda: retry_storage(lambda: load_init(settings, chosen), limit_s, what))


def choose_init(settings: Settings) -> tuple[Checkpoint, Contents | None] | str:
    """Find what INIT_FROM names now: the newest good checkpoint of another run, or the SHA-256 of a file.

    With a checkpoint that is in parts only comes what they hold.
    """
    wanted = settings.init_from
    if not wanted.startswith("run:"):
        storage, file = _init_file(settings)
        try:
            return storage.digest(file)[1]
        except NotFoundError as error:
            raise SettingsError(f"SUNSPOT_INIT_FROM={wanted}: no such file") from error
    other = _init_run(settings)
    checkpoint, _ = find_newest_good(other, read_attempts(other))
    if not checkpoint:
        absence = describe_absence(other) or f"{other.location} has no good checkpoint"
        raise SettingsError(f"SUNSPOT_INIT_FROM={wanted}: {absence}")
    return checkpoint, None if "model.pt" in checkpoint.files else read_contents(other, checkpoint)


def load_init(settings: Settings, chosen: tuple[Checkpoint, Contents | None] | str) -> Any:
    """Load the state_dict that `choose_init` chose; raises `ConflictError` when it is not there any more."""
    wanted, content = settings.init_from, bytearray()
    replaced = f"SUNSPOT_INIT_FROM={wanted}: was replaced while it was read; start again, from what is not written to"
    try:
        if isinstance(chosen, tuple):
            return load_model(_init_run(settings), *chosen)
        storage, file = _init_file(settings)
        sha256 = storage.digest(file, content.extend)[1]
    except NotFoundError as error:
        raise ConflictError(replaced) from error
    if sha256 != chosen:
        raise ConflictError(replaced)
    try:
        state = read_weights(storage, file, content)
    except ValueError as error:
        raise SettingsError(
            f"SUNSPOT_INIT_FROM={wanted}: {error}; give a state_dict saved by torch.save, or as safetensors"
        ) from error
    if not isinstance(state, dict):
        raise SettingsError(f"SUNSPOT_INIT_FROM={wanted}: a {type(state).__name__}; give a state_dict of torch.save")
    return state


def _init_run(settings: Settings) -> Run:
    return open_run(settings.storage_path, settings.init_from.removeprefix("run:"))


def _init_file(settings: Settings) -> tuple[Storage, str]:
    folder, slash, file = settings.init_from.rpartition("/")
    return open_storage(folder or slash or ".", follow_links=True), file
