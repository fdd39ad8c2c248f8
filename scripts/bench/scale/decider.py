"""Measures the membership server, which decides in the driver who is in a group, with many simulated members.

The members are simulated by one other process, which runs this module. They send heartbeats and requests as workers do,
but have no threads. The server is the product's own. Its CPU time is that of this process.
"""

from __future__ import annotations

import json
import math
import os
import queue
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

from scripts.bench import Figure
from sunspot.background import map_parallel, start_thread
from sunspot.elastic.member_connections import (
    HEARTBEAT,
    HEARTBEAT_EVERY_S,
    DriverConnection,
    FrameReader,
    decode,
    encode,
    open_connection,
)
from sunspot.elastic.membership import Change, Close, Generation, Member
from sunspot.elastic.membership_channel import JoinRequest, MembershipServer

SIZES = (64, 512, 2_048)
"""Numbers of members."""

REST_S = 10.0
"""Seconds for which a group at rest is measured."""

FORM_S = 120.0
"""Seconds within which a group must form."""

SELECT_S = 0.005
"""Seconds between two rounds of the simulated members."""


def measure() -> Iterator[Figure]:
    """Yield the figures of each number of members."""
    for size in SIZES:
        at = f"{size:,} members"
        threads = threading.active_count()
        with open_server(size) as server, simulated(server, size) as ask:
            threads = threading.active_count() - threads
            formed = ask("form")
            time.sleep(1.0)  # the group comes to rest
            rest = measure_rest(ask)
            lost = ask("lose")
        yield Figure("seconds until all members know their first group", at, formed["seconds"], "s")
        yield Figure("bytes sent for that", at, formed["bytes"] / 1e6, "MB")
        yield Figure("seconds until all know the next group after a loss", at, lost["seconds"], "s")
        yield Figure("CPU time of the driver at rest", at, 100 * rest["cpu"], "% of a core")
        yield Figure("bytes sent at rest", at, rest["bytes"] / 1e3, "kB/s")
        yield Figure("members presumed lost at rest", at, rest["lost"], "")
        yield Figure("threads of the server", at, threads, "")


def measure_rest(ask: Callable[[str], dict[str, float]]) -> dict[str, float]:
    """Return the share of a core, bytes a second, and losses of a group that only trains."""
    before = ask("count")
    began = time.monotonic()
    used = time.process_time()
    time.sleep(REST_S)
    used = time.process_time() - used
    took_s = time.monotonic() - began
    after = ask("count")
    return {
        "cpu": used / took_s,
        "bytes": (after["bytes"] - before["bytes"]) / took_s,
        "lost": after["lost"] - before["lost"],
    }


@contextmanager
def open_server(size: int) -> Iterator[MembershipServer]:
    """Yield a membership server on this machine that reports to nobody."""
    with patch("ray.util.get_node_ip_address", lambda: "127.0.0.1"), MembershipServer(size, Mock()) as server:
        yield server


@contextmanager
def simulated(server: MembershipServer, size: int) -> Iterator[Callable[[str], dict[str, float]]]:
    """Yield a function that gives the process of `size` simulated members an order, and returns its answer."""
    address = server.address
    command = [sys.executable, "-m", "scripts.bench.scale.decider", address.host, str(address.port), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout

        def ask(order: str) -> dict[str, float]:
            assert process.stdin
            assert process.stdout
            print(order, file=process.stdin, flush=True)
            answer: dict[str, float] = json.loads(process.stdout.readline())
            return answer

        print(address.key.hex(), file=process.stdin, flush=True)
        try:
            process.stdout.readline()  # all are connected
            yield ask
        finally:
            process.kill()


class SimulatedMember(NamedTuple):
    """A simulated member: its connection, the connection's non-blocking socket, and the reader of received data."""

    connection: DriverConnection
    socket: socket.socket
    reader: FrameReader

    def send(self, data: bytes) -> None:
        """Send bytes, unless the connection has just ended."""
        with suppress(OSError):
            self.socket.send(data)


class SimulatedMembers:
    """Members of one group, which one thread serves."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._members: deque[SimulatedMember] = deque()
        "Members in the order in which they send their heartbeats."
        self._owed = 0.0
        "Number of heartbeats that are due."
        self._owed_at = time.monotonic()
        self.bytes = 0
        "Number of bytes that all members have received."
        self.lost = 0
        "Number of members that were presumed lost."
        self._formed = 0
        "Number of members that were told the newest group."

    def connect(self, host: str, port: int, key: bytes, size: int) -> None:
        """Connect `size` members, 16 at a time, while those that are connected send heartbeats."""
        draw = random.Random(0)

        def connect(number: int) -> None:
            name = f"{draw.randbytes(16).hex()}-{draw.randbytes(8).hex()}-{number}"
            connection = open_connection(host, port, key, FORM_S)
            connection.send(Member(f"{name}-1", draw.randbytes(28).hex(), name, f"run-gpu-worker-{number:05}"))
            connection.receive()
            own = socket.socket(fileno=os.dup(connection.fileno()))
            own.setblocking(False)
            member = SimulatedMember(connection, own, FrameReader())
            self._selector.register(own, selectors.EVENT_READ, member)
            self._members.append(member)

        connecting = start_thread(lambda: map_parallel(connect, range(size)), "connect")
        while not connecting.done():
            self.serve()
        connecting.result()

    def serve(self) -> None:
        """Send the heartbeats that are due, and read what has arrived."""
        now = time.monotonic()
        self._owed += len(self._members) * (now - self._owed_at) / HEARTBEAT_EVERY_S
        self._owed_at = now
        for _ in range(min(int(self._owed), len(self._members))):
            self._members[0].send(HEARTBEAT)
            self._members.rotate(-1)
        self._owed %= 1
        for key, _ in self._selector.select(SELECT_S):
            member: SimulatedMember = key.data
            try:
                received = member.socket.recv(1 << 20)
            except OSError:
                received = b""
            if not received:
                self.lost += 1
                self._forget(member)
            self.bytes += len(received)
            for message in map(decode_once, member.reader.read(received)):
                if isinstance(message, Generation):
                    self._formed += 1
                elif isinstance(message, Close | Change):
                    member.send(encode(JoinRequest(7)))

    def _forget(self, member: SimulatedMember) -> None:
        self._selector.unregister(member.socket)
        self._members.remove(member)
        member.socket.close()
        member.connection.close()

    def form(self) -> dict[str, float]:
        """Let all members join a group, and return the seconds and bytes until all were told who is in it."""
        return self._await_group(lambda: [member.send(encode(JoinRequest(7))) for member in self._members])

    def lose(self) -> dict[str, float]:
        """End one member, and return the seconds and bytes until the others were told their next group."""
        return self._await_group(lambda: self._forget(self._members[0]))

    def _await_group(self, begin: Callable[[], object]) -> dict[str, float]:
        began = time.monotonic()
        before = self.bytes
        self._formed = 0
        begin()
        while self._formed < len(self._members) and time.monotonic() < began + FORM_S:
            self.serve()
        formed = self._formed == len(self._members)
        return {"seconds": time.monotonic() - began if formed else math.inf, "bytes": self.bytes - before}

    def count(self) -> dict[str, float]:
        """Return the bytes that all members have received, and the number of members that were presumed lost."""
        return {"bytes": self.bytes, "lost": self.lost}


@lru_cache(maxsize=4)
def decode_once(body: bytes) -> Any:
    """Return a decoded message. Real members would decode it at the same time, on their own machines."""
    return decode(body)


def simulate(host: str, port: str, size: str) -> None:
    """Simulate members, and obey the orders on standard input, which begins with the key."""
    members = SimulatedMembers()
    members.connect(host, int(port), bytes.fromhex(sys.stdin.readline()), int(size))
    orders: queue.Queue[str] = queue.Queue()
    start_thread(lambda: deque(map(orders.put, map(str.strip, sys.stdin))), "orders")
    print("connected", flush=True)
    acts = {"form": members.form, "lose": members.lose, "count": members.count}
    while True:
        members.serve()
        with suppress(queue.Empty):
            print(json.dumps(acts[orders.get_nowait()]()), flush=True)


if __name__ == "__main__":
    simulate(*sys.argv[1:])
