"""A TCP proxy that allows each connection so many bytes a second, each way, as servers of object storage do.

`python -m scripts.bench.scale.throttle UPSTREAM_PORT BYTES_A_SECOND` prints its port on 127.0.0.1, and runs until it is
killed. Linux paces what it sends and moves the bytes from socket to socket, so it takes little of the cores that it
shares with what is measured.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import threading
from contextlib import suppress

PIECE = 1 << 20
"""Bytes moved at once: as many as a user's pipe may hold."""

SO_MAX_PACING_RATE = 47
"""Linux's option of a socket, in bytes a second; Python has no name for it."""


def main(upstream: int, rate: int) -> None:
    """Accept connections for ever."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", upstream))
            for source, sink in ((client, server), (server, client)):
                sink.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, PIECE)
    with suppress(OSError):
        while size := os.splice(source.fileno(), into, PIECE):
            while size:
                size -= os.splice(out, sink.fileno(), size)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
    os.close(out)
    os.close(into)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(float(sys.argv[2])))
