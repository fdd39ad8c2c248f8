"""The base class of two HTTP servers, for the live page of all runs and the proxy of a run's Ray dashboard.

A client can open connections and send nothing, so request headers must arrive in time, and idle connections are closed
to make room for new ones. Any web page can make a visitor's browser send requests here under the page's own host name
(DNS rebinding), so the servers check the Host header.
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
"""Seconds within which a client must send complete request headers. Browsers open connections early."""

MAX_HEAD = 64 << 10
"""Maximum size of the request headers, in bytes."""

MAX_WAITING = 128
"""Maximum number of connections without complete headers. A further connection closes the oldest one."""

MAX_CONNECTIONS = 512
"""Maximum number of connections, each with its own thread. Further connections are closed immediately."""

CHUNK = 64 << 10
"""Number of bytes to read from a socket at a time."""


class LocalServer(ThreadingTCPServer):
    """A server with one thread per connection. A connection's handler has to call `read_head` first."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self._waiting: dict[socket.socket, None] = {}
        "Connections that have not sent complete headers, oldest first."
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
                with contextlib.suppress(OSError):  # the client has disconnected
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
        """Return a request's headers and the bytes after them.

        Returns two empty values if the headers do not arrive within HEAD_WITHIN_S.
        """
        data = b""
        deadline = time.monotonic() + HEAD_WITHIN_S
        with contextlib.suppress(OSError):
            while b"\r\n\r\n" not in data and len(data) < MAX_HEAD:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
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
    """Return the name or address in a Host header, without its port, or an empty string if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Return True if a name or address refers to the local machine."""
    address = as_address(name)
    return name == "localhost" or bool(address and address.is_loopback)


def as_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return `name` as an IP address, or None if it is not an address."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
