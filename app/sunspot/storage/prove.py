"""The proof that a storage does what runs rely on, and what `sunspot doctor` measures of it, from here or in a pod.

Everything is written below one folder that is not a run, and deleted afterwards.
"""

import contextlib
import enum
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sunspot.errors import RefusedStorageError, StorageError
from sunspot.storage import open_storage
from sunspot.storage.base import Storage
from sunspot.storage.bucket import PART, Bucket

FOLDER = "sunspot-doctor"

SMALL, SMALL_TIMES = 1000, 5
"""Bytes of a small object such as a status, and how often one is written and read."""

LARGE, LARGE_TIMES, LARGE_WITHIN_S = PART + (8 << 20), 3, 10.0
"""Bytes of an object in two parts, how often it is written and read, and the seconds after which it is not repeated."""

MIN_MB_PER_S = 5.0
"""Enough to save the default task's state, 134 MB, within a notice of 30 s."""

MAX_LATENCY_S = 1.0
"""Status, logs and metrics are several small writes every few seconds."""

MAX_SKEW_S = 30.0
"""A run counts as lost after about two minutes of silence by the reader's clock."""

FASTER_DISK = "set SUNSPOT_STORAGE_PATH to a folder on a faster disk"

UNKNOWN = "may not be looked up here, or the server does not know it"


class Result(enum.StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    "A run can do without it, or it could not be examined."
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One check: what was tried, what was seen, and the fix."""

    check: str
    result: Result
    seen: str
    fix: str = ""


def failure(name: str, error: Exception) -> Check:
    """A failed check from an error whose text ends in the fix."""
    said, _, fix = str(error).rpartition("; ")
    return Check(name, Result.FAILED, said or fix, fix if said else "")


def prove(storage: Storage, prefix: str) -> None:
    """Check that objects below `prefix` can be created, read, listed and deleted, and that a second create fails.

    The last is what keeps two processes from owning one run. Raises `StorageError`, which names only `prefix`.
    """
    probe = f"/probe-{uuid.uuid4().hex}"
    try:
        _prove(storage, prefix + probe)
    except StorageError as error:
        error.args = (str(error).replace(probe, ""),)
        raise


def _prove(storage: Storage, key: str) -> None:
    content = uuid.uuid4().bytes
    created = storage.create(key, content)
    try:
        # Before the second create, which replaces the content where it is not refused.
        found = storage.read(key) == content and [entry.key for entry in storage.list(key)] == [key]
        again = storage.create(key, b"another writer")
    finally:
        storage.delete(key)
    if not created or not found:
        raise StorageError(
            f"{storage.locate(key)}: written, but not found again; "
            "check that SUNSPOT_STORAGE_PATH is one consistent store"
        )
    if storage.exists(key):
        fix = "allow deleting below SUNSPOT_STORAGE_PATH"
        raise StorageError(f"{storage.locate(key)}: deleted, but still there; {fix}")
    if again:
        raise RefusedStorageError(
            f"{storage.locate(key)}: created twice; this store ignores 'If-None-Match: *', without which two "
            "processes could write one run. Use a server that supports conditional writes"
        )


def probe_path(storage_path: str) -> Iterator[Check]:
    """All checks of a storage path, up to the first that fails."""
    try:
        yield from probe_storage(open_storage(storage_path))
    except StorageError as error:
        yield failure("storage", error)


def probe_storage(storage: Storage) -> Iterator[Check]:
    """Like `probe_path`, but raises `StorageError` when a check cannot continue."""
    folder = f"{FOLDER}/{uuid.uuid4().hex}"
    prove(storage, folder)
    can = "lists, creates, reads and deletes, and refuses to create twice"
    yield Check("storage access", Result.OK, f"{storage.locate('')}: {can}")
    try:
        yield probe_small(storage, f"{folder}/small")
        yield probe_clock(storage, f"{folder}/small")
        yield probe_large(storage, f"{folder}/large")
    finally:
        with contextlib.suppress(StorageError):
            storage.delete_many([entry.key for entry in storage.list(folder)])
            storage.delete_folders(FOLDER)
    if isinstance(storage, Bucket):
        yield probe_versions(storage)
        yield probe_unfinished(storage)


def probe_small(storage: Storage, key: str) -> Check:
    """Latency of a small object."""
    content = os.urandom(SMALL)
    writes = [seconds(lambda: storage.write(key, content)) for _ in range(SMALL_TIMES)]
    reads = [seconds(lambda: storage.read(key)) for _ in range(SMALL_TIMES)]
    write, read = statistics.median(writes), statistics.median(reads)
    said = f"write {write * 1000:.0f} ms, read {read * 1000:.0f} ms (medians of {SMALL_TIMES})"
    fix = "keep the bucket in the region of the nodes" if isinstance(storage, Bucket) else FASTER_DISK
    return _judged("storage latency", max(write, read) <= MAX_LATENCY_S, said, fix)


def probe_large(storage: Storage, key: str) -> Check:
    """Throughput of a large object, in parts, both ways."""
    content = os.urandom(LARGE)
    up, down = list[float](), list[float]()

    def write() -> None:
        with storage.writer(key) as writer:
            writer.write(content)

    began = time.monotonic()
    while len(up) < LARGE_TIMES and (not up or time.monotonic() - began < LARGE_WITHIN_S):
        up.append(LARGE / 1e6 / seconds(write))
        down.append(LARGE / 1e6 / seconds(lambda: storage.digest(key)))
    there, back = statistics.median(up), statistics.median(down)
    said = f"{there:.0f} MB/s there, {back:.0f} MB/s back (medians of {len(up)}, {LARGE / 1e6:.0f} MB each)"
    from_pods = "what counts is how it looks from the pods: --from-pods; there, choose a bucket that is nearer"
    fix = from_pods if isinstance(storage, Bucket) else FASTER_DISK
    return _judged("storage throughput", min(there, back) >= MIN_MB_PER_S, said, fix)


def probe_clock(storage: Storage, key: str) -> Check:
    """The difference between this machine's clock and the storage's."""
    before = time.time()
    storage.write(key, b"now")
    after = time.time()
    [entry] = storage.list(key)
    apart = min((entry.modified - moment for moment in (before, after)), key=abs)
    said = f"this clock and the storage's are {abs(apart):.0f} s apart"
    return _judged("clock", abs(apart) <= MAX_SKEW_S, said, "set this machine's clock by NTP")


def probe_versions(bucket: Bucket) -> Check:
    """Whether deleted objects keep taking space."""
    kept = bucket.keeps_versions()
    if kept is None:
        return _judged("versions", False, UNKNOWN, f"allow {bucket.VERSIONS_RIGHT}")
    said = "versions of what is deleted, and their space is paid" if kept else "no versions of what is deleted"
    return _judged("versions", not kept, f"the bucket keeps {said}", bucket.VERSIONS_FIX)


def probe_unfinished(bucket: Bucket) -> Check:
    """Whether the bucket removes the uploads of killed writers."""
    name, dropped = "unfinished uploads", bucket.drops_unfinished()
    if dropped is None:
        return _judged(name, False, UNKNOWN, f"allow {bucket.UNFINISHED_RIGHT}")
    paid = "no lifecycle rule removes uploads that killed processes left, and their space is paid"
    fix = f"{bucket.UNFINISHED_FIX}; `sunspot checkpoints gc` and `sunspot delete` remove them too"
    return _judged(name, dropped, "a lifecycle rule removes them" if dropped else paid, fix)


def _judged(name: str, good: bool, seen: str, fix: str) -> Check:
    return Check(name, Result.OK, seen) if good else Check(name, Result.WARNING, seen, fix)


def seconds(act: Callable[[], object]) -> float:
    """How long something takes."""
    began = time.monotonic()
    act()
    return max(time.monotonic() - began, 1e-6)
