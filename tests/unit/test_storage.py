"""Tests that directories and buckets behave the same, and that failures raise clear errors."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import torch

import sunspot.storage.limits
import sunspot.storage.local
from sunspot.background import map_parallel
from sunspot.errors import NotFoundError, RefusedStorageError, SettingsError, StorageError
from sunspot.storage import bucket as module
from sunspot.storage import open_storage
from sunspot.storage.base import CHUNK, Storage
from sunspot.storage.google import GoogleStorage
from sunspot.storage.limits import MIN_RATE, ProgressDeadline, RetryWindow, operation, record_progress
from sunspot.storage.local import LocalStorage
from sunspot.storage.prove import prove
from sunspot.storage.s3 import S3Storage
from tests.harness import REPOSITORY, s3
from tests.harness.clouds import BUCKETS, CLOUDS, VERSITYGW
from tests.harness.constants import SetConstants
from tests.harness.s3 import FaultProxy
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20
PART = 5 * MIB  # the smallest part that S3 accepts

MANY_TRIES = 10
"""Largest number of times that a request is sent."""


@pytest.fixture(autouse=True)
def small_parts(set_constants: SetConstants) -> Iterator[None]:
    """Use small parts, and check that no upload thread outlives its test."""
    set_constants(module, PART=PART)
    yield
    assert_no_threads()


@pytest.fixture(params=["local", "s3", VERSITYGW, *CLOUDS])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "not" / "there" / "yet"))
    if request.param == "versitygw":
        return open_storage(f"s3://{request.getfixturevalue('versity_bucket')}/some/prefix/")
    scheme, _, without_prefix = request.param.partition(" ")
    bucket = request.getfixturevalue(BUCKETS[scheme])
    return open_storage(f"{scheme}://{bucket}" + ("" if without_prefix else "/some/prefix/"))


@pytest.fixture
def s3_storage(s3_proxy: FaultProxy, s3_bucket: str) -> S3Storage:
    """Return S3 storage behind the proxy."""
    return S3Storage(f"s3://{s3_bucket}/runs")


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CONNECT_TIMEOUT_S": 1, "READ_TIMEOUT_S": 0.3, "REQUEST_TRIES": 3}.items():
        monkeypatch.setattr(module, name, value)


def assert_no_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "storage-part":
            thread.join(1)  # it might have just delivered its result
            assert not thread.is_alive()


def pattern(size: int) -> bytes:
    """Return bytes that are different in every part."""
    return (b"".join(n.to_bytes(8, "big") for n in range(size // 8 + 1)))[:size]


def listed(storage: Storage, prefix: str) -> list[tuple[str, int]]:
    """Return the keys and sizes of a listing."""
    return [(entry.key, entry.size) for entry in storage.list(prefix)]


# --------------------------------------------------------------------------------------------------------- all backends


def test_the_storage_path_determines_the_backend(tmp_path: Path, s3_bucket: str) -> None:
    assert isinstance(open_storage(str(tmp_path)), LocalStorage)
    assert isinstance(open_storage(f"s3://{s3_bucket}/x"), S3Storage)
    assert open_storage(str(tmp_path)).locate("run/a") == f"{tmp_path}/run/a"
    assert open_storage(f"s3://{s3_bucket}/x/").locate("run/a") == f"s3://{s3_bucket}/x/run/a"
    assert open_storage(f"s3://{s3_bucket}").locate("run/a") == f"s3://{s3_bucket}/run/a"


def test_a_storage_path_with_an_unknown_scheme_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^xyz://bucket/a: the scheme xyz:// is not supported; use s3://, gs://, "):
        open_storage("xyz://bucket/a")
    assert isinstance(open_storage(f"{tmp_path}/a://b"), LocalStorage)


def test_objects_can_be_written_and_replaced_and_deleted(storage: Storage) -> None:
    storage.write("run/a.json", b"one")
    storage.write("run/a.json", b"two, longer")
    assert storage.read("run/a.json") == b"two, longer"
    assert storage.exists("run/a.json")
    storage.delete("run/a.json")
    storage.delete("run/a.json")
    assert not storage.exists("run/a.json")
    assert storage.list("run") == []


def test_deleting_a_listed_version_keeps_a_newer_version_of_the_object(storage: Storage) -> None:
    if isinstance(storage, GoogleStorage):
        pytest.skip("fake-gcs-server ignores the condition, unlike Google's service")
    storage.write("run/a.json", b"one")
    [old] = storage.list("run")
    storage.write("run/a.json", b"two")
    storage.delete("run/a.json", old.version)
    assert storage.read("run/a.json") == b"two"
    [new] = storage.list("run")
    storage.delete("run/a.json", new.version)
    storage.delete("run/a.json", new.version)
    assert storage.list("run") == []


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 5 * PART + 1])
def test_writer_and_digest_return_the_same_size_and_hash(storage: Storage, size: int) -> None:
    content = pattern(size)
    with storage.writer("run/model.pt") as writer:
        for start in range(0, size, 3 * MIB - 1):
            writer.write(content[start : start + 3 * MIB - 1])
        writer.flush()
    assert (writer.size, writer.sha256) == (size, hashlib.sha256(content).hexdigest())
    assert storage.digest("run/model.pt") == (writer.size, writer.sha256)
    assert storage.read("run/model.pt") == content
    assert listed(storage, "run") == [("run/model.pt", size)]


@pytest.mark.parametrize("size", [0, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_a_stream_can_be_read_to_its_end(storage: Storage, size: int) -> None:
    content = pattern(size)
    storage.write("run/log", content)
    with storage.open("run/log") as stream:
        assert stream.read() == content


def test_a_writer_accepts_any_buffer_and_can_write_several_parts(storage: Storage) -> None:
    content = pattern(2 * PART + 24)
    with storage.writer("run/model.pt") as writer:
        assert writer.write(memoryview(content).cast("Q")) == len(content)
        assert writer.write(bytearray(b"end")) == 3
    assert storage.read("run/model.pt") == content + b"end"


def test_a_stream_can_be_read_in_pieces(storage: Storage) -> None:
    content = pattern(3 * MIB + 5)
    storage.write("run/a", content)
    with storage.open("run/a") as stream:
        assert stream.read(7) == content[:7]
        assert stream.read(2 * MIB) == content[7 : 2 * MIB + 7]
        assert stream.read() == content[2 * MIB + 7 :]
        assert stream.read() == b""
    with storage.open("run/a") as stream:  # closed early
        assert stream.read(1) == content[:1]
    assert stream.closed


@pytest.mark.parametrize("offset", [0, 1, MIB, 3 * MIB + 4])
def test_a_stream_can_begin_at_an_offset(storage: Storage, offset: int) -> None:
    content = pattern(3 * MIB + 5)
    storage.write("run/a", content)
    with storage.open("run/a", offset) as stream:
        assert stream.read() == content[offset:]


def test_a_write_of_the_same_size_changes_the_version(storage: Storage) -> None:
    def version() -> str:
        [entry] = storage.list("run")
        assert abs(time.time() - entry.modified) < 60
        return entry.version

    storage.write("run/a", b"one")
    first = version()
    assert version() == first
    storage.write("run/a", b"two")
    assert version() != first


def test_the_unfinished_write_of_a_killed_writer_is_listed_and_discarded(storage: Storage) -> None:
    storage.write("run/a", b"whole")
    killed = [storage.writer(key) for key in ("run/b", "run2/b")]
    for context in killed:
        context.__enter__().write(bytes(2 * PART))
    wait_until(lambda: [left.key for left in storage.list_unfinished("") if left.size >= PART] == ["run/b", "run2/b"])
    [unfinished] = storage.list_unfinished("run")
    assert unfinished.key == "run/b"
    assert abs(time.time() - unfinished.modified) < 60
    assert listed(storage, "") == [("run/a", 5)]
    storage.discard(unfinished)
    storage.discard(unfinished)
    assert storage.list_unfinished("run") == []
    assert [left.key for left in storage.list_unfinished("")] == ["run2/b"]
    assert storage.read("run/a") == b"whole"


def test_if_several_parallel_calls_fail_the_error_of_the_first_item_is_raised() -> None:
    both_started = threading.Barrier(2, timeout=60)

    def fail(number: int) -> None:
        both_started.wait()
        if number == 0:
            second_failed.wait(60)
        else:
            second_failed.set()
        raise ValueError(number)

    second_failed = threading.Event()
    with pytest.raises(ValueError, match=r"^0$"):
        map_parallel(fail, range(2))


def test_parallel_calls_keep_the_order_of_the_items_and_stop_at_the_first_error() -> None:
    begun: list[int] = []

    def act(number: int) -> int:
        begun.append(number)
        time.sleep(0.01)
        if number == 5:
            raise StorageError("five")
        return -number

    assert map_parallel(act, range(5)) == [0, -1, -2, -3, -4]
    assert map_parallel(act, []) == []
    begun.clear()
    with pytest.raises(StorageError, match="five"):
        map_parallel(act, range(1000), at_once=2)
    assert len(begun) < 50


def test_work_on_hung_storage_is_aborted_and_publishes_nothing(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    let_go = threading.Event()
    left: list[threading.Thread] = []

    def work() -> None:
        left.append(threading.current_thread())
        map_parallel(hang, [1, 2])

    def hang(number: int) -> None:
        with operation("/mnt/run/model.pt"):
            let_go.wait(60)
        storage.write("run/late", b"")

    deadline = ProgressDeadline(0.2, "reading a checkpoint")
    with pytest.raises(StorageError, match=r"^/mnt/run/model\.pt: no answer from storage for 0 s"):
        deadline.run(work)
    assert deadline.passed
    let_go.set()
    left[0].join()
    assert storage.list("") == []


@pytest.mark.parametrize("how", ["write", "create", "writer"])
def test_an_aborted_write_that_resumes_is_not_published(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(str(tmp_path))
    let_go = threading.Event()
    left: list[threading.Thread] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (let_go.wait(60), fsync(descriptor)))

    def work() -> None:
        left.append(threading.current_thread())
        if how == "writer":
            with storage.writer("run/late") as writer:
                writer.write(b"late")
        else:
            getattr(storage, how)("run/late", b"late")

    with pytest.raises(StorageError, match="no answer from storage"):
        ProgressDeadline(0.1, "a commit").run(work)
    let_go.set()
    left[0].join()
    assert storage.list("") == []


@pytest.mark.parametrize("how", ["write", "create", "writer"])
def test_an_object_is_on_disk_before_it_is_published(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(str(tmp_path))
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (fsync(descriptor), synced.append(os.fstat(descriptor).st_ino)))
    if how == "writer":
        with storage.writer("run/a") as writer:
            writer.write(b"content")
    else:
        getattr(storage, how)("run/a", b"content")
    assert synced == [(tmp_path / "run" / "a").stat().st_ino, (tmp_path / "run").stat().st_ino], (
        "the content, and then the name"
    )


def test_progress_extends_the_deadline_of_an_operation_only_up_to_a_limit() -> None:
    hangs = threading.Event()

    def moves_much_and_hangs() -> None:
        record_progress(1000 * MIN_RATE)
        hangs.wait(5)

    with pytest.raises(StorageError, match="no answer from storage"):
        ProgressDeadline(0.1, "reading").run(moves_much_and_hangs)
    hangs.set()


def test_retries_share_one_time_limit_even_if_they_hang() -> None:
    window, hangs = RetryWindow(), threading.Event()

    def refuse() -> None:
        raise StorageError("refused")

    with pytest.raises(StorageError, match="refused"):
        window.attempt(2, "reading", refuse)
    time.sleep(1.5)
    began = time.monotonic()
    with pytest.raises(StorageError, match="no answer"):
        window.attempt(2, "reading", lambda: hangs.wait(60))
    assert time.monotonic() - began < 1.5, "the second try had the whole limit to itself"
    assert window.over
    assert window.seconds >= 2
    hangs.set()


def test_an_operation_that_makes_progress_can_take_longer_than_the_limit(
    set_constants: SetConstants, warned: list[str]
) -> None:
    set_constants(sunspot.storage.limits, WARN_AFTER_S=0.05)

    def answers() -> str:
        for _ in range(8):
            with operation("/mnt/a"):
                time.sleep(0.08)
        return "done"

    def move_bytes(rate: float) -> None:
        for _ in range(80):
            time.sleep(0.01)
            record_progress(int(rate / 100))

    assert ProgressDeadline(0.4, "listing").run(answers) == "done"
    assert warned == ["listing: /mnt/a: no answer from storage for 0 s; waiting up to 0 s more"]
    ProgressDeadline(0.4, "reading").run(lambda: move_bytes(10 * MIN_RATE))
    with pytest.raises(StorageError, match=r"^reading: storage transfers less than 100 kB/s"):
        ProgressDeadline(0.4, "reading").run(lambda: move_bytes(MIN_RATE / 10))


def test_a_process_exits_even_if_its_storage_hangs() -> None:
    program = """
import threading
from sunspot.errors import run_and_exit
from sunspot.background import map_parallel
from sunspot.storage.limits import retry_storage
hang = lambda number: threading.Event().wait()
run_and_exit(lambda: retry_storage(0.1, "reading a checkpoint", map_parallel, hang, range(3)))
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 4
    assert ended.stderr.startswith(
        "error: reading a checkpoint: storage has failed for 0 s (SUNSPOT_STORAGE_TIMEOUT_S="
    )


def test_reading_a_missing_object_raises_a_not_found_error(storage: Storage) -> None:
    storage.write("run/there", b"")
    for ask in (storage.read, storage.digest):
        with pytest.raises(NotFoundError, match="run/missing was not found"):
            ask("run/missing")
    assert not storage.exists("run/missing")
    assert not storage.exists("run")
    assert not storage.exists("run/the")
    assert storage.list("elsewhere") == []


@pytest.mark.parametrize("storage", ["local", "s3", VERSITYGW, *CLOUDS, "s3 without a prefix"], indirect=True)
def test_a_listing_is_sorted_and_contains_only_keys_below_its_prefix(storage: Storage) -> None:
    keys = ["run/b", "run/a/z", "run/a", "run2/a", "run-3", "run/B", "run/a.tmp", "run/ü %+"]
    keys.remove("run/a")  # a directory cannot also be a file
    for key in keys:
        storage.write(key, key.encode())
    below = sorted(key for key in keys if key.startswith("run/"))
    assert listed(storage, "run") == listed(storage, "run/") == [(key, len(key.encode())) for key in below]
    assert [entry.key for entry in storage.list("run/b")] == ["run/b"]
    assert storage.list("ru") == []
    assert storage.list_folders() == ["run", "run2"]
    assert [entry.key for entry in storage.list("")] == sorted(keys)
    assert storage.read("run/ü %+") == "run/ü %+".encode()


def two_a_page(handler: Any, request: s3.Request) -> None:
    """Respond to a listing with two keys and the position of the next keys."""
    target = re.sub("&max-keys=[0-9]+", "", request.target) + "&max-keys=2"
    handler.reply(*handler.ask_server(dataclasses.replace(request, target=target)))


def test_a_listing_skips_other_runs_with_the_same_prefix(s3_storage: S3Storage, s3_proxy: FaultProxy) -> None:
    keys = ["search", *(f"search/{number}" for number in range(5)), "search0/a", "searches/b"]
    for key in [*keys, *(f"search-01/{number}" for number in range(20))]:
        s3_storage.write(key, b"")
    s3_proxy.on("ListObjects", two_a_page)

    def listing(prefix: str) -> tuple[list[str], int]:
        before = len(s3_proxy.seen("ListObjects"))
        found = [entry.key for entry in s3_storage.list(prefix)]
        return found, len(s3_proxy.seen("ListObjects")) - before

    assert listing("search") == (keys[:6], 1 + 3)
    assert listing("search/0") == (["search/0"], 1)
    assert listing("search0") == (["search0/a"], 1)
    assert len(listing("search-01")[0]) == 20
    assert len(listing("")[0]) == 28


def test_creating_an_object_succeeds_for_exactly_one_of_many_writers(storage: Storage) -> None:
    for n in range(3):
        together = threading.Barrier(8)

        def create(who: int, key: str = f"run/{n}.json", together: threading.Barrier = together) -> bool:
            together.wait()
            return storage.create(key, f"writer {who}".encode())

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert won.count(True) == 1
        assert storage.read(f"run/{n}.json") == f"writer {won.index(True)}".encode()
    assert len(storage.list("run")) == 3


def test_torch_save_can_write_to_a_writer(storage: Storage) -> None:
    torch.manual_seed(0)
    state: dict[str, Any] = {"weight": torch.randn(1000, 7500), "bias": torch.arange(5), "step": 3}
    with storage.writer("run/model.pt") as writer:
        torch.save(state, cast(BinaryIO, writer))
    assert writer.size > 30_000_000
    content = storage.read("run/model.pt")
    assert hashlib.sha256(content).hexdigest() == writer.sha256
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert torch.equal(loaded["weight"], state["weight"])
    assert torch.equal(loaded["bias"], state["bias"])


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError("mine")), (10, FileNotFoundError("mine")), (3 * PART + 1, KeyboardInterrupt())],
)
def test_a_failed_writer_leaves_no_object(storage: Storage, size: int, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, storage.writer("run/model.pt") as writer:  # noqa: PT012
        writer.write(bytes(size))
        raise error
    assert raised.value is error
    assert not storage.exists("run/model.pt")
    assert storage.list("") == []
    assert storage.list_unfinished("") == []


def test_an_error_raised_by_the_caller_is_not_turned_into_a_storage_error(storage: Storage) -> None:
    storage.write("run/a", b"content")
    with pytest.raises(FileNotFoundError), storage.open("run/a"):
        Path("/nowhere/at/all").read_bytes()


def test_the_storage_check_leaves_no_objects(storage: Storage) -> None:
    storage.write("run/a", b"")
    prove(storage, "run")
    assert listed(storage, "") == [("run/a", 0)]


# ---------------------------------------------------------------------------------------------------------- directories


@pytest.fixture
def below_a_file(tmp_path: Path) -> LocalStorage:
    (tmp_path / "file").write_text("not a directory")
    return LocalStorage(str(tmp_path / "file" / "runs"))


@pytest.mark.parametrize(
    "act",
    [
        lambda storage: storage.write("run/a", b""),
        lambda storage: storage.create("run/a", b""),
        lambda storage: storage.writer("run/a").__enter__(),
        lambda storage: storage.read("run/a"),
        lambda storage: storage.list("run/a"),
        lambda storage: storage.delete("run/a"),
        lambda storage: prove(storage, "run/a"),
    ],
)
def test_errors_of_local_storage_name_the_path(below_a_file: LocalStorage, act: Callable[[Storage], Any]) -> None:
    with pytest.raises(StorageError, match=r"/file/runs/run/a.*: Not a directory; check that SUNSPOT_STORAGE_PATH"):
        act(below_a_file)


def test_a_path_in_an_unknown_home_directory_is_rejected() -> None:
    with pytest.raises(SettingsError, match=r"~nobody-of-that-name/x: .*; write the path without '~'"):
        open_storage("~nobody-of-that-name/x")


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_fifos_and_devices_are_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(StorageError, match=r"status\.json: not a regular file"):
        LocalStorage(str(tmp_path)).read("status.json")


def test_a_full_disk_raises_a_storage_error_even_inside_torch_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(str(tmp_path))
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(sunspot.storage.local, "open", lambda *_, **__: os.fdopen(full, "wb"), raising=False)
    with (
        pytest.raises(StorageError, match=r"/model\.pt: No space left on device"),
        storage.writer("model.pt") as writer,
    ):
        torch.save({"weight": torch.zeros(MIB)}, cast(BinaryIO, writer))
    assert storage.list("") == []


def test_listing_an_unreadable_directory_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(str(tmp_path))
    storage.write("run/checkpoints/a/manifest.json", b"")
    open_file = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("checkpoints"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        storage.list("run")


def test_creating_a_local_object_succeeds_even_if_the_response_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, link = LocalStorage(str(tmp_path)), os.link

    def link_and_deny(source: Any, target: Any, **options: Any) -> None:
        link(source, target, **options)
        raise FileExistsError(errno.EEXIST, "File exists", str(target))

    monkeypatch.setattr(os, "link", link_and_deny)
    assert storage.create("run/a", b"ours")
    assert storage.read("run/a") == b"ours"
    assert os.listdir(tmp_path / "run") == ["a"]


def test_a_local_write_succeeds_even_if_its_directory_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(str(tmp_path))
    mkdir, removals = os.mkdir, iter(range(2))

    def mkdir_then_lose(name: Any, *arguments: Any, **options: Any) -> None:
        mkdir(name, *arguments, **options)
        if name == "run" and next(removals, None) is not None:
            os.rmdir(name, **options)

    monkeypatch.setattr(os, "mkdir", mkdir_then_lose)
    storage.write("run/a", b"content")
    assert storage.read("run/a") == b"content"
    removals = iter(range(100))
    storage.delete("run/a")
    with pytest.raises(StorageError):  # after a limited number of attempts, and not NotFoundError
        storage.write("run/a", b"content")


def test_deleting_a_local_object_keeps_the_root_directory(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    storage.write("a", b"")
    storage.delete("a")
    assert tmp_path.is_dir()


# ------------------------------------------------------------------------------------------------------------------- S3


def write_parts(storage: Storage, parts: int = 3) -> str:
    """Upload `parts` parts and one more byte, and return their SHA-256."""
    content = pattern(parts * PART + 1)
    with storage.writer("run/model.pt") as writer:
        for start in range(0, len(content), MIB):
            writer.write(content[start : start + MIB])
    assert_no_threads()
    return writer.sha256


def test_part_sizes_grow_so_that_an_object_can_have_5_tib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = [module.part_size(number) for number in range(1, 10_001)]
    assert sum(sizes) >= 5 << 40
    assert max(sizes) <= 5 << 30, "S3 accepts no larger part"
    assert sum(sizes[:1000]) == 1000 * module.PART, "an object of the usual size has parts of equal size"
    assert all(size * module.PARTS_IN_FLIGHT < max(200 * MIB, sum(sizes[:n]) / 50) for n, size in enumerate(sizes))


def test_parts_are_uploaded_in_growing_sizes(
    s3_storage: S3Storage,
    s3_proxy: FaultProxy,
    set_constants: SetConstants,
) -> None:
    set_constants(module, EVEN_PARTS=2, GROWTH=MIB)
    sha256 = write_parts(s3_storage, 5)
    assert s3_storage.digest("run/model.pt") == (5 * PART + 1, sha256)
    sizes = {int(each.query["partNumber"]): len(each.body) for each in s3_proxy.seen("UploadPart")}
    assert [sizes[number] for number in sorted(sizes)] == [PART, PART, PART + MIB, PART + 2 * MIB, 2 * MIB + 1]


@pytest.mark.parametrize("verifies", [True, False])
def test_a_writer_detects_whether_the_server_verifies_parts(
    verifies: bool,
    s3_storage: S3Storage,
    s3_proxy: FaultProxy,
) -> None:
    """A damaged part is sent with an unused number, and never becomes part of the object."""
    for name in ("TryPart", "UploadPart"):
        s3_proxy.on(name, s3.refuse_damage if verifies else s3.pass_on)
    content = pattern(3 * PART + 1)
    with s3_storage.writer("run/model.pt") as writer:
        writer.write(content)
    assert writer.verified == verifies
    with s3_storage.writer("run/optimizer.pt") as other:
        other.write(content)
    assert other.verified == verifies
    assert len(s3_proxy.seen("TryPart")) == 2, "once for each object"
    assert s3_storage.digest("run/model.pt") == (writer.size, writer.sha256)
    parts = s3_proxy.seen("UploadPart")
    assert [part.headers["x-amz-checksum-crc32"] for part in parts] == [s3.crc32(part.body) for part in parts]
    assert {part.headers["x-amz-content-sha256"] for part in parts} == {"UNSIGNED-PAYLOAD"}, "only we hash the parts"


@pytest.mark.parametrize("fault", [s3.answer(403, "AccessDenied"), s3.answer(400, "InvalidRequest"), s3.reset])
def test_a_part_rejected_for_a_reason_other_than_damage_does_not_show_that_the_server_verifies_parts(
    fault: s3.Fault,
    s3_storage: S3Storage,
    s3_proxy: FaultProxy,
) -> None:
    s3_proxy.on("TryPart", fault)
    with s3_storage.writer("run/model.pt") as writer:
        writer.write(pattern(PART + 1))
    assert not writer.verified
    s3_proxy.clear()
    s3_proxy.on("TryPart", s3.refuse_damage)
    with s3_storage.writer("run/model.pt") as writer:
        writer.write(pattern(PART + 1))
    assert writer.verified


def test_parts_are_read_in_parallel_and_returned_in_order(s3_storage: S3Storage, s3_proxy: FaultProxy) -> None:
    content = pattern(5 * PART + 1)
    s3_storage.write("run/model.pt", content)
    together = threading.Barrier(5, timeout=20)

    def wait_for_the_others(handler: Any, request: s3.Request) -> None:
        together.wait()
        handler.reply(*handler.ask_server(request))

    s3_proxy.on(lambda request: "if-match" in request.headers, wait_for_the_others)  # all requests except the first
    assert b"".join(s3_storage.chunks("run/model.pt")) == content
    assert len(s3_proxy.seen("GetObject")) == 6


def test_a_reader_requests_no_bytes_beyond_the_end_of_the_object(s3_storage: S3Storage, s3_proxy: FaultProxy) -> None:
    s3_storage.write("run/log", pattern(3 * CHUNK))  # ranges of one and two chunks
    with s3_storage.open("run/log") as stream:
        assert stream.read() == pattern(3 * CHUNK)
    assert len(s3_proxy.seen("GetObject")) == 2


def assert_nothing_left(storage: S3Storage) -> None:
    assert s3.leftover_uploads(storage.bucket) == []
    assert storage.list("run") == []


def test_uploads_succeed_even_if_a_busy_server_rejects_some_requests(
    s3_storage: S3Storage, s3_proxy: FaultProxy
) -> None:
    s3_proxy.on("CreateMultipartUpload", s3.answer(503, "SlowDown"), times=1)
    s3_proxy.on("UploadPart", s3.answer(503, "SlowDown"), times=2)
    s3_proxy.on("UploadPart", s3.reset, times=1)
    s3_proxy.on("CompleteMultipartUpload", s3.answer(503, "SlowDown"), times=1)
    sha256 = write_parts(s3_storage)
    assert s3_storage.digest("run/model.pt") == (3 * PART + 1, sha256)
    assert len(s3_proxy.seen("UploadPart")) == 4 + 3
    assert s3.leftover_uploads(s3_storage.bucket) == []


@pytest.mark.parametrize(("status", "code", "passes"), [(503, "SlowDown", True), (403, "AccessDenied", False)])
@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_uploads_fail_after_a_limited_number_of_attempts(
    s3_storage: S3Storage,
    s3_proxy: FaultProxy,
    operation: str,
    status: int,
    code: str,
    passes: bool,
) -> None:
    """A temporary error is retried a limited number of times. Any other error is raised at once."""
    s3_proxy.on(operation, s3.answer(status, code))
    where = rf"^cannot upload s3://{s3_storage.bucket}/runs/run/model\.pt: .*{code}"
    with pytest.raises(StorageError, match=where):
        write_parts(s3_storage)
    assert_nothing_left(s3_storage)
    at_once = module.PARTS_IN_FLIGHT if operation == "UploadPart" else 1
    tries = len(s3_proxy.seen(operation))
    assert at_once < tries <= MANY_TRIES * at_once if passes else tries <= at_once


def test_an_error_in_a_200_response_to_the_completion_of_an_upload_is_raised(
    s3_storage: S3Storage, s3_proxy: FaultProxy
) -> None:
    s3_proxy.on("CompleteMultipartUpload", s3.answer(200, "InternalError"), times=1)
    sha256 = write_parts(s3_storage, 1)
    assert s3_storage.digest("run/model.pt") == (PART + 1, sha256)
    s3_storage.delete("run/model.pt")
    s3_proxy.on("CompleteMultipartUpload", s3.answer(200, "InternalError"))
    with pytest.raises(StorageError, match=r"cannot upload .*run/model\.pt: .*InternalError"):
        write_parts(s3_storage, 1)
    assert len(s3_proxy.seen("CompleteMultipartUpload")) <= 2 + MANY_TRIES
    assert_nothing_left(s3_storage)


def test_an_upload_succeeds_even_if_the_response_to_its_completion_was_lost(
    s3_storage: S3Storage, s3_proxy: FaultProxy
) -> None:
    s3_proxy.on("CompleteMultipartUpload", s3.carry_out_then_reset, times=1)
    s3_proxy.on("CompleteMultipartUpload", s3.answer(404, "NoSuchUpload"))
    sha256 = write_parts(s3_storage, 1)
    assert s3_storage.digest("run/model.pt") == (PART + 1, sha256)
    s3_storage.delete("run/model.pt")
    with pytest.raises(StorageError, match="NoSuchUpload"):  # neither the upload nor the object exists
        write_parts(s3_storage, 1)


def test_a_failed_abort_does_not_hide_the_original_error(s3_storage: S3Storage, s3_proxy: FaultProxy) -> None:
    s3_proxy.on("AbortMultipartUpload", s3.answer(403, "AccessDenied"))
    with pytest.raises(ValueError, match="mine"), s3_storage.writer("run/a") as writer:  # noqa: PT012
        writer.write(bytes(PART + 1))
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("operation", "act"),
    [
        ("PutObject", lambda storage: storage.write("run/a", b"content")),
        ("PutObject", lambda storage: storage.create("run/a", b"content")),
        ("GetObject", lambda storage: storage.read("run/a")),
        ("DeleteObject", lambda storage: storage.delete("run/a")),
        ("ListObjects", lambda storage: storage.list("run/a")),
        ("ListObjects", lambda storage: storage.exists("run/a")),
    ],
)
@pytest.mark.parametrize(
    ("fault", "passes"),
    [(s3.reset, True), (s3.answer(503, "SlowDown"), True), (s3.answer(403, "AccessDenied"), False)],
    ids=["reset", "503", "403"],
)
def test_operations_are_retried_only_if_a_retry_can_help(
    s3_storage: S3Storage,
    s3_proxy: FaultProxy,
    operation: str,
    act: Callable[[Storage], Any],
    fault: s3.Fault,
    passes: bool,
) -> None:
    s3_storage.write("run/a", b"content")
    s3_proxy.requests.clear()
    s3_proxy.on(operation, fault)
    with pytest.raises(StorageError, match=rf"^cannot .* s3://{s3_storage.bucket}/runs/run/a: ") as raised:
        act(s3_storage)
    assert not isinstance(raised.value, NotFoundError)
    tries = len(s3_proxy.requests)
    assert 1 < tries <= MANY_TRIES if passes else tries == 1


@pytest.mark.usefixtures("short_limits")
def test_a_request_waits_for_a_slow_server(s3_proxy: FaultProxy, s3_bucket: str) -> None:
    s3_proxy.on("PutObject", s3.delay(0.1))
    S3Storage(f"s3://{s3_bucket}").write("a", b"content")
    assert len(s3_proxy.seen("PutObject")) == 1


@pytest.mark.parametrize("how", ["close", "reset", "stall"])
@pytest.mark.parametrize(("ask", "keep"), [("read", 0), ("digest", MIB // 2), ("exactly", MIB // 2)])
@pytest.mark.usefixtures("short_limits")
def test_a_truncated_response_is_never_read_as_a_short_object(
    s3_proxy: FaultProxy,
    s3_bucket: str,
    how: str,
    ask: str,
    keep: int,
) -> None:
    storage = S3Storage(f"s3://{s3_bucket}")
    storage.write("a", pattern(3 * MIB + 1))
    s3_proxy.on("GetObject", s3.cut_body(keep, how))

    def read_exactly(key: str) -> bytes:
        with storage.open(key) as stream:
            return stream.read(3 * MIB + 1)

    act: Callable[[str], Any] = {"read": storage.read, "digest": storage.digest, "exactly": read_exactly}[ask]
    with pytest.raises(StorageError, match=rf"^cannot read s3://{s3_bucket}/a: "):
        act("a")


def test_a_response_truncated_by_the_client_library_raises_an_error(
    s3_storage: S3Storage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Missing bytes would be read as zeros. Only later versions of the library check the length."""
    s3_storage.write("a", pattern(100))
    get = s3_storage._client.get_object

    def cut(**asked: Any) -> Any:
        answer = get(**asked)
        return {**answer, "Body": io.BytesIO(answer["Body"].read()[:-1])}

    monkeypatch.setattr(s3_storage._client, "get_object", cut)
    with pytest.raises(StorageError, match="the response ended after 99 of 100 bytes"):
        s3_storage.digest("a")


def test_a_server_without_etags_is_rejected(s3_storage: S3Storage) -> None:
    s3_storage.write("a", b"content")

    def without_etag(parsed: dict[str, Any], **_: Any) -> None:
        for answer in (parsed, *parsed.get("Contents", ())):
            answer.pop("ETag", None)

    for act, request in (lambda: s3_storage.read("a"), "GetObject"), (lambda: s3_storage.list(""), "ListObjectsV2"):
        s3_storage._client.meta.events.register(f"after-call.s3.{request}", without_etag)
        with pytest.raises(StorageError, match="the server's response has no ETag"):
            act()


def test_creating_an_object_is_retried_while_another_writer_is_active(
    s3_storage: S3Storage,
    s3_proxy: FaultProxy,
    set_constants: SetConstants,
) -> None:
    set_constants(module, RACE_PAUSE_S=0)
    s3_proxy.on("PutObject", s3.answer(409, "ConditionalRequestConflict"), times=2)
    assert s3_storage.create("run/a", b"ours")  # the other writer failed
    s3_proxy.on("PutObject", s3.answer(409, "ConditionalRequestConflict"))
    assert not s3_storage.create("run/a", b"theirs")
    with pytest.raises(
        StorageError, match=r"cannot create .*run/b: the service reported 5 times that the object exists"
    ) as raised:
        s3_storage.create("run/b", b"ours")
    assert not isinstance(raised.value, NotFoundError)


def test_the_storage_check_rejects_a_server_without_conditional_writes(
    s3_storage: S3Storage,
    s3_proxy: FaultProxy,
) -> None:
    s3_proxy.on("PutObject", s3.without_header("If-None-Match"))
    with pytest.raises(StorageError, match=r"/runs/run was created twice, because this store ignores 'If-None-Match"):
        prove(s3_storage, "run")
    assert s3_storage.list("") == []


def test_errors_of_the_storage_check_mention_the_folder_instead_of_the_probe_object(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"/file/run: Not a directory; check that SUNSPOT_STORAGE_PATH can"):
        prove(open_storage(str(tmp_path / "file")), "run")


def test_the_storage_check_rejects_storage_that_does_not_delete_objects(
    s3_storage: S3Storage, s3_proxy: FaultProxy
) -> None:
    s3_proxy.on("DeleteObject", lambda handler, request: handler.reply(204, {}, b""))
    with pytest.raises(StorageError, match="still exists after it was deleted"):
        prove(s3_storage, "run")


@pytest.mark.parametrize(
    ("code", "keys", "final"),
    [
        ("AccessDenied", True, True),
        ("ExpiredToken", True, True),
        ("AccessDenied", False, False),
        ("PermanentRedirect", False, True),
        ("InvalidRequest", True, False),
    ],
)
def test_rejected_requests_that_use_the_identity_of_a_pod_are_retried(
    code: str, keys: bool, final: bool, s3_storage: S3Storage, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_storage.list("run")  # so that the client loads its credentials
    s3_proxy.on(lambda request: True, s3.answer(403, code))
    if not keys:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StorageError) as raised:
        prove(s3_storage, "run")
    assert raised.value.final is final


def test_the_storage_check_reports_why_the_first_write_failed(s3_storage: S3Storage, s3_proxy: FaultProxy) -> None:
    s3_proxy.on(lambda request: True, s3.answer(403, "AccessDenied"))
    with pytest.raises(RefusedStorageError, match=r"cannot create .*AccessDenied.*; allow s3:ListBucket"):
        prove(s3_storage, "run")
    assert len(s3_proxy.requests) == 1


def test_deleting_a_missing_object_is_not_an_error(s3_storage: S3Storage, s3_proxy: FaultProxy) -> None:
    s3_proxy.on("DeleteObject", s3.answer(404, "NoSuchKey"))
    s3_storage.delete("run/a")


EVERY_OPERATION: list[Callable[[Storage], Any]] = [
    lambda storage: storage.write("run/a", b""),
    lambda storage: storage.create("run/a", b""),
    lambda storage: write_parts(storage, 1),
    lambda storage: storage.read("run/a"),
    lambda storage: storage.exists("run/a"),
    lambda storage: storage.list("run"),
    lambda storage: storage.list_unfinished("run"),
    lambda storage: storage.delete("run/a"),
    lambda storage: prove(storage, "run"),
]


@pytest.mark.parametrize("act", EVERY_OPERATION)
def test_the_error_for_a_missing_bucket_includes_the_fix(s3_bucket: str, act: Callable[[Storage], Any]) -> None:
    storage = S3Storage(f"s3://{s3_bucket}-no/runs")
    with pytest.raises(StorageError, match=r"-no/runs/run.*NoSuchBucket.*; create the bucket, or correct") as raised:
        act(storage)
    assert not isinstance(raised.value, NotFoundError)


@pytest.mark.parametrize("act", EVERY_OPERATION)
def test_the_error_for_missing_credentials_includes_the_fix(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, act: Any
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match=r"/runs/run.*Unable to locate credentials; set AWS_ACCESS_KEY_ID and"):
        act(S3Storage(f"s3://{s3_bucket}/runs"))


@pytest.mark.parametrize(("name", "value"), [("AWS_ENDPOINT_URL", "minio:9000"), ("AWS_PROFILE", "nobody")])
def test_an_invalid_aws_environment_is_reported(
    s3_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        StorageError, match=f"^s3://{s3_bucket}/runs: the AWS environment variables are not usable: .*{value}"
    ):
        S3Storage(f"s3://{s3_bucket}/runs")


def test_the_region_of_the_aws_profile_is_used(
    tmp_path: Path, s3_bucket: str, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text("[default]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_REGION")
    S3Storage(f"s3://{s3_bucket}").exists("a")
    assert "/eu-north-1/s3/" in s3_proxy.requests[-1].headers["authorization"], "the region that it signs for"


def test_a_listing_of_several_pages_is_complete(s3_storage: S3Storage, s3_proxy: FaultProxy) -> None:
    s3.plain_client().put_object(Bucket=s3_storage.bucket, Key="runs/run/")  # a folder created in a browser
    for n in range(5):
        s3_storage.write(f"run/{n}", b"")
    s3_proxy.on("ListObjects", two_a_page)
    assert [entry.key for entry in s3_storage.list("run")] == [f"run/{n}" for n in range(5)]
    assert len(s3_proxy.seen("ListObjects")) == 3
