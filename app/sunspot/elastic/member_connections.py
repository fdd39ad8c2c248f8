"""Authenticated connections between the driver and the members of a worker group.

A heartbeat is one byte. Any other message is pickled, and sent with a header that contains its length. One thread of
the driver serves all connections. The thread never blocks, so a process that is stopped (SIGSTOP) does not delay the
others: bytes that a socket does not accept at once are sent later.
"""

import contextlib
import hmac
import pickle
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import zlib
from collections import deque
from multiprocessing import AuthenticationError
from typing import Any, Protocol, Self

MACHINE_LIMIT_S = 1.0
"""Seconds for which a peer's kernel may leave a packet unacknowledged."""

HEARTBEAT_EVERY_S = 0.1

QUIET_S = 0.15
"""Seconds without a heartbeat after which the driver sends a byte, which the kernel of a live machine acknowledges."""

LOOK_EVERY_S = 0.05
"""Seconds between two checks for silent connections."""

AUTHENTICATE_S = 5.0
"""Seconds within which a process must prove that it knows the key, and then identify itself."""

EXTRA_UNAUTHENTICATED = 16
"""Number of unauthenticated connections allowed in addition to two per worker."""

PAUSE_S = 0.1
"""Pause in seconds after a connection could not be accepted, for example because too many files are open."""

SELECT_S = 0.02
"""Seconds that one call of `MemberConnections.serve` waits for messages."""

BACKLOG = 4096
"""Number of connections that the kernel keeps until they are accepted, because workers start together."""

CONNECTION_ERRORS = (EOFError, OSError, AuthenticationError)
"""Errors raised by reads and writes if the other process is gone, is silent, or does not know the key."""

HEARTBEAT, MESSAGE = b"\0", b"\1"
"""The only byte of a heartbeat, and the first byte of a message."""

HEADER = struct.Struct("!cI")
"""First byte of a message, and the number of bytes that follow this header."""

READ_BYTES = 1 << 12
"""Number of bytes to read at once. Reading many heartbeats is faster with a small buffer."""

NONCE_BYTES = PROOF_BYTES = 32

MOST_BYTES = 1 << 28
"""Size of the largest message from an authenticated process."""


def encode(message: object) -> bytes:
    """Encode a message as bytes to send, with a header in front."""
    return _frame(zlib.compress(pickle.dumps(message), 1))


def decode(body: bytes) -> Any:
    """Decode a message that `encode` has encoded. The sender must have been authenticated."""
    return pickle.loads(zlib.decompress(body))


def _frame(body: bytes) -> bytes:
    return HEADER.pack(MESSAGE, len(body)) + body


class FrameReader:
    """Finds the messages in the bytes that a connection receives."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        """Accept messages of at most `most` bytes."""
        self.most = most
        self._unread = bytearray()

    def read(self, received: bytes) -> list[bytes]:
        """Add received bytes, and return the messages that are now complete, still encoded. Heartbeats are dropped.

        Raises `ConnectionError` if a message is too large or invalid.
        """
        if not self._unread and not received.strip(HEARTBEAT):
            return []
        self._unread += received
        messages = []
        while self._unread:
            if self._unread.startswith(HEARTBEAT):
                del self._unread[:1]
                continue
            if len(self._unread) < HEADER.size:
                break
            kind, size = HEADER.unpack_from(self._unread)
            if kind != MESSAGE or size > self.most:
                raise ConnectionError(f"received a message that is invalid or too large ({size:,} bytes)")
            if len(self._unread) < HEADER.size + size:
                break
            messages.append(bytes(self._unread[HEADER.size : HEADER.size + size]))
            del self._unread[: HEADER.size + size]
        return messages


class MemberConnection:
    """The driver's end of one connection. Only the thread that serves the connections uses it."""

    def __init__(self, opened: socket.socket, selector: selectors.BaseSelector, now: float) -> None:
        """Serve a connection that was opened at `now`, as measured by `time.monotonic()`."""
        opened.setblocking(False)
        _end_if_unacknowledged(opened)
        self._socket = opened
        self._selector = selector
        self._unsent: deque[memoryview] = deque()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._reader = FrameReader(most=NONCE_BYTES + PROOF_BYTES)
        self.silence_limit_s = AUTHENTICATE_S
        "Seconds without a heartbeat after which the peer counts as lost."
        self.heard_at = now
        selector.register(opened, selectors.EVENT_READ, self)
        self.send(_frame(self._nonce))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send as many bytes as possible now, and the rest later.

        The bytes are not copied, so several connections can share them.
        """
        self._unsent.append(memoryview(data))
        self.flush()

    def receive(self, now: float) -> list[bytes]:
        """Return the messages that have arrived, still encoded. Raises `EOFError` or `OSError` if the peer is gone."""
        try:
            received = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not received:
            raise EOFError
        self.heard_at = now
        return self._reader.read(received)

    def authenticate(self, key: bytes, answer: bytes) -> None:
        """Check that the peer knows the key, and prove that this process does. Raises `AuthenticationError`."""
        nonces, proof = self._nonce + answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _prove(key, b"worker", nonces)):
            self.send(_frame(b""))  # instead of a proof
            raise AuthenticationError
        self._reader.most = MOST_BYTES
        self.send(_frame(_prove(key, b"driver", nonces)))

    def flush(self) -> None:
        """Send as many of the waiting bytes as the socket accepts."""
        try:
            while self._unsent:
                rest = self._unsent.popleft()
                sent = self._socket.send(rest)
                if sent < len(rest):
                    self._unsent.appendleft(rest[sent:])
        except BlockingIOError:
            self._unsent.appendleft(rest)
        except OSError:
            self._unsent.clear()  # the next read raises this error, too
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self._selector.get_key(self._socket).events != events:
            self._selector.modify(self._socket, events, self)

    def probe(self) -> None:
        """Send a byte that the peer's kernel must acknowledge, unless other bytes are already waiting to be sent."""
        if not self._unsent:
            self.send(HEARTBEAT)

    def close(self) -> None:
        """End the connection."""
        self._selector.unregister(self._socket)
        self._socket.close()


class ConnectionHandler(Protocol):
    """Callbacks of `MemberConnections`."""

    def receive(self, connection: MemberConnection, message: Any) -> None:
        """Handle a message from an authenticated process."""

    def declare_lost(self, connection: MemberConnection, error: BaseException | None) -> None:
        """Handle the end of an authenticated connection.

        `error` is the error that ended the connection, or None if the process was silent for too long.
        """


class MemberConnections:
    """Connections accepted at one address. Call `serve` repeatedly, from a single thread."""

    def __init__(self, host: str, key: bytes, size: int, handler: ConnectionHandler) -> None:
        """Listen on `host` for `size` workers that know the key."""
        self._key = key
        self._handler = handler
        self._most_unauthenticated = 2 * size + EXTRA_UNAUTHENTICATED
        self._unauthenticated: dict[MemberConnection, float] = {}
        "Unauthenticated connections, oldest first, with the deadline of each (`monotonic`)."
        self._authenticated: set[MemberConnection] = set()
        self._accept_at = 0.0
        "Time at which the next connection may be accepted."
        self._look_at = 0.0
        "Time of the next check for silent connections."
        self._listening = create_server(host)
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """Port on which connections are accepted."""
        port: int = self._listening.getsockname()[1]
        return port

    def serve(self) -> None:
        """Accept connections, receive and send messages, and close lost connections."""
        # This process may have been stopped. A peer is silent only if nothing from it had arrived at `began`.
        began = time.monotonic()
        for key, events in self._selector.select(SELECT_S):
            connection: MemberConnection | None = key.data
            if connection is None:
                self._accept()
            elif connection in self._authenticated or connection in self._unauthenticated:  # it has not just ended
                if events & selectors.EVENT_WRITE:
                    connection.flush()
                if events & selectors.EVENT_READ:
                    self._receive(connection)
        for connection in [each for each, until in self._unauthenticated.items() if until < began]:
            self._end_unauthenticated(connection)
        if began >= self._look_at:
            self._look_at = began + LOOK_EVERY_S
            self._end_silent(began)

    def close(self) -> None:
        """End all connections, and accept no more."""
        for connection in [*self._unauthenticated, *self._authenticated]:
            connection.close()
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        now = time.monotonic()
        while now >= self._accept_at:
            try:
                accepted, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:
                self._accept_at = now + PAUSE_S
                return
            self._unauthenticated[MemberConnection(accepted, self._selector, now)] = now + AUTHENTICATE_S
            if len(self._unauthenticated) > self._most_unauthenticated:
                self._end_unauthenticated(next(iter(self._unauthenticated)))

    def _receive(self, connection: MemberConnection) -> None:
        try:
            for message in connection.receive(time.monotonic()):
                if connection in self._authenticated:
                    self._handler.receive(connection, decode(message))
                else:
                    connection.authenticate(self._key, message)
                    del self._unauthenticated[connection]
                    self._authenticated.add(connection)
        except CONNECTION_ERRORS as error:
            if connection in self._authenticated:
                self._end(connection, error)
            else:
                self._end_unauthenticated(connection)

    def _end_silent(self, at: float) -> None:
        """End connections that have been silent for longer than their limit, and probe those silent for QUIET_S.

        `at` is the current time.
        """
        for connection in list(self._authenticated):
            silent_s = at - connection.heard_at
            if silent_s > connection.silence_limit_s:
                self._end(connection, None)
            elif silent_s > QUIET_S:
                connection.probe()

    def _end_unauthenticated(self, connection: MemberConnection) -> None:
        del self._unauthenticated[connection]
        connection.close()

    def _end(self, connection: MemberConnection, error: BaseException | None) -> None:
        self._authenticated.remove(connection)
        connection.close()
        self._handler.declare_lost(connection, error)


class DriverConnection:
    """A worker's end of its connection to the driver. Any thread may send, but only one thread receives."""

    def __init__(self, opened: socket.socket) -> None:
        """Use a socket that is connected to the driver."""
        self._socket = opened
        self._sending = threading.Lock()
        self._reader = FrameReader()
        self._received: deque[bytes] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def limit_wait(self, limit_s: float | None) -> None:
        """Limit each wait for the driver to `limit_s` seconds. None means no limit."""
        self._socket.settimeout(limit_s)

    def send(self, message: object) -> None:
        """Send a message. Raises `OSError` if the connection has ended."""
        self._send(encode(message))

    def beat(self) -> None:
        """Send a heartbeat. Raises `OSError` if the connection has ended."""
        self._send(HEARTBEAT)

    def receive(self) -> Any:
        """Wait for the next message and return it. Raises `EOFError` or `OSError` if the connection has ended."""
        return decode(self._receive())

    def authenticate(self, key: bytes) -> None:
        """Prove that this process knows the key, and check that the driver does. Raises one of CONNECTION_ERRORS."""
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = self._receive() + own
        self._send(_frame(own + _prove(key, b"worker", nonces)))
        if not hmac.compare_digest(self._receive(), _prove(key, b"driver", nonces)):
            raise AuthenticationError("the driver's key differs from this worker's key")

    def end(self) -> None:
        """End the connection, so that pending calls of `send` and `receive` fail.

        The receiving thread must then call `close`.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.end()
        with self._sending:  # otherwise another thread could write to another file with the same number
            self._socket.close()

    def _send(self, data: bytes) -> None:
        with self._sending:
            self._socket.sendall(data)

    def _receive(self) -> bytes:
        while not self._received:
            received = self._socket.recv(READ_BYTES)
            if not received:
                raise EOFError
            self._received += self._reader.read(received)
        return self._received.popleft()


def create_server(host: str) -> socket.socket:
    """Return a socket that listens only on `host`, on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)


def open_connection(host: str, port: int, key: bytes, limit_s: float) -> DriverConnection:
    """Return an authenticated connection to the driver.

    Each answer from the driver can take up to `limit_s`, until `limit_wait` sets another limit. Raises one of
    CONNECTION_ERRORS.
    """
    opened = socket.create_connection((host, port), limit_s)
    _end_if_unacknowledged(opened)
    connection = DriverConnection(opened)
    try:
        connection.authenticate(key)
    except BaseException:
        connection.close()
        raise
    return connection


def _prove(key: bytes, role: bytes, nonces: bytes) -> bytes:
    """Return a digest that proves that its sender knows the key.

    The `role` prevents a peer from sending back the proof that it has received.
    """
    return hmac.digest(key, role + nonces, "sha256")


def _end_if_unacknowledged(own: socket.socket) -> None:
    """Send packets without delay, and close the connection if a packet is not acknowledged for MACHINE_LIMIT_S.

    See TCP_USER_TIMEOUT in tcp(7).
    """
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * MACHINE_LIMIT_S))
