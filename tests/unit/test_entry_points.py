"""Tests of every `python -m sunspot...`: help is fast and does nothing, and wrong arguments exit with code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sunspot.command_line import CommandParser
from sunspot.settings import PREFIX, SETTING_NAMES, describe_settings

ENTRY_POINTS = [
    "sunspot.train",
    "sunspot.tune",
    "sunspot.predict",
    "sunspot.baseline",
    "sunspot.data.convert",
    "sunspot.tracking",
    "sunspot.train.pod_probe",
]

OWN = ("app", "client", "data", "main", "run", "settings", "storage", "submitter", "train")
"""Common names of users' own files, which must not shadow Sunspot's modules."""


def run_module(module: str, word: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE WORD` among a user's own files. The last output line lists which of torch and Ray it
    imported."""
    program = (
        f"import runpy, sys; sys.argv = ['', {word!r}]\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "finally: print('imported', sorted({'torch', 'ray'} & sys.modules.keys()))"
    )
    for name in OWN:
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the user ran')")
    environment = {**os.environ, "PYTHONPATH": ".", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_the_help_option_describes_the_command_and_does_nothing_else(module: str, tmp_path: Path) -> None:
    done = run_module(module, "--help", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m {module} [-h]")
    assert done.stdout.endswith("imported []\n")
    if module != "sunspot.data.convert":
        assert f"  {PREFIX}STORAGE_PATH=runs\n" in done.stdout
    assert {path.stem for path in tmp_path.iterdir()} == set(OWN)


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_an_unknown_argument_is_rejected(module: str, tmp_path: Path) -> None:
    done = run_module(module, "--hepl", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: --hepl: no such option; did you mean --help?\n"
    assert done.stdout == "imported []\n"
    assert {path.stem for path in tmp_path.iterdir()} == set(OWN)


@pytest.mark.parametrize("module", ["sunspot", "sunspot.cli"])
def test_the_sunspot_command_can_be_run_as_a_module(module: str, tmp_path: Path) -> None:
    done = run_module(module, "--help", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: sunspot ")
    assert done.stdout.endswith("imported []\n")


def test_user_files_do_not_shadow_the_library(tmp_path: Path) -> None:
    done = run_module("sunspot.client", "", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "imported []\n", "")


@pytest.mark.parametrize(
    ("word", "kind", "hint"),
    [
        ("--epoch", "option", "did you mean the environment variable SUNSPOT_EPOCHS?"),
        ("SUNSPOT_EPOCHS=3", "argument", "did you mean the environment variable SUNSPOT_EPOCHS?"),
        ("LR=0.1", "argument", "did you mean the environment variable SUNSPOT_LEARNING_RATE?"),
        ("xyz", "argument", "see `python -m sunspot.some --help`"),
    ],
)
def test_a_setting_passed_as_an_argument_is_reported_with_a_hint(
    word: str, kind: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        CommandParser("python -m sunspot.some", "", ["epochs", "learning_rate"]).parse_args([word])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {word}: no such {kind}; {hint}\n"


def test_every_setting_is_described() -> None:
    described = describe_settings()
    assert [setting.variable for setting in described] == [PREFIX + name.upper() for name in SETTING_NAMES]
    assert all(setting.takes and setting.meaning.endswith(".") for setting in described)
    assert describe_settings(["storage_path"])[0].default == "runs"
