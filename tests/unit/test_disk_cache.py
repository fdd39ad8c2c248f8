"""Tests for the cache on the node's disk: repeated reads, use by several processes, the size limit, and disk faults."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.data import disk_cache
from sunspot.data.disk_cache import DISK_BLOCK, DiskCache, export_cache
from sunspot.data.image_sources import find_sources
from sunspot.data.source import rows_in
from sunspot.data.table_files import clear_file_cache
from sunspot.errors import DataError, StorageError
from sunspot.settings import load_settings
from sunspot.storage import open_storage
from tests.harness.clouds import BUCKETS, CLOUDS
from tests.harness.constants import SetConstants
from tests.harness.datasets import everything, random_images
from tests.harness.s3 import FaultProxy, answer, cut_body

CONTENT = b"0123456789" * 1000

ON_DISK = 3 * DISK_BLOCK
"""Size of an entry with CONTENT on the disk, in bytes."""


class Bucket:
    """A bucket that counts how often each object is read."""

    def __init__(self) -> None:
        self.reads = Counter[str]()

    def read(self, cache: DiskCache, name: str, content: bytes = CONTENT) -> bytes:
        def fetch() -> bytes:
            self.reads[name] += 1
            return content

        return bytes(cache.read(name, fetch))


def entries_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("??/*") if path.is_file()]


def used(folder: Path) -> int:
    return sum(-(-path.stat().st_size // DISK_BLOCK) * DISK_BLOCK for path in entries_in(folder))


# ------------------------------------------------------------------------------------------------------------- datasets


class Reads(NamedTuple):
    labels: list[int]
    requests: int


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder to which DATA_CACHE points in this test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SUNSPOT_DATA_CACHE", str(folder))
    return folder


def put_digits(url: str, labels: list[int]) -> None:
    images = pa.array(random_images(len(labels), 8, 8).tolist())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"image": images, "label": labels}), sink, row_group_size=2)
    open_storage(url).write("digits/0.parquet", sink.getvalue().to_pybytes())


def read_epoch(url: str, proxy: FaultProxy) -> Reads:
    """Open and read a dataset as a new process does, and count the requests for its content."""
    clear_file_cache()
    before = len(proxy.seen("GetObject"))
    train, _ = find_sources(load_settings({"DATASET": f"{url}/digits"}))
    return Reads(everything(train)["label"].tolist(), len(proxy.seen("GetObject")) - before)


def test_only_the_first_epoch_reads_unchanged_files_from_the_bucket(
    s3_bucket: str, s3_proxy: FaultProxy, cache_folder: Path
) -> None:
    url = f"s3://{s3_bucket}"
    put_digits(url, [0, 1, 2, 3, 4])
    assert read_epoch(url, s3_proxy).requests > 0
    assert read_epoch(url, s3_proxy) == Reads([0, 1, 2, 3, 4], requests=0)
    put_digits(url, [4, 3, 2, 1, 0])
    changed = read_epoch(url, s3_proxy)
    assert changed.labels == [4, 3, 2, 1, 0], "a replaced file of the same size is read again"
    assert changed.requests > 0


def test_images_in_folders_are_cached(s3_bucket: str, s3_proxy: FaultProxy, cache_folder: Path) -> None:
    from PIL import Image

    url = f"s3://{s3_bucket}"
    for number, name in enumerate(("cat/0.bmp", "cat/1.bmp", "dog/0.bmp")):
        picture = Path(cache_folder.parent, f"{number}.bmp")
        Image.fromarray(random_images(8, 8, seed=number)).save(picture)
        open_storage(url).write(f"digits/{name}", picture.read_bytes())
    assert read_epoch(url, s3_proxy).requests > 0
    assert read_epoch(url, s3_proxy) == Reads([0, 0, 1], requests=0)


@pytest.mark.parametrize("scheme", CLOUDS)
def test_files_in_the_buckets_of_every_cloud_are_cached(
    scheme: str, request: pytest.FixtureRequest, cache_folder: Path
) -> None:
    url = f"{scheme}://{request.getfixturevalue(BUCKETS[scheme])}"
    put_digits(url, [3, 1, 2])
    for _ in range(2):
        clear_file_cache()
        train, _ = find_sources(load_settings({"DATASET": f"{url}/digits"}))
        assert everything(train)["label"].tolist() == [3, 1, 2]
        assert rows_in(train) == 3
        assert entries_in(cache_folder)


def test_files_on_disk_are_not_cached(tmp_path: Path, cache_folder: Path) -> None:
    pq.write_table(pa.table({"image": random_images(2, 8, 8).tolist(), "label": [0, 1]}), tmp_path / "0.parquet")
    clear_file_cache()
    find_sources(load_settings({"DATASET": str(tmp_path / "0.parquet")}))
    assert not cache_folder.exists()


def test_bucket_errors_are_raised_and_the_cache_keeps_no_incomplete_entry(
    s3_bucket: str, s3_proxy: FaultProxy, cache_folder: Path
) -> None:
    url = f"s3://{s3_bucket}"
    put_digits(url, [0, 1, 2])
    for fault in (answer(403, "AccessDenied"), cut_body(100)):
        s3_proxy.on("GetObject", fault)
        with pytest.raises(StorageError, match=r"digits/0\.parquet cannot be read"):
            read_epoch(url, s3_proxy)
        s3_proxy.clear()
        assert not entries_in(cache_folder)
    assert read_epoch(url, s3_proxy).labels == [0, 1, 2]


def test_a_file_that_is_truncated_while_it_is_open_is_not_cached(
    s3_bucket: str, s3_proxy: FaultProxy, cache_folder: Path
) -> None:
    url = f"s3://{s3_bucket}"
    put_digits(url, [0, 1, 2])
    content = open_storage(url).read("digits/0.parquet")
    clear_file_cache()
    train, _ = find_sources(load_settings({"DATASET": f"{url}/digits"}))
    open_storage(url).write("digits/0.parquet", content[:100])
    with pytest.raises(DataError, match=r"digits/0\.parquet has changed since it was opened"):
        everything(train)
    open_storage(url).write("digits/0.parquet", content)
    assert read_epoch(url, s3_proxy).labels == [0, 1, 2]


def test_the_cache_does_not_change_the_error_for_an_invalid_file(
    s3_bucket: str, s3_proxy: FaultProxy, cache_folder: Path
) -> None:
    open_storage(f"s3://{s3_bucket}").write("digits/0.parquet", b"no table")
    for _ in range(2):
        with pytest.raises(DataError, match=r"digits/0\.parquet is not a Parquet file"):
            read_epoch(f"s3://{s3_bucket}", s3_proxy)


def test_a_large_range_is_read_in_parts(
    s3_bucket: str, s3_proxy: FaultProxy, cache_folder: Path, set_constants: SetConstants
) -> None:
    set_constants(disk_cache, PART_BYTES=1000)
    put_digits(f"s3://{s3_bucket}", list(range(5)))
    assert read_epoch(f"s3://{s3_bucket}", s3_proxy).labels == list(range(5))


def test_the_processes_of_a_session_inherit_the_settings_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SUNSPOT_DATA_CACHE", "SUNSPOT_DATA_CACHE_GB"):
        monkeypatch.setenv(name, "")
    export_cache(load_settings({"DATA_CACHE": "/cache", "DATA_CACHE_GB": "2.5"}))
    assert (os.environ["SUNSPOT_DATA_CACHE"], os.environ["SUNSPOT_DATA_CACHE_GB"]) == ("/cache", "2.5")


# ---------------------------------------------------------------------------------------------------- several processes


def test_processes_that_need_the_same_entry_read_it_once(tmp_path: Path) -> None:
    bucket = Bucket()
    start = threading.Barrier(4)
    found: list[bytes] = []

    def work() -> None:
        cache = DiskCache(str(tmp_path), limit=1 << 20)  # each process has its own object
        start.wait()
        found.extend(bucket.read(cache, name) for name in "abcdef")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {CONTENT}
    assert bucket.reads == dict.fromkeys("abcdef", 1)
    assert int((tmp_path / "size").read_text()) == used(tmp_path) == 6 * ON_DISK


def test_a_process_waits_for_another_process_only_until_a_timeout(
    tmp_path: Path, set_constants: SetConstants, warned: list[str]
) -> None:
    set_constants(disk_cache, WAIT_S=0.05)
    program = f"""
import time
from sunspot.data.disk_cache import DiskCache
def fetch():
    print("reading", flush=True)
    time.sleep(60)
DiskCache({str(tmp_path)!r}, 1 << 20).read("a", fetch)
"""
    bucket = Bucket()
    cache = DiskCache(str(tmp_path), limit=1 << 20)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        assert bucket.read(cache, "a") == CONTENT
        assert "has been locked by another process for 0.05 s; stop that process" in warned[0]
        other.kill()
    for _ in range(2):
        assert bucket.read(cache, "a") == CONTENT
    assert bucket.reads["a"] == 2, "a killed process unlocks the entry, which is then kept"


# ---------------------------------------------------------------------------------------------------------------- limit


@given(sizes=st.lists(st.integers(0, 6 * DISK_BLOCK), max_size=20), limit=st.integers(1, 12))
def test_the_cache_never_uses_more_disk_space_than_its_limit(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache = DiskCache(str(folder), limit * DISK_BLOCK)
    bucket = Bucket()
    for number, size in enumerate(sizes):
        assert bucket.read(cache, str(number), b"x" * size) == b"x" * size
        assert used(folder) <= limit * DISK_BLOCK
    assert not sizes or used(folder) or sizes[-1] + 4 > limit * DISK_BLOCK, "the newest entry is kept if it fits"


def test_the_least_recently_used_entries_are_removed_first(tmp_path: Path) -> None:
    bucket = Bucket()
    cache = DiskCache(str(tmp_path), limit=10 * ON_DISK)
    for number in range(10):
        bucket.read(cache, str(number))
        newest = max(entries_in(tmp_path), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, ns=(number, number))
    for number in (0, 3):
        bucket.read(cache, str(number))  # now the most recently used
    bucket.read(cache, "new")
    before = bucket.reads.copy()
    for name in ("0", "3", "new", "9"):
        bucket.read(cache, name)
    assert bucket.reads == before
    bucket.read(cache, "1")
    assert bucket.reads["1"] == 2


@pytest.mark.parametrize("recorded", ["", "x", "-1"])
def test_a_damaged_record_of_the_cache_size_is_replaced(tmp_path: Path, recorded: str) -> None:
    bucket = Bucket()
    cache = DiskCache(str(tmp_path), limit=10 * ON_DISK)
    bucket.read(cache, "a")
    (tmp_path / "size").write_text(recorded)
    bucket.read(cache, "b")
    assert int((tmp_path / "size").read_text()) == used(tmp_path) == 2 * ON_DISK


# --------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "damaged", [b"", b"abc", CONTENT, b"\0" * (len(CONTENT) + 4)], ids=["empty", "cut", "no checksum", "zeros"]
)
def test_a_damaged_entry_is_read_from_the_bucket_again(tmp_path: Path, damaged: bytes, warned: list[str]) -> None:
    bucket = Bucket()
    cache = DiskCache(str(tmp_path), limit=1 << 20)
    bucket.read(cache, "a")
    [entry] = entries_in(tmp_path)
    entry.write_bytes(damaged)
    for _ in range(2):
        assert bucket.read(cache, "a") == CONTENT
    assert bucket.reads["a"] == 2
    assert len(warned) == 1
    assert f"{tmp_path}: an entry is damaged" in warned[0]


def test_a_full_disk_stops_additions_to_the_cache_with_one_warning(tmp_path: Path, warned: list[str]) -> None:
    bucket = Bucket()
    cache = DiskCache(str(tmp_path), limit=1 << 20)
    bucket.read(cache, "a")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))  # as on a full disk, a write fails halfway
    try:
        for name in ("b", "b", "c"):
            assert bucket.read(cache, name) == CONTENT
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for name in ("a", "c", "c"):
        assert bucket.read(cache, name) == CONTENT
    assert bucket.reads == {"a": 1, "b": 2, "c": 3}, "this process does not try again"
    assert len(warned) == 1
    assert (
        f"SUNSPOT_DATA_CACHE={tmp_path}: no more entries will be added to the cache: File too large; set it to"
        in warned[0]
    )
    assert bucket.read(DiskCache(str(tmp_path), limit=1 << 20), "b") == CONTENT


def test_a_folder_that_cannot_be_created_turns_the_cache_off(tmp_path: Path, warned: list[str]) -> None:
    (tmp_path / "file").touch()
    bucket = Bucket()
    cache = DiskCache(str(tmp_path / "file" / "cache"), limit=1 << 20)
    for name in ("a", "b"):
        assert bucket.read(cache, name) == CONTENT
    assert len(warned) == 1
    assert "Not a directory" in warned[0]


def test_a_process_killed_while_it_writes_an_entry_leaves_no_entry_in_the_cache(tmp_path: Path) -> None:
    program = f"""
import os
from sunspot.data import disk_cache
disk_cache.Path.replace = lambda self, target: os.kill(os.getpid(), 9)
disk_cache.DiskCache({str(tmp_path)!r}, 1 << 20).read("a", lambda: b"x" * 10000)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    bucket = Bucket()
    cache = DiskCache(str(tmp_path), limit=1 << 20)
    for _ in range(2):
        assert bucket.read(cache, "a") == CONTENT
    assert bucket.reads["a"] == 1
    assert len(entries_in(tmp_path)) == 1
