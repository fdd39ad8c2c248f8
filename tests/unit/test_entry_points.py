"""Every `python -m app...`: its help answers at once and does nothing, and an unknown argument ends it with 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.settings import PREFIX, CommandParser, Settings, describe_settings
from tests.harness import REPOSITORY

ENTRY_POINTS = [
    "app",
    "app.tune",
    "app.predict",
    "app.baseline",
    "app.data.convert",
    "app.tracking",
    "app.train.pod_probe",
]


def run_module(module: str, word: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE WORD` in a folder; what it has imported of torch and Ray is its last line on stdout."""
    program = (
        f"import runpy, sys; sys.argv = ['', {word!r}]\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "finally: print('imported', sorted({'torch', 'ray'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_help_describes_the_command_and_does_nothing(module: str, tmp_path: Path) -> None:
    done = run_module(module, "--help", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m {module} [-h]")
    assert done.stdout.endswith("imported []\n")
    if module != "app.data.convert":
        assert f"  {PREFIX}STORAGE_PATH=runs\n" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_an_unknown_argument_ends_it(module: str, tmp_path: Path) -> None:
    done = run_module(module, "--hepl", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: --hepl: no such argument; did you mean --help?\n"
    assert done.stdout == "imported []\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--epoch", "did you mean the environment variable SUNSPOT_EPOCHS?"),
        ("SUNSPOT_EPOCHS=3", "did you mean the environment variable SUNSPOT_EPOCHS?"),
        ("xyz", "`python -m app.some --help` lists what there is"),
    ],
)
def test_a_setting_given_as_an_argument_is_named(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        CommandParser("app.some", "", ["epochs"]).parse([word])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {word}: no such argument; {hint}\n"


def test_every_setting_is_described() -> None:
    described = describe_settings()
    assert [setting.variable for setting in described] == list(Settings().environment())
    assert all(setting.takes and setting.meaning.endswith(".") for setting in described)
    assert describe_settings(["storage_path"])[0].default == "runs"
