"""More nodes for a local Ray cluster: told to go, or lost, as real ones are."""

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
"""For a node on which nothing runs any more."""

OBJECT_STORE_BYTES = 100_000_000


class Node(subprocess.Popen[bytes]):
    """A node's `ray start --block`, which drains the node on SIGTERM: `reclaim` and `lose` are the two ways to go."""

    node_id: str
    "Ray's."

    def reclaim(self) -> None:
        """Tell the node to go. It ends when nothing runs on it any more, or when its notice is over."""
        self.send_signal(signal.SIGTERM)

    def lose(self) -> None:
        """End the node and all that runs on it, without notice."""
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
    """A node that has joined the cluster, for as long as the context lasts at most.

    `resources` are Ray's: CPU (1 unless given) and any others. `notice_s` is how long it stays once told to go.
    """
    output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the node
    node, name = begin_node(ray_address, notice_s, resources, output)
    try:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while not (joined := [one for one in ray.nodes() if one["Alive"] and name in one["Resources"]]):
            if node.poll() is not None:
                # Ray gives a node 30 s, which one request to a busy machine may take.
                assert read_all(output).count("timed out during startup") == 1, read_all(output)
                node, name = begin_node(ray_address, notice_s, resources, output)
            assert time.monotonic() < deadline, "the node has not joined"
            time.sleep(0.1)
        node.node_id = joined[0]["NodeID"]
        yield node
        node.reclaim()  # so that Ray knows at once: what it takes to be alive for a while gets the next test's workers
        with suppress(subprocess.TimeoutExpired):
            node.wait(LEAVES_WITHIN_S)
    finally:
        node.lose()
        output.close()


def begin_node(ray_address: str, notice_s: float, resources: dict[str, float], output: IO[bytes]) -> tuple[Node, str]:
    """Start a node's processes; also returns a resource that only this node has."""
    name = f"test-{uuid.uuid4().hex}"
    # Ports that are given need not be waited for: Ray gives an agent 15 s to tell its own, and then gives up.
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
    """Ports that nobody listens on at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
