"""Runs the training program on small data, in a Ray session that all tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.ray_processes import ray_processes
from tests.harness import REPOSITORY
from tests.harness.forking import executable, server_running
from tests.harness.process_group import ON_FIRST_USE

RAY_JOB_CONFIG_JSON_ENV_VAR = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable through which Ray's job server passes the job's configuration to a driver."""

SETTINGS = {
    "TASK": "tests.tasks.tiny",
    "RUN_NAME": "run",
    "RESOURCES_PER_WORKER": '{"CPU": 1}',
    "NUM_WORKERS": "2",
    "LEARNING_RATE": "0.05",
    "CHECKPOINT_EVERY_S": "0",
    "AUDIT": "true",
    "PREDICT_ROWS": "0",
}
"""Settings for the small task without batch norm, with one of Ray's CPUs per worker."""

GIVEN = ("AWS_", "AZURE_STORAGE_", "STORAGE_EMULATOR_", "NO_PROXY", "PYTHONPATH", "SUNSPOT_CODE")
"""Prefixes of the variables that workers get: those of object store clients, and the task path."""

WORKER_NODE = {"training-worker": 1.0}
"""Resources of a cluster node with room for one worker."""

FORKED_WITH = [
    "ray",
    "sunspot.predict.actor",
    "sunspot.train.group",
    "sunspot.train.trainer",
    "sunspot.tune.search",
    "ray.train.torch",
    *ON_FIRST_USE,
]
"""Modules that the fork server of the tests' own Ray job imports for its workers."""

FORKED_WITHOUT_RAY = ["pandas", "pyarrow.dataset", "torchvision", *ON_FIRST_USE]
"""Modules that the fork server of all other jobs imports. Ray is not one, because it reads its job's ID on import."""

OWN_JOB, OTHER_JOBS = (f"sunspot-tests-{os.getpid()}-{jobs}" for jobs in ("own", "others"))
"""Names of the two fork servers."""


class Training(Future[int]):
    """The training program in a thread of this process."""

    def poll(self) -> int | None:
        """Return None while the program trains, like a process's `poll`. Raises the program's error."""
        return self.result() if self.done() else None


@dataclass
class Program:
    """Runs `python -m sunspot.train` with its own settings, in this process or in another one."""

    settings: dict[str, str]
    ray_address: str
    monkeypatch: pytest.MonkeyPatch

    def environment(self, **settings: Any) -> dict[str, str]:
        merged = {**self.settings, **{name: str(value) for name, value in settings.items()}}
        return {f"SUNSPOT_{name}": value for name, value in merged.items()}

    def run(self, **settings: Any) -> None:
        """Train in this process, with the shared Ray session. Raises the program's error."""
        from sunspot.train.__main__ import main

        with self.monkeypatch.context() as patch:
            for name, value in self.environment(**settings).items():
                patch.setenv(name, value)
            assert main([]) == 0

    def begin(self, **settings: Any) -> Training:
        """Train like `run`, but in a thread, for tests that act while it trains and do not kill it."""
        training = Training()

        def work() -> None:
            try:
                training.set_result(self.run(**settings) or 0)
            except BaseException as error:
                training.set_exception(error)

        threading.Thread(target=work, name="training", daemon=True).start()
        return training

    def start(self, **settings: Any) -> subprocess.Popen[str]:
        """Start the program in a separate process, with the shared Ray session.

        Its workers get the test's PYTHONPATH and cloud variables, as the workers of a submitted job get the job's.
        """
        environment = {**os.environ, **self.environment(**settings), **job_environment(self.ray_address)}
        command = [sys.executable, "-m", "sunspot.train"]
        return subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )


def job_environment(ray_address: str) -> dict[str, str]:
    """Return the variables with which a driver in another process joins the tests' Ray session as a job.

    The job's workers are forked.
    """
    given = {name: value for name, value in os.environ.items() if name.upper().startswith(GIVEN)}
    runtime_env = {"env_vars": given, "py_executable": executable(OTHER_JOBS)}
    return {"RAY_ADDRESS": ray_address, RAY_JOB_CONFIG_JSON_ENV_VAR: json.dumps({"runtime_env": runtime_env})}


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a Ray session for all tests, with more CPUs than the machine has, which Ray does not check.

    The session has one node with room for one cluster worker (`WORKER_NODE`). tests/harness/nodes.py adds more nodes.
    Workers are forked (tests/harness/forking.py).
    """
    import ray

    from sunspot.ray_internals.coordinator import install_coordinator
    from sunspot.ray_session import RAY_ENVIRONMENT, start_local_ray

    if "PYTEST_XDIST_WORKER" in os.environ:
        # Fails in a second process if pytest-xdist has not kept the group together.
        (tmp_path_factory.getbasetemp().parent / "ray").mkdir()
    os.environ.update(RAY_ENVIRONMENT, RAY_prestart_worker_first_driver="0")  # for workers that are not forked
    context = start_local_ray(
        num_cpus=4,
        resources=WORKER_NODE,
        log_to_driver=False,
        runtime_env={"py_executable": executable(OWN_JOB)},
    )
    raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
    # As in a worker, because Ray reads these variables when it is imported.
    environment = {"RAY_RAYLET_PID": str(raylet)}
    own_job = {"RAY_JOB_ID": ray.get_runtime_context().get_job_id(), **environment}
    with (
        server_running(OTHER_JOBS, FORKED_WITHOUT_RAY, environment),
        server_running(OWN_JOB, FORKED_WITH, own_job),
    ):
        # Otherwise, a run of fixed size would let Ray create its own coordinator, which elastic runs could not replace.
        install_coordinator()
        # Ray 2.60 always reports a lost node on stdout, even during a later test. That test's output would contain the
        # report.
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
        yield context.address_info["gcs_address"]
        ray.shutdown()


@pytest.fixture
def program(ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """Return the training program with its own storage."""
    yield Program({**SETTINGS, "STORAGE_PATH": str(tmp_path / "runs")}, ray_address, monkeypatch)
    end_placement_group_cleaners()


def end_placement_group_cleaners() -> None:
    """End the detached actors of Ray Train 2.60. Each killed driver leaves one, which takes 0.2 GB and 3% of a core."""
    for process in ray_processes("PlacementGroup", psutil.Process()):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a learnable dataset of small images and returns its path."""

    def make(rows: int, name: str = "data", row_group: int = 64, test_rows: int = 0, side: int = 8) -> str:
        for split, count in [("train", rows), ("test", test_rows)]:
            folder = tmp_path / name / split
            if count:
                folder.mkdir(parents=True)
                pq.write_table(images(count, side), folder / "part.parquet", row_group_size=row_group)
        return str(tmp_path / name if test_rows else tmp_path / name / "train")

    return make


def images(rows: int, side: int, seed: int = 0) -> pa.Table:
    """Return noisy images of three classes, each with its own bright stripe."""
    random = np.random.default_rng(seed)
    labels = np.arange(rows) % 3
    pixels = random.integers(0, 100, (rows, side, side), dtype=np.uint8)
    pixels[np.arange(rows), labels] = 255
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    return pa.table({"image": column, "label": labels})
