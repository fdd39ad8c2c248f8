"""Loads the state from which a worker group starts: from a node's memory, a checkpoint, or INIT_FROM."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from sunspot.checkpoint.files import read_weights
from sunspot.checkpoint.foreign_weights import load_by_name, without_prefix
from sunspot.checkpoint.memory_files import as_bytes
from sunspot.checkpoint.parts import ShardedContents, is_sharded, load_model, load_parts, load_whole, read_contents
from sunspot.checkpoint.pieces import METADATA
from sunspot.checkpoint.tensors import in_buffer, leaves_of
from sunspot.checkpoint.weight_files import WeightFiles, find_in_folder, find_weights
from sunspot.elastic.claim import LocalState, StartPoint
from sunspot.elastic.copies import ChosenCopy
from sunspot.errors import ConflictError, NotFoundError, SettingsError
from sunspot.formatting import kind_of
from sunspot.parallel.collectives import broadcast_from_rank0, run_on_all_ranks
from sunspot.run import Run, open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.checkpoints import Checkpoint, find_newest_good
from sunspot.run.overview import describe_absence
from sunspot.settings import Settings
from sunspot.storage import Storage, open_storage
from sunspot.storage.limits import retry_storage


@dataclass(frozen=True)
class TrainingState:
    """The state from which a worker group continues. In a new run, it contains only INIT_FROM's weights, if any.

    It contains no tensors on a rank that already has them (`train.survivor.hand_over`).
    """

    model: Any = None
    optimizer: Any = None
    evaluated: bool = True
    metrics: dict[str, Any] = field(default_factory=dict)
    taken: float | None = None
    "Time at which its last step was taken, in seconds since the epoch."
    tier: str = "beginning"
    total_steps: int = 0
    "Number of steps of the whole run as planned when the state was saved, or 0 if unknown."
    ledger: tuple[Any, ...] = ()
    "Windows of consumed rows that are not in storage yet."
    load_parts: Callable[[nn.Module, Optimizer], None] | None = None
    """Function that loads each worker's part into the sharded model and optimizer, called by all workers together.
    Under fsdp, it replaces `model` and `optimizer`."""


def load_start(
    run: Run,
    settings: Settings,
    start: StartPoint,
    found: LocalState,
    group: dist.ProcessGroup | None,
) -> TrainingState:
    """Load the state from which the group continues. All workers call this together.

    `start` and `found` are the results of `agree_on_start`.
    """
    if not start.checkpoint:
        found.state.close()  # frees a checkpoint that turned out to be damaged
    if start.copy:
        return _load_copy(start.copy, found)
    if not start.checkpoint:
        return load_initial(settings, group)
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
    """Load a sharded checkpoint on every rank. Rank 0 reads the parts' tables of contents and broadcasts them."""

    def patiently(read: Callable[[], Any]) -> Any:
        return retry_storage(settings.storage_timeout_s, "reading a checkpoint", read)

    contents = broadcast_from_rank0(group, lambda: patiently(lambda: read_contents(run, checkpoint)))

    def load(*into: Any) -> None:
        run_on_all_ranks(group, lambda: patiently(lambda: load_parts(run, checkpoint, contents, *into)))

    if settings.sharded:
        return {"load_parts": load}
    return run_on_all_ranks(group, lambda: patiently(lambda: load_whole(run, checkpoint, contents)))


def _load_copy(copy: ChosenCopy, found: LocalState) -> TrainingState:
    """Load the chosen in-memory copy on every rank."""
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


def load_initial(settings: Settings, group: dist.ProcessGroup | None) -> TrainingState:
    """Return the initial state of a new run, with the weights of INIT_FROM if set. All workers call this together.

    If the model is sharded, each worker later reads only its parts. Raises the errors of `read_init`.
    """
    if not settings.init_from:
        return TrainingState()
    limit_s, what = settings.storage_timeout_s, f"reading SUNSPOT_INIT_FROM={settings.init_from}"
    files = broadcast_from_rank0(group, lambda: retry_storage(limit_s, what, find_init_files, settings))
    if not files:
        return TrainingState(model=read_init(settings, group))

    def load(model: nn.Module, _: Optimizer) -> None:
        run_on_all_ranks(group, lambda: retry_storage(limit_s, what, load_init_files, settings, files, model))

    return TrainingState(load_parts=load)


def find_init_files(settings: Settings) -> WeightFiles | None:
    """Return the positions of the tensors in INIT_FROM, or None if every worker reads the whole state_dict.

    Raises `SettingsError` if INIT_FROM cannot be used.
    """
    wanted = settings.init_from
    if not wanted.startswith("run:"):
        storage, file = _init_file(settings)
        try:
            folder = find_in_folder(storage, file)
            if not folder and any(entry.key.startswith(f"{file}/") for entry in storage.list(file)):
                raise ValueError(f"it is a folder without {METADATA}")
        except ValueError as error:
            raise SettingsError(
                f"SUNSPOT_INIT_FROM={wanted}: {error}; use a folder that torch.distributed.checkpoint wrote, or a "
                "weights file"
            ) from error
        return folder or (find_weights(storage, file) if settings.parallel != "ddp" else None)
    if settings.parallel == "ddp":
        return None
    run = _init_run(settings)
    chosen = choose_init(settings)
    assert isinstance(chosen, tuple)
    checkpoint, contents = chosen
    if not contents:
        return find_weights(run.storage, run.key("checkpoints", checkpoint.name, "model.pt"))
    stored = {piece.name for piece in contents.pieces}
    if not all(value in stored for _, value in leaves_of(contents.outline["model"])):
        return None  # the state_dict also contains plain values
    located = [each._replace(file=run.key("checkpoints", checkpoint.name, each.file)) for each in contents.pieces]
    return WeightFiles(located, {}, archives=True)


def load_init_files(settings: Settings, files: WeightFiles, model: nn.Module) -> None:
    """Load this worker's parts of `files`, the result of `find_init_files`, into the model."""
    wanted = settings.init_from
    storage = _init_run(settings).storage if wanted.startswith("run:") else _init_file(settings)[0]
    if files.archives:
        files = files.rename(without_prefix(model.state_dict(), files.shapes))
    try:
        load_by_name(model, files.shapes, wanted, functools.partial(files.read_into, storage))
    except NotFoundError as error:
        raise ConflictError(_replaced(wanted)) from error


def read_init(settings: Settings, group: dist.ProcessGroup | None) -> Any:
    """Return the state_dict of INIT_FROM, which is a file or the newest intact checkpoint of a run.

    Rank 0 chooses the source. All workers call this together and get the same state_dict. Raises `SettingsError` if
    INIT_FROM cannot be used, and `ConflictError` if its source was replaced while it was being read.
    """
    limit_s, what = settings.storage_timeout_s, f"reading SUNSPOT_INIT_FROM={settings.init_from}"
    chosen = broadcast_from_rank0(group, lambda: retry_storage(limit_s, what, choose_init, settings))
    return run_on_all_ranks(group, lambda: retry_storage(limit_s, what, load_init, settings, chosen))


def choose_init(settings: Settings) -> tuple[Checkpoint, ShardedContents | None] | str:
    """Return what INIT_FROM refers to: the newest intact checkpoint of a run, or the SHA-256 digest of a file.

    A checkpoint is returned with a description of its tensors' pieces, or with None if the checkpoint is not sharded.
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
        absence = describe_absence(other) or f"{other.location} has no intact checkpoint"
        raise SettingsError(f"SUNSPOT_INIT_FROM={wanted}: {absence}")
    return checkpoint, None if "model.pt" in checkpoint.files else read_contents(other, checkpoint)


def load_init(settings: Settings, chosen: tuple[Checkpoint, ShardedContents | None] | str) -> Any:
    """Return the state_dict that `choose_init` chose. Raises `ConflictError` if the source has been replaced."""
    wanted, content = settings.init_from, bytearray()
    replaced = _replaced(wanted)
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
            f"SUNSPOT_INIT_FROM={wanted}: {error}; use a state_dict saved with torch.save, a safetensors file, or a "
            "folder written by torch.distributed.checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise SettingsError(
            f"SUNSPOT_INIT_FROM={wanted} contains {kind_of(state)}; use a state_dict saved with torch.save"
        )
    return state


def _replaced(wanted: str) -> str:
    return f"SUNSPOT_INIT_FROM={wanted} was replaced while it was being read; use a source that nobody writes to"


def _init_run(settings: Settings) -> Run:
    return open_run(settings.storage_path, settings.init_from.removeprefix("run:"))


def _init_file(settings: Settings) -> tuple[Storage, str]:
    folder, slash, file = settings.init_from.rstrip("/").rpartition("/")
    return open_storage(folder or slash or ".", follow_links=True), file
