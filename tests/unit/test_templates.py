"""Tests that `sunspot init` writes tasks that learn, and does not replace files."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sunspot.data.source import Source, read_rows
from sunspot.plan import make_plan
from sunspot.settings import Settings, load_settings
from sunspot.settings.file import read_settings_file
from sunspot.submitter.commands.init import KINDS
from sunspot.tasks import load_predict, load_task
from sunspot.train.task_check import check
from tests.harness.commands import Command
from tests.harness.commands import run as run
from tests.harness.commands import sunspot as sunspot


@pytest.mark.parametrize("kind", KINDS)
def test_the_task_written_by_init_learns(
    kind: str, sunspot: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new"
    assert sunspot("init", kind, str(folder), "--json") == 0
    name = f"my_{kind}"
    assert {f"{folder}/{name}.py", f"{folder}/sunspot.toml"} <= {*sunspot.json["files"]}
    *others, predict = [line.partition(" ")[2] for line in sunspot.json["commands"]]
    assert others == ["check", "train", f"report my-{kind}"]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)  # left by another test
    settings = load_settings(read_settings_file(Path("sunspot.toml")))
    assert settings.run_name == f"my-{kind}"
    assert predict == f"predict my-{kind} --dataset {settings.dataset} --output predictions"
    task: Any = load_task(settings)
    assert Path(vars(__import__(name))["__file__"]).parent == folder
    source = make_plan(settings, task).source
    means = train(task, settings, source)
    assert means[-1] < 0.9 * means[0]
    check(settings)  # including the loop of the task, if it has one
    rows = {name: torch.from_numpy(column) for name, column in read_rows(source, 0, 5).items() if name != "label"}
    assert load_predict(settings)(task.build_model(settings, source), rows).shape == (5, source.classes)


def train(task: Any, settings: Settings, source: Source) -> list[float]:
    """Take 20 steps on a few rows, and return the mean loss of each step."""
    torch.manual_seed(0)
    batch = {column: torch.from_numpy(values) for column, values in read_rows(source, 0, 64).items()}
    model = task.build_model(settings, source)
    optimizer = task.build_optimizer(model, settings)
    means = []
    for _ in range(20):
        losses, metrics = task.loss(model, batch)
        assert losses.shape == metrics["accuracy"].shape == (64,)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(losses.mean().item())
    return means


def test_init_does_not_replace_files(sunspot: Command, tmp_path: Path) -> None:
    (tmp_path / "sunspot.toml").write_text("EPOCHS = 7")
    assert sunspot("init", "table", str(tmp_path)) == 2
    assert f"nothing was written, because the files would overwrite {tmp_path / 'sunspot.toml'};" in sunspot.err
    assert [path.name for path in tmp_path.iterdir()] == ["sunspot.toml"]
    assert sunspot("init", "tables", str(tmp_path / "new")) == 2
    assert not (tmp_path / "new").exists()


def test_init_prints_the_next_commands(sunspot: Command, tmp_path: Path) -> None:
    assert sunspot("init", "loop", str(tmp_path / "my new")) == 0
    wrote, *commands = sunspot.out.splitlines()
    assert wrote.startswith("wrote ")
    assert shlex.split(commands[0]) == ["cd", str(tmp_path / "my new")]
    assert all(shutil.which(shlex.split(line)[0]) for line in commands[1:])
