"""One connection to a port of a pod: a WebSocket through the API server, in Kubernetes' own framing.

Every message begins with the number of a channel: 0 carries the bytes, 1 what went wrong; the first message of each
only repeats the port. The end of the bytes cannot be told to the other side: closing closes both directions.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from websocket import WebSocket

PROTOCOL = "v4.channel.k8s.io"

DATA, ERROR = 0, 1

STALL_S = 20.0
"""Longest silence in the middle of a message, and longest time that the other side may take nothing."""


class PodConnection:
    """Bytes to and from the pod. To be used by one thread; `select` takes it, after a look at `pending`."""

    def __init__(self, websocket: WebSocket) -> None:
        websocket.settimeout(STALL_S)
        self._websocket = websocket
        self._begun: set[int] = set()
        self.error = ""
        "What the cluster says went wrong."

    def fileno(self) -> int:
        return int(self._websocket.fileno())

    def pending(self) -> bool:
        """Whether bytes wait that TLS has taken from the socket already, so that `select` would not see them."""
        waiting = getattr(self._websocket.sock, "pending", None)
        return bool(waiting and waiting())

    def receive(self) -> bytes | None:
        """What the next message carries, which may be nothing; None at the end."""
        from websocket import ABNF, WebSocketException

        try:
            operation, frame = self._websocket.recv_data_frame(control_frame=True)
        except (WebSocketException, OSError):
            return None
        if operation == ABNF.OPCODE_CLOSE:
            return None
        if operation != ABNF.OPCODE_BINARY or not frame.data:
            return b""
        channel, data = frame.data[0], frame.data[1:]
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
        """End it, whatever state it is in."""
        with contextlib.suppress(Exception):
            self._websocket.shutdown()
