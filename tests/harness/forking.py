"""Forks Ray's workers from a process with all imports, because importing takes longer than most tests.

Ray runs this file instead of Python (`executable`). The file's process represents the forked worker: if one of the two
processes ends, so does the other.
"""

import array
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOOK_EVERY_S = 1.0
"""Seconds between checks that Ray's process on the node is running."""

READY_S = 120.0
"""Seconds within which the server must listen."""

STARTER = 0
"""Descriptor that is open while the process that started the server is running: stdin."""

NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment that keeps pyarrow's allocator from starting a thread when the server imports it."""


def executable(name: str) -> str:
    """Return the command line that Ray runs instead of Python, for the server with this name."""
    return shlex.join([sys.executable, "-I", "-S", __file__, name])


@contextlib.contextmanager
def server_running(name: str, modules: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Context manager that runs a server in this environment, which imports these modules before its first fork."""
    command = [sys.executable, __file__, name, "serve", *modules]
    server = subprocess.Popen(command, env={**os.environ, **NO_THREADS, **environment}, stdin=subprocess.PIPE)
    deadline = time.monotonic() + READY_S
    while f"@{name}\n" not in Path("/proc/net/unix").read_text():
        assert server.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    try:
        yield
    finally:
        server.communicate()


def become(name: str, command: list[str]) -> None:
    """Ask the server for a forked worker that runs the command, and exit with its code."""
    ray = os.getppid()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{name}")
    request = json.dumps({"command": command, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    files = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
    connection.sendmsg([len(request).to_bytes(4, "little")], [files])
    connection.sendall(request)
    ended = os.pidfd_open(int(connection.recv(20)))
    while not select.select([ended], [], [], LOOK_EVERY_S)[0] and os.getppid() == ray:
        pass
    os._exit(1)


def serve(name: str, modules: list[str]) -> None:
    """Fork a worker for each client until the process that started this server ends."""
    del sys.path[0]  # the folder of this file
    plain_path = list(sys.path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen()  # before the imports, which clients can then wait for
    if "ray" in modules:
        draw_class_ids_apart()
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a garbage collection would copy the pages of all imported modules by writing to them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    while STARTER not in select.select([listener, STARTER], [], [])[0]:
        connection = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            script = become_worker(connection)
            folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            given = [folder for folder in folders if folder and folder not in plain_path]
            sys.path[:] = [os.path.dirname(script), *given, *plain_path]
            runpy.run_path(script, run_name="__main__")
            return
        connection.close()


def become_worker(connection: socket.socket) -> str:
    """Take over the environment and the arguments that Ray gave the client, and return the script to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    head, files, *_ = socket.recv_fds(connection, 4, 3)
    content = connection.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    request = json.loads(content)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["command"]
    sys.modules["numpy"].random.seed()  # as in a new process; Python's own generator is reseeded automatically
    # From now on, the kernel kills this process when the client closes its connection, even if the client is killed.
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    connection.send(str(os.getpid()).encode())
    connection.detach()
    return str(sys.argv[0])


def draw_class_ids_apart() -> None:
    """Let Ray draw the IDs of this process's actor classes from the operating system.

    Ray 2.60 draws an ID when `@ray.remote` decorates a class, from a generator that is seeded at its first use in a
    process, and not again after a fork. Otherwise, two forked workers would give their objects the same IDs.
    """
    import ray.actor

    class ClassID(ray.ActorClassID):
        @classmethod
        def from_random(cls) -> ray.ActorClassID:
            return ray.ActorClassID(os.urandom(len(ray.ActorClassID.nil().binary())))

    ray.actor.ActorClassID = ClassID


if __name__ == "__main__":
    if sys.argv[2:3] == ["serve"]:
        serve(sys.argv[1], sys.argv[3:])
    else:
        become(sys.argv[1], sys.argv[2:])
