"""Ray's own workers, forked by a server: Ray knows them, keeps what they print, and ends them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from sunspot.warm import fork_server


@ray.remote(num_cpus=0)
class Worker:
    def tell(self) -> dict[str, Any]:
        print("printed by a forked worker", flush=True)
        score = Path("/proc/self/oom_score_adj").read_text()
        return {"process": os.getpid(), "parent": os.getppid(), "given": os.environ["GIVEN"], "score": score}

    def leave(self) -> None:
        os._exit(3)


def test_ray_knows_and_ends_forked_workers(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ray.get_runtime_context()
    plain = Worker.options(runtime_env={"py_executable": sys.executable, "env_vars": {"GIVEN": "1"}}).remote()
    cold = ray.get(plain.tell.remote())
    raylet = psutil.Process(cold["process"]).ppid()
    for name, value in {"RAY_JOB_ID": context.get_job_id(), "RAY_RAYLET_PID": str(raylet)}.items():
        monkeypatch.setenv(name, value)  # as in a worker: Ray reads them as it is imported
    key, node = fork_server.new_key(), context.get_node_id()
    assert fork_server.begin_server(key, node, raylet, ["ray", "sunspot.warm"]) == ""
    runtime_env = {"py_executable": fork_server.executable(key), "env_vars": {"GIVEN": "1"}}
    ends: dict[str, Callable[[Any, psutil.Process], object]] = {
        "by Ray": lambda worker, _: ray.kill(worker),
        "by itself": lambda worker, _: worker.leave.remote(),
        "by a signal": lambda _, process: process.kill(),
    }
    servers, printed = set(), 0
    for end in ends.values():
        worker = Worker.options(runtime_env=runtime_env).remote()
        told = ray.get(worker.tell.remote())
        process, server = psutil.Process(told["process"]), psutil.Process(told["parent"])
        assert (told["given"], told["score"]) == ("1", cold["score"])
        clients = [each for each in psutil.Process(raylet).children() if key in each.cmdline()]
        assert len(clients) == 1
        logs = Path(ray._private.worker._global_node.get_logs_dir_path())
        printed += "forked worker" in next(logs.glob(f"worker-*-{process.pid}.out")).read_text()
        end(worker, process)
        psutil.wait_procs([process, *clients], timeout=20)
        assert not process.is_running()
        assert not clients[0].is_running()
        servers.add(server)
    fork_server.end_server(key, node)
    [server] = servers
    server.wait(20)
    assert printed == 3
