"""A whole state that all nodes upload which hold it (PARALLEL=ddp): bandwidth grows with them, one manifest commits.

rank 0        begins an upload of each file, and hands parts of it to a rank of each other node (`share-00001.json`)
these ranks   send them out of their copies of the same step, and tell which have arrived (`sent-00001.json`)
rank 0        meanwhile sends its own parts and hashes all; takes another rank's part only with the CRC-32 of its own
              copy, sends what is missing, and completes the files

Bytes outside of tensors (names, zip headers) come with the share, so that the parts fit together whatever torch.save
does elsewhere. Ranks learn of each other only from storage, as in sharded.py: one that dies keeps nobody waiting in a
collective call, and costs rank 0 the time of its share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from typing import Any

from sunspot.background import start_thread
from sunspot.checkpoint.files import Files, describe_arrived, upload_state, write_whole
from sunspot.checkpoint.layout import Layout, crc32_of, layout_from_json, layout_to_json, read_spans, views
from sunspot.checkpoint.slots import Slot
from sunspot.checkpoint.snapshot import Snapshot
from sunspot.errors import NotFoundError, StorageError
from sunspot.run import Run, to_json
from sunspot.storage.base import map_parallel
from sunspot.storage.deadline import moved
from sunspot.storage.parts import Part

LEAST_BYTES = 256 << 20
"""Of a state that is shared: below, rank 0 is done before the others have heard of it."""

SHARE, SENT = "share-{:05d}.json", "sent-{:05d}.json"

POLL_EVERY_S = 0.5
"""Between two looks for a share, or for what was sent."""

LATE_S = 10.0
"""How much longer than its own parts took rank 0 waits for the others'."""


def is_shared(run: Run, snapshot: Snapshot) -> bool:
    """Whether several nodes upload this snapshot; all ranks find the same."""
    return run.storage.is_bucket and snapshot.slot.size >= LEAST_BYTES


class SharedWriter:
    """Writes rank 0's snapshots, with the help of other ranks."""

    def __init__(self, helpers: Sequence[int], warn: Callable[[str], Any]) -> None:
        """`helpers`: a rank of each other node, which has a `ShareSender`."""
        self._helpers, self._warn = list(helpers), warn
        self._handed_out = ""
        "The last checkpoint of which others got shares: in a second try, rank 0 is alone."

    def __call__(self, run: Run, snapshot: Snapshot) -> Files:
        name = snapshot.manifest.name
        if not self._helpers or name == self._handed_out or not is_shared(run, snapshot):
            return write_whole(run, snapshot)
        self._handed_out = name
        ranks, files = [0, *self._helpers], list[_File]()
        try:
            for kind in ("model", "optimizer"):
                files.append(_File(run, name, f"{kind}.pt", snapshot.state[kind], snapshot.slot, ranks))
            map_parallel(lambda rank: _write(run, name, SHARE, rank, [file.share(rank) for file in files]), ranks[1:])
            began = time.monotonic()
            map_parallel(lambda file: file.send(file.numbers[0]), files)
            self._collect(run, name, files, time.monotonic() - began + LATE_S)
            entries = map_parallel(lambda file: file.complete(), files)
        except BaseException:
            for file in files:
                file.abort()
            raise
        finally:
            with contextlib.suppress(StorageError):  # what is left goes with the checkpoint
                run.storage.delete_many([_key(run, name, kind, rank) for rank in ranks[1:] for kind in (SHARE, SENT)])
        extra_state = upload_state(run, name, "extra_state.pt", snapshot.extra_state)
        return {file.name: entry for file, entry in zip(files, entries, strict=True)} | {"extra_state.pt": extra_state}

    def _collect(self, run: Run, name: str, files: list[_File], limit_s: float) -> None:
        """Take what the helpers have sent, wait for more for so long, and send the rest."""
        until = time.monotonic() + limit_s

        def wait_for(rank: int) -> Any:
            while (sent := _read(run, name, SENT, rank)) is None and time.monotonic() < until:
                time.sleep(POLL_EVERY_S)
            return sent

        for rank, sent in zip(list(self._helpers), map_parallel(wait_for, self._helpers), strict=True):
            took = [file.take(rank, parts) for file, parts in zip(files, sent or [[] for _ in files], strict=True)]
            if not all(took):
                self._helpers.remove(rank)
                what = "sent other bytes than rank 0 has" if sent else "has not sent its parts in time"
                self._warn(f"{name}: rank {rank} {what}; rank 0 sends them, and no more are handed to that rank")
        map_parallel(lambda file: file.send(file.missing), files)


class _File:
    """A file on its way, as rank 0 sees it."""

    def __init__(self, run: Run, checkpoint: str, name: str, state: Any, slot: Slot, ranks: list[int]) -> None:
        self.name, self._run, self._checkpoint, self._slot = name, run, checkpoint, slot
        layout = Layout(state, slot)
        self._size = layout.size
        upload = run.storage.upload(run.key("checkpoints", checkpoint, name))
        assert upload
        self._upload = upload
        self._parts = dict(enumerate(layout.cut(upload.part_size), start=1))
        self.numbers = {rank: list(self._parts)[first :: len(ranks)] for first, rank in enumerate(ranks)}
        "Of the parts that each rank sends."
        self._sent: dict[int, Part] = {}
        self._checksums: dict[int, int] = {}
        "Of the parts that other ranks send."
        self._hash = start_thread(self._hash_all, "checkpoint-hash")

    def share(self, rank: int) -> dict[str, Any]:
        """What a rank has to know to send its parts."""
        return {
            "file": self.name,
            "token": self._upload.token,
            "parts": {number: layout_to_json(self._parts[number]) for number in self.numbers[rank]},
        }

    def send(self, numbers: Collection[int]) -> None:
        """Send some parts."""
        for part in self._upload.send_all(numbers, lambda number: read_spans(self._parts[number], self._slot)):
            self._sent[part.number] = part

    def take(self, rank: int, parts: list[Any]) -> bool:
        """Take the parts that a rank has sent, if they are those of this copy; whether all of them are."""
        self._hash.result()
        for part in [Part(*part) for part in parts]:
            if part.number in self.numbers[rank] and part.crc32 == self._checksums[part.number]:
                self._sent[part.number] = part
        return all(number in self._sent for number in self.numbers[rank])

    @property
    def missing(self) -> list[int]:
        return [number for number in self._parts if number not in self._sent]

    def complete(self) -> dict[str, Any]:
        """Publish the file; returns its entry in the manifest. Raises like `upload`."""
        sha256, size = self._hash.result(), self._size
        verified = self._upload.complete(list(self._sent.values()), size)
        return describe_arrived(self._run, self._checkpoint, self.name, size, sha256, verified=verified)

    def abort(self) -> None:
        wait([self._hash])
        self._upload.abort()

    def _hash_all(self) -> str:
        sha256 = hashlib.sha256()
        for number, spans in self._parts.items():
            for view in views(spans, self._slot):
                sha256.update(view)
                moved(len(view))
            if number not in self.numbers[0]:
                self._checksums[number] = crc32_of(spans, self._slot)
        return sha256.hexdigest()


class ShareSender:
    """Sends one rank's share of each snapshot that rank 0 commits, in a thread; it fails without consequences.

    Like rank 0, it holds the snapshot that is committed, and the newest one that waits for it.
    """

    def __init__(self, run: Run, rank: int, limit_s: float, warn: Callable[[str], Any]) -> None:
        """A snapshot that rank 0 has not begun to upload after `limit_s` is let go."""
        self._run, self._rank, self._limit_s, self._warn = run, rank, limit_s, warn
        self._held: list[tuple[Snapshot, float]] = []
        "Snapshots and when they are let go, the oldest first."
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="checkpoint-share", daemon=True).start()

    def offer(self, snapshot: Snapshot) -> None:
        """Hold a snapshot until rank 0 has handed out its parts, or those of a newer one; returns at once."""
        with self._changed:
            if not is_shared(self._run, snapshot):
                snapshot.release()
                return
            for waiting, _ in self._held[1:]:
                waiting.release()
            self._held[1:] = [(snapshot, time.monotonic() + self._limit_s)]
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held)
                held = list(self._held)
            for snapshot, until in held:
                try:
                    share = _read(self._run, snapshot.manifest.name, SHARE, self._rank)
                    if share is None and time.monotonic() < until:
                        continue
                    if self._let_go(snapshot, itself=False) and share is not None:
                        self._send(snapshot, share)
                except Exception as error:
                    self._warn(f"the share in {snapshot.manifest.name} was not sent: {error}")
                self._let_go(snapshot)
                break
            else:
                time.sleep(POLL_EVERY_S)

    def _send(self, snapshot: Snapshot, share: list[dict[str, Any]]) -> None:
        snapshot.copied.result()
        if snapshot.torn:
            return
        name = snapshot.manifest.name

        def send(file: dict[str, Any]) -> list[Part]:
            upload = self._run.storage.upload(self._run.key("checkpoints", name, file["file"]), file["token"])
            assert upload
            parts = {int(number): layout_from_json(spans) for number, spans in file["parts"].items()}
            return upload.send_all(parts, lambda number: read_spans(parts[number], snapshot.slot))

        sent = map_parallel(send, share)
        if _read(self._run, name, SHARE, self._rank) is not None:  # or else rank 0 waits no more
            _write(self._run, name, SENT, self._rank, sent)

    def _let_go(self, snapshot: Snapshot, itself: bool = True) -> bool:
        """Release those before a snapshot, which rank 0 has left behind, and `itself`; False if it is held no more."""
        with self._changed:
            position = next((n for n, (held, _) in enumerate(self._held) if held is snapshot), None)
            if position is not None:
                for held, _ in self._held[: position + itself]:
                    held.release()
                del self._held[: position + itself]
            return position is not None


def _key(run: Run, name: str, kind: str, rank: int) -> str:
    return run.key("checkpoints", name, kind.format(rank))


def _write(run: Run, name: str, kind: str, rank: int, content: Any) -> None:
    run.storage.write(_key(run, name, kind, rank), to_json(content))


def _read(run: Run, name: str, kind: str, rank: int) -> Any:
    """The content, or None if there is none yet."""
    try:
        return json.loads(run.storage.read(_key(run, name, kind, rank)))
    except NotFoundError:
        return None
