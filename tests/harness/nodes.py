"""Adds nodes to a local Ray cluster, and reclaims or loses them like real nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil
import ray

RAY = Path(sys.executable).with_name("ray")
JOIN_TIMEOUT_S = 120
LEAVES_WITHIN_S = 5
"""Seconds within which an idle node leaves."""

OBJECT_STORE_BYTES = 100_000_000


class Node(subprocess.Popen[bytes]):
    """A node's `ray start --block` process, which drains the node on SIGTERM. `reclaim` and `lose` end it."""

    node_id: str
    "The node's id in Ray."

    def reclaim(self) -> None:
        """Give the node notice. It ends when it is idle, or when the notice is over."""
        self.send_signal(signal.SIGTERM)

    def lose(self) -> None:
        """End the node and all its processes without notice."""
        try:
            tree = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.wait()


@contextmanager
def start_node(ray_address: str, notice_s: float = 15, **resources: float) -> Iterator[Node]:
    """Add a node to the cluster, and yield it. The node ends with the context at the latest.

    `resources` are Ray resources, with one CPU by default. `notice_s` is the time from a notice to the node's end.
    """
    output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the node
    node, name = begin_node(ray_address, notice_s, resources, output)
    try:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while not (joined := [one for one in ray.nodes() if one["Alive"] and name in one["Resources"]]):
            if node.poll() is not None:
                # Ray gives a node 30 s to start, but on a busy machine, a single request can take that long.
                assert read_all(output).count("timed out during startup") == 1, read_all(output)
                node, name = begin_node(ray_address, notice_s, resources, output)
            assert time.monotonic() < deadline, "the node has not joined"
            time.sleep(0.1)
        node.node_id = joined[0]["NodeID"]
        yield node
        node.reclaim()  # otherwise, Ray would place the next test's workers on the dead node
        with suppress(subprocess.TimeoutExpired):
            node.wait(LEAVES_WITHIN_S)
    finally:
        node.lose()
        output.close()


def begin_node(ray_address: str, notice_s: float, resources: dict[str, float], output: IO[bytes]) -> tuple[Node, str]:
    """Start a node's processes, and return them with the name of a resource that only this node has."""
    name = f"test-{uuid.uuid4().hex}"
    # Set the ports explicitly. Otherwise Ray waits for an agent to report its ports, and stops waiting after 15 s.
    ports = dict(
        zip(("dashboard-agent-grpc", "dashboard-agent-listen", "runtime-env-agent"), free_ports(3), strict=True)
    )
    others = {resource: amount for resource, amount in resources.items() if resource != "CPU"}
    command = [
        str(RAY),
        "start",
        "--block",
        f"--address={ray_address}",
        f"--num-cpus={resources.get('CPU', 1):g}",
        f"--resources={json.dumps({**others, name: 1})}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        *(f"--{port}-port={number}" for port, number in ports.items()),
    ]
    environment = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(notice_s)}
    return Node(command, env=environment, stdout=output, stderr=subprocess.STDOUT), name


def read_all(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing is listening."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
