"""Tests of `sunspot train`: the precedence of settings, and the same outcomes as `python -m sunspot.train`."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sunspot.cli import make_parser
from sunspot.errors import SettingsError
from sunspot.run.overview import list_runs
from sunspot.settings.file import as_variables, read_settings_file
from sunspot.storage.local import LocalStorage
from sunspot.submitter.commands.arguments import given_settings
from sunspot.submitter.commands.train import train_and_print
from sunspot.submitter.local_training import training_environment
from sunspot.task_file import find_module
from sunspot.train.__main__ import main
from tests.harness.commands import Answer, process


def train(folder: Path, *words: str, **environment: str) -> Answer:
    """Return a function that runs `sunspot train` in the test's folder."""
    command = [sys.executable, "-m", "sunspot", "train", *words]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_command_line_overrides_the_environment_which_overrides_the_settings_file(
    tmp_path: Path, form: tuple[str, ...]
) -> None:
    (tmp_path / "sunspot.toml").write_text("EPOCHS = 0\nSUNSPOT_SEED = -1\ntrials = 0\n")
    answer = train(tmp_path, "--set", "TRIALS=-3", *form, SUNSPOT_SEED="-2", SUNSPOT_TRIALS="-2")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("sunspot.toml sets EPOCHS, SEED, TRIALS\n")
    assert re.findall(r"SUNSPOT_(\w+=\S+):", answer.err) == ["EPOCHS=0", "SEED=-2", "TRIALS=-3"]


@pytest.mark.parametrize("verb", ["train", "check", "tune"])
def test_settings_and_options_can_be_mixed_on_the_command_line(verb: str) -> None:
    words = [verb, "EPOCHS=3", "--storage", "elsewhere", "my_task.py", "--json", "seed=-1", "--set", "TRIALS=2"]
    arguments = make_parser().parse_args(words)
    assert given_settings(arguments) == {"TRIALS": "2", "EPOCHS": "3", "TASK": "my_task.py", "seed": "-1"}
    assert (arguments.storage, arguments.json) == ("elsewhere", True)


@pytest.mark.parametrize(
    ("word", "example"),
    [
        ("mnist", "VAR=VALUE, such as RUN_NAME=mnist"),
        ("=3", "VAR=VALUE, such as RUN_NAME==3"),
        ("EPOCHS", "EPOCHS=VALUE"),
    ],
)
def test_an_argument_that_is_neither_a_setting_nor_a_file_is_rejected(word: str, example: str) -> None:
    with pytest.raises(SettingsError, match=f"^{word} is not a setting; write {example}, or the path of a task"):
        given_settings(make_parser().parse_args(["train", word]))


@pytest.mark.parametrize(
    ("path", "module", "folder"),
    [
        ("here.py", "here", ""),
        ("tasks/../here.py", "here", ""),
        ("tasks/there.py", "there", "tasks"),
        ("vision/tasks/cats.py", "vision.tasks.cats", ""),
        ("tasks/pets/dogs.py", "pets.dogs", "tasks"),
        ("tasks/pets/__init__.py", "pets", "tasks"),
    ],
)
@pytest.mark.parametrize("given_by", ["word", "file of settings", "environment"])
def test_a_file_path_selects_its_module_and_extends_pythonpath(
    path: str, module: str, folder: str, given_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["here.py", "tasks/there.py", "vision/__init__.py", "vision/tasks/__init__.py", "vision/tasks/cats.py"]
    for file in [*files, "tasks/pets/__init__.py", "tasks/pets/dogs.py"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/others")
    words = []
    if given_by == "word":
        words = [path]
    elif given_by == "environment":
        monkeypatch.setenv("SUNSPOT_TASK", path)
    else:
        (tmp_path / "sunspot.toml").write_text(f'TASK = "{path}"\n')
    environment = training_environment(given_settings(argparse.Namespace(settings=[], words=words)))
    assert environment["SUNSPOT_TASK"] == module
    assert environment["PYTHONPATH"] == (f"{tmp_path / folder}{os.pathsep}/others" if folder else "/others")
    found = subprocess.run(
        [sys.executable, "-c", f"import {module} as found; print(found.__file__)"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert found.stdout == f"{os.path.normpath(tmp_path / path)}\n"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere.py", "no such file; pass the path of the task's file, or its module as TASK=MODULE"),
        ("my-task.py", "'my-task' is not a valid module name; use only letters, digits and '_'"),
        ("tasks/task.py", "task in the working directory would be imported instead; rename one of them, or run the "),
    ],
)
def test_a_file_that_cannot_be_imported_is_rejected(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    for name in ("my-task.py", "task.py", "tasks/task.py"):
        (tmp_path / name).touch()
    with pytest.raises(SettingsError, match=f"^{path}: {said}"):
        find_module(path)


def test_training_that_fails_to_start_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    monkeypatch.setenv("SUNSPOT_TASK", "sunspot.tasks.trees")
    monkeypatch.setenv("SUNSPOT_STORAGE_PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="xgboost is not installed; add EXTRAS=trees to `make train`"):
        main([])
    assert "report" not in capsys.readouterr().out
    storage = LocalStorage(str(tmp_path))
    assert list_runs(storage) == {}
    assert not [entry.key for entry in storage.list("mnist") if "/logs/" not in entry.key]


def test_training_that_fails_to_start_still_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own handlers
    code = train_and_print((sys.executable, "-c", "raise SystemExit(2)"), {"SUNSPOT_STORAGE_PATH": str(tmp_path)})
    assert code == 2
    assert json.loads(capfd.readouterr().out) == {
        **{"run": "mnist", "state": None, "reason": "it never began", "step": 0, "exit_code": 2}
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_before_the_command_prints_json(number: signal.Signals, tmp_path: Path) -> None:
    told = f"""import signal, time
def save(*_):
    time.sleep(1)
    raise SystemExit(0)
signal.signal({number:d}, save)
print("begun", flush=True)
time.sleep(60)"""
    program = (
        "import sys; from sunspot.submitter.commands.train import train_and_print as train; "
        f"sys.exit(train((sys.executable, '-c', {told!r}), {{'SUNSPOT_STORAGE_PATH': {str(tmp_path)!r}}}))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, start_new_session=True, **pipes) as process:
        assert process.stderr
        process.stderr.readline()
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)  # a terminal signals the whole group
        out, err = process.communicate()
    assert (process.returncode, json.loads(out)["exit_code"]) == (0, 0), err


def test_the_settings_file_can_contain_values_of_any_type(tmp_path: Path) -> None:
    file = tmp_path / "sunspot.toml"
    file.write_text('TASK = "my_task"\nAUDIT = true\nLEARNING_RATE = 1e-3\nTASK_ARGS = {width = 64}\n')
    read = read_settings_file(file)
    assert read == {
        "TASK": "my_task",
        "AUDIT": "true",
        "LEARNING_RATE": "0.001",
        "TASK_ARGS": json.dumps({"width": 64}),
    }
    assert as_variables({"epochs": "3", "SUNSPOT_SEED": "1"}) == {"SUNSPOT_EPOCHS": "3", "SUNSPOT_SEED": "1"}
    assert read_settings_file(tmp_path / "none.toml") == {}


def test_the_settings_file_can_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "sunspot.toml").write_bytes(b"\xef\xbb\xbfEPOCHS = 3\r\n")
    assert read_settings_file(tmp_path / "sunspot.toml") == {"EPOCHS": "3"}


def test_the_error_for_a_settings_file_that_is_not_utf_8_includes_the_fix(tmp_path: Path) -> None:
    (tmp_path / "sunspot.toml").write_text("EPOCHS = 3", encoding="utf-16")  # like a redirection in PowerShell
    with pytest.raises(
        SettingsError, match=r"^\S*sunspot\.toml is not in UTF-8, which TOML requires; save it as UTF-8"
    ):
        read_settings_file(tmp_path / "sunspot.toml")


@pytest.mark.parametrize("content", [b"EPOCHS = [", b"EPOCHS = 2026-01-01", b"EPOCHS 3", b"\xff"])
def test_an_invalid_settings_file_is_reported_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sunspot.toml").write_bytes(content)
    with pytest.raises(SettingsError, match=r"^\S*sunspot\.toml(: | is not in UTF-8)"):
        read_settings_file(tmp_path / "sunspot.toml")


@pytest.mark.parametrize("words", [["train"], ["tune"], ["demo"], ["predict", "run", __file__]])
def test_a_command_that_needs_a_missing_extra_says_what_to_install(words: list[str], tmp_path: Path) -> None:
    answer = process(*words, "--storage", str(tmp_path))
    what = "predicting" if "predict" in words else "training"
    said = f"error: {what} on this machine needs ray and torch; `make .venv/train` installs it\n"
    assert (answer.code, answer.out, answer.err) == (2, "", said)
