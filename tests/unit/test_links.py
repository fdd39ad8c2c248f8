"""Tests that links in a storage directory are never followed if they point outside the storage path."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sunspot.elastic.restore import choose_init
from sunspot.errors import NotFoundError, OutsideStorageError
from sunspot.run import Run, open_run
from sunspot.run.checkpoints import find_faults, list_checkpoints
from sunspot.run.logs import LogWriter
from sunspot.settings import Settings
from sunspot.storage import open_storage
from sunspot.storage.local import LocalStorage
from sunspot.ui.site import Site
from tests.harness.commands import StorageCommand
from tests.harness.runs import begin, commit, start

SECRET = b"a private key"


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Create a private folder of the reader outside the storage path."""
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "key").write_bytes(SECRET)
    return folder


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(str(tmp_path / "runs"))
    storage.write("run/run.json", b"{}")
    return storage


def write_stream(storage: LocalStorage) -> None:
    with storage.writer("run/folder/new") as writer:
        writer.write(b"x")


@pytest.mark.parametrize(
    "act",
    [
        lambda storage: storage.read("run/folder/key"),
        lambda storage: storage.list("run/folder"),
        lambda storage: storage.list("run/folder/below"),
        lambda storage: storage.list_unfinished("run/folder"),
        lambda storage: storage.exists("run/folder/key"),
        lambda storage: storage.write("run/folder/new", b"x"),
        lambda storage: storage.write("run/folder/below/more/new", b"x"),
        lambda storage: storage.create("run/folder/key", b"x"),
        write_stream,
        lambda storage: storage.delete("run/folder/key"),
        lambda storage: storage.refresh("run/folder"),
        lambda storage: storage.read("run/../../private/key"),
        lambda storage: storage.delete("run/../../private/key"),
    ],
)
def test_a_link_to_a_folder_outside_the_storage_path_is_rejected(
    act: Callable[[LocalStorage], Any], storage: LocalStorage, private: Path
) -> None:
    (private / "below").mkdir()
    (storage.root / "run/folder").symlink_to(private)
    with pytest.raises(
        OutsideStorageError, match=rf"a symbolic link to {private}.*outside the storage path {storage.root}"
    ):
        act(storage)
    assert sorted(path.name for path in private.rglob("*")) == ["below", "key"]
    assert (private / "key").read_bytes() == SECRET


def test_a_link_to_a_file_outside_the_storage_path_is_not_followed(storage: LocalStorage, private: Path) -> None:
    (private / "key").write_bytes(SECRET * 1000)
    link = storage.root / "run/file"
    link.symlink_to(private / "key")
    with pytest.raises(OutsideStorageError, match=f"{link} resolves through a symbolic link to {private}/key"):
        storage.read("run/file")
    [entry] = storage.list("run/file")
    assert entry.size == link.lstat().st_size
    storage.write("run/file", b"ours")
    assert storage.read("run/file") == b"ours"
    link.unlink()
    link.symlink_to(private / "key")
    storage.delete("run/file")
    assert [entry.key for entry in storage.list("run")] == ["run/run.json"]
    assert (private / "key").read_bytes() == SECRET * 1000


def test_links_within_the_storage_path_and_links_to_the_storage_path_are_followed(
    tmp_path: Path, storage: LocalStorage
) -> None:
    (tmp_path / "link").symlink_to(storage.root)
    (storage.root / "same").symlink_to("run")
    (storage.root / "run/again.json").symlink_to("run.json")
    for path in (tmp_path / "link", storage.root):
        there = LocalStorage(str(path))
        assert there.read("same/run.json") == there.read("run/again.json") == b"{}"
        assert [entry.key for entry in there.list("run")] == ["run/again.json", "run/run.json"]
        there.write("same/new", b"x")
        assert there.exists("run/new")
        there.delete("same/new")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a").write_bytes(b"1")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    there = LocalStorage(str(tmp_path / "link"))
    assert there.read("a") == b"1"
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(storage.root)
    assert there.read("run/run.json") == b"{}", "the storage path was moved while it was open"
    with pytest.raises(NotFoundError):
        there.read("a")


def test_a_file_chosen_by_the_user_can_be_a_link(storage: LocalStorage, private: Path) -> None:
    (storage.root / "model.safetensors").symlink_to(private / "key")
    assert open_storage(str(storage.root), follow_links=True).read("model.safetensors") == SECRET
    settings = Settings(storage_path=str(storage.root), init_from=str(storage.root / "model.safetensors"))
    assert choose_init(settings) == hashlib.sha256(SECRET).hexdigest()


def test_nothing_is_written_to_a_folder_that_becomes_a_link(storage: LocalStorage, private: Path) -> None:
    folder = storage.root / "run/folder"

    def write_meanwhile() -> None:
        with storage.writer("run/folder/key") as writer:
            writer.write(b"x")
            folder.rename(storage.root / "run/moved")
            folder.symlink_to(private)

    with pytest.raises(OutsideStorageError):
        write_meanwhile()
    assert (private / "key").read_bytes() == SECRET
    assert os.listdir(private) == ["key"]


def test_empty_folders_behind_a_link_are_not_deleted(storage: LocalStorage, private: Path) -> None:
    (private / "empty").mkdir()
    (storage.root / "run/folder").symlink_to(private)
    storage.delete("run/run.json")
    storage.delete_folders("run")
    assert not (storage.root / "run").exists()
    assert (private / "empty").is_dir()


# ------------------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = begin(open_run(str(tmp_path / "runs"), "run"))
    attempt = start(run, "job")
    commit(run, attempt, 5)
    commit(run, attempt, 10)
    log = LogWriter(run, "driver-20261121T141013679Z")
    log.append(b"step 1\n")
    log.flush()
    return run


@pytest.fixture
def sunspot(run: Run, capsys: pytest.CaptureFixture[str]) -> StorageCommand:
    return StorageCommand(run.storage.locate(""), capsys)


def test_a_log_that_is_a_link_is_not_shown(run: Run, sunspot: StorageCommand, private: Path) -> None:
    [segment] = Path(run.location).glob("logs/*/*.log")
    segment.unlink()
    segment.symlink_to(private / "key")
    answer = sunspot("logs", "run")
    assert (answer.code, answer.out) == (4, "")
    assert answer.err.splitlines()[-1].startswith(
        f"error: {segment} resolves through a symbolic link to {private}/key, which is outside"
    )
    page = Site(run.storage).answer("/run/run").body.decode()
    assert SECRET.decode() not in page
    assert "outside the storage path" in page


def test_a_checkpoint_with_a_link_is_reported_as_damaged(run: Run, sunspot: StorageCommand, private: Path) -> None:
    first, last = list_checkpoints(run)
    model = Path(run.location, "checkpoints", last.name, "model.pt")
    (private / "model.pt").write_bytes(model.read_bytes())
    model.unlink()
    model.symlink_to(private / "model.pt")
    assert any("outside the storage path" in fault for fault in find_faults(run, last))
    manifest = Path(run.location, "checkpoints", first.name, "manifest.json")
    (private / "manifest.json").write_bytes(manifest.read_bytes())
    manifest.unlink()
    manifest.symlink_to(private / "manifest.json")
    answer = sunspot("checkpoints", "verify", "run")
    assert answer.code == 7
    assert answer.out.count("outside the storage path") == 2


def test_gc_removes_nothing_behind_a_link(run: Run, sunspot: StorageCommand, private: Path) -> None:
    folder = Path(run.location, "checkpoints")
    folder.rename(private / "checkpoints")
    folder.symlink_to(private / "checkpoints")
    kept = private / "checkpoints/step-00000001-attempt-0001/precious.txt"
    kept.parent.mkdir()
    kept.write_bytes(SECRET)
    answer = sunspot("checkpoints", "gc", "run", "--yes")
    assert (answer.code, answer.out) == (4, "")
    assert (
        f"error: {folder} resolves through a symbolic link to {private}/checkpoints, which is outside the storage path"
        in answer.err
    )
    assert kept.read_bytes() == SECRET
