"""Saving: a copy of the state that the training thread hardly notices, and a commit that cannot be half done.

The training thread pays for handing over the copy. Parameters and optimizer state do not change during forward and
backward, so they are copied behind them, and only the next optimizer step waits (`wait_for_copy`). Serializing,
hashing, uploading and reading back happen in one thread of rank 0, one checkpoint at a time; when storage is slower
than the interval, a newer copy takes the place of one that still waits.
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow
import torch

from app.errors import DamageError, NotFoundError, StorageError
from app.layout import Run
from app.layout.attempts import Attempt, checkpoint_name, ensure_owner, lineage, read_attempts
from app.layout.checkpoints import Checkpoint, delete_checkpoint, in_lineage, list_checkpoints, surplus, write_manifest
from app.layout.history import Journal, write_audit
from app.settings import Settings

BACKOFF_S = (1, 2, 4, 8, 16, 30)
"""Pauses between tries of a commit that storage refuses; the last one is repeated until `storage_timeout_s`."""


@dataclass
class Snapshot:
    """A copy of the state at one step, in host memory."""

    about: Checkpoint
    "What the manifest will say; its files are still missing."
    extra_state: dict[str, Any]
    pool: dict[Any, torch.Tensor]
    "Host tensors by their place in the state, used again for a later snapshot."
    state: dict[str, Any] = field(default_factory=dict)
    "`model` and `optimizer`: state_dicts whose tensors are those of the pool."
    copied: Future[None] | None = None


class Saver:
    """Takes snapshots on rank 0 and commits them behind the training."""

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        settings: Settings,
        journals: Mapping[str, Journal],
        warn: Callable[[str], Any],
    ) -> None:
        self._run, self._attempt, self._settings, self._journals, self._warn = run, attempt, settings, journals, warn
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="state-copy")
        self._copying: Future[None] | None = None
        self._pools: list[dict[Any, torch.Tensor]] = []
        self._audit: list[tuple[int, int, pyarrow.Table]] = []
        self._pending: Snapshot | None = None
        self._busy = False
        self._closing = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._failing_since: float | None = None
        self.last_committed: Checkpoint | None = None
        self._thread = threading.Thread(target=self._commit_all, name="checkpoint-commit", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------- in the training thread

    def save(
        self, about: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra_state: dict[str, Any]
    ) -> None:
        """Begin to copy the state; the caller goes on, and calls `wait_for_copy` before it changes parameters."""
        self.wait_for_copy()
        snapshot = Snapshot(about, extra_state, self._free_pool())
        parameters = dict(model.named_parameters())
        tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

        def copy_later(place: tuple[Any, ...], source: torch.Tensor) -> torch.Tensor:
            target = _host_tensor(snapshot.pool, place, source)
            if place[0] == "model" and place[1] not in parameters:
                target.copy_(source)  # buffers, such as batch norm's averages, change in the very next forward pass
            else:
                tensors.append((target, source.detach()))
            return target

        snapshot.state = {
            "model": _map_tensors(("model",), model.state_dict(), copy_later),
            "optimizer": _map_tensors(("optimizer",), optimizer.state_dict(), copy_later),
        }
        self._copying = snapshot.copied = self._copier.submit(_copy, tensors, _gpu_mark(tensors))
        with self._changed:
            if self._pending:
                self._pools.append(self._pending.pool)  # newest wins: it was never begun
            self._pending = snapshot
            self._changed.notify_all()

    def wait_for_copy(self) -> None:
        """Return when the state may change again."""
        if self._copying:
            self._copying.result()
            self._copying = None

    def record_audit(self, first: int, last: int, consumed: pyarrow.Table) -> None:
        """Hand over the rows of the steps `first` .. `last`; durable before the checkpoint that covers them."""
        with self._changed:
            self._audit.append((first, last, consumed))

    def raise_if_failed(self) -> None:
        """Raise what ended the commits for good: a newer owner, or storage that failed for too long."""
        if self._error:
            raise self._error

    def drain(self) -> None:
        """Wait until the newest snapshot is committed; raises like `raise_if_failed`.

        It ends: each request is bounded, and a commit that keeps failing is given up after `storage_timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or not (self._pending or self._busy))
        self.raise_if_failed()

    def finish(self) -> None:
        """`drain`, and end the threads."""
        self.drain()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._copier.shutdown()

    # ------------------------------------------------------------------------------------------ in the commit thread

    def _commit_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                snapshot, self._pending, self._busy = self._pending, None, True
            try:
                self._commit_with_patience(snapshot)
            except Exception as error:
                self._error = error
            with self._changed:
                self._pools.append(snapshot.pool)
                self._busy = False
                self._changed.notify_all()
            if self._error:
                return

    def _commit_with_patience(self, snapshot: Snapshot) -> None:
        """Try until it is committed, a newer snapshot waits, or storage has failed for `storage_timeout_s`."""
        tries = 0
        while True:
            try:
                self._commit(snapshot)
                self._failing_since = None
                return
            except (StorageError, NotFoundError, DamageError) as error:
                self._failing_since = self._failing_since or time.monotonic()
                failing_for = time.monotonic() - self._failing_since
                self._note("commit failed", snapshot.about, str(error))
                if failing_for > self._settings.storage_timeout_s:
                    raise StorageError(
                        f"no checkpoint could be committed for {failing_for:.0f} s "
                        f"(SUNSPOT_STORAGE_TIMEOUT_S={self._settings.storage_timeout_s:g}): {error}"
                    ) from error
            with self._changed:
                if self._changed.wait_for(lambda: self._pending, BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]):
                    return
            tries += 1

    def _commit(self, snapshot: Snapshot) -> None:
        """Write one checkpoint. Killed at any point, the last one stands, and this one does or does not exist."""
        about = snapshot.about
        assert snapshot.copied
        snapshot.copied.result()
        ensure_owner(self._run, self._attempt)
        self._write_history()
        files = {
            "model.pt": self._upload(about.name, "model.pt", snapshot.state["model"]),
            "optimizer.pt": self._upload(about.name, "optimizer.pt", snapshot.state["optimizer"]),
            "extra_state.pt": self._upload(about.name, "extra_state.pt", snapshot.extra_state),
        }
        ensure_owner(self._run, self._attempt)
        committed = Checkpoint(**{**vars(about), "files": files, "time": time.time()})
        write_manifest(self._run, committed)
        ensure_owner(self._run, self._attempt)  # taken over in between, it is outside the lineage and does not count
        self.last_committed = committed
        self._delete_surplus()

    def _write_history(self) -> None:
        for journal in self._journals.values():
            journal.flush()
        with self._changed:
            windows = list(self._audit)
        if windows:
            rows = pyarrow.concat_tables([table for _, _, table in windows])
            write_audit(self._run, self._attempt.number, windows[0][0], windows[-1][1], rows)
            with self._changed:
                del self._audit[: len(windows)]

    def _upload(self, name: str, file: str, state: Any) -> dict[str, Any]:
        """Stream one file to storage, then read it back: an upload that was acknowledged may still have been lost."""
        key = self._run.key("checkpoints", name, file)
        with self._run.storage.writer(key) as writer:
            torch.save(state, writer)  # type: ignore[arg-type]  # of a file it needs only write()
        written = (writer.size, writer.sha256)
        arrived = self._run.storage.digest(key)
        if arrived != written:
            raise DamageError(
                f"{self._run.storage.locate(key)}: {arrived[0]} bytes came back of {written[0]}, or other bytes"
            )
        version = next(entry.version for entry in self._run.storage.list(key) if entry.key == key)
        return {"size": writer.size, "sha256": writer.sha256, "version": version}

    def _delete_surplus(self) -> None:
        """Keep the best and the newest. Comes after the new manifest: nothing goes before what replaces it is safe."""
        try:
            mine = in_lineage(list_checkpoints(self._run), lineage(read_attempts(self._run)))
            keep, metric = self._settings.checkpoints_to_keep, self._settings.checkpoint_metric
            for checkpoint in surplus(mine, keep, metric, self._settings.checkpoint_order):
                ensure_owner(self._run, self._attempt)
                delete_checkpoint(self._run, checkpoint.name)
        except StorageError as error:
            self._note("old checkpoints not deleted", self.last_committed, str(error))

    def _free_pool(self) -> dict[Any, torch.Tensor]:
        with self._changed:
            return self._pools.pop() if self._pools else {}

    def _note(self, what: str, about: Checkpoint | None, detail: str) -> None:
        step = about.step if about else 0
        self._warn(f"{what} at step {step}: {detail}")
        self._journals["events"].append({"step": step, "time": time.time(), "event": what, "detail": detail})


def load_state(run: Run, checkpoint: Checkpoint, file: str) -> Any:
    """Load one file of a checkpoint on the CPU, checked against the manifest; raises `DamageError`.

    The bytes that were checked are the bytes that are loaded.
    """
    content = run.storage.read(run.key("checkpoints", checkpoint.name, file))
    if hashlib.sha256(content).hexdigest() != checkpoint.files[file]["sha256"]:
        raise DamageError(
            f"{run.storage.locate(run.key('checkpoints', checkpoint.name, file))}: does not match its manifest"
        )
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def describe(
    attempt: Attempt, step: int, steps_per_epoch: int, total_steps: int, metrics: dict[str, Any]
) -> Checkpoint:
    """The manifest's content for a checkpoint at `step`, its files not yet known."""
    epoch = (step - 1) // steps_per_epoch + 1
    name = checkpoint_name(step, attempt.number)
    return Checkpoint(name, step, epoch, steps_per_epoch, total_steps, attempt.number, metrics)


def _map_tensors(
    place: tuple[Any, ...], value: Any, change: Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor]
) -> Any:
    """The same nested dicts, lists and tuples, with every tensor replaced by `change(place, tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(place, value)
    if isinstance(value, Mapping):
        return {key: _map_tensors((*place, key), item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors((*place, index), item, change) for index, item in enumerate(value))
    return value


def _host_tensor(pool: dict[Any, torch.Tensor], place: Any, like: torch.Tensor) -> torch.Tensor:
    """The pool's tensor for `place`, made on first use; pinned for a GPU, so that the copy needs no CPU."""
    tensor = pool.get(place)
    if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
        tensor = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        pool[place] = tensor
    return tensor


def _gpu_mark(tensors: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event | None:
    """The point in the GPU's queue at which the state is the one to copy."""
    if not any(source.is_cuda for _, source in tensors):
        return None
    mark = torch.cuda.Event()
    mark.record()
    return mark


def _copy(tensors: list[tuple[torch.Tensor, torch.Tensor]], mark: torch.cuda.Event | None) -> None:
    if mark is None:
        for target, source in tensors:
            target.copy_(source)
        return
    device = next(source.device for _, source in tensors if source.is_cuda)
    stream = torch.cuda.Stream(device)
    stream.wait_event(mark)
    with torch.cuda.stream(stream):
        for target, source in tensors:
            target.copy_(source, non_blocking=True)
    stream.synchronize()
