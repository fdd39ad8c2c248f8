"""Tests that run every command in the README and docs/, and check the examples."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sunspot.settings import Settings
from tests.harness import REPOSITORY, SHELL, skip_without
from tests.harness.documentation import find_commands, find_example, find_patched
from tests.harness.program import job_environment
from tests.harness.shards import write_tar

COMMANDS = find_commands("sh")
ON_A_CLUSTER = find_commands("sh cluster")
DEMO = "make demo"  # test_demo.py
TRAIN = "make train"
TESTS = "make test"  # runs this file, too

QUICK = re.compile(r"\.venv/bin/sunspot (?!delete|predict|train|tune)|make render ")
"""Pattern of commands that only render, or read the run that TRAIN leaves."""

CONTEXT = SHELL.get("KUBE_CONTEXT", "")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources with the same .venv, the README's task, and a folder of images."""
    folder = tmp_path_factory.mktemp("readme") / "sunspot"
    folder.mkdir()
    for name in ("app", "k8s", "requirements", "Makefile", "pyproject.toml"):
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy2
        copy(REPOSITORY / name, folder / name)
    # Create new stamps, so that make does not install this copy into the tests' environment.
    (folder / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(REPOSITORY / ".venv" / name)
    for stamp in ("uv", "submitter", "train", "dev"):
        (folder / ".venv" / stamp).touch()
    for name in ("my_task.py", "my_loop.py", "my_augmentation.py", "my_f1.py", "flowers.py"):
        (folder / name).write_text(find_example("python", f"# {name}"))
    (folder / "my_dataset.py").write_text(find_patched("my_dataset.py"))
    for name in ("mine.yaml", "places.yaml"):
        (folder / name).write_text(find_example("yaml", f"# {name}"))
    rows = "".join(f"0.{number},1.{number},{'setosa' if number % 2 else 'virginica'}\n" for number in range(40))
    (folder / "flowers.csv").write_text(f"width,length,label\n{rows}")
    random = np.random.default_rng(0)
    for label in ("cats", "dogs"):
        (folder / "pictures" / label).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 255, (70, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / label / f"{number}.png")
    pictures = [(label, path) for label in ("cats", "dogs") for path in (folder / "pictures" / label).iterdir()]
    files = [(f"{label}-{path.name}", path.read_bytes(), label.encode()) for label, path in pictures]
    (folder / "shards").mkdir()
    samples = [each for name, png, label in files for each in ((name, png), (name.replace("png", "cls"), label))]
    write_tar(folder / "shards" / "000.tar", samples)
    Image.fromarray(random.integers(0, 255, (28, 28), dtype=np.uint8)).save(folder / "digit.png")
    return folder


@pytest.fixture(scope="module")
def trained(checkout: Path, ray_address: str) -> str:
    """Train the run that all commands read, with the README's first command, and return its output."""
    return run_command(TRAIN, checkout, ray_address)


def run_command(command: str, checkout: Path, ray_address: str) -> str:
    """Run a documented command for only a few steps and return its output. It must exit with code 0."""
    short = {
        "PYTHON": "false",  # must not rebuild the .venv, which is the repository's own
        **job_environment(ray_address),
        "SUNSPOT_MAX_STEPS": "2",
        "SUNSPOT_NUM_WORKERS": "1",
        "SUNSPOT_GLOBAL_BATCH_SIZE": "16",
        "SUNSPOT_RESOURCES_PER_WORKER": '{"CPU": 1}',
        "SUNSPOT_PREDICT_ROWS": "32",
        "SUNSPOT_AUDIT": "true",
    }
    if "sunspot.tasks.trees" in command:
        skip_without("lightgbm", "trees")
        del short["SUNSPOT_GLOBAL_BATCH_SIZE"]  # a round takes all rows
    if "keras" in command:
        skip_without("keras", "tensorflow")
    if re.search(r"\bsunspot[. ]predict ", command):
        short = job_environment(ray_address)
    elif re.search(r"\b(make|sunspot) tune ", command):
        short |= {"SUNSPOT_TRIALS": "2"}
    elif not re.search(r"\b(make|sunspot) train\b", command):
        short = {}
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    answer = subprocess.run(
        command, shell=True, cwd=checkout, env={**environment, **short}, capture_output=True, text=True, timeout=280
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_the_readme_begins_with_three_commands() -> None:
    assert COMMANDS[:3] == [DEMO, TRAIN, TESTS]
    assert len(COMMANDS) >= 20
    assert len(ON_A_CLUSTER) >= 12


def test_the_first_command_in_the_readme_trains(trained: str) -> None:
    assert "weights: " in trained
    assert "report: " in trained


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(line, marks=() if QUICK.match(line) else pytest.mark.slow)
        for line in COMMANDS
        if line not in (DEMO, TRAIN, TESTS)
    ],
)
def test_each_documented_command_works(command: str, checkout: Path, trained: str, ray_address: str) -> None:
    output = run_command(command, checkout, ray_address)
    if "make train" in command or command.startswith("make tune"):
        assert ("weights: " if "make train" in command else "the best of search-0") in output
        assert "report: " in output


@pytest.mark.slow
def test_the_fine_tuning_commands_work(checkout: Path, ray_address: str) -> None:
    skip_without("peft", "hf")
    # In a separate process, because transformers aborts a process that has imported what other tests need.
    models = "from pathlib import Path; from tests.harness.language_models import write_base, write_texts; "
    write = f"write_base(Path({str(checkout / 'model')!r})); write_texts(Path({str(checkout / 'texts')!r}))"
    subprocess.run([sys.executable, "-c", models + write], cwd=REPOSITORY, check=True)
    rows = pq.read_table(checkout / "texts").to_pylist()
    (checkout / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (checkout / "my_trainer.py").write_text(find_patched("my_trainer.py"))
    train, get, predict, train_by_trainer = find_commands("sh finetune")
    assert "weights: " in run_command(train, checkout, ray_address)
    run_command(get, checkout, ray_address)
    assert (checkout / "adapter" / "adapter_config.json").is_file()
    assert run_command(predict, checkout, ray_address).startswith("The with statement: ")
    assert "weights: " in run_command(train_by_trainer, checkout, ray_address)


def test_the_task_in_the_readme_learns() -> None:
    import torch

    from sunspot.data.source import EmptySource
    from sunspot.tasks.defaults import PlainTask

    module = ModuleType("my_task")
    text = find_example("python", "# my_task.py")
    assert text.count("\n") < 40
    exec(text, vars(module))
    settings = Settings(task_args={"hidden": 32}, learning_rate=0.01)
    task = PlainTask(module, settings)
    torch.manual_seed(0)
    model = task.build_model(settings, EmptySource((1, 28, 28), 10))
    optimizer = task.build_optimizer(model, settings)
    batch = {"image": torch.randint(0, 256, (64, 1, 28, 28), dtype=torch.uint8), "label": torch.arange(64) % 10}
    means = []
    for _ in range(30):
        losses, metrics = task.loss(model, batch)
        assert losses.shape == metrics["accuracy"].shape == (64,)
        means.append(losses.mean().item())
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert means[-1] < means[0] / 2
    assert task.predict(model, batch["image"]).shape == (64, 10)
    assert task.schedule(0, 10) == 1


@pytest.mark.slow
def test_the_documented_model_worker_example_makes_predictions(
    checkout: Path, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    first_line = "from sunspot.predict import model_worker"
    monkeypatch.chdir(checkout)
    names: dict[str, Any] = {"ray": ray, "images": np.zeros((3, 1, 28, 28), dtype=np.uint8)}
    exec(first_line + "\n" + find_example("python", first_line), names)
    assert names["classes"].shape == (3,)
    assert names["probabilities"].shape == (3, 10)


@pytest.mark.timeout(1500)
@pytest.mark.skipif(not CONTEXT, reason="KUBE_CONTEXT names no cluster to try the commands on")
def test_the_cluster_commands_work(checkout: Path, tmp_path: Path) -> None:
    """Run all commands in order, with the image that `make smoke` has loaded onto the nodes."""
    view = ["kubectl", "config", "view", "--minify", "--flatten", "--context", CONTEXT]
    config = subprocess.check_output(view, env=SHELL)
    (tmp_path / "kubeconfig").write_bytes(config)
    environment = {
        **{name: value for name, value in SHELL.items() if name not in ("MAKEFLAGS", "MAKELEVEL")},
        "PYTHON": "false",
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "SUNSPOT_STORAGE_PATH": f"s3://sunspot/readme-{uuid.uuid4().hex[:8]}",
    }

    def call(command: str) -> str:
        done = subprocess.run(command, shell=True, cwd=checkout, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, command + done.stdout + done.stderr
        return done.stdout

    if "sunspot" in call("kubectl get namespaces -o name").replace("sunspot-", "").split("/"):
        pytest.skip("the namespace sunspot is in use")
    try:
        output = "".join(call(command) for command in ON_A_CLUSTER)
    finally:
        call("kubectl delete -k k8s/base --timeout=300s")
    assert "digits: succeeded" in output
