"""Forwards a local HTTP port to a pod, and adds headers to every request.

Each local connection serves one request. The request's head is changed so that the server closes the connection
afterwards. All other bytes pass unchanged, so request bodies, streams and WebSockets work.

The connection to the pod is a WebSocket through the API server. Each message starts with a channel number: 0 for data
and 1 for an error. The first message of each channel contains only the port. Closing the WebSocket closes both
directions. The Kubernetes client's own `PortForward` is not used, because its requests hang after a connection is
reset, and because it patches a method of the client that all threads share.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Mapping
from socketserver import BaseRequestHandler
from typing import TYPE_CHECKING, Any

from sunspot.errors import SettingsError, SunspotError
from sunspot.machine.local_http import CHUNK, LocalServer, host_name

if TYPE_CHECKING:
    from websocket import WebSocket

PROTOCOL = "v4.channel.k8s.io"

DATA, ERROR = 0, 1

STALL_S = 20.0
"""Timeout in seconds for the rest of a message, or for the other side to accept more data."""

HERE = "127.0.0.1"

NAMES = (HERE, "localhost")
"""Host names under which browsers reach the port, directly or through a tunnel."""

DECISIVE = ("host", "origin", "sec-fetch-site")
"""Headers that identify the site that sent a request."""


class PodConnection:
    """A connection to a pod's port, for use by one thread.

    It can be passed to `select`, but only if `pending` returns False.
    """

    def __init__(self, websocket: WebSocket) -> None:
        websocket.settimeout(STALL_S)
        self._websocket = websocket
        self._begun: set[int] = set()
        self.error = ""
        "The error that the cluster reported, or empty without an error."

    def fileno(self) -> int:
        return int(self._websocket.fileno())

    def pending(self) -> bool:
        """Return True if TLS has buffered bytes, which `select` would not notice."""
        waiting = getattr(self._websocket.sock, "pending", None)
        return bool(waiting and waiting())

    def receive(self) -> bytes | None:
        """Return the next message's data, which can be empty, or None if the connection is closed."""
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
        """Send all the data. Raises `OSError` if the connection is lost."""
        from websocket import WebSocketException

        try:
            self._websocket.send_binary(bytes((DATA,)) + data)
        except WebSocketException as error:
            raise ConnectionError(str(error)) from error

    def close(self) -> None:
        """Close the connection. Errors are ignored."""
        with contextlib.suppress(Exception):
            self._websocket.shutdown()


class LocalPort(LocalServer):
    """A server on this machine that forwards requests to a pod and adds `headers` to them.

    It rejects requests from other websites' pages, so that such pages cannot use the headers. `dial` connects to the
    pod or raises `SunspotError`. Raises `SettingsError` if the port is in use.
    """

    def __init__(self, port: int, dial: Callable[[], PodConnection], headers: Mapping[str, str]) -> None:
        self.dial = dial
        self.headers = headers
        try:
            super().__init__((HERE, port), _Exchange)
        except (OSError, OverflowError) as error:
            raise SettingsError(f"cannot listen on port {port} of {HERE}: {error}; choose another --port") from error
        self.url = f"http://{HERE}:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error, because browsers close connections at any time."""


class _Exchange(BaseRequestHandler):
    """A handler for one local connection."""

    server: LocalPort
    request: socket.socket

    def handle(self) -> None:
        head, rest = self.server.read_head(self.request)
        self.request.settimeout(STALL_S)
        if not head:
            return
        problem = find_problem(head)
        if problem:
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
    """Return the reason why a request is rejected, or an empty string if it is allowed.

    The headers that `rewrite` adds contain a secret. A request is therefore rejected if another site's page sent it. It
    is also rejected if it uses a host name that is not in NAMES, because another site's name can resolve to this
    machine (DNS rebinding).
    """
    names = [name for name, _ in _headers(head)]
    twice = next((name for name in DECISIVE if names.count(name) > 1), "")
    if twice:
        return f"the header {twice} is repeated"
    headers = dict(_headers(head))
    host = headers.get("host", "")
    origin = headers.get("origin")
    if host_name(host) not in NAMES:
        return f"only requests to {' or '.join(NAMES)} are served, not to {host or 'an empty host'}"
    if origin is not None and origin != f"http://{host}":
        return f"pages of {origin} are not allowed to send requests here"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):  # browsers send Origin with some requests
        return "another site linked here; type the address into the browser instead"
    return ""


def rewrite(head: bytes, headers: Mapping[str, str]) -> bytes:
    """Return the request's head with `headers` added.

    Also asks the server to close the connection afterwards, unless the request upgrades the protocol.
    """
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
    """Pass data in both directions until either side closes. Return True if the far side sent any data."""
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
