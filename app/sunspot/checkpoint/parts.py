"""Writes and reads sharded checkpoints (PARALLEL=fsdp or hsdp). Each rank writes a part, and rank 0 commits all parts.

The files have the format of torch.distributed.checkpoint, so any PyTorch program can read the directory with its
`FileSystemReader`:

    __0_0.distcp __0_1.distcp   the tensors in rank 0's part of the model and of the optimizer's state
    part-00000.json             rank 0's index, with the position of each tensor in these files; written after the
                                files were verified
    .metadata                   the indexes of all ranks, for torch (not read here, because it is a pickle)
    extra_state.pt              the same as under DDP, plus the optimizer's plain values under `state`
    model.pt                    the whole model (only in the last checkpoint of a finished run); with
                                WEIGHTS=safetensors, all ranks write safetensors files and weights-00000.json instead

Only rank 0 writes the tensors that are not sharded (buffers, the optimizer's step counts). Under hsdp, several ranks
have the same shard, and each of these ranks writes some of the shard's tensors.

Rank 0 looks in storage for the files that the other ranks have written. If a rank dies, no other rank waits for it in a
collective, and the directory gets no manifest. The other ranks only write their parts of snapshots that rank 0
has started committing (`CommitCoordinator` in commit.py).

Torch modules that only sharded checkpoints need are imported lazily, because importing them takes seconds.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sunspot.background import map_parallel
from sunspot.checkpoint.commit import CommitCoordinator
from sunspot.checkpoint.files import (
    Files,
    load_state,
    load_weights,
    plan_shards,
    upload,
    upload_bytes,
    upload_index,
    upload_shard,
    upload_state,
)
from sunspot.checkpoint.pieces import (
    INDEX,
    METADATA,
    Piece,
    extent_of,
    make_metadata,
    read_index,
    read_into,
)
from sunspot.checkpoint.snapshot import MoreFiles, Snapshot
from sunspot.checkpoint.tensors import fill, keys_of, leaves_of, make_outline, tensors_in
from sunspot.errors import DamageError
from sunspot.parallel.collectives import WorkerPlace
from sunspot.parallel.sharding import parameters_of
from sunspot.run import Run, to_json
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.shards import describe_gap
from sunspot.settings import Settings
from sunspot.storage.base import Writer
from sunspot.storage.limits import WARN_AFTER_S, refuse_if_given_up

log = logging.getLogger(__name__)

KINDS = ("model", "optimizer")
"""The kinds of files in a part, in order of their numbers. Prediction only reads the model's files."""

WEIGHTS = "weights-{:05d}.json"
"""Name of the file that lists a rank's safetensors files. It is written after these files were verified."""

PEER_TIMEOUT_S = 60.0
"""Seconds beyond STORAGE_TIMEOUT_S that rank 0 waits for parts, so that the failing rank reports its error first."""

POLL_EVERY_S = 0.5
"""Seconds between listings while rank 0 waits for the other parts."""


class ShardWriter:
    """Writes one rank's part of each snapshot, in the commit thread.

    Rank 0 also writes the files that all ranks share.
    """

    def __init__(
        self,
        run: Run,
        worker: WorkerPlace,
        names: list[str],
        settings: Settings,
        coordinator: CommitCoordinator,
        more_files: MoreFiles | None = None,
    ) -> None:
        """Create a writer. `names` contains the parameters' names in the optimizer's order (`parameter_names`).

        `more_files` are only written to a finished run's last checkpoint.
        """
        self._run = run
        self._coordinator = coordinator
        self._names = names
        self._more_files = more_files
        self._rank = worker.rank
        self._world_size = worker.world_size
        self._parts = worker.parts
        self._timeout_s = settings.storage_timeout_s + PEER_TIMEOUT_S
        self._safetensors = settings.weights == "safetensors"
        self._took_s = 0.0
        "Seconds that writing this rank's part took. Other ranks can take twice as long."
        self._written: list[str] = []
        """The keys of this rank's indexes in storage, for the newest checkpoint. A retry does not write them again."""

    def files(self, snapshot: Snapshot) -> Files:
        """Write this rank's part. On rank 0, wait for the other parts, and return all files."""
        name = snapshot.manifest.name
        safetensors = self._safetensors and snapshot.manifest.finished
        self._write_once(name, INDEX, lambda: self.write_part(snapshot))
        if safetensors:
            self._wait_for_parts(name)
            self._write_once(name, WEIGHTS, lambda: self.write_weights(snapshot))
        if self._rank:
            return {}
        self._wait_for_indexes(name, WEIGHTS if safetensors else INDEX)
        return self.write_common(snapshot)

    def write_part(self, snapshot: Snapshot) -> dict[str, Any]:
        """Write this rank's part of the tensors, and return its index."""
        name = snapshot.manifest.name
        files = Files()
        pieces = list[Piece]()
        tensors = zip(keys_of(snapshot.state, self._names), tensors_in(snapshot.state), snapshot.places, strict=True)
        # Tensors that are not sharded come first, because every rank reads rank 0's copy of them, in one request.
        in_order = sorted(tensors, key=lambda item: item[2] is not None)
        # Rank 0 writes the tensors that are not sharded. The last ranks have no part of a tensor with few rows.
        whole = [item for item in in_order if not item[2] and self._rank == 0]
        sharded = [item for item in in_order if item[2] and item[1].numel()]
        # The ranks with the same shard take turns, beginning with the largest tensors, so that the shares are similar.
        largest = sorted(sharded, key=lambda item: -item[1].nbytes)
        own = {key for key, _, _ in largest[self._rank // self._parts :: self._world_size // self._parts]}
        mine = whole + [item for item in sharded if item[0] in own]
        for number, kind in enumerate(KINDS):
            file = f"__{self._rank}_{number}.distcp"

            def write(writer: Writer, file: str = file, kind: str = kind) -> None:
                for key, tensor, place in mine:
                    if key.startswith(f"{kind}."):
                        content = io.BytesIO()
                        torch.save(tensor, content)
                        data = content.getbuffer()
                        extent = extent_of(key, tensor, place)
                        pieces.append(Piece(*extent, file, writer.size, len(data), zlib.crc32(data)))
                        writer.write(data)

            files[file] = upload(self._run, name, file, write)
        return {"files": files, "tensors": [piece._asdict() for piece in pieces]}

    def write_weights(self, snapshot: Snapshot) -> dict[str, Any]:
        """Write this rank's share of the model's safetensors files, and return their index.

        The tensors are read from all ranks' parts.
        """
        run = self._run
        name = snapshot.manifest.name
        written = Files()
        whole = whole_model(read_indexes(run, name, 1)[1])
        mine = list(plan_shards(whole).items())[self._rank :: self._world_size]
        if mine:  # a rank without a file reads nothing
            files, pieces = self._read_parts(name)
        for file, tensors in mine:
            into = {f"model.{tensor}": torch.empty_like(whole[tensor], device="cpu") for tensor in tensors}
            wanted = [piece for piece in pieces if piece.name in into]
            read_into(run, replace(snapshot.manifest, files=files), wanted, into)
            written[file] = upload_shard(run, name, file, {tensor: into[f"model.{tensor}"] for tensor in tensors})
        return {"files": written}

    def write_common(self, snapshot: Snapshot) -> Files:
        """Write the files that all ranks share, once all parts are written. Return all files of the checkpoint.

        A finished run's last checkpoint contains the whole model in one file, unless the ranks wrote safetensors.
        """
        run = self._run
        name = snapshot.manifest.name
        files, pieces = self._read_parts(name)
        metadata = make_metadata(pieces)
        files[METADATA] = upload(run, name, METADATA, lambda writer: pickle.dump(metadata, writer))  # type: ignore[arg-type]
        outline = make_outline(snapshot.state, self._names)
        extra_state = {**snapshot.extra_state, "state": outline}
        files["extra_state.pt"] = upload_state(run, name, "extra_state.pt", extra_state)
        if not snapshot.manifest.finished:
            return files
        if self._safetensors:
            model: Any = whole_model(pieces)
            files |= read_indexes(run, name, self._world_size, WEIGHTS)[0] | upload_index(run, name, model)
        else:
            model = load_whole(run, replace(snapshot.manifest, files=files), ShardedContents(pieces, outline["model"]))
            files["model.pt"] = upload_state(run, name, "model.pt", model)
        if self._more_files:
            more = self._more_files(model)
            files |= {file: upload_bytes(run, name, file, content) for file, content in more.items()}
        return files

    def _read_parts(self, name: str) -> tuple[Files, list[Piece]]:
        """Read the indexes of all parts.

        Raises `RuntimeError` if the parts lack values or overlap. Another attempt to commit them would not help,
        because each rank writes its part only once.
        """
        files, pieces = read_indexes(self._run, name, self._world_size)
        gap = describe_gap(piece.extent for piece in pieces)
        if gap:
            raise RuntimeError(f"{name} cannot be committed: {gap}")
        return files, pieces

    def _write_once(self, name: str, index: str, write: Callable[[], dict[str, Any]]) -> None:
        """Write files, then their index, which marks them as complete. Does nothing if they were written before."""
        own = self._run.key("checkpoints", name, index.format(self._rank))
        if own not in self._written:
            began = time.monotonic()
            self._run.storage.write(own, to_json(write()))
            self._took_s = time.monotonic() - began
            self._written = [own, *self._written[:1]]

    def _wait_for_parts(self, name: str) -> None:
        """Wait until all ranks have written their parts. Rank 0 checks this and informs the others."""
        if self._rank == 0:
            self._wait_for_indexes(name, INDEX)
            self._coordinator.announce_written(name)
        else:
            missing = "rank 0 has not seen the parts of all ranks"
            self._wait(name, lambda: "" if self._coordinator.is_written(name) else missing)

    def _wait_for_indexes(self, name: str, index: str) -> None:
        """Wait until all ranks have written their indexes."""

        def find_missing() -> str:
            entries = self._run.storage.list(self._run.key("checkpoints", name))
            there = {entry.key.rpartition("/")[2] for entry in entries}
            missing = [str(rank) for rank in range(self._world_size) if index.format(rank) not in there]
            return f"missing parts of ranks {', '.join(missing)}" if missing else ""

        self._wait(name, find_missing)

    def _wait(self, name: str, find_missing: Callable[[], str]) -> None:
        """Wait until `find_missing` returns an empty string. Raises `RuntimeError` if this takes too long."""
        began = time.monotonic()
        limit_s = self._timeout_s + self._took_s
        warned = False
        while missing := find_missing():
            refuse_if_given_up(name)
            waited = time.monotonic() - began
            text = f"{name}: {missing} after {waited:.0f} s"
            if waited > limit_s:
                raise RuntimeError(text)
            if waited > WARN_AFTER_S and not warned:
                warned = True
                log.warning(f"{text}; waiting up to {limit_s:.0f} s")
            time.sleep(POLL_EVERY_S)


def whole_model(pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
    """Return the model's full tensors on the meta device, in the order in which rank 0's index lists them."""
    return {
        piece.name.removeprefix("model."): piece.allocate("meta") for piece in pieces if piece.name.startswith("model.")
    }


def read_indexes(run: Run, name: str, world_size: int, index: str = INDEX) -> tuple[Files, list[Piece]]:
    """Read all ranks' indexes of an uncommitted checkpoint. Return all files, including the indexes, and all pieces.

    Raises `DamageError` if a file has changed since it was written.
    """
    folder = run.key("checkpoints", name)
    listed = {entry.key.removeprefix(f"{folder}/"): entry for entry in run.storage.list(folder)}
    indexes = [index.format(rank) for rank in range(world_size)]
    contents = map_parallel(lambda file: run.storage.read(f"{folder}/{file}"), indexes)
    files: Files = {}
    pieces: list[Piece] = []
    for file, content in zip(indexes, contents, strict=True):
        found = json.loads(content)
        sha256 = hashlib.sha256(content).hexdigest()
        files |= found["files"] | {file: {"size": len(content), "sha256": sha256, "version": listed[file].version}}
        pieces += [Piece(**piece) for piece in found.get("tensors", [])]
    for file, written in files.items():
        if file not in listed or (listed[file].size, listed[file].version) != (written["size"], written["version"]):
            raise DamageError(f"{run.storage.locate(f'{folder}/{file}')} has changed since it was written")
    return files, pieces


# -------------------------------------------------------------------------------------------------------------- reading


def is_sharded(checkpoint: Checkpoint) -> bool:
    """Return True if a checkpoint is sharded (each rank wrote its part)."""
    return INDEX.format(0) in checkpoint.files


class ShardedContents(NamedTuple):
    """The pieces of a sharded checkpoint, and the outline of the checkpoint's state (`make_outline`)."""

    pieces: list[Piece]
    outline: Any
    "The state with each tensor replaced by its name."


def read_contents(run: Run, checkpoint: Checkpoint) -> ShardedContents:
    """Return the contents of a sharded checkpoint. Sends one request for each rank that wrote the checkpoint.

    Raises `DamageError` if a file does not match the manifest.
    """
    return ShardedContents(read_index(run, checkpoint), load_state(run, checkpoint, "extra_state.pt")["state"])


def load_model(run: Run, checkpoint: Checkpoint, contents: ShardedContents | None = None) -> Any:
    """Load the model's whole state_dict on the CPU, from `model.pt` or from parts.

    Raises `DamageError` if a file does not match the manifest, or if the parts from which `model.pt` was made are
    incomplete.
    """
    if "model.pt" in checkpoint.files:
        if is_sharded(checkpoint):
            read_index(run, checkpoint)
        return load_state(run, checkpoint, "model.pt")
    pieces, outline = contents or read_contents(run, checkpoint)
    return load_whole(run, checkpoint, ShardedContents(pieces, outline["model"]))


def load_whole(run: Run, checkpoint: Checkpoint, contents: ShardedContents) -> Any:
    """Load the state that the outline in `contents` describes, with full tensors on the CPU.

    Raises `DamageError` if a file does not match its index.
    """
    named = {name for _, name in leaves_of(contents.outline)}
    wanted = [piece for piece in contents.pieces if piece.name in named]
    tensors = {piece.name: piece.allocate() for piece in wanted}
    read_into(run, checkpoint, wanted, tensors)
    return fill(contents.outline, tensors)


def load_parts(
    run: Run,
    checkpoint: Checkpoint,
    contents: ShardedContents,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Load this rank's part of a sharded model and its optimizer. The checkpoint can have any number of parts.

    Raises `DamageError` if a file does not match its index, and `ConflictError` if the checkpoint does not fit the
    model.
    """
    read = functools.partial(read_into, run, checkpoint, contents.pieces)
    load_pieces(contents, checkpoint.name, model, optimizer, read)


def load_pieces(
    contents: ShardedContents,
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    read: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    """Load this rank's part of the checkpoint `name`. `read` fills the given tensors, which are keyed by name."""
    pieces, outline = contents
    own = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    parameters = parameters_of(optimizer)
    owners = {
        key: parameters[number]
        for number, values in outline["optimizer"]["state"].items()
        if number < len(parameters)
        for _, key in leaves_of(values)
        if isinstance(key, str)
    }

    def place(piece: Piece) -> torch.Tensor:
        like = own.get(piece.name, owners.get(piece.name))
        if like is None or list(like.shape) != piece.shape:
            return piece.allocate()
        return like if piece.name in own else torch.empty_like(like.detach(), dtype=getattr(torch, piece.dtype))

    tensors = {piece.name: place(piece) for piece in pieces}
    read(tensors)
    load_weights(model, fill(outline["model"], tensors), name)
    optimizer.load_state_dict(fill(outline["optimizer"], tensors))


def weights_digest(checkpoint: Checkpoint) -> str:
    """Return a SHA-256 that identifies a checkpoint's weights."""
    if "model.pt" in checkpoint.files:
        return str(checkpoint.files["model.pt"]["sha256"])
    ending = f"_{KINDS.index('model')}.distcp"
    parts = sorted((file, entry["sha256"]) for file, entry in checkpoint.files.items() if file.endswith(ending))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
