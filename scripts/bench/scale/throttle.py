"""A TCP proxy that allows each connection so many bytes a second, each way, as servers of object storage do.

`python -m scripts.bench.scale.throttle UPSTREAM_PORT BYTES_A_SECOND` prints its port on 127.0.0.1, and runs until it is
killed.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import suppress

PIECE = 256 << 10
"""Bytes passed on at once."""

CREDIT_S = 0.02
"""What a connection that was silent, or late, may make up for."""


def main(upstream: int, rate: float) -> None:
    """Accept connections for ever."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", upstream))
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=_pass_on, args=(source, sink, rate), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket, rate: float) -> None:
    buffer, due = bytearray(PIECE), 0.0
    with suppress(OSError):
        while size := source.recv_into(buffer):
            sink.sendall(memoryview(buffer)[:size])
            due = max(due, time.monotonic() - CREDIT_S) + size / rate
            time.sleep(max(0.0, due - time.monotonic()))
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
