"""An HTTP port of this machine that leads to one elsewhere, with headers added to every request on its way.

Each connection carries one request: its head is read and rewritten so that the server closes afterwards, and from
there on bytes pass as they are. So bodies, streams and WebSockets of any kind go through, and none is understood here.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Mapping
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, Protocol
from urllib.parse import urlsplit

from app.errors import SettingsError, SunspotError

HERE = "127.0.0.1"

NAMES = (HERE, "localhost")
"""What a browser on this machine calls it, or on another one with a tunnel to it."""

CHUNK = 64 << 10

LONGEST_HEAD = 64 << 10

HEAD_WITHIN_S = 60.0
"""A connection that a browser opened in advance is closed when it is not used within this."""


class Connection(Protocol):
    """The far side of one connection."""

    error: str

    def fileno(self) -> int: ...

    def pending(self) -> bool: ...

    def receive(self) -> bytes | None: ...

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class LocalPort(ThreadingTCPServer):
    """Listens on this machine alone, and only for its own pages: a page of another site cannot use the headers.

    `dial` makes a connection to the other side, or raises `SunspotError`. Raises `SettingsError` for a taken port.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, port: int, dial: Callable[[], Connection], headers: Mapping[str, str]) -> None:
        self.dial, self.headers = dial, headers
        try:
            super().__init__((HERE, port), _Exchange)
        except (OSError, OverflowError) as error:
            raise SettingsError(f"--port {port}: cannot listen on {HERE}: {error}; choose another one") from error
        self.url = f"http://{HERE}:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Browsers close connections as they please."""


class _Exchange(BaseRequestHandler):
    """One request and all that follows it."""

    server: LocalPort
    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(HEAD_WITHIN_S)
        head, rest = _read_head(self.request)
        if not head:
            return
        if problem := find_problem(head):
            self._answer("403 Forbidden", problem)
            return
        try:
            far = self.server.dial()
        except SunspotError as error:
            self._answer("502 Bad Gateway", str(error))
            return
        try:
            self.request.settimeout(None)
            far.send(rewrite(head, self.server.headers) + rest)
            if not _relay(self.request, far) and far.error:
                self._answer("502 Bad Gateway", far.error)
        finally:
            far.close()

    def _answer(self, status: str, text: str) -> None:
        body = f"{text}\n".encode()
        about = f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\nConnection: close"
        self.request.sendall(f"HTTP/1.1 {status}\r\n{about}\r\n\r\n".encode() + body)


def find_problem(head: bytes) -> str:
    """Why a request is not passed on; empty when it may be.

    What is added to it is worth stealing: so not for a name that another site made to mean this machine, nor from
    another site's page.
    """
    headers = dict(_headers(head))
    host, origin = headers.get("host", ""), headers.get("origin")
    if urlsplit(f"//{host}").hostname not in NAMES:
        return f"this is for {' and '.join(NAMES)} alone, and was asked for as {host or 'nobody'}"
    if origin is not None and origin != f"http://{host}":
        return f"a page of {origin} has no business here"
    return ""


def rewrite(head: bytes, headers: Mapping[str, str]) -> bytes:
    """The head of a request with `headers` in the place of its own, and the connection closed afterwards, if it is not
    to become one of another protocol."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    replaced = {name.lower() for name in headers}
    upgraded = "upgrade" in dict(_headers(head))
    if not upgraded:
        replaced |= {"connection", "keep-alive", "proxy-connection"}
    kept = [line for line in lines if line.partition(b":")[0].strip().lower().decode("latin-1") not in replaced]
    added = [f"{name}: {value}".encode("latin-1") for name, value in headers.items()]
    if not upgraded:
        added.append(b"Connection: close")
    return b"\r\n".join([first, *kept, *added]) + b"\r\n\r\n"


def _headers(head: bytes) -> list[tuple[str, str]]:
    fields = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return [(name.strip().lower().decode("latin-1"), value.strip().decode("latin-1")) for name, _, value in fields]


def _read_head(near: socket.socket) -> tuple[bytes, bytes]:
    """The head of a request, and what came behind it; both empty when there is none."""
    data = b""
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in data and len(data) < LONGEST_HEAD:
            chunk = near.recv(CHUNK)
            if not chunk:
                break
            data += chunk
    head, end, rest = data.partition(b"\r\n\r\n")
    return (head + end, rest) if end else (b"", b"")


def _relay(near: socket.socket, far: Connection) -> bool:
    """Pass bytes both ways until either side ends; whether the far side has sent any."""
    both: list[Any] = [near, far]
    answered = False
    while True:
        readable = [far] if far.pending() else select.select(both, [], [])[0]
        if far in readable:
            data = far.receive()
            if data is None:
                return answered
            if data:
                near.sendall(data)
                answered = True
        if near in readable:
            data = near.recv(CHUNK)
            if not data:
                return True
            far.send(data)
