"""Workers that are forked by a node's server: they are what a new Python would be, and nothing is left of them."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sunspot.ray_internals.workers import NODE
from sunspot.warm import client, fork_server, server
from tests.harness import REPOSITORY
from tests.harness.waiting import wait_until

WAIT_S = 20.0

SCRIPT = """
import json, os, random, signal, sys, time
told = {
    "process": os.getpid(),
    "parent": os.getppid(),
    "session": os.getsid(0),
    "forked": "sunspot.warm" in sys.modules and sys.modules["sunspot.warm"].forked,
    "imported": "colorsys" in sys.modules,
    "random": random.random(),
    "files": sorted(os.listdir("/proc/self/fd")),
    "arguments": sys.argv,
    "main": __name__,
    "folder": os.getcwd(),
    "X": os.environ.get("X"),
    "SERVER": os.environ.get("SERVER"),
    "numpy": sys.modules["numpy"].random.random() if "numpy" in sys.modules else None,
    "path": sys.path,
    "ignored": signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN,
    "score": open("/proc/self/oom_score_adj").read(),
}
print(json.dumps(told), flush=True)
exec(sys.argv[-1])
"""


class Node:
    """Starts workers as the Ray of a node does, which `raylet` stands for."""

    def __init__(self, folder: Path) -> None:
        self.key, self.node = fork_server.new_key(), "0" * 56
        self.script = folder / "worker.py"
        self.script.write_text(SCRIPT)
        self.suspended: psutil.Process | None = None
        self.raylet = subprocess.Popen(["sleep", "1000"])

    def serve(self, *modules: str, linger_s: float = 60.0) -> str:
        return fork_server.begin_server(self.key, self.node, self.raylet.pid, list(modules), linger_s)

    def command(self, code: str) -> list[str]:
        return [*shlex.split(fork_server.executable(self.key)), str(self.script), f"{NODE}{self.node}", code]

    def start(self, code: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(code), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )

    def run(self, code: str = "", **options: Any) -> tuple[dict[str, Any], int]:
        """What a worker says of itself, and the code that its client ends with."""
        with self.start(code, **options) as started:
            out, err = started.communicate(timeout=WAIT_S)
            assert out, err
            return json.loads(out), started.returncode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    if node.suspended and node.suspended.is_running():
        node.suspended.resume()
    fork_server.end_server(node.key, node.node)
    node.raylet.kill()
    node.raylet.wait()


def test_a_forked_worker_is_what_a_new_one_would_be(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what the server has imported, and the session that keeps signals of the terminal from it."""
    environment = {**os.environ, "X": "ä" * 60_000}
    options = {"env": environment, "cwd": tmp_path, "preexec_fn": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN)}
    cold, code = node.run("raise SystemExit(3)", **options)
    assert (cold["forked"], cold["imported"], code) == (False, False, 3), "there is no server yet"
    monkeypatch.setenv("SERVER", "has more than the worker is given")
    assert node.serve("sunspot.warm", "colorsys", "numpy.random", "no_such_module") == ""
    warm, code = node.run("raise SystemExit(3)", **options)
    assert (warm["forked"], warm["imported"], code) == (True, True, 3)
    assert warm["arguments"] == [str(node.script), f"{NODE}{node.node}", "raise SystemExit(3)"]
    own = {"process", "parent", "forked", "imported", "random", "numpy", "session", "files"}
    assert {name: warm[name] for name in warm.keys() - own} == {name: cold[name] for name in cold.keys() - own}
    assert set(warm["files"]) <= {"0", "1", "2", "3", "4"}, "its connection, and the listing itself"
    again, _ = node.run(**options)
    assert again["parent"] == warm["parent"], "one server forks all"
    assert again["random"] != warm["random"]
    assert again["numpy"] != warm["numpy"]


def test_forks_do_not_draw_the_same_ids_for_what_they_give_to_ray(node: Node) -> None:
    """Else one would read the object of another. Classes under @ray.remote draw an ID when they are imported."""
    assert node.serve("ray", "ray.data._internal.memory_tracing") == ""
    draw = "print(json.dumps(__import__('ray').ObjectRef.from_random().hex()))"
    drawn = []
    for _ in range(2):
        with node.start(draw) as started:
            drawn.append(started.communicate(timeout=WAIT_S)[0].splitlines()[1])
    assert drawn[0] != drawn[1]


def test_a_server_whose_forks_would_draw_alike_does_not_serve(node: Node, tmp_path: Path) -> None:
    (tmp_path / "draws_an_id.py").write_text("import ray\nray.ObjectRef.from_random()\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        assert "all forks would draw the same" in node.serve("ray", "draws_an_id")


def test_another_users_client_gets_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "peer_of", lambda connection: (1, os.getuid() + 1, 0))
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it would run their code as this user"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        listener.bind("")  # any free abstract address
        listener.listen()
        stranger.connect(listener.getsockname())
        client.send(stranger, {"command": ["theirs.py"]})
        assert server.Server(listener, listener.fileno(), 1.0)._accept() == ""
        stranger.settimeout(WAIT_S)
        with pytest.raises(ConnectionError):
            client.receive(stranger)


@pytest.mark.parametrize(
    ("code", "ends_with"),
    [("raise SystemExit(7)", 7), ("raise ValueError", 1), ("os.kill(os.getpid(), 9)", -9), ("os._exit(5)", 5)],
)
def test_a_client_ends_as_its_worker_does(code: str, ends_with: int, node: Node) -> None:
    assert node.serve("sunspot.warm") == ""
    told, ended = node.run(code)
    assert (told["forked"], ended) == (True, ends_with)


def test_signals_reach_the_worker(node: Node) -> None:
    assert node.serve("sunspot.warm") == ""
    code = "signal.signal(15, lambda *_: sys.exit(9)); print(flush=True); time.sleep(1000)"
    with node.start(code) as started:
        assert started.stdout
        started.stdout.readline()
        started.stdout.readline()
        started.terminate()
        assert started.wait(WAIT_S) == 9


def test_a_worker_ends_with_its_client_and_others_stay(node: Node) -> None:
    assert node.serve("sunspot.warm") == ""
    deaf = "for n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)"
    with node.start(f"{deaf}\nprint(flush=True)\ntime.sleep(60)") as first, node.start("time.sleep(60)") as second:
        assert first.stdout
        assert second.stdout
        workers = [psutil.Process(json.loads(each.stdout.readline())["process"]) for each in (first, second)]
        first.stdout.readline()
        first.kill()
        workers[0].wait(WAIT_S)
        time.sleep(0.1)
        assert second.poll() is None
        workers[1].kill()
        assert second.wait(WAIT_S) == -9


def test_a_worker_ends_with_ray(node: Node) -> None:
    """Ray's process on the node is the parent of the client; cold workers see that they have lost it."""
    assert node.serve("sunspot.warm") == ""
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:]); input()"
    command = [sys.executable, "-c", code, *node.command("time.sleep(1000)")]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        worker = psutil.Process(json.loads(parent.stdout.readline())["process"])
        parent.kill()
        worker.wait(WAIT_S)


def test_a_worker_outlives_its_server_and_the_next_is_a_new_python(node: Node) -> None:
    assert node.serve("sunspot.warm") == ""
    with node.start("time.sleep(1000)") as started:
        assert started.stdout
        told = json.loads(started.stdout.readline())
        psutil.Process(told["parent"]).kill()
        time.sleep(0.1)
        assert started.poll() is None
        assert not node.run()[0]["forked"]
        os.kill(told["process"], signal.SIGKILL)
        assert started.wait(WAIT_S) == 1


def test_a_server_that_does_not_answer_is_left_alone(node: Node) -> None:
    """When it wakes, nothing is forked: the worker has begun without it."""
    assert node.serve("sunspot.warm") == ""
    server = psutil.Process(node.run()[0]["parent"])
    server.suspend()
    node.suspended = server
    with node.start("") as started:  # it has a copy of the worker's stdout, so that has no end yet
        assert started.stdout
        assert not json.loads(started.stdout.readline())["forked"]
        assert started.wait(WAIT_S) == 0
    server.resume()
    wait_until(lambda: not server.children())
    assert node.run()[0]["forked"]


def test_a_server_ends_with_the_run_once_its_workers_have(node: Node) -> None:
    assert node.serve("sunspot.warm") == ""
    with node.start("time.sleep(1000)") as started:
        assert started.stdout
        told = json.loads(started.stdout.readline())
        server = psutil.Process(told["parent"])
        fork_server.end_server(node.key, node.node)
        assert not node.run()[0]["forked"], "the run is over"
        os.kill(told["process"], signal.SIGKILL)
        assert started.wait(WAIT_S) == -9
    server.wait(WAIT_S)


def test_a_server_ends_with_ray(node: Node) -> None:
    assert node.serve("sunspot.warm") == ""
    server = psutil.Process(node.run()[0]["parent"])
    node.raylet.kill()
    server.wait(WAIT_S)


@pytest.mark.parametrize("modules", [["sunspot.warm"], ["sunspot.warm", "slow"]], ids=["serving", "importing"])
def test_a_server_ends_when_nobody_is_left(modules: list[str], node: Node, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nopen('begun', 'w').write('')\ntime.sleep(2)")
    path, order = [str(REPOSITORY), "."], (node.key, node.node, node.raylet.pid, modules, 0.5)
    code = (
        f"import sys; sys.path[:0] = {path}; from sunspot.warm import fork_server; fork_server.begin_server(*{order})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(flush=True); input()"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as starter:
        if "slow" in modules:
            wait_until((tmp_path / "begun").exists)
        else:
            assert starter.stdout
            starter.stdout.readline()
            assert node.run()[0]["forked"]
            time.sleep(1)
            assert fork_server.serves(node.key, node.node), "the process that began it lives"
        starter.kill()
    wait_until(lambda: not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)])


def test_a_process_with_a_thousand_open_files_begins_a_server(node: Node) -> None:
    """A rank is connected to each of the others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert node.serve("sunspot.warm") == ""
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert node.run()[0]["forked"]


def test_a_process_unfit_to_fork_does_not_serve(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "starts_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[1000], daemon=True).start()"
    )
    assert node.serve("starts_thread") == "threads that an import has begun (1)"
    assert not node.run()[0]["forked"]


def test_a_server_leaves_memory_to_the_training(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "memory_left", lambda: 700_000_000)
    assert node.serve() == "700 MB of memory is left there, of 1 GB that it wants"
    assert not fork_server.serves(node.key, node.node)


def test_a_job_with_a_python_of_its_own_is_started_cold() -> None:
    assert fork_server.why_unsupported({"env_vars", "working_dir"}) == ""
    assert fork_server.why_unsupported({"env_vars", "pip", "conda"}) == "the job's runtime environment has conda, pip"
