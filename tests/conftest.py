"""What the tests share: a clean environment, one Ray instance, small data, and a way to run the training program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings

# How long an example takes is the machine's business.
settings.register_profile("sunspot", deadline=None)
settings.load_profile("sunspot")

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them whatever they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).parent.parent

SHELL = dict(os.environ)
"""The environment that the tests were started in, for those of a real cluster."""

pytest_plugins = [
    "tests.harness.s3",
    "tests.harness.kubernetes",
    "tests.harness.commands",
    "tests.harness.browser",
    "tests.harness.model_runs",
    "tests.harness.mlflow_server",
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's shell reaches a test, nor does a test reach the developer's cluster."""
    monkeypatch.setenv("KUBECONFIG", os.devnull)
    for name in list(os.environ):
        if name.startswith(("SUNSPOT_", "AWS_")) and name != "AWS_CA_BUNDLE":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """One Ray instance for the whole suite, with more CPUs than the machine has: they are numbers to Ray."""
    import ray

    from app.ray_session import RAY_ENVIRONMENT

    os.environ.update(RAY_ENVIRONMENT)
    context = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    # Of a node that was lost Ray tells on stdout, in some later test, whatever is set above (Ray 2.60): there it would
    # stand in what a command has printed.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    yield context.address_info["gcs_address"]
    ray.shutdown()


@dataclass
class Program:
    """Runs `python -m app` with settings of its own, in this process or in another."""

    settings: dict[str, str]
    ray_address: str
    monkeypatch: pytest.MonkeyPatch

    def environment(self, **settings: Any) -> dict[str, str]:
        merged = {**self.settings, **{name: str(value) for name, value in settings.items()}}
        return {f"SUNSPOT_{name}": value for name, value in merged.items()}

    def run(self, **settings: Any) -> None:
        """Train in this process, on the shared Ray instance; raises what the program raises."""
        from app.__main__ import main

        with self.monkeypatch.context() as patch:
            for name, value in self.environment(**settings).items():
                patch.setenv(name, value)
            assert main() == 0

    def start(self, **settings: Any) -> subprocess.Popen[str]:
        """Start the program as a process of its own, on the shared Ray instance."""
        environment = {**os.environ, **self.environment(**settings), "RAY_ADDRESS": self.ray_address}
        command = [sys.executable, "-m", "app"]
        return subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )


@pytest.fixture
def program(ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The training program on the small task without batch norm; one core's worth of Ray for each worker."""
    settings = {
        "TASK": "tests.tasks.tiny",
        "RUN_NAME": "run",
        "STORAGE_PATH": str(tmp_path / "runs"),
        "RESOURCES_PER_WORKER": '{"CPU": 1}',
        "NUM_WORKERS": "2",
        "LEARNING_RATE": "0.05",
        "CHECKPOINT_EVERY_S": "0",
        "AUDIT": "true",
        "PREDICT_ROWS": "0",
    }
    return Program(settings, ray_address, monkeypatch)


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., str]:
    """Writes a dataset of small images that can be learned; returns its path."""

    def make(rows: int, name: str = "data", row_group: int = 64, test_rows: int = 0, side: int = 8) -> str:
        for split, count in [("train", rows), ("test", test_rows)]:
            folder = tmp_path / name / split
            if count:
                folder.mkdir(parents=True)
                pq.write_table(images(count, side), folder / "part.parquet", row_group_size=row_group)
        return str(tmp_path / name if test_rows else tmp_path / name / "train")

    return make


def images(rows: int, side: int, seed: int = 0) -> pa.Table:
    """`rows` noisy images of three classes, each with its own bright stripe."""
    random = np.random.default_rng(seed)
    labels = np.arange(rows) % 3
    pixels = random.integers(0, 100, (rows, side, side), dtype=np.uint8)
    pixels[np.arange(rows), labels] = 255
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    return pa.table({"image": column, "label": labels})
