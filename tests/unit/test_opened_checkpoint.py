"""Tests for opening checkpoints written by someone else, which must not import unknown tasks."""

from __future__ import annotations

import hashlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sunspot.cli import make_parser
from sunspot.data.source import ModelData
from sunspot.elastic.restore import choose_init
from sunspot.errors import DamageError, NotFoundError, SettingsError
from sunspot.predict.classifier import Classifier, open_checkpoint
from sunspot.run import Run, open_run
from sunspot.run.attempts import checkpoint_name
from sunspot.run.checkpoints import Checkpoint, write_manifest
from sunspot.settings import JobContext, Settings
from sunspot.tasks import load_task
from tests.harness.runs import begin, start

DATA = ModelData((1, 8, 8), 3).record()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(str(tmp_path / "runs"), "run")


def keep(run: Run, extra: Any) -> None:
    """Write the run's only checkpoint, with an empty model and the given `extra_state.pt`."""
    attempt = start(run, "job")
    name = checkpoint_name(1, attempt.number, attempt.nonce)
    files = {}
    for file, content in (("model.pt", {}), ("extra_state.pt", extra)):
        stream = io.BytesIO()
        torch.save(content, stream)
        run.storage.write(run.key("checkpoints", name, file), stream.getvalue())
        files[file] = {"size": len(stream.getvalue()), "sha256": hashlib.sha256(stream.getvalue()).hexdigest()}
    write_manifest(run, Checkpoint(name, 1, 1, 1, 1, attempt.number, files=files))


def settings_with(task: str) -> dict[str, str]:
    return {**Settings().environment(), "SUNSPOT_TASK": task}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a module in the reader's folder that writes a file when it is imported."""
    (tmp_path / "bystander.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("bystander", None)
    return "bystander"


def test_a_custom_task_is_not_imported_just_because_a_run_names_it(
    run: Run, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(run, {"settings": settings_with(module), "data": DATA})
    storage = run.storage.locate("")
    said = f"the run's task is {module}, but SUNSPOT_TASK is not set.* use --task {module}, "
    with pytest.raises(SettingsError, match=said):
        Classifier("run", storage=storage)
    monkeypatch.setenv("SUNSPOT_TASK", "another")
    with pytest.raises(SettingsError, match=f"the run's task is {module}, but SUNSPOT_TASK is another"):
        Classifier("run", storage=storage)
    with pytest.raises(SettingsError, match=f"the run's task is {module}"):
        Classifier("run", storage=storage, task="mine")
    assert not Path("ran").exists()


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize("named_by", ["option", "environment", "sunspot.toml"])
def test_a_custom_task_named_by_the_user_is_imported(
    run: Run, module: str, named_by: str, by_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(run, {"settings": settings_with(module), "data": DATA})
    own = f"{module}.py" if by_file else module
    if named_by == "environment":
        monkeypatch.setenv("SUNSPOT_TASK", own)
    elif named_by == "sunspot.toml":
        Path("sunspot.toml").write_text(f'task = "{own}"\n')
    with pytest.raises(SettingsError, match=f"SUNSPOT_TASK={module}: .* does not define build_model"):
        Classifier("run", storage=run.storage.locate(""), task=own if named_by == "option" else "")
    assert Path("ran").exists()


@pytest.mark.parametrize("named_by", ["option", "environment"])
def test_the_predict_command_accepts_a_task_file(
    run: Run, module: str, named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(run, {"settings": settings_with(module), "data": DATA})
    words = ["predict", "run", f"{module}.py", "--storage", run.storage.locate("")]
    if named_by == "option":
        words += ["--task", f"{module}.py"]
    else:
        monkeypatch.setenv("SUNSPOT_TASK", f"{module}.py")
    arguments = make_parser().parse_args(words)
    with pytest.raises(SettingsError, match=f"SUNSPOT_TASK={module}: .* does not define build_model"):
        arguments.begin(arguments)


def test_a_task_file_in_another_folder_is_also_found_in_child_processes(
    run: Run, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("tasks").mkdir()
    Path("tasks/elsewhere.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "/others")
    keep(run, {"settings": settings_with("elsewhere"), "data": DATA})
    here = Path.cwd()
    with pytest.raises(SettingsError, match=f"{here}/tasks/elsewhere.py does not define build_model"):
        Classifier("run", storage=run.storage.locate(""), task="tasks/elsewhere.py")
    assert os.environ["PYTHONPATH"] == f"{here}/tasks{os.pathsep}/others"


@pytest.mark.parametrize(
    ("job_id", "fix"),
    [
        (
            "",
            "did you mean bystander? Or run the command in the folder of bystandr.py, or put that folder on PYTHONPATH",
        ),
        (
            "run-1",
            "`sunspot submit --code FOLDER` uploads the folder of bystandr.py, or use an image that contains it",
        ),
    ],
)
def test_a_task_that_is_not_found_is_reported_with_the_fix(job_id: str, fix: str, module: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_task(Settings(task="bystandr", job=JobContext(job_id=job_id)))
    assert str(refused.value) == f"SUNSPOT_TASK=bystandr cannot be imported: No module named 'bystandr'; {fix}"


def test_the_error_for_a_missing_run_lists_the_existing_runs(run: Run) -> None:
    begin(run)
    storage = run.storage.locate("")
    with pytest.raises(NotFoundError, match=f"^no run rum in {storage.rstrip('/')}; it contains run$"):
        open_checkpoint("rum", "newest", storage)
    with pytest.raises(NotFoundError, match=r"/runs/run: no checkpoint yet$"):
        open_checkpoint("run", "newest", storage)
    with pytest.raises(SettingsError, match=r"^SUNSPOT_INIT_FROM=run:rum: no run rum in .*; it contains run$"):
        choose_init(Settings(init_from="run:rum", storage_path=storage))


def test_built_in_tasks_need_no_task_argument(run: Run) -> None:
    keep(run, {"settings": settings_with("sunspot.tasks.mnist"), "data": DATA})
    loaded = open_checkpoint("run", "newest", run.storage.locate(""))
    assert loaded.settings.task == "sunspot.tasks.mnist"
    assert loaded.arguments["task"] == "sunspot.tasks.mnist"
    assert (loaded.data.shape, loaded.data.classes) == ((1, 8, 8), 3)


@pytest.mark.parametrize(
    "extra",
    [
        [],
        "text",
        torch.zeros(1),
        {},
        {"settings": settings_with("sunspot.tasks.mnist")},
        {"settings": {"SUNSPOT_EPOCHS": "many"}, "data": DATA},
        {"settings": [], "data": DATA},
        {"settings": {1: 2}, "data": DATA},
        {"settings": {}, "data": []},
        {"settings": {}, "data": {**DATA, "shape": 3}},
        {"settings": {}, "data": {**DATA, "shape": ["a"]}},
        {"settings": {}, "data": {**DATA, "shape": [-1, 8, 8]}},
        {"settings": {}, "data": {**DATA, "shape": [10**9, 10**9]}},
        {"settings": {}, "data": {**DATA, "shape": [], "classes": 10**12}},
        {"settings": {}, "data": {**DATA, "classes": torch.zeros(2)}},
        {"settings": {}, "data": {**DATA, "class_names": [1, 2]}},
        {"settings": {}, "data": {**DATA, "more": 1}},
    ],
    ids=lambda extra: str(extra)[:40],
)
def test_malformed_model_data_in_a_checkpoint_is_reported_as_damage(run: Run, extra: Any) -> None:
    keep(run, extra)
    with pytest.raises(DamageError, match="cannot be used: it does not describe the model's data and"):
        open_checkpoint("run", "newest", run.storage.locate(""))
