"""An HTTP port on this machine that leads to a port of a pod, adding headers to every request.

Each connection carries one request: its head is rewritten so that the server closes afterwards, then bytes pass
unchanged, so bodies, streams and WebSockets of any kind go through.

To the pod, each is a WebSocket through the API server. Every message begins with the number of a channel: 0 carries the
bytes, 1 an error; the first message of each only repeats the port. The end of the bytes cannot be signalled: closing
closes both directions. The Kubernetes client's own `PortForward` will not do: a reset connection kills its thread and
leaves the local socket open, so the request hangs, and its `portforward` replaces a method of the client shared by all.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Mapping
from socketserver import BaseRequestHandler
from typing import TYPE_CHECKING, Any

from sunspot.errors import SettingsError, SunspotError
from sunspot.local_http import CHUNK, LocalServer, host_name

if TYPE_CHECKING:
    from websocket import WebSocket

PROTOCOL = "v4.channel.k8s.io"

DATA, ERROR = 0, 1

STALL_S = 20.0
"""Longest silence in the middle of a message, and longest time for which the other side may accept nothing."""

HERE = "127.0.0.1"

NAMES = (HERE, "localhost")
"""What browsers call it, on this machine or through a tunnel to it."""

DECISIVE = ("host", "origin", "sec-fetch-site")
"""Headers that say whose request it is."""


class PodConnection:
    """Bytes to and from a port of a pod, for one thread. `select` takes it; check `pending` first."""

    def __init__(self, websocket: WebSocket) -> None:
        websocket.settimeout(STALL_S)
        self._websocket = websocket
        self._begun: set[int] = set()
        self.error = ""
        "What went wrong, by the cluster."

    def fileno(self) -> int:
        return int(self._websocket.fileno())

    def pending(self) -> bool:
        """Whether TLS has already read bytes from the socket, which `select` would not see."""
        waiting = getattr(self._websocket.sock, "pending", None)
        return bool(waiting and waiting())

    def receive(self) -> bytes | None:
        """Receive the bytes of the next message, maybe none; None at the end."""
        from websocket import ABNF, WebSocketException

        try:
            operation, frame = self._websocket.recv_data_frame(control_frame=True)
        except (WebSocketException, OSError):
            return None
        if operation == ABNF.OPCODE_CLOSE:
            return None
        if operation != ABNF.OPCODE_BINARY or not frame.data:
            return b""
        channel = frame.data[0]
        data = frame.data[1:]
        if channel not in self._begun:
            self._begun.add(channel)
            return b""
        if channel == ERROR:
            self.error += data.decode(errors="replace")
            return None
        return bytes(data) if channel == DATA else b""

    def send(self, data: bytes) -> None:
        """Send all of it; raises `OSError` when the connection is gone."""
        from websocket import WebSocketException

        try:
            self._websocket.send_binary(bytes((DATA,)) + data)
        except WebSocketException as error:
            raise ConnectionError(str(error)) from error

    def close(self) -> None:
        """Close it, whatever state it is in."""
        with contextlib.suppress(Exception):
            self._websocket.shutdown()


class LocalPort(LocalServer):
    """Listens on this machine only, and serves only its own pages: no other site can use the added headers.

    `dial` connects to the other side, or raises `SunspotError`. Raises `SettingsError` if the port is taken.
    """

    def __init__(self, port: int, dial: Callable[[], PodConnection], headers: Mapping[str, str]) -> None:
        self.dial, self.headers = dial, headers
        try:
            super().__init__((HERE, port), _Exchange)
        except (OSError, OverflowError) as error:
            raise SettingsError(f"--port {port}: cannot listen on {HERE}: {error}; choose another one") from error
        self.url = f"http://{HERE}:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignored: browsers close connections at will."""


class _Exchange(BaseRequestHandler):
    """One request and everything after it."""

    server: LocalPort
    request: socket.socket

    def handle(self) -> None:
        head, rest = self.server.read_head(self.request)
        self.request.settimeout(STALL_S)
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
            far.send(rewrite(head, self.server.headers) + rest)
            if not _relay(self.request, far) and far.error:
                self._answer("502 Bad Gateway", far.error)
        finally:
            far.close()

    def _answer(self, status: str, text: str) -> None:
        body = f"{text}\n".encode()
        fields = f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\nConnection: close"
        self.request.sendall(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body)


def find_problem(head: bytes) -> str:
    """Say why a request is refused; empty if it is not.

    The added headers are worth stealing, so neither another site's name for this machine (DNS rebinding) nor another
    site's page may use them.
    """
    names = [name for name, _ in _headers(head)]
    if twice := next((name for name in DECISIVE if names.count(name) > 1), ""):
        return f"{twice} is there twice"
    headers = dict(_headers(head))
    host = headers.get("host", "")
    origin = headers.get("origin")
    if host_name(host) not in NAMES:
        return f"this is for {' and '.join(NAMES)} alone, and was asked for as {host or 'nobody'}"
    if origin is not None and origin != f"http://{host}":
        return f"a page of {origin} has no business here"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):  # browsers send Origin with some requests
        return "another site led here; type the address into the browser instead"
    return ""


def rewrite(head: bytes, headers: Mapping[str, str]) -> bytes:
    """Put `headers` into the head of a request; the server closes afterwards unless it upgrades the protocol."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    replaced = {name.lower() for name in headers}
    added = [f"{name}: {value}".encode("latin-1") for name, value in headers.items()]
    if "upgrade" not in dict(_headers(head)):
        replaced |= {"connection", "keep-alive", "proxy-connection"}
        added.append(b"Connection: close")
    kept = [line for line in lines if line.partition(b":")[0].strip().lower().decode("latin-1") not in replaced]
    return b"\r\n".join([first, *kept, *added]) + b"\r\n\r\n"


def _headers(head: bytes) -> list[tuple[str, str]]:
    fields = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return [(name.strip().lower().decode("latin-1"), value.strip().decode("latin-1")) for name, _, value in fields]


def _relay(near: socket.socket, far: PodConnection) -> bool:
    """Pass bytes both ways until either side ends; returns whether the far side sent any."""
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
