"""Tests of a run with a task that exists only in an archive, including all of Ray's processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sunspot.code_archive import CODE
from sunspot.run import open_run
from sunspot.run.history import read_events
from sunspot.submitter.code_files import pack
from tests.harness.program import Program

TASK = """
from lib.model import build_model
from pytest import MINE  # which is installed, too, but the code is first
from sunspot.data.image_sources import find_sources as find
from sunspot.tasks.images import loss


class Mine:  # only the code has this class, and it travels to Ray's processes
    def __init__(self, source):
        self.source = source

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.source, name)


def find_sources(settings):
    train, test = find(settings)
    return Mine(train), test
"""

MODEL = """
from math import prod

from torch import nn


def build_model(settings, source):
    width = int(open("lib/width").read())
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(source.shape), width), nn.Linear(width, source.classes))
"""


@pytest.mark.slow
def test_a_run_uses_edited_code_and_reports_the_change(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_data: Callable[..., str]
) -> None:
    folder, storage = tmp_path / "mine", program.settings["STORAGE_PATH"]
    (folder / "lib").mkdir(parents=True)
    (folder / "lib/model.py").write_text(MODEL)
    (folder / "lib/width").write_text("7")
    (folder / "pytest.py").write_text("MINE = 1")
    settings = {"TASK": "my_task", "DATASET": make_data(64), "GLOBAL_BATCH_SIZE": 32, "LOADER": "ray"}
    run = open_run(storage, "run")
    for edit, epochs in (("", 1), ("# another line\n", 2)):
        (folder / "my_task.py").write_text(TASK + edit)
        archive = pack(folder)
        run.storage.write(run.key(archive.name), archive.content)
        monkeypatch.setenv(CODE, archive.url(storage, "run"))
        process = program.start(**settings, EPOCHS=epochs)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
    began = [event["detail"] for event in read_events(run) if event["event"] == "attempt began"]
    assert ["with other code" in detail for detail in began] == [False, True]
