"""Tests of which objects `sunspot checkpoints` reads, downloads, removes and keeps."""

from __future__ import annotations

import os
import shutil
import threading
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sunspot.errors import StorageError
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt, Metadata, checkpoint_name, claim, read_attempts
from sunspot.run.checkpoints import MANIFEST, Checkpoint, find_newest_good, list_checkpoints, write_manifest
from sunspot.run.status import RunState, Status, write_status
from sunspot.storage.local import LocalStorage
from sunspot.submitter import garbage
from sunspot.submitter.commands.checkpoints import gc as checkpoints_gc
from sunspot.submitter.commands.checkpoints import get as checkpoints_get
from tests.harness import s3
from tests.harness.commands import StorageCommand
from tests.harness.constants import SetConstants
from tests.harness.runs import age, begin, commit, start
from tests.harness.s3 import FaultProxy


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path / "runs"), "run"))


@pytest.fixture
def sunspot(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> StorageCommand:
    return StorageCommand(str(tmp_path / "runs"), capsys)


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the keys of the objects that are hashed on local storage."""
    asked: list[str] = []
    digest = LocalStorage.digest

    def spy(self: LocalStorage, key: str, *copy: Any) -> tuple[int, str]:
        asked.append(key)
        return digest(self, key, *copy)

    monkeypatch.setattr(LocalStorage, "digest", spy)
    return asked


def flip_byte(path: Path) -> None:
    """Change one byte in place."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def path_of(run: Run, checkpoint: Checkpoint, file: str) -> Path:
    assert isinstance(run.storage, LocalStorage)
    return run.storage.root / run.key("checkpoints", checkpoint.name, file)


def leave_incomplete(run: Run, attempt: Attempt, step: int) -> str:
    """Write the files that a process leaves if it is killed in the middle of a commit."""
    name = commit(run, attempt, step).name
    run.storage.delete(run.key("checkpoints", name, MANIFEST))
    return name


# ------------------------------------------------------------------------------------------------------------------- ls


@pytest.mark.parametrize("file", ["model.pt", "optimizer.pt", MANIFEST])
def test_listing_checkpoints_finds_a_flipped_byte(
    run: Run, sunspot: StorageCommand, digests: list[str], file: str
) -> None:
    attempt = start(run, "job")
    whole, flipped = commit(run, attempt, 3), commit(run, attempt, 5)
    flip_byte(path_of(run, flipped, file))
    listed = sunspot("checkpoints", "ls", "run", "--json").json
    assert [(line["name"], line["verified"]) for line in listed] == [(whole.name, True), (flipped.name, False)]
    assert file in listed[1]["faults"][0]
    assert digests == ([] if file == MANIFEST else [run.key("checkpoints", flipped.name, file)]), "nothing else is read"


def test_a_copied_run_is_verified_by_hashing_its_files(run: Run, sunspot: StorageCommand, digests: list[str]) -> None:
    attempt = start(run, "job")
    for step in (3, 5):
        commit(run, attempt, step)
    assert isinstance(run.storage, LocalStorage)
    shutil.copytree(run.storage.root / "run", run.storage.root / "copy")
    assert [line["verified"] for line in sunspot("checkpoints", "ls", "copy", "--json").json] == [True, True]
    assert len(digests) == 4


def test_files_without_recorded_versions_are_hashed_whenever_checkpoints_are_listed(
    run: Run, sunspot: StorageCommand, digests: list[str]
) -> None:
    checkpoint = commit(run, start(run, "job"), 3)
    files = {name: {"size": f["size"], "sha256": f["sha256"]} for name, f in checkpoint.files.items()}
    write_manifest(run, replace(checkpoint, files=files))
    assert [line["verified"] for line in sunspot("checkpoints", "ls", "run", "--json").json] == [True]
    assert len(digests) == 2


def test_only_the_newest_checkpoints_are_listed_by_default(run: Run, sunspot: StorageCommand) -> None:
    attempt = start(run, "job")
    for step in range(1, 61):
        commit(run, attempt, step)
    listed = sunspot("checkpoints", "ls", "run", "--json")
    assert [line["step"] for line in listed.json] == list(range(11, 61))
    assert "--all also lists 10 older checkpoints" in listed.err
    assert [line["step"] for line in sunspot("checkpoints", "ls", "run", "--limit", "2", "--json").json] == [59, 60]
    assert len(sunspot("checkpoints", "ls", "run", "--all", "--json").json) == 60


def test_listing_s3_checkpoints_reads_only_manifests_and_changed_objects(
    s3_proxy: FaultProxy, s3_bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sunspot = StorageCommand(f"s3://{s3_bucket}/team", capsys)
    run = begin(open_run(sunspot.storage, "run"))
    attempt = start(run, "job")
    commits = [commit(run, attempt, step) for step in range(1, 8)]
    s3_proxy.requests.clear()
    listed = sunspot("checkpoints", "ls", "run", "--limit", "5", "--json")
    assert [(line["step"], line["verified"]) for line in listed.json] == [(step, True) for step in range(3, 8)]
    assert len(s3_proxy.seen("GetObject")) == 5 + 1, "one manifest for each row, and the attempt"
    assert len(s3_proxy.requests) - 6 == len(s3_proxy.seen("ListObjects")) == 3, (
        "the run, its checkpoints, its attempts"
    )

    content = bytearray(run.storage.read(run.key("checkpoints", commits[-1].name, "model.pt")))
    content[3] ^= 1
    key = f"team/run/checkpoints/{commits[-1].name}/model.pt"
    s3.plain_client().put_object(Bucket=s3_bucket, Key=key, Body=bytes(content))
    s3_proxy.requests.clear()
    listed = sunspot("checkpoints", "ls", "run", "--limit", "5", "--json")
    assert [line["verified"] for line in listed.json] == [True] * 4 + [False]
    assert len(s3_proxy.seen("GetObject")) == 7


# ------------------------------------------------------------------------------------------------------------------ get


def read(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def in_storage(run: Run, checkpoint: Checkpoint) -> dict[str, bytes]:
    names = [*checkpoint.files, MANIFEST]
    return {name: run.storage.read(run.key("checkpoints", checkpoint.name, name)) for name in names}


def test_the_newest_checkpoint_is_downloaded_to_a_directory_named_after_it(
    run: Run, sunspot: StorageCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    attempt = start(run, "job")
    commit(run, attempt, 3)
    newest = commit(run, attempt, 5)
    answer = sunspot("checkpoints", "get", "run", "--json")
    assert answer.code == 0
    assert answer.json == {
        "name": newest.name,
        "step": 5,
        "directory": str(tmp_path / newest.name),
        "files": ["model.pt", "optimizer.pt"],
        "bytes": newest.bytes,
        "kept": [],
    }
    assert read(tmp_path / newest.name) == in_storage(run, newest)
    again = sunspot("checkpoints", "get", "run", newest.name)
    assert (again.code, "2 files, 2 of which existed already" in again.out) == (0, True)


def test_the_best_checkpoint_is_chosen_by_the_metric_of_the_run(
    run: Run, sunspot: StorageCommand, tmp_path: Path
) -> None:
    measure = {"SUNSPOT_CHECKPOINT_METRIC": "accuracy", "SUNSPOT_CHECKPOINT_ORDER": "max"}
    attempt = Attempt(1, "job", None, 0, metadata=Metadata(measure))
    claim(run, [], attempt)
    best, second, _ = (commit(run, attempt, step, accuracy=a) for step, a in [(2, 0.9), (4, 0.8), (6, 0.7)])
    out = str(tmp_path / "best")
    assert sunspot("checkpoints", "get", "run", "best", "--output", out, "--json").json["name"] == best.name
    flip_byte(path_of(run, best, "model.pt"))
    answer = sunspot("checkpoints", "get", "run", "best", "--output", str(tmp_path / "second"), "--json")
    assert answer.json["name"] == second.name
    assert f"passed over {best.name}: damaged" in answer.err


def test_an_interrupted_download_is_resumed(
    run: Run, sunspot: StorageCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = commit(run, start(run, "job"), 3)
    out, wanted = tmp_path / "out", in_storage(run, checkpoint)
    sunspot("checkpoints", "get", "run", "--output", str(out))
    for part, cut in [("model.pt", 7), (MANIFEST, 10**6)]:
        (out / part).rename(out / f"{part}.part")
        os.truncate(out / f"{part}.part", min(cut, len(wanted[part])))
    asked: list[tuple[str, int]] = []
    opened = LocalStorage.open

    def spy(self: LocalStorage, key: str, offset: int = 0) -> Any:
        asked.append((key.rpartition("/")[2], offset))
        return opened(self, key, offset)

    monkeypatch.setattr(LocalStorage, "open", spy)
    answer = sunspot("checkpoints", "get", "run", "--output", str(out), "--json")
    assert answer.json["kept"] == ["optimizer.pt"]
    assert read(out) == wanted
    assert ("model.pt", 7) in asked
    assert not [file for file, _ in asked if file == "optimizer.pt"]

    (out / "model.pt").write_bytes(b"x" * 5)  # of another file: fetched again, like a part that is too large
    (out / "optimizer.pt.part").write_bytes(b"x" * 5)
    (out / "optimizer.pt").unlink()
    assert sunspot("checkpoints", "get", "run", "--output", str(out)).code == 0
    assert read(out) == wanted


def test_a_download_continues_after_a_broken_connection(
    s3_proxy: FaultProxy, s3_bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sunspot = StorageCommand(f"s3://{s3_bucket}/team", capsys)
    run = begin(open_run(sunspot.storage, "run"))
    attempt = start(run, "job")
    name, content = checkpoint_name(3, 1), os.urandom(3 << 20)
    with run.storage.writer(run.key("checkpoints", name, "model.pt")) as writer:
        writer.write(content)
    files = {"model.pt": {"size": writer.size, "sha256": writer.sha256}}
    write_manifest(run, Checkpoint(name, 3, 1, 5, 100, attempt.number, files=files))

    def of_model(request: s3.Request) -> bool:
        return request.operation == "GetObject" and request.path.endswith("model.pt")

    s3_proxy.on(of_model, s3.cut_body(3 << 19), times=2)  # longer than the first range, not than the second
    out = str(tmp_path / "out")
    assert sunspot("checkpoints", "get", "run", name, "--output", out).code == 0
    assert (tmp_path / "out" / "model.pt").read_bytes() == content
    ranges = [r.headers.get("range") for r in s3_proxy.seen("GetObject") if of_model(r)]
    assert [str(each).startswith("bytes=0-") for each in ranges].count(True) == 1, "the download does not start again"

    s3_proxy.on(of_model, s3.cut_body(1000))
    answer = sunspot("checkpoints", "get", "run", name, "--output", str(tmp_path / "other"))
    assert answer.code == 4
    assert MANIFEST not in os.listdir(tmp_path / "other")


def test_a_damaged_checkpoint_is_never_downloaded(run: Run, sunspot: StorageCommand, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert (sunspot("checkpoints", "get", "run").code, sunspot("checkpoints", "get", "run", "best").code) == (3, 3)
    attempt = start(run, "job")
    older, newest = commit(run, attempt, 3), commit(run, attempt, 5)
    flip_byte(path_of(run, newest, "model.pt"))
    answer = sunspot("checkpoints", "get", "run", newest.name, "--output", out)
    assert (answer.code, answer.out) == (7, "")
    assert "model.pt" in answer.err
    assert MANIFEST not in os.listdir(out)
    answer = sunspot("checkpoints", "get", "run", "--output", str(tmp_path / "older"), "--json")
    assert (answer.code, answer.json["name"]) == (0, older.name)
    assert f"passed over {newest.name}: damaged" in answer.err

    run.storage.delete(run.key("checkpoints", older.name, "model.pt"))
    for which in ("newest", "best", older.name):
        assert sunspot("checkpoints", "get", "run", which, "--output", str(tmp_path / which)).code == 7
    assert sunspot("checkpoints", "get", "run", "step-00000009-attempt-0001").code == 3


@pytest.mark.parametrize("file", ["../outside.pt", "/tmp/outside.pt", "manifest.json", "."])
def test_a_manifest_cannot_make_a_download_write_outside_its_directory(
    run: Run, sunspot: StorageCommand, tmp_path: Path, file: str
) -> None:
    checkpoint = commit(run, start(run, "job"), 3)
    run.storage.write(run.key("checkpoints", checkpoint.name, "x"), b"")
    evil = replace(checkpoint, files={file: checkpoint.files["model.pt"]})
    write_manifest(run, evil)
    before = sorted(tmp_path.rglob("*"))
    answer = sunspot("checkpoints", "get", "run", checkpoint.name, "--output", str(tmp_path / "out"))
    assert answer.code == 7
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and "out" not in path.parts] == []


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_download_does_not_write_through_a_link(kind: str, run: Run, sunspot: StorageCommand, tmp_path: Path) -> None:
    commit(run, start(run, "job"), 3)
    out, mine = tmp_path / "out", tmp_path / "mine"
    assert sunspot("checkpoints", "get", "run", "--output", str(out)).code == 0
    mine.write_bytes(b"work")
    (out / "model.pt").unlink()
    if kind == "link":
        (out / "model.pt.part").symlink_to(mine)
    else:
        os.mkfifo(out / "model.pt.part")
    answer = sunspot("checkpoints", "get", "run", "--output", str(out))
    assert (answer.code, "neither a file nor a folder" in answer.err) == (2, True)
    assert mine.read_bytes() == b"work"


def test_a_download_into_a_directory_with_other_files_is_rejected(
    run: Run, sunspot: StorageCommand, tmp_path: Path
) -> None:
    attempt = start(run, "job")
    first, second = commit(run, attempt, 3), commit(run, attempt, 5)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model.pt").write_bytes(b"work of a week")
    answer = sunspot("checkpoints", "get", "run", "--output", str(mine))
    assert (answer.code, "contains files that do not belong" in answer.err) == (2, True)
    assert read(mine) == {"model.pt": b"work of a week"}
    out = str(tmp_path / "out")
    assert sunspot("checkpoints", "get", "run", first.name, "--output", out).code == 0
    assert sunspot("checkpoints", "get", "run", second.name, "--output", out).code == 2
    answer = sunspot("checkpoints", "get", "run", "--output", "/proc/nowhere")
    assert (answer.code, "/proc/nowhere" in answer.err) == (4, True)


# ------------------------------------------------------------------------------------------------------------------- gc


@pytest.fixture
def littered(run: Run) -> dict[str, str]:
    """Create a run with two attempts that keeps two checkpoints. Returns checkpoint names keyed by their fate."""
    keep = {"SUNSPOT_CHECKPOINTS_TO_KEEP": "2", "SUNSPOT_CHECKPOINT_METRIC": "loss", "SUNSPOT_CHECKPOINT_ORDER": "min"}
    first = start(run, "old")
    names = {"worst": commit(run, first, 2, loss=0.9).name, "best": commit(run, first, 4, loss=0.1).name}
    names["superseded"] = commit(run, first, 9, loss=0.01).name
    names["killed, old"] = leave_incomplete(run, first, 8)
    second = Attempt(2, "new", names["best"], 4, metadata=Metadata(keep))
    claim(run, read_attempts(run), second)
    names["second"] = commit(run, second, 6, loss=0.2).name
    names["damaged"] = commit(run, second, 7, loss=0.0).name
    run.storage.write(run.key("checkpoints", names["damaged"], "model.pt"), b"other bytes")
    names["newest"] = commit(run, second, 10, loss=0.95).name
    names["damaged newest"] = commit(run, second, 12, loss=0.0).name
    run.storage.delete(run.key("checkpoints", names["damaged newest"], "optimizer.pt"))
    names["being written"] = leave_incomplete(run, second, 14)
    return names


def left(run: Run) -> set[str]:
    return {entry.key.split("/")[2] for entry in run.storage.list(run.key("checkpoints"))}


def test_gc_shows_and_then_removes_unneeded_checkpoints(
    run: Run, sunspot: StorageCommand, littered: dict[str, str]
) -> None:
    def content() -> list[tuple[str, bytes]]:
        return [(entry.key, run.storage.read(entry.key)) for entry in run.storage.list("run")]

    before = content()
    newest = find_newest_good(run, read_attempts(run))
    shown = sunspot.process("checkpoints", "gc", "run", "--json")
    assert content() == before
    useless = {littered[what] for what in ("worst", "superseded", "killed, old", "damaged", "damaged newest")}
    assert {line["name"] for line in shown.json} == useless
    assert not any(line["removed"] for line in shown.json)
    table = sunspot("checkpoints", "gc", "run").out
    for word in ("neither the newest nor among the best 2 by loss (min)", "damaged, model.pt has", "superseded"):
        assert word in table
    assert "5 can be removed: " in table
    assert content() == before

    removed = sunspot("checkpoints", "gc", "run", "--yes", "--json")
    assert (removed.code, {line["name"] for line in removed.json}) == (0, useless)
    assert all(line["removed"] and line["bytes"] > 0 for line in removed.json)
    assert left(run) == set(littered.values()) - useless
    assert find_newest_good(run, read_attempts(run))[0] == newest[0]
    assert "nothing to remove" in sunspot("checkpoints", "gc", "run", "--yes").out


def test_gc_keeps_the_given_number_of_checkpoints(run: Run, sunspot: StorageCommand, littered: dict[str, str]) -> None:
    answer = sunspot("checkpoints", "gc", "run", "--keep", "1", "--yes")
    assert "removed 6 of 6: " in answer.out
    assert left(run) == {littered[what] for what in ("best", "newest", "being written")}
    assert sunspot("checkpoints", "gc", "run", "--keep", "0").code == 2


def test_gc_never_removes_the_newest_intact_checkpoint(run: Run, sunspot: StorageCommand) -> None:
    """The newest checkpoint's bytes have changed but its listing has not, so the previous checkpoint counts."""
    attempt = start(run, "job")
    good, bad = commit(run, attempt, 3, loss=0.9), commit(run, attempt, 5, loss=0.1)
    flip_byte(path_of(run, bad, "model.pt"))
    [entry] = run.storage.list(run.key("checkpoints", bad.name, "model.pt"))
    files = {**bad.files, "model.pt": {**bad.files["model.pt"], "version": entry.version}}
    write_manifest(run, replace(bad, files=files))
    shown = sunspot("checkpoints", "gc", "run", "--keep", "1", "--yes", "--json")
    assert [(line["name"], line["why"].partition(",")[0]) for line in shown.json] == [(bad.name, "damaged")]
    assert left(run) == {good.name}


def test_gc_removes_nothing_if_no_checkpoint_is_intact(run: Run, sunspot: StorageCommand) -> None:
    attempt = start(run, "old")
    for step in (3, 5):
        flip_byte(path_of(run, commit(run, attempt, step), "model.pt"))
    start(run, "new")
    before = left(run)
    answer = sunspot("checkpoints", "gc", "run", "--yes")
    assert (answer.code, left(run)) == (0, before)
    assert "no checkpoint is intact" in answer.err


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.STOPPED, RunState.SUCCEEDED, RunState.LOST])
def test_gc_keeps_files_that_a_live_process_might_be_writing(
    run: Run, sunspot: StorageCommand, state: RunState
) -> None:
    attempt = start(run, "job")
    good, begun = commit(run, attempt, 3), leave_incomplete(run, attempt, 5)
    write_status(run, Status(state, "job"))
    sunspot("checkpoints", "gc", "run", "--yes")
    ended = state in (RunState.STOPPED, RunState.SUCCEEDED)
    assert left(run) == ({good.name} if ended else {good.name, begun})
    age(run, garbage.ABANDONED_S - 60, "checkpoints", begun)
    sunspot("checkpoints", "gc", "run", "--yes")
    assert (begun in left(run)) == (not ended)
    age(run, 120, "checkpoints", begun)
    sunspot("checkpoints", "gc", "run", "--yes")
    assert left(run) == {good.name}


def test_gc_uses_the_storage_clock_instead_of_the_local_clock(
    run: Run, sunspot: StorageCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = start(begin(run), "job")
    good, begun = commit(run, attempt, 3), leave_incomplete(run, attempt, 5)
    write_status(run, Status(RunState.RUNNING, "job"))
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 2 * garbage.ABANDONED_S)
    assert sunspot("checkpoints", "gc", "run", "--yes").code == 0
    assert left(run) == {good.name, begun}, "this machine's clock is two days ahead"


def test_gc_keeps_files_of_a_commit_that_could_still_complete(run: Run, sunspot: StorageCommand) -> None:
    """The next attempt started from a copy of that step in memory while the old process is about to commit the step."""
    attempt = start(run, "job")
    good = commit(run, attempt, 3)
    begun = leave_incomplete(run, attempt, 5)
    other = leave_incomplete(run, attempt, 6)
    start(run, "job", begun, tier="memory")
    sunspot("checkpoints", "gc", "run", "--yes")
    assert left(run) == {good.name, begun}, f"{other} no longer counts"


def test_gc_stops_when_a_new_attempt_begins(
    run: Run, sunspot: StorageCommand, littered: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_then_lose(*arguments: Any) -> list[Any]:
        removals = list(garbage.find_removals(*arguments))
        start(run, "another", littered["newest"])
        return removals

    monkeypatch.setattr(checkpoints_gc, "find_removals", find_then_lose)
    before = left(run)
    answer = sunspot("checkpoints", "gc", "run", "--yes")
    assert (answer.code, left(run)) == (6, before)
    assert "a new attempt has begun; try again" in answer.err
    assert "removed 0 of 5" in answer.out


def test_gc_ignores_an_attempt_that_began_after_the_listing(
    run: Run, sunspot: StorageCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = commit(run, start(run, "job"), 3)
    later = replace(good, name=checkpoint_name(5, 2), step=5, attempt=2)
    write_manifest(run, later)
    leave_incomplete(run, replace(read_attempts(run)[0], number=2), 7)
    assert sunspot("checkpoints", "gc", "run", "--json").json == []
    assert [checkpoint.name for checkpoint in list_checkpoints(run)] == [good.name, later.name]


def test_gc_removes_nothing_while_an_attempt_is_choosing_its_starting_checkpoint(
    run: Run, sunspot: StorageCommand
) -> None:
    first = start(run, "job")
    for step in (3, 5):
        commit(run, first, step)
    assert claim(run, read_attempts(run), replace(first, number=2, owner="another", nonce="89abcdef", chosen=False))
    answer = sunspot("checkpoints", "gc", "run", "--keep", "1", "--yes")
    assert "attempt 2 is still choosing" in answer.err
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [3, 5]


def test_gc_lists_the_removed_checkpoints_if_storage_fails(
    run: Run, sunspot: StorageCommand, littered: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, deleted = garbage.delete_checkpoint, []

    def fail_at_the_third(run: Run, name: str) -> None:
        if len(deleted) == 2:
            raise StorageError("gone")
        deleted.append(name)
        delete(run, name)

    monkeypatch.setattr(garbage, "delete_checkpoint", fail_at_the_third)
    answer = sunspot("checkpoints", "gc", "run", "--yes")
    assert (answer.code, "removed 2 of 5: " in answer.out) == (4, True)


def test_gc_removes_temporary_files_of_killed_writers_from_a_directory(run: Run, sunspot: StorageCommand) -> None:
    assert isinstance(run.storage, LocalStorage)
    commit(run, start(run, "job"), 3)
    folder = run.storage.root / "run" / "metrics"
    folder.mkdir()
    old, young = (folder / f".attempt-0001-00000.jsonl.{digit * 32}.tmp" for digit in "ab")
    for path in (old, young):
        path.write_bytes(b"12345")
    moment = time.time() - garbage.ABANDONED_S - 60
    os.utime(old, (moment, moment))
    removed = sunspot("checkpoints", "gc", "run", "--yes", "--json").json
    assert [(line["name"], line["bytes"]) for line in removed] == [("run/metrics/attempt-0001-00000.jsonl", 5)]
    assert (old.exists(), young.exists()) == (False, True)


def test_gc_aborts_unfinished_uploads(
    s3_proxy: FaultProxy, s3_bucket: str, capsys: pytest.CaptureFixture[str], set_constants: SetConstants
) -> None:
    sunspot = StorageCommand(f"s3://{s3_bucket}/team", capsys)
    run = begin(open_run(sunspot.storage, "run"))
    commit(run, start(run, "job"), 3)
    client = s3.plain_client()
    for key in ("team/run/checkpoints/x/model.pt", "team/run2/model.pt"):
        upload = client.create_multipart_upload(Bucket=s3_bucket, Key=key)["UploadId"]
        client.upload_part(Bucket=s3_bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"12345")
    assert sunspot("checkpoints", "gc", "run", "--json").json == [], "the upload may still be running"
    set_constants(garbage, ABANDONED_S=-60)
    [shown] = sunspot("checkpoints", "gc", "run", "--json").json
    assert (shown["name"], shown["bytes"]) == ("run/checkpoints/x/model.pt", 5)
    assert sunspot("checkpoints", "gc", "run", "--yes").code == 0
    assert s3.leftover_uploads(s3_bucket) == ["team/run2/model.pt"]

    s3_proxy.on(lambda request: "uploads" in request.query, s3.answer(403, "AccessDenied"))
    answer = sunspot("checkpoints", "gc", "run", "--yes")
    assert answer.code == 0
    assert "unfinished uploads cannot be listed" in answer.err


def test_an_interrupted_download_stops_promptly_and_keeps_its_partial_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = commit(run, start(run, "job"), 3)
    go_on, begun = checkpoints_get.Download._continue, threading.Event()

    def interrupted(download: checkpoints_get.Download, key: str, part: Path, size: int) -> Any:
        if key.endswith("model.pt"):
            assert begun.wait(10)
            raise KeyboardInterrupt
        begun.set()
        assert download._given_up.wait(10)
        part.write_bytes(b"opt")
        return go_on(download, key, part, size)

    monkeypatch.setattr(checkpoints_get.Download, "_continue", interrupted)
    output, storage = str(tmp_path / "out"), run.storage.locate("")
    newest = Namespace(run="run", storage=storage, name="newest", format="sunspot", output=output, json=False)
    with pytest.raises(KeyboardInterrupt):
        checkpoints_get.run(newest)
    assert read(tmp_path / "out")["optimizer.pt.part"] == b"opt"
    monkeypatch.undo()
    checkpoints_get.run(newest)
    assert read(tmp_path / "out") == in_storage(run, checkpoint)
