"""The server of a node: imports what workers need, and forks one for each client that asks.

It has a single thread and has touched no GPU, so what it forks is as good as a new Python. It ends with Ray's process
on the node, when the run is over, and when for a while there was neither a worker nor the process that began it.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import sunspot.warm
from sunspot.ray_internals.workers import draw_class_ids_apart, forks_draw_alike
from sunspot.warm.client import ANSWER_S, PASSED_ON, address, peer_of, receive, send

GPU = "/dev/nvidia"
"""Begins the names of the devices that CUDA opens when it is initialized."""


STARTER = 0
"""The descriptor that the process which began this one keeps open: stdin."""


class Worker(NamedTuple):
    """A worker that was forked, and the connection to its client."""

    process: int
    connection: socket.socket


def main(plain_path: list[str]) -> None:
    """Serve as the line on stdin says, once a line on stdout has told whether that is possible.

    `plain_path` is `sys.path` as Python begins with it. The process that began this one keeps stdin open.
    """
    if os.fork():
        os._exit(0)  # nobody's child, as Ray ends those of its workers
    order = json.loads(sys.stdin.readline())
    answer, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.close(nothing)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    raylet = os.pidfd_open(order["raylet"])
    sys.path[:] = order["path"]
    if "ray" in order["modules"]:
        draw_class_ids_apart()
    for module in order["modules"]:
        if select.select([STARTER], [], [], 0)[0]:
            return  # who began this is gone
        with contextlib.suppress(Exception):  # the worker meets it again, should it need that module
            importlib.import_module(module)
    obstacle = why_unfit()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if not obstacle:
        listener.bind(address(order["key"], order["node"]))
        listener.listen()
    os.write(answer, json.dumps({"obstacle": obstacle}).encode() + b"\n")
    os.close(answer)
    if not obstacle and (script := Server(listener, raylet, order["linger_s"]).serve()):
        sys.path[:] = [os.path.dirname(script), *plain_path]
        runpy.run_path(script, run_name="__main__")


def why_unfit() -> str:
    """Say why this process is not fit to be forked; empty if it is."""
    gc.collect()
    gc.freeze()  # a collection would write to the pages of all that was imported, and so copy them
    if (trial := os.fork()) == 0:
        os._exit(0)
    os.waitpid(trial, 0)  # threads that know of forks, as OpenBLAS's, are gone now
    if (threads := len(os.listdir("/proc/self/task")) - 1) > 0:
        return f"threads that an import has begun ({threads})"
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").startswith(GPU):
                return "CUDA, which an import has initialized"
    if "ray" in sys.modules and forks_draw_alike():
        return "an ID of Ray's, which an import has drawn: all forks would draw the same ones"
    return ""


class Server:
    """Forks workers until nobody needs them any more."""

    def __init__(self, listener: socket.socket, raylet: int, linger_s: float) -> None:
        """`raylet` is a descriptor that becomes readable as Ray's process ends."""
        self._listener, self._raylet, self._linger_s = listener, raylet, linger_s
        self._workers: dict[int, Worker] = {}
        "By the descriptor that becomes readable as the worker ends."
        self._starter_lives, self._over = True, False
        self._poll = select.poll()
        for file in (listener.fileno(), raylet, STARTER):
            self._poll.register(file, select.POLLIN)

    def serve(self) -> str:
        """Serve; returns the script in each worker that is forked, and nothing at the end."""
        while self._workers or not self._over:
            needed = self._workers or self._starter_lives
            ready = [file for file, _ in self._poll.poll(None if needed else self._linger_s * 1000)]
            if not ready or self._raylet in ready:
                break
            for file in ready:
                if file == STARTER:
                    self._poll.unregister(STARTER)
                    self._starter_lives = False
                elif file in self._workers:
                    self._report_exit(file)
                elif script := self._accept():
                    return script
        return ""

    def _accept(self) -> str:
        """Do what the next client asks for; returns the script in a worker that is forked for it."""
        connection, _ = self._listener.accept()
        connection.settimeout(ANSWER_S)
        files: list[int] = []
        try:
            if peer_of(connection)[1] != os.getuid():
                raise PermissionError("another user's")
            request, files = receive(connection, 3)
            self._over = self._over or not request
            if self._over:
                raise ConnectionAbortedError("the run is over")
            process = os.fork()
        except (OSError, ValueError):  # a client does without
            process = -1
            connection.close()
        if process == 0:
            try:
                return self._become_worker(connection, request, files)
            except BaseException:
                os._exit(1)  # its client is gone, and nothing has begun
        for file in files:
            os.close(file)
        if process < 0:
            return ""
        end = os.pidfd_open(process)
        self._workers[end] = Worker(process, connection)
        self._poll.register(end, select.POLLIN)
        return ""

    def _become_worker(self, connection: socket.socket, request: dict[str, Any], files: list[int]) -> str:
        """Take over what the client had from Ray; returns the script."""
        self._listener.close()
        for end, worker in self._workers.items():  # else their clients would not see them end
            os.close(end)
            worker.connection.close()
        os.close(self._raylet)
        os.setsid()
        for descriptor, file in enumerate(files):
            os.dup2(file, descriptor)
            os.close(file)
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
        if signal.SIGINT not in request["ignored"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["folder"])
        os.sched_setaffinity(0, request["cores"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = request["command"]
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # as in a new process; Python's own generator does so itself
        sunspot.warm.forked = True
        with contextlib.suppress(OSError):  # Ray has the kernel end workers before itself
            score = Path(f"/proc/{peer_of(connection)[0]}/oom_score_adj").read_text()
            Path("/proc/self/oom_score_adj").write_text(score)
        send(connection, {"process": os.getpid()})
        receive(connection)
        # From now on the kernel kills this process when the client closes its end, as it does when it is killed.
        fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
        if not select.select([connection], [], [], 0)[0]:  # readable: it was closed before that
            connection.detach()
            return str(sys.argv[0])
        raise ConnectionError("the client is gone")

    def _report_exit(self, end: int) -> None:
        """Tell a client how its worker ended."""
        process, connection = self._workers.pop(end)
        self._poll.unregister(end)
        os.close(end)
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(OSError):
            send(connection, {"code": os.waitstatus_to_exitcode(status)})
        connection.close()
