"""What the two HTTP servers have in common, the page over all runs and the way to a run's Ray dashboard.

Anybody who reaches such a server can open connections and send nothing, and any page that its user visits can have the
browser ask it under a name of that page's site (DNS rebinding). So the head of a request must arrive within a time,
connections that have sent none make room for new ones, and the name that was asked for is looked at.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

HEAD_WITHIN_S = 60.0
"""Browsers open connections in advance; one that has sent no whole head within this time is closed."""

MAX_HEAD = 64 << 10
"""Bytes of the largest head of a request."""

MAX_WAITING = 128
"""Connections that have sent no whole head yet. With one more, the one that has waited longest is closed."""

MAX_CONNECTIONS = 512
"""All connections, each with a thread. Further ones are closed at once."""

CHUNK = 64 << 10


class LocalServer(ThreadingTCPServer):
    """Serves HTTP, with a thread for each connection, which calls `read_head` first."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self._waiting: dict[socket.socket, None] = {}
        "Connections that have sent no whole head, the oldest first."
        self._lock = threading.Lock()
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with contextlib.suppress(OSError):  # it has gone
                    oldest.shutdown(socket.SHUT_RDWR)
            self._waiting[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def shutdown_request(self, request: Any) -> None:
        self._stop_waiting(request)
        super().shutdown_request(request)

    def read_head(self, connection: socket.socket) -> tuple[bytes, bytes]:
        """Return the head of a request and the bytes after it; both empty if there is none within HEAD_WITHIN_S."""
        data = b""
        deadline = time.monotonic() + HEAD_WITHIN_S
        with contextlib.suppress(OSError):
            while b"\r\n\r\n" not in data and len(data) < MAX_HEAD and (left := deadline - time.monotonic()) > 0:
                connection.settimeout(left)
                chunk = connection.recv(CHUNK)
                if not chunk:
                    break
                data += chunk
        self._stop_waiting(connection)
        head, end, rest = data.partition(b"\r\n\r\n")
        return (head + end, rest) if end else (b"", b"")

    def _stop_waiting(self, connection: Any) -> None:
        with self._lock:
            self._waiting.pop(connection, None)


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without its port; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Return whether a name or address stands for the machine that uses it."""
    address = as_address(name)
    return name == "localhost" or bool(address and address.is_loopback)


def as_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that `name` is; None if it is a name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
