"""Tests of docs/tutorial.ipynb: all cells run in order, and the stored outputs do not mention the machine."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sunspot.settings import PREFIX, SETTING_NAMES
from tests.harness import REPOSITORY
from tests.harness.notebook import execute, kinds

TUTORIAL = REPOSITORY / "docs/tutorial.ipynb"

WRITE = "WRITE_NOTEBOOK" in os.environ
"""True to keep the outputs."""

WORK = re.compile(r"[\w./-]*/tutorial-\w+")
"""Pattern of the working folder, whose name varies."""

MAX_BYTES = 400_000


def sources(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(TUTORIAL.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.fixture(scope="module")
def functions() -> dict[str, str]:
    """Return the source of every function in the tutorial."""
    code = ast.parse("\n".join(sources("code")))
    return {node.name: ast.unparse(node) for node in code.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_tutorial_cell_runs() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets do not allow a longer path
        run_all(Path(folder))


def run_all(folder: Path) -> None:
    """Execute the tutorial, and compare or keep its outputs."""
    copy = folder / "tutorial.ipynb"
    environment = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "RAY_"))}
    environment |= {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}  # other tests run at the same time
    command = [sys.executable, "-m", "tests.harness.notebook", str(TUTORIAL), str(copy)]
    subprocess.run(command, env=environment, cwd=REPOSITORY, check=True, timeout=1100)
    text = WORK.sub("...", copy.read_text())
    cells = json.loads(text)["cells"]
    assert "killed one of 3 workers" in str(cells)
    assert not [path for path in folder.iterdir() if path.name.startswith("tutorial-")]
    if WRITE:
        TUTORIAL.write_text(text)
    else:
        for cell, kept in zip(cells, json.loads(TUTORIAL.read_text())["cells"], strict=True):
            assert kinds(kept) == kinds(cell)


def test_all_tutorial_cells_before_the_first_call_of_train_can_be_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    page = json.loads(TUTORIAL.read_text())
    first_training = next(
        n for n, cell in enumerate(page["cells"]) if "model, history = train(" in "".join(cell["source"])
    )
    part = tmp_path / "part.ipynb"
    part.write_text(json.dumps({**page, "cells": page["cells"][:first_training]}))
    outputs = str([cell.get("outputs") for cell in execute(part)["cells"]])
    assert "12000 digits for training, 2000 held out" in outputs
    assert "to have 3 channels, but got 1 channels instead" in outputs
    assert "image/png" in outputs


def test_the_plain_training_code_in_the_tutorial_equals_the_baseline(functions: dict[str, str]) -> None:
    """Compare all code except docstrings and types, which the tutorial explains in words."""
    for node in ast.parse((REPOSITORY / "app/sunspot/baseline/train.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name != "save":
            del node.body[0]
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
            assert ast.unparse(node) == functions[node.name]


def test_the_tutorial_contains_nothing_about_the_machine_that_ran_it() -> None:
    text = TUTORIAL.read_text()
    assert len(text) < MAX_BYTES
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", ())]
    pictures = [output["data"].pop("image/png", None) for output in outputs if "data" in output]
    assert sum(picture is not None for picture in pictures) >= 2
    assert "image/svg+xml" in str(outputs)
    assert not re.search(rf"/tmp/|/home/|/root|\d\d:\d\d:\d\d|\b{re.escape(os.uname().nodename)}\b", str(outputs))


def test_every_setting_and_class_and_link_target_in_the_tutorial_exists() -> None:
    import ray.train.torch

    text = "\n".join(sources("markdown"))
    settings = set(re.findall(r"`([A-Z][A-Z_]+)\b", text)) - {"SIGTERM"}
    assert len(settings) > 10
    assert settings <= {name.upper() for name in SETTING_NAMES}
    names = set(re.findall(r"`(\w+)\(", "\n".join(re.findall(r"^\| (.*?) \|", text, re.M))))
    assert {"ScalingConfig", "RunConfig", "FailureConfig", "TorchTrainer"} <= names
    assert all(hasattr(ray.train, name) or hasattr(ray.train.torch, name) for name in names)
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (TUTORIAL.parent / link).exists(), link
