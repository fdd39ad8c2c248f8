"""Tests of the container image, if docker has it: it trains unchanged or with a user's task, without write access."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sunspot import __version__

IMAGE = os.environ.get("IMAGE", f"sunspot:{__version__}")


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def image_exists() -> bool:
    return bool(
        shutil.which("docker")
        and subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode == 0
    )


pytestmark = pytest.mark.skipif(not image_exists(), reason=f"docker has no image {IMAGE}: make image")


@pytest.fixture
def derived(tmp_path: Path) -> Iterator[str]:
    """Build a user's own image like the README describes."""
    (tmp_path / "my_task.py").write_text("from sunspot.tasks.mnist import *  # noqa: F403\nprint('my own task')\n")
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY my_task.py .\nENV SUNSPOT_TASK=my_task\n")
    name = f"sunspot-test:{uuid.uuid4().hex[:8]}"
    docker("build", "-q", "-t", name, str(tmp_path))
    yield name
    docker("rmi", name)


def test_a_container_of_the_image_can_train_with_a_read_only_file_system(derived: str) -> None:
    limits = ["--read-only", "--tmpfs", "/tmp", "--tmpfs", "/runs:uid=1000", "--cap-drop", "ALL", "--network", "none"]
    settings = ["-e", "SUNSPOT_MAX_STEPS=3"]
    output = docker("run", "--rm", "--shm-size", "512m", *limits, *settings, derived)
    assert "my own task" in output
    assert re.search(r"weights: /runs/mnist/checkpoints/step-00000003-attempt-0001-\w{8}/model\.pt", output)


@pytest.mark.slow
def test_a_container_of_the_unmodified_image_can_train() -> None:
    output = docker("run", "--rm", "-e", "SUNSPOT_MAX_STEPS=2", IMAGE)
    assert "12000 training rows" in output
    assert "weights: /runs/mnist/" in output


def test_the_image_runs_as_an_unprivileged_user_and_has_labels() -> None:
    assert docker("run", "--rm", IMAGE, "id", "-u").strip() == "1000"
    assert docker("run", "--rm", IMAGE, "ray", "--version").startswith("ray, version 2.")
    libraries = "import ctypes; ctypes.CDLL('libibverbs.so.1'), ctypes.CDLL('libmlx5.so.1')"
    docker("run", "--rm", IMAGE, "python", "-c", libraries)  # NCCL opens them for InfiniBand
    labels = docker("image", "inspect", "--format", "{{json .Config.Labels}}", IMAGE)
    assert '"org.opencontainers.image.title":"sunspot"' in labels
    packages = docker(
        "run", "--rm", IMAGE, "bash", "-c", "ls -d /opt/sunspot/lib/python3*/site-packages/kubernetes || true"
    )
    assert not packages.strip(), "the submitter's packages are not needed where it trains"
