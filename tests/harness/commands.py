"""The command `sunspot` on the one run of a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.run import Run, open_run
from submitter.cli import main


class Command:
    """Runs `sunspot` on the run of a test."""

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
