"""Authenticated connections between a worker group's members and the driver, with limits on their number and time."""

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Self

from sunspot.background import start_thread

MACHINE_LIMIT_S = 1.0
"""Seconds for which a peer's kernel may leave a packet unacknowledged."""

AUTHENTICATE_S = 5.0
"""Seconds within which a process must prove that it belongs to this training."""

EXTRA_UNAUTHENTICATED = 16
"""Number of unauthenticated connections allowed in addition to two per worker."""

LOOK_EVERY_S = 0.5
"""Seconds between two checks for connections that take too long to authenticate."""

PAUSE_S = 0.1
"""Pause in seconds after a connection could not be accepted, for example because too many files are open."""

CONNECTION_ERRORS = (EOFError, OSError, AuthenticationError)
"""Errors raised by reads and writes if the other process is gone, is silent, or does not know the key."""


class MemberListener:
    """Context manager that listens on one address and serves each process that knows the key in a separate thread."""

    def __init__(self, host: str, key: bytes, size: int, serve: Callable[[Connection], None]) -> None:
        """Create a listener for `size` workers. `serve` returns or raises one of CONNECTION_ERRORS to end a
        connection."""
        self._key = key
        self._serve = serve
        self._most = 2 * size + EXTRA_UNAUTHENTICATED
        self._socket = create_server(host)
        self._socket.settimeout(LOOK_EVERY_S)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._unauthenticated: dict[socket.socket, float] = {}
        "Unauthenticated connections, oldest first, with the deadline of each (`monotonic`)."
        self._closing = False

    def __enter__(self) -> Self:
        start_thread(self._accept, "members")
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which closes the socket

    def _accept(self) -> None:
        with self._socket:
            while not self._closing:
                self._end_overdue()
                try:
                    accepted, _ = self._socket.accept()
                except TimeoutError:
                    continue
                except OSError:
                    time.sleep(PAUSE_S)
                    continue
                accepted.settimeout(None)
                self._end_overdue(most=self._most - 1)
                with self._lock:
                    self._unauthenticated[accepted] = time.monotonic() + AUTHENTICATE_S
                try:
                    start_thread(partial(self._admit, accepted), "member")
                except RuntimeError:  # no more threads can be started
                    self._forget(accepted)
                    time.sleep(PAUSE_S)

    def _end_overdue(self, most: int = sys.maxsize) -> None:
        """End the unauthenticated connections whose deadline has passed, and the oldest ones beyond `most`."""
        with self._lock:
            excess = len(self._unauthenticated) - most
            for number, (pending, until) in enumerate(list(self._unauthenticated.items())):
                if number < excess or time.monotonic() > until:
                    del self._unauthenticated[pending]
                    with contextlib.suppress(OSError):
                        pending.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it

    def _forget(self, accepted: socket.socket) -> None:
        with self._lock:
            self._unauthenticated.pop(accepted, None)
        accepted.close()

    def _admit(self, accepted: socket.socket) -> None:
        """Serve a connection once it has authenticated itself."""
        try:
            connection = Connection(os.dup(accepted.fileno()))
        except OSError:
            self._forget(accepted)
            return
        with connection:
            try:
                expect_answers(connection)
                deliver_challenge(connection, self._key)  # type: ignore[arg-type]
                answer_challenge(connection, self._key)  # type: ignore[arg-type]
                authenticated = True
            except CONNECTION_ERRORS:
                authenticated = False
            self._forget(accepted)
            if authenticated:
                with contextlib.suppress(*CONNECTION_ERRORS):
                    self._serve(connection)


def create_server(host: str) -> socket.socket:
    """Return a socket that listens only on `host`, on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=128)


def open_connection(host: str, port: int, key: bytes, limit_s: float) -> Connection:
    """Return an authenticated connection to the driver.

    Each answer from the driver can take up to `limit_s` until `expect_answers` is called. Raises one of
    CONNECTION_ERRORS.
    """
    with socket.create_connection((host, port), limit_s) as opened:
        opened.settimeout(None)
        _limit_reads(opened, limit_s)
        connection = Connection(os.dup(opened.fileno()))
    try:
        answer_challenge(connection, key)  # type: ignore[arg-type]
        deliver_challenge(connection, key)  # type: ignore[arg-type]
    except BaseException:
        connection.close()
        raise
    return connection


def expect_answers(connection: Connection) -> None:
    """Let reads wait without a limit, but end the connection if the peer's kernel is silent for MACHINE_LIMIT_S.

    See TCP_USER_TIMEOUT in tcp(7).
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _limit_reads(own, 0)
        if sys.platform == "linux":
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * MACHINE_LIMIT_S))


def _limit_reads(own: socket.socket, limit_s: float) -> None:
    """Make each read of a socket fail after `limit_s` seconds, or never if it is 0. See SO_RCVTIMEO in socket(7)."""
    seconds = int(limit_s)
    own.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, int(1_000_000 * (limit_s - seconds)))
    )
