"""Runs the `sunspot` command on a test's only run, or on a storage location."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sunspot.cli import main
from sunspot.run import Run, open_run
from tests.harness import REPOSITORY

WITHOUT = "import sys; sys.modules.update(dict.fromkeys(['torch', 'ray', 'numpy', 'pandas'])); "
"""Beginning of a program in which these packages cannot be imported."""


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return stdout parsed as strict JSON."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


class StorageCommand:
    """Runs `sunspot` on a test's storage, in this process or in another one."""

    def __init__(self, storage: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.storage, self._capsys = storage, capsys

    def __call__(self, *words: str) -> Answer:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*words, "--storage", self.storage])
        return Answer(ended.value.code, *self._capsys.readouterr())

    def process(self, *words: str) -> Answer:
        """Run a subcommand in a process that cannot import torch, Ray, NumPy or pandas."""
        return process(*words, "--storage", self.storage)


def process(*words: str, program: str = f"{WITHOUT}from sunspot.cli import main; main()") -> Answer:
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=REPOSITORY, capture_output=True, text=True)
    return Answer(done.returncode, done.stdout, done.stderr)


class Command:
    """Runs `sunspot` on a test's only run."""

    def __init__(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        self.run, self._capsys = run, capsys
        self.out, self.err = "", ""

    def __call__(self, *words: str) -> int:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*words, "--storage", self.run.storage.locate("")])
        self.out, self.err = self._capsys.readouterr()
        return int(ended.value.code or 0)

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(str(tmp_path / "runs"), "run")


@pytest.fixture
def sunspot(run: Run, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(run, capsys)
