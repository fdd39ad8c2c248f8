"""Checks that storage is suitable for runs, and measures its speed. `sunspot doctor` runs this locally or in a pod.

The test objects are in a folder that is not a run, and are deleted afterwards.
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

SMALL = 1000
"""Size in bytes of a small object, such as a status."""

SMALL_TIMES = 5
"""Number of times that the small object is written and read."""

LARGE = PART + (8 << 20)
"""Size in bytes of a large object, which is uploaded in two parts."""

LARGE_TIMES = 3
"""Largest number of times that the large object is written and read."""

LARGE_WITHIN_S = 10.0
"""Seconds after which the large object is not written again."""

MIN_MB_PER_S = 5.0
"""Lowest throughput without a warning. At this rate, the default task's state of 134 MB is saved within a notice of 30
s."""

MAX_LATENCY_S = 1.0
"""Largest latency without a warning. Status, logs and metrics need several small writes every few seconds."""

MAX_SKEW_S = 30.0
"""Largest clock skew without a warning. A run counts as lost after two minutes of silence according to the reader's
clock."""

FASTER_DISK = "set SUNSPOT_STORAGE_PATH to a folder on a faster disk"

UNKNOWN = "the credentials do not allow this check, or the server does not support it"


class Result(enum.StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    "Runs work without the feature, or the feature could not be checked."
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """A check's name and result, what was observed, and how to fix a problem."""

    check: str
    result: Result
    seen: str
    fix: str = ""


def failure(name: str, error: Exception) -> Check:
    """Return a failed check for an error. The fix is the text after the error's last semicolon."""
    problem, _, fix = str(error).rpartition("; ")
    return Check(name, Result.FAILED, problem or fix, fix if problem else "")


def prove(storage: Storage, prefix: str) -> None:
    """Check that an object below `prefix` can be created, read, listed and deleted, but not created twice.

    If an object could be created twice, two processes could own the same run. Raises `StorageError` if a check fails.
    The message contains the location of `prefix`, not that of the test object.
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
        # Read this before the second create, which replaces the content if it is not rejected.
        found = storage.read(key) == content and [entry.key for entry in storage.list(key)] == [key]
        again = storage.create(key, b"another writer")
    finally:
        storage.delete(key)
    if not created or not found:
        raise StorageError(
            f"{storage.locate(key)} was written, but not found afterwards; "
            "check that SUNSPOT_STORAGE_PATH is a single, consistent store"
        )
    if storage.exists(key):
        fix = "allow deleting below SUNSPOT_STORAGE_PATH"
        raise StorageError(f"{storage.locate(key)} still exists after it was deleted; {fix}")
    if again:
        raise RefusedStorageError(
            f"{storage.locate(key)} was created twice, because this store ignores 'If-None-Match: *', so two processes "
            "could write to the same run; use a server that supports conditional writes"
        )


def probe_path(storage_path: str) -> Iterator[Check]:
    """Check a storage path, and yield the results up to the first failure."""
    try:
        yield from probe_storage(open_storage(storage_path))
    except StorageError as error:
        yield failure("storage", error)


def probe_storage(storage: Storage) -> Iterator[Check]:
    """Check storage, and yield all results. Raises `StorageError` if a check cannot continue."""
    folder = f"{FOLDER}/{uuid.uuid4().hex}"
    prove(storage, folder)
    proved = "objects can be listed, created, read and deleted, and cannot be created twice"
    yield Check("storage access", Result.OK, f"{storage.locate('')}: {proved}")
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
    """Measure the latency of writing and reading a small object."""
    content = os.urandom(SMALL)
    writes = [seconds(lambda: storage.write(key, content)) for _ in range(SMALL_TIMES)]
    reads = [seconds(lambda: storage.read(key)) for _ in range(SMALL_TIMES)]
    write = statistics.median(writes)
    read = statistics.median(reads)
    seen = f"write {write * 1000:.0f} ms, read {read * 1000:.0f} ms (medians of {SMALL_TIMES})"
    fix = "keep the bucket in the region of the nodes" if isinstance(storage, Bucket) else FASTER_DISK
    return _judged("storage latency", max(write, read) <= MAX_LATENCY_S, seen, fix)


def probe_large(storage: Storage, key: str) -> Check:
    """Measure the throughput of writing and reading a large object in several parts."""
    content = os.urandom(LARGE)
    up = list[float]()
    down = list[float]()

    def write() -> None:
        with storage.writer(key) as writer:
            writer.write(content)

    began = time.monotonic()
    while len(up) < LARGE_TIMES and (not up or time.monotonic() - began < LARGE_WITHIN_S):
        up.append(LARGE / 1e6 / seconds(write))
        down.append(LARGE / 1e6 / seconds(lambda: storage.digest(key)))
    written = statistics.median(up)
    read = statistics.median(down)
    seen = f"write {written:.0f} MB/s, read {read:.0f} MB/s (medians of {len(up)}, {LARGE / 1e6:.0f} MB each)"
    from_pods = (
        "only the throughput from the pods matters: check it with --from-pods; if it is low, use a closer bucket"
    )
    fix = from_pods if isinstance(storage, Bucket) else FASTER_DISK
    return _judged("storage throughput", min(written, read) >= MIN_MB_PER_S, seen, fix)


def probe_clock(storage: Storage, key: str) -> Check:
    """Measure the difference between this machine's clock and the storage's clock."""
    before = time.time()
    storage.write(key, b"now")
    after = time.time()
    [entry] = storage.list(key)
    apart = min((entry.modified - moment for moment in (before, after)), key=abs)
    seen = f"the clocks of this machine and of the storage differ by {abs(apart):.0f} s"
    return _judged("clock", abs(apart) <= MAX_SKEW_S, seen, "synchronize this machine's clock with NTP")


def probe_versions(bucket: Bucket) -> Check:
    """Check that the bucket frees the space of deleted objects."""
    kept = bucket.keeps_versions()
    if kept is None:
        return _judged("versions", False, UNKNOWN, f"allow {bucket.VERSIONS_RIGHT}")
    versions = "versions of deleted objects, which cost money" if kept else "no versions of deleted objects"
    return _judged("versions", not kept, f"the bucket keeps {versions}", bucket.VERSIONS_FIX)


def probe_unfinished(bucket: Bucket) -> Check:
    """Check that the bucket deletes the uploads of killed writers."""
    name = "unfinished uploads"
    dropped = bucket.drops_unfinished()
    if dropped is None:
        return _judged(name, False, UNKNOWN, f"allow {bucket.UNFINISHED_RIGHT}")
    kept = "no lifecycle rule deletes the uploads of killed processes, which cost money"
    fix = f"{bucket.UNFINISHED_FIX}; `sunspot checkpoints gc` and `sunspot delete` remove them too"
    return _judged(name, dropped, "a lifecycle rule deletes them" if dropped else kept, fix)


def _judged(name: str, good: bool, seen: str, fix: str) -> Check:
    return Check(name, Result.OK, seen) if good else Check(name, Result.WARNING, seen, fix)


def seconds(act: Callable[[], object]) -> float:
    """Call `act`, and return its duration in seconds."""
    began = time.monotonic()
    act()
    return max(time.monotonic() - began, 1e-6)
