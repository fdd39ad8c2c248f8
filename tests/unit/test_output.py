"""Tests that output cannot control the terminal, and that files of other programs are not replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sunspot.errors import SettingsError, StorageError
from sunspot.run import Run
from sunspot.run.status import RunState
from sunspot.submitter.printing import print_json, print_json_line, print_table, print_text, warn, write_file
from tests.harness.commands import Command, StorageCommand
from tests.harness.runs import begin, commit, report, set_status, start

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\x00\x08\ud800 end"

MARK = b"written by us"


def test_output_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(HOSTILE)
    warn(HOSTILE)
    print_table(["name", HOSTILE], [[HOSTILE, 1.5], ["b", None]])
    print_json({HOSTILE: [HOSTILE]})
    print_json_line(HOSTILE)
    out, err = capsys.readouterr()
    for text in (out, err):
        assert " end" in text
        assert not [c for c in text if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000)]


def test_colors_are_removed_and_other_text_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    print_text("\x1b[1;31mred\x1b[0m, größer, 数字\r\nnext\ttab")
    assert capsys.readouterr().out == "red, größer, 数字\nnext\ttab\n"


def test_no_command_lets_stored_text_control_the_terminal(run: Run, sunspot: Command, tmp_path: Path) -> None:
    attempt = start(begin(run), f"job{HOSTILE[:-5]}", tier="beginning", world_size=2)
    commit(run, attempt, 5)
    report(run, attempt, {"step": 5, "time": 1.0, "loss": 0.5, "note\x1b[2J": "a\x1b[2J"})
    run.storage.write(run.key("logs", "driver-20261121T141013679Z", "000000.log"), b"\x1b[2Jhello\n\x9b\n")
    set_status(run, RunState.FAILED, reason="broken \x1b[2J", warning="\x1b[2Jwarning")
    verbs = [
        ["status", "run"],
        ["list"],
        ["wait", "run"],
        ["logs", "run"],
        ["checkpoints", "ls", "run"],
        ["checkpoints", "verify", "run"],
        ["checkpoints", "get", "run", "--output", str(tmp_path / "got")],
        ["checkpoints", "gc", "run"],
        ["events", "run"],
        ["metrics", "run"],
        ["metrics", "run", "--csv"],
        ["report", "run", "--output", str(tmp_path / "report.html")],
        ["audit", "run"],
        ["doctor", "run"],
        ["delete", "run"],
    ]
    for verb in verbs:
        for words in (verb, [*verb, "--json"]):
            if words[-2:] != ["--csv", "--json"]:
                sunspot(*words)
                assert sunspot.out + sunspot.err, words
                assert not set(sunspot.out + sunspot.err) & {"\x1b", "\x9b", "\x07", "\x08", "\x00"}, words


def test_each_kind_of_ray_message_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray = pytest.importorskip("ray._private.worker")
    from sunspot.ray_internals.output import brief_ray

    printed: list[str] = []
    monkeypatch.setattr(ray, "print_to_stdstream", lambda data, **options: printed.extend(data["lines"]))
    dump = (
        "Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL by the user"
        + " or" * 99
    )
    told = [
        f"{dump}\n    Eviction Stats:\n    (global lru) capacity: 10",
        "WARNING: 64 PYTHON worker processes have been started on node: 1a2b with address: 127.0.0.1, which is 8x the",
        "6 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, ID: 1a2b)",
        "A worker died or was killed while executing a task by an unexpected system error.\nThere are some reasons",
        "The node with node id 1a2b is over 95% full",
        "The node with node id 3c4d is over 96% full",
    ]
    with brief_ray():
        for text in told:
            ray.print_to_stdstream({"lines": [text], "pid": "raylet", "is_err": False}, ignore_prefix=False)
        ray.print_to_stdstream({"lines": ["of a worker of the user's own session"], "pid": 7}, ignore_prefix=False)
    shown = [record.getMessage() for record in caplog.records]
    assert [text[:40] for text in shown] == [f"Ray: {dump[:35]}", "Ray: The node with node id 1a2b is over 9"[:40]]
    assert max(map(len, shown)) < 250
    assert printed == ["of a worker of the user's own session"]


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_file_written_by_sunspot_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").touch()  # like a file from mktemp
    path = write_file(str(tmp_path / "a"), MARK + b" first", MARK)
    assert write_file(str(tmp_path / "a"), b"x" * 200_000 + MARK, MARK) == path
    assert write_file(str(tmp_path / "a"), b"last " + MARK, MARK).read_bytes() == b"last " + MARK
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["file", "link", "broken link", "fifo", "folder", "device"])
def test_files_not_written_by_sunspot_are_not_replaced(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "out", tmp_path / "other"
    other.write_bytes(MARK)
    match kind:
        case "file":
            path.write_bytes(b"a user's")
        case "link":
            path.symlink_to(other)
        case "broken link":
            path.symlink_to(tmp_path / "nothing")
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path = Path("/dev/null")
    before = path.lstat()
    with pytest.raises((SettingsError, StorageError), match="remove it, or choose another name"):
        write_file(str(path), MARK, MARK)
    after = path.lstat()
    assert (stat.S_IFMT(after.st_mode), after.st_ino) == (stat.S_IFMT(before.st_mode), before.st_ino)
    assert other.read_bytes() == MARK
    assert not list(tmp_path.glob(".*"))


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory"):
        write_file(str(tmp_path / "no" / "file"), MARK, MARK)
    with pytest.raises(SettingsError, match="~nobody-of-that-name"):
        write_file("~nobody-of-that-name/x", MARK, MARK)


def test_commands_replace_only_files_that_they_have_written(run: Run, sunspot: Command, tmp_path: Path) -> None:
    report(run, start(begin(run), "job", tier="beginning"), {"step": 5, "time": 1.0, "loss": 0.5})
    set_status(run, RunState.SUCCEEDED)
    mine = tmp_path / "mine"
    for words in (["report", "run", "--output"], ["metrics", "run", "--parquet"]):
        path = str(tmp_path / words[0])
        assert [sunspot(*words, path) for _ in range(2)] == [0, 0]
        mine.write_text("<!doctype html> of a user's")
        assert sunspot(*words, str(mine)) == 2
        assert sunspot(*words, "/dev/null") == 2
        assert Path("/dev/null").is_char_device()
        assert mine.read_text() == "<!doctype html> of a user's"


def test_render_replaces_only_rendered_manifests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, sunspot = tmp_path / "rendered", StorageCommand("s3://bucket/runs", capsys)
    words = ["render", "--run", "mnist", "--image", "sunspot:1", "--output", str(folder)]
    assert sunspot(*words).code == 0
    kustomization = folder / "kustomization.yaml"
    kustomization.write_text("resources: [rayjob.yaml]\npatches: []\n")
    assert sunspot(*words, "--set", "EPOCHS=3").code == 0
    assert "patches" in kustomization.read_text(), "the user's own"
    assert "SUNSPOT_EPOCHS" in (folder / "rayjob.yaml").read_text()
    (folder / "rayjob.yaml").write_text("kind: RayJob # a user's")
    assert sunspot(*words).code == 2
    assert (folder / "rayjob.yaml").read_text() == "kind: RayJob # a user's"
