"""Brings the members of a worker group and its decider together, by a connection from each of them to the driver.

A connection that ends is a loss, known at once. A node that goes closes none, but its kernel no longer answers, as one
does while it is busy; both sides send heartbeats, so MACHINE_LIMIT_S are enough. A process that stands still has a
kernel that answers: it is lost when no heartbeat has come for PROCESS_LIMIT_S, or for longer while it builds what it
trains with. A process that was taken for lost, and is not, finds its connection closed. It reconnects at once, under
another uid. If the others have not formed a group by then, they wait until it stands; else it joins them later.
"""

import contextlib
import errno
import logging
import math
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Self

import ray.util
import torch.distributed as dist

from sunspot.background import Background, start_thread
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.member_connections import (
    CONNECTION_ERRORS,
    MemberListener,
    create_server,
    expect_answers,
    open_connection,
)
from sunspot.elastic.membership import Change, Generation, Member, Membership, MembershipSnapshot, Message
from sunspot.elastic.messages import Incident
from sunspot.formatting import plural
from sunspot.parallel.process_group import LOOPBACK
from sunspot.ray_internals.nodes import is_own_session
from sunspot.run.incidents import Cause

log = logging.getLogger(__name__)

HEARTBEAT_EVERY_S = 0.1
HEARTBEAT, END = "beat", "end"

ASK_LIVING = "living"
"""First message on a connection that asks which processes live."""

MACHINE_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of a connection to a machine that does not answer. A process that ends closes its connection instead."""

PROCESS_LIMIT_S = 10.0
"""For which a member may send no heartbeat: one that is starved, or keeps Python's lock, sends none for seconds."""

DECIDE_EVERY_S = 0.02

STORE_TIMEOUT_S = 60

RECONNECT_S = 60.0
"""Seconds for which a process tries to reach the driver. If the driver is gone, Ray ends the process sooner."""

ANSWER_S = 10.0
"""Seconds that the driver may take for each answer while a connection is opened. The kernel of a stopped driver accepts
connections, but the driver never answers."""

RETRY_S = 0.2
"""Pause in seconds between two tries to reach the driver."""


@dataclass(frozen=True)
class MembershipAddress:
    """Where the decider is to be found."""

    host: str
    port: int
    store_port: int
    "Of the store in which the members of a generation meet."
    key: bytes = field(repr=False)
    "Proves that a process belongs to this training."


@dataclass(frozen=True)
class HeartbeatLimit:
    """Tells the decider how many seconds without a heartbeat to allow the sender."""

    limit_s: float


@dataclass(frozen=True)
class JoinRequest:
    """Tells the decider that the sender asks to be in the next generation."""

    step: int | None
    "Step of the sender's state; None if it has no usable state."


class MembershipServer:
    """Runs a `Membership` while the context lasts."""

    def __init__(self, size: int, control: ControlClient) -> None:
        """`size` processes are started; `control` is told why groups end."""
        self._control = control
        self._membership = Membership(size)
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}
        host = LOOPBACK if is_own_session() else ray.util.get_node_ip_address()
        key = secrets.token_bytes(16)
        self._listener = MemberListener(host, key, size, self._serve)
        # The store is in the driver, because a store in a member would be lost with it. By itself torch (2.15) listens
        # on all interfaces. It accepts no store that is written in Python (`Store.clone`), so the store cannot ask for
        # the key.
        listening = create_server(host)
        store_port: int = listening.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            store_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            master_listen_fd=listening.detach(),
        )
        self.address = MembershipAddress(host, self._listener.port, store_port, key)
        self._deciding = Background(DECIDE_EVERY_S, self._decide)
        self._last_heartbeat = 0.0
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_connections)
            stack.enter_context(self._deciding)
            stack.enter_context(self._listener)
            self._running = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _close_connections(self) -> None:
        for connection in list(self._connections.values()):
            connection.close()

    def snapshot(self) -> MembershipSnapshot:
        """Return the current state of the membership."""
        with self._lock:
            return self._membership.snapshot()

    def drain(self, nodes: Collection[str]) -> None:
        """Do without these nodes as soon as their members' step is done."""
        with self._lock:
            self._membership.drain(nodes)

    def _serve(self, connection: Connection) -> None:
        first: Member | str = connection.recv()
        if isinstance(first, str):  # ASK_LIVING
            with self._lock:
                living = list(self._connections)
            connection.send(living)
            return
        try:
            self._hear(connection, first)
        finally:
            with self._lock:
                self._note_loss(first, sys.exception())
                self._membership.lose(first.uid, time.monotonic())
                del self._connections[first.uid]
            self._deciding.run_now()

    def _hear(self, connection: Connection, member: Member) -> None:
        """Do what a member says, as long as it says something."""
        with self._lock:
            self._connections[member.uid] = connection
            self._membership.enter(member)
            connection.send(self._membership.trains)
        limit_s = PROCESS_LIMIT_S
        while connection.poll(None if limit_s == math.inf else limit_s):
            word: HeartbeatLimit | JoinRequest | str = connection.recv()
            if isinstance(word, HeartbeatLimit):
                limit_s = word.limit_s
            elif isinstance(word, JoinRequest):
                with self._lock:
                    self._membership.request_to_join(member.uid, time.monotonic(), word.step)
            elif word == END:
                with self._lock:
                    self._membership.end(member.uid)

    def _note_loss(self, member: Member, error: BaseException | None) -> None:
        """Report why the present group ends, unless the member left when it was meant to.

        `error` is what ended the connection; None if the member was silent for too long.
        """
        place = self._membership.generation.ranks.get(member.uid)
        if place is None or self._membership.ended:
            return
        cause, detail = Cause.WORKER_LOST, f"rank {place} on {member.place}"
        if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
            cause, detail = Cause.NODE_LOST, f"{member.place} (rank {place})"
        self._control.send(ControlChannel.add_loss, member.node, Incident(cause, detail, time.time()))

    def _decide(self) -> None:
        with self._lock:
            words = self._membership.decide(time.monotonic())
            told: list[tuple[Connection, Message | str]] = [
                (self._connections[uid], word) for uid, word in words if uid in self._connections
            ]
            if time.monotonic() > self._last_heartbeat + HEARTBEAT_EVERY_S:
                self._last_heartbeat = time.monotonic()
                told += [(connection, HEARTBEAT) for connection in self._connections.values()]
            changing = any(isinstance(word, Change) for _, word in words)
            incident = self._incident_of_change() if changing else None
        if incident:
            self._control.send(ControlChannel.add_incident_facts, incident)
        for connection, word in told:
            try:
                connection.send(word)
            except (OSError, TypeError):  # TypeError: another thread has closed it meanwhile
                continue  # its thread notices
        if any(isinstance(word, Generation) for _, word in words):
            self._forget_meetings()

    def _incident_of_change(self) -> Incident:
        """Return why the members are told to change their group: some leave it with their nodes, or others join."""
        leaving = sorted({member.place for member in self._membership.leavers})
        if leaving:
            return Incident(Cause.PREEMPTED, ", ".join(leaving), time.time())
        return Incident(Cause.JOINED, f"{plural(self._membership.newcomers, 'worker')} more", time.time())

    def _forget_meetings(self) -> None:
        """Delete the addresses that the members of earlier generations left in the store."""
        newest = f"{self._membership.generation.number}/"
        for key in self._store.list_keys() if hasattr(self._store, "list_keys") else ():  # new in torch 2.15
            if not key.startswith(newest):
                self._store.delete_key(key)


def ask_living(address: MembershipAddress) -> list[str]:
    """Return the uids of the processes that are alive, as far as the decider knows. Raises one of CONNECTION_ERRORS."""
    with open_connection(address.host, address.port, address.key, ANSWER_S) as connection:
        connection.send(ASK_LIVING)
        living: list[str] = connection.recv()
    return living


class DriverUnreachableError(ConnectionError):
    """The decider could not be reached for RECONNECT_S."""


@dataclass(frozen=True, eq=False)
class Link:
    """A connection to the decider, and the generations that it has announced."""

    connection: Connection
    uid: str
    "The decider's name for this process while the connection lasts."
    formed: queue.Queue[Generation | None] = field(default_factory=queue.Queue)


class MembershipClient:
    """This process's connection to the decider."""

    def __init__(self, address: MembershipAddress, identity: Member, on_close: Callable[[], None]) -> None:
        """`on_close` ends the collectives of this process; it is called in a thread of its own."""
        self._address, self._identity, self._on_close = address, identity, on_close
        self._connecting, self._sending = threading.Lock(), threading.Lock()
        self._link: Link | None = None
        self._left = False
        "True once this process has left for good."
        self.connections = 0
        "Number of connections so far: one, and one more each time that this process was taken for lost."
        self._others_train = False
        self._heartbeat_limit_s = PROCESS_LIMIT_S
        self._generation = 0
        "Number of the generation that it is in; 0: none."
        self._newest_closed = 0
        "Number of the newest generation that is known to be closed."
        self._closed = threading.Event()
        "Set while it is in none that is open."
        self._newest_change = 0
        "Number of the newest generation that is to change once a step is done."

    def connect(self) -> bool:
        """Enter the decider's list as a newcomer, if this process is not in it, and return True if others train.

        Raises `DriverUnreachableError`.
        """
        with self._connecting:
            if self._link is None:
                self._open_link()
            return self._others_train

    def _open_link(self) -> None:
        until = time.monotonic() + RECONNECT_S
        address = self._address
        while True:
            connection: Connection | None = None
            uid = f"{self._identity.uid}-{self.connections + 1}"
            try:
                connection = open_connection(address.host, address.port, address.key, ANSWER_S)
                connection.send(replace(self._identity, uid=uid, process=self._identity.uid))
                self._others_train = connection.recv()
                expect_answers(connection)
                connection.send(HeartbeatLimit(self._heartbeat_limit_s))
                break
            except CONNECTION_ERRORS as error:
                if connection:
                    connection.close()
                if time.monotonic() > until or self._left:
                    raise DriverUnreachableError(
                        f"the driver at {address.host}:{address.port} could not be reached for {RECONNECT_S:.0f} s "
                        f"({error or type(error).__name__}); check that it runs, and that this node may connect to it"
                    ) from error
                time.sleep(RETRY_S)
        self.connections += 1
        link = self._link = Link(connection, uid)
        if self._left:  # meanwhile: the others would wait for it
            connection.close()
        start_thread(lambda: self._stay_connected(link), "membership")
        start_thread(lambda: self._beat(link), "heartbeat")

    def join_next(self, step: int | None) -> tuple[Generation, int] | None:
        """Leave the present generation, and return the next one and the rank in it, however long that takes.

        `step` is the step of this process's state, or None if it has no usable state. Returns None if there is no next
        generation. Raises `DriverUnreachableError`.
        """
        self._leave()
        while True:
            self.connect()
            link = self._link
            if not link or not self._send(JoinRequest(step), link):
                continue
            while self._link is link:
                with contextlib.suppress(queue.Empty):
                    generation = link.formed.get(timeout=0.1)
                    if generation is None:
                        return None
                    self._generation = generation.number
                    self._closed.clear()
                    if self._newest_closed >= generation.number or self._link is not link:
                        self._leave()
                        break  # and stand again
                    return generation, generation.ranks[link.uid]

    def _leave(self) -> None:
        self._generation = 0
        self._closed.set()

    @property
    def changing(self) -> bool:
        """Whether the group is to change once a step is done."""
        return self._newest_change == self._generation > 0

    def closed(self, wait_s: float) -> bool:
        """Whether the generation has ended, or does so within some seconds."""
        return self._closed.wait(wait_s) if wait_s else self._closed.is_set()

    @contextlib.contextmanager
    def heartbeat_limit(self, limit_s: float) -> Iterator[None]:
        """Make the decider wait up to `limit_s` (0: without a limit) for a heartbeat while this context lasts.

        Use it around code that may hold the GIL for long.
        """
        before = self._heartbeat_limit_s
        self._set_heartbeat_limit(max(before, limit_s or math.inf))
        try:
            yield
        finally:
            self._set_heartbeat_limit(before)

    def _set_heartbeat_limit(self, limit_s: float) -> None:
        self._heartbeat_limit_s = limit_s
        self._send(HeartbeatLimit(limit_s))

    def end(self) -> None:
        """Tell that the group ends as a whole: no other follows."""
        self._send(END)

    def close(self) -> None:
        """Leave for good."""
        self._left = True
        if self._link:
            self._link.connection.close()

    def _send(self, word: HeartbeatLimit | JoinRequest | str, link: Link | None = None) -> bool:
        link = link or self._link
        if not link:
            return False
        try:
            with self._sending:
                link.connection.send(word)
                return True
        except (OSError, TypeError):  # TypeError: another thread has closed it meanwhile
            self._drop(link)
        return False

    def _beat(self, link: Link) -> None:
        while self._link is link:
            self._send(HEARTBEAT, link)
            time.sleep(HEARTBEAT_EVERY_S)

    def _stay_connected(self, link: Link) -> None:
        """Listen until the connection ends, and open the next one at once, so that this process counts as living."""
        self._listen(link)
        if not self._left:
            with contextlib.suppress(DriverUnreachableError):  # `join_next` tries again, and raises the error
                self.connect()

    def _listen(self, link: Link) -> None:
        try:
            while True:
                word: Message | str = link.connection.recv()
                if isinstance(word, str):
                    continue  # HEARTBEAT
                if word is None or isinstance(word, Generation):
                    link.formed.put(word)
                elif isinstance(word, Change):
                    self._newest_change = word.number
                else:
                    self._newest_closed = word.number
                    if word.number == self._generation:
                        self._end_generation()
        except (EOFError, OSError, TypeError):
            self._drop(link)

    def _drop(self, link: Link) -> None:
        """Note that the decider has closed the connection: it takes this process for lost."""
        if self._link is link:
            self._link = None
            link.connection.close()
            self._end_generation()

    def _end_generation(self) -> None:
        self._closed.set()
        try:
            self._on_close()
        except Exception:  # the thread that listens must go on
            log.exception("the collectives of a group that has ended could not be ended")
