"""Brings the members of a worker group and its decider together, by a connection from each of them to the driver.

A connection that ends is a loss, known at once. A node that goes closes none, but its kernel no longer answers, as one
does while it is busy; both sides send heartbeats, so MACHINE_LIMIT_S are enough. A process that stands still has a
kernel that answers: it is lost when no heartbeat has come for PROCESS_LIMIT_S. Who was taken for lost, and is not,
finds its connection closed, and comes back as a newcomer.
"""

import contextlib
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Self

import ray.util
import torch.distributed as dist

from sunspot.background import Background, start_thread
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.membership import Change, Generation, Member, Membership, Word
from sunspot.elastic.messages import Incident
from sunspot.formatting import plural
from sunspot.run.incidents import Cause

HEARTBEAT_EVERY_S = 0.1
BEAT = "beat"

MACHINE_LIMIT_S = 1.0
"""For which a member's kernel may leave a packet without an answer."""

PROCESS_LIMIT_S = 10.0
"""For which a member may send no heartbeat: one that is starved, or keeps Python's lock, sends none for seconds."""

DECIDE_EVERY_S = 0.02

STORE_TIMEOUT_S = 60

RECONNECT_S = 10.0
"""How long a member that lost its decider tries to come back; the driver is gone then, and ends it."""


@dataclass(frozen=True)
class MembershipAddress:
    """Where the decider is to be found."""

    host: str
    port: int
    store_port: int
    "Of the store in which the members of a generation meet."
    key: bytes
    "Proves that a process belongs to this training."


class MembershipServer:
    """Runs a `Membership` while the context lasts."""

    def __init__(self, size: int, control: ControlClient) -> None:
        """`size` processes are started; `control` is told why groups end."""
        self._control = control
        self.state = Membership(size)
        "Others may look at it, and change nothing."
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}
        host, key = ray.util.get_node_ip_address(), secrets.token_bytes(16)
        self._listener = Listener((host, 0), backlog=64)
        # Of the driver, as one of a member would be gone with it, and with it the way to the next generation.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STORE_TIMEOUT_S)
        )
        self.address = MembershipAddress(host, self._listener.address[1], self._store.port, key)
        self._deciding, self._beating = Background(DECIDE_EVERY_S, self._decide), 0.0
        self._closing = False

    def __enter__(self) -> Self:
        start_thread(self._accept, "members")
        self._deciding.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._deciding.__exit__(None, None, None)
        with contextlib.suppress(OSError):  # which its thread waits for
            socket.create_connection(self._listener.address, HEARTBEAT_EVERY_S).close()
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.close()

    def drain(self, nodes: Collection[str]) -> None:
        """Do without these nodes as soon as their members' step is done."""
        with self._lock:
            self.state.drain(nodes)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection = self._listener.accept()
            except OSError:  # who came is gone, or this is the end
                continue
            start_thread(partial(self._serve, connection), "member")

    def _serve(self, connection: Connection) -> None:
        expect_answers(connection)
        ends = (EOFError, OSError, AuthenticationError)  # the process has ended, or its machine, or it is a stranger
        with connection, contextlib.suppress(*ends):
            # Not by the listener: who says nothing would keep all others waiting.
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            member: Member = connection.recv()
            try:
                self._hear(connection, member)
            finally:
                with self._lock:
                    self._note_loss(member)
                    self.state.lose(member.uid, time.monotonic())
                    del self._connections[member.uid]
                self._deciding.run_now()

    def _hear(self, connection: Connection, member: Member) -> None:
        """Do what a member says, as long as it says something."""
        with self._lock:
            self._connections[member.uid] = connection
            self.state.enter(member)
            connection.send(self.state.trains)
        acts: dict[str, Callable[[], None]] = {
            "stand": lambda: self.state.stand(member.uid, time.monotonic()),
            "end": lambda: self.state.end(member.uid),
            BEAT: lambda: None,
        }
        while connection.poll(PROCESS_LIMIT_S):
            word = connection.recv()
            with self._lock:
                acts[word]()

    def _note_loss(self, member: Member) -> None:
        """Tell why the present group ends, unless its member has gone when it was to go."""
        place = self.state.generation.place_of(member.uid)
        if place is not None and not self.state.ended:
            detail = f"rank {place} on node {member.node[:12]}"
            self._control.tell(ControlChannel.add_loss, member.node, Incident(Cause.WORKER_LOST, detail, time.time()))

    def _decide(self) -> None:
        with self._lock:
            words = self.state.decide(time.monotonic())
            told: list[tuple[Connection, Word | str]] = [
                (self._connections[uid], word) for uid, word in words if uid in self._connections
            ]
            if time.monotonic() > self._beating + HEARTBEAT_EVERY_S:
                self._beating = time.monotonic()
                told += [(connection, BEAT) for connection in self._connections.values()]
            joining = any(isinstance(word, Change) for _, word in words) and self.state.newcomers
        if joining:
            detail = f"{plural(joining, 'worker')} more"
            self._control.tell(ControlChannel.add_incident_facts, Incident(Cause.JOINED, detail, time.time()))
        for connection, word in told:
            try:
                connection.send(word)
            except (OSError, TypeError):  # TypeError: another thread has closed it meanwhile
                continue  # its thread notices


def expect_answers(connection: Connection) -> None:
    """Have a connection end when the other kernel does not answer what is sent for MACHINE_LIMIT_S; see tcp(7)."""
    if sys.platform != "linux":
        return
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * MACHINE_LIMIT_S))
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class DeciderLostError(ConnectionError):
    """The decider cannot be reached: who was in a group tries on, and Ray ends it if the driver is gone."""


class MembershipClient:
    """This process's connection to the decider."""

    def __init__(self, address: MembershipAddress, identity: Member, on_close: Callable[[], None]) -> None:
        """`on_close` ends the collectives of this process; it is called in a thread of its own."""
        self._address, self._identity, self._on_close = address, identity, on_close
        self._formed: queue.Queue[Generation | None] = queue.Queue()
        self._sending = threading.Lock()
        self._connection: Connection | None = None
        self._uid = 0
        "How often it has connected."
        self._generation = 0
        "Number of the generation that it is in; 0: none."
        self._newest_closed = 0
        "Number of the newest generation that is known to be closed."
        self._closed = threading.Event()
        "Set while it is in none that is open."
        self._newest_change = 0
        "Number of the newest generation that is to change once a step is done."

    def connect(self) -> bool:
        """Enter the decider's list, as a newcomer; returns whether others train. Raises `DeciderLostError`."""
        until = time.monotonic() + RECONNECT_S
        address = self._address
        while True:
            try:
                connection = Client((address.host, address.port), authkey=address.key)
                expect_answers(connection)
                self._uid += 1
                connection.send(Member(self.uid, self._identity.node))
                others_train: bool = connection.recv()
                break
            except Exception as error:
                if time.monotonic() > until:
                    raise DeciderLostError(f"the driver at {address.host} cannot be reached: {error}") from error
                time.sleep(0.2)
        self._formed = queue.Queue()
        self._connection = connection
        start_thread(lambda: self._listen(connection), "membership")
        start_thread(lambda: self._beat(connection), "heartbeat")
        return others_train

    def stand(self) -> tuple[Generation, int] | None:
        """Leave the present generation, and return the next one and the rank in it, however long that takes.

        None: there is no next one. Raises `DeciderLostError`.
        """
        self._leave()
        while True:
            if self._connection is None:
                self.connect()
            if not self._send("stand"):
                continue
            while self._connection is not None:
                with contextlib.suppress(queue.Empty):
                    generation = self._formed.get(timeout=0.1)
                    if generation is None:
                        return None
                    self._generation = generation.number
                    self._closed.clear()
                    if self._newest_closed >= generation.number:
                        self._leave()
                        break  # and stand again
                    rank = generation.place_of(self.uid)
                    assert rank is not None
                    return generation, rank

    def _leave(self) -> None:
        self._generation = 0
        self._closed.set()

    @property
    def changing(self) -> bool:
        """Whether the group is to change once a step is done."""
        return self._newest_change == self._generation > 0

    @property
    def uid(self) -> str:
        """How the decider knows this process: by another name each time that it was taken for lost."""
        return f"{self._identity.uid}-{self._uid}"

    def closed(self, wait_s: float) -> bool:
        """Whether the generation has ended, or does so within some seconds."""
        return self._closed.wait(wait_s)

    def end(self) -> None:
        """Tell that the group ends as a whole: no other follows."""
        self._send("end")

    def close(self) -> None:
        """Leave for good."""
        if self._connection:
            self._connection.close()

    def _send(self, word: str) -> bool:
        connection = self._connection
        try:
            with self._sending:
                if connection:
                    connection.send(word)
                    return True
        except (OSError, TypeError):  # TypeError: another thread has closed it meanwhile
            self._drop(connection)
        return False

    def _beat(self, connection: Connection) -> None:
        while self._connection is connection:
            self._send(BEAT)
            time.sleep(HEARTBEAT_EVERY_S)

    def _listen(self, connection: Connection) -> None:
        formed = self._formed
        try:
            while True:
                word: Word | str = connection.recv()
                if isinstance(word, str):
                    continue  # BEAT
                if word is None or isinstance(word, Generation):
                    formed.put(word)
                elif isinstance(word, Change):
                    self._newest_change = word.number
                else:
                    self._newest_closed = word.number
                    if word.number == self._generation:
                        self._end_generation()
        except (EOFError, OSError, TypeError):
            self._drop(connection)

    def _drop(self, connection: Connection | None) -> None:
        """Note that the decider has closed the connection: it takes this process for lost."""
        if connection and self._connection is connection:
            self._connection = None
            connection.close()
            self._end_generation()

    def _end_generation(self) -> None:
        self._closed.set()
        self._on_close()
