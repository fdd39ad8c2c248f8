"""Every command of the README is run, and its example task is the one that is trained."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.harness import REPOSITORY, SHELL

README = (REPOSITORY / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
ON_A_CLUSTER = [line for block in re.findall(r"```sh cluster\n(.*?)```", README, re.S) for line in block.splitlines()]

CONTEXT = SHELL.get("KUBE_CONTEXT", "")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with the same .venv, the README's task, and a folder of pictures."""
    folder = tmp_path_factory.mktemp("readme") / "sunspot"
    folder.mkdir()
    for name in ("app", "submitter", "k8s", "requirements", "Makefile", "pyproject.toml"):
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy2
        copy(REPOSITORY / name, folder / name)
    (folder / ".venv").symlink_to(REPOSITORY / ".venv")
    [task] = re.findall(r"```python\n# my_task\.py\n(.*?)```", README, re.S)
    assert task.count("\n") < 40
    (folder / "my_task.py").write_text(task)
    [profile] = re.findall(r"```yaml\n# mine\.yaml\n(.*?)```", README, re.S)
    (folder / "mine.yaml").write_text(profile)
    random = np.random.default_rng(0)
    for label in ("cats", "dogs"):
        (folder / "pictures" / label).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 255, (70, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / label / f"{number}.png")
    Image.fromarray(random.integers(0, 255, (28, 28), dtype=np.uint8)).save(folder / "digit.png")
    return folder


def test_the_readme_has_commands() -> None:
    assert COMMANDS[:2] == ["make train SUNSPOT_AUDIT=true", ".venv/bin/sunspot audit mnist"]
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_works(command: str, checkout: Path, ray_address: str) -> None:
    short = {
        "PYTHON": "false",  # the .venv is the repository's own: a wish to make it anew has to fail
        "RAY_ADDRESS": ray_address,
        "SUNSPOT_MAX_STEPS": "2",
        "SUNSPOT_GLOBAL_BATCH_SIZE": "16",
        "SUNSPOT_RESOURCES_PER_WORKER": '{"CPU": 1}',
        "SUNSPOT_PREDICT_ROWS": "32",
    }
    if " -m app.predict " in command:
        short = {"RAY_ADDRESS": ray_address}
    elif command.startswith("make tune"):
        short |= {"SUNSPOT_TRIALS": "2", "SUNSPOT_NUM_WORKERS": "1"}
    elif not command.startswith("make train"):
        short = {}
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    answer = subprocess.run(
        command, shell=True, cwd=checkout, env={**environment, **short}, capture_output=True, text=True, timeout=280
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    if command.startswith(("make train", "make tune")):
        assert ("weights: " if "make train" in command else "the best of search-0") in answer.stdout
        assert "report: " in answer.stdout


@pytest.mark.timeout(1500)
@pytest.mark.skipif(not CONTEXT, reason="KUBE_CONTEXT names no cluster to try the commands on")
def test_the_commands_for_a_cluster_work(checkout: Path, tmp_path: Path) -> None:
    """All of them in their order, with the image that `make smoke` has brought onto the nodes."""
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
