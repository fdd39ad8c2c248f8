"""Tests of a real local Ray session: the processes that can use it, and the files that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import REPOSITORY

PROGRAM = """
import asyncio, json, os, subprocess, sys
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False)  # as in a notebook: this process gets its own token
ray.shutdown()
os.environ["HOME"] = os.environ["NO_HOME"]
from sunspot.ray_session import ray_session

with ray_session():
    from ray._raylet import GcsClient
    from ray.dashboard.modules.job.common import JobInfoStorageClient
    from ray.job_submission import JobStatus

    address, job = ray.get_runtime_context().gcs_address, "run-1-x7k2p"

    def can_read(**environment):
        "Return True if a process with this environment can read Ray's control store."
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        program = (
            "from ray._raylet import GcsClient\\n"
            f"print(len(GcsClient(address={address!r}).internal_kv_keys(b'', None)))"
        )
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env={**own, **environment}, capture_output=True).returncode == 0

    token = os.environ["RAY_AUTH_TOKEN"]
    node = ray._private.worker._global_node
    session = {
        "in a worker": ray.get(ray.remote(lambda: os.environ.get("RAY_AUTH_TOKEN")).remote()) == token,
        "folder": node.get_session_dir_path(),
        "groups": [os.getpgid(each.process.pid) for kind in node.all_processes.values() for each in kind],
        "own group": os.getpgrp(),
        "with the token": can_read(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token),
        "with another": can_read(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64),
    }

    jobs = JobInfoStorageClient(GcsClient(address=address))
    asyncio.run(jobs.put_status(job, JobStatus.RUNNING))
    config = json.dumps({"metadata": {"job_submission_id": job}})
    of_job = {"RAY_ADDRESS": address, "RAY_CLUSTER_NAME": "run-1-9fwqz", "RAY_JOB_CONFIG_JSON_ENV_VAR": config}
    driver = [sys.executable, "-m", "sunspot.train"]
    code = subprocess.run(driver, env={**os.environ, **of_job, "SUNSPOT_EPOCHS": "none"}).returncode
    try:  # as Ray does next
        asyncio.run(jobs.put_status(job, JobStatus.FAILED, "exit code 2"))
    except RuntimeError:
        pass
    info = asyncio.run(jobs.get_info(job))
print(json.dumps({"session": session, "job": {"code": code, "status": info.status.value, "message": info.message}}))
"""
"""Program that starts a session after another one, and runs a KubeRay job with an invalid setting in it."""


@pytest.fixture(scope="module")
def session_output(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what PROGRAM prints. Its second session has no home directory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    home = tmp_path_factory.mktemp("home")
    no_home = home / "file"
    no_home.write_text("")  # this is a file, because root could write to a folder without permissions
    return run_program({**environment, "HOME": str(home), "NO_HOME": str(no_home)})


def run_program(environment: dict[str, str]) -> dict[str, Any]:
    """Run PROGRAM, and run it again if Ray's own processes were too slow."""
    for last in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, cwd=REPOSITORY, capture_output=True, text=True
        )
        if last or "try again when the machine is less busy" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def test_a_session_is_private_and_needs_no_home_directory(session_output: dict[str, Any]) -> None:
    session = session_output["session"]
    assert session["in a worker"]
    assert session["with the token"]
    assert not session["with another"]
    if sys.platform == "linux":
        assert session["own group"] not in session["groups"], "a signal to the driver's group would end Ray's processes"
    folder = Path(session["folder"])
    [private] = [parent for parent in folder.parents if parent.name == f"sunspot-{os.getuid()}"]
    assert private.stat().st_mode & 0o777 == 0o700


def test_an_invalid_setting_ends_a_kuberay_job_without_retries(session_output: dict[str, Any]) -> None:
    job = session_output["job"]
    assert (job["code"], job["status"]) == (2, "STOPPED")
    assert job["message"].startswith("failed for good with exit code 2, so it is not tried again\nerror: ")
    assert "SUNSPOT_EPOCHS" in job["message"]
