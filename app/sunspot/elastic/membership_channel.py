"""Connects the members of a worker group with the membership server in the driver, over one connection for each member.

Members send heartbeats, ask for the next group, and report that no other group should follow. The server announces the
members of each group, and tells them when the group changes or ends. All other reports and commands go through the
control channel (control.py).

`MembershipServer.declare_lost` is the only function that declares a process lost. If a process exits, its connection
ends, so the loss is known at once. A lost node does not close its connections, but its kernel no longer answers. The
server sends a byte to a member that has sent no heartbeat for a while. Even a busy kernel acknowledges such bytes, so
a limit of MACHINE_LIMIT_S is enough. Members notice a lost driver in the same way. If a process is stopped (SIGSTOP),
its kernel still answers. The process therefore counts as lost only after PROCESS_LIMIT_S without a heartbeat, or even
later if it is doing something that can take any time, such as building its model (`Watchdog.paused`).

A process that was wrongly presumed lost finds its connection closed, and reconnects at once under another uid. If the
other members have not formed a group by then, they wait for the process to join. Otherwise, it joins them later.
"""

import contextlib
import errno
import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Self

import ray.util
import torch.distributed as dist

from sunspot.background import Background, start_thread
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.member_connections import (
    CONNECTION_ERRORS,
    HEARTBEAT_EVERY_S,
    DriverConnection,
    MemberConnection,
    MemberConnections,
    create_server,
    encode,
    open_connection,
)
from sunspot.elastic.membership import (
    Change,
    Generation,
    Member,
    Membership,
    MembershipSnapshot,
    Message,
    PassBarriers,
)
from sunspot.elastic.messages import Incident, StepTimes, WorkerGroup
from sunspot.elastic.sick_nodes import SickNode, SickNodes
from sunspot.formatting import plural
from sunspot.parallel.process_group import LOOPBACK
from sunspot.parallel.step_barrier import StepBarrier
from sunspot.ray_internals.nodes import is_own_session
from sunspot.run.incidents import Cause

log = logging.getLogger(__name__)

END = "end"
"""Message that tells the membership server that the whole group is ending."""

ASK_LIVING = "living"
"""First message on a connection that requests the list of live processes."""

MACHINE_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Connection errors raised if a machine does not answer. A process that ends closes its connection instead."""

PROCESS_LIMIT_S = 10.0
"""Seconds without a heartbeat after which a member counts as lost. A starved process, or one that holds the GIL, can be
silent for seconds."""

DECIDE_EVERY_S = 0.01
"""Pause in seconds of the server's thread, so that one pass receives the heartbeats of many members."""

FILES_PER_MEMBER = 3
"""Number of files that the driver has open for each member: its connections to the membership server, to the store, and
to Ray."""

RECONNECT_S = 60.0
"""Seconds for which a process tries to reach the driver. If the driver is gone, Ray ends the process sooner."""

ANSWER_S = 10.0
"""Seconds that the driver may take for each answer while a connection is opened. The kernel of a stopped driver accepts
connections, but the driver never answers."""

RETRY_S = 0.2
"""Pause in seconds between two attempts to reach the driver."""


@dataclass(frozen=True)
class MembershipAddress:
    """Address of the membership server."""

    host: str
    port: int
    store_port: int
    "Port of the store in which the members of a generation meet."
    key: bytes = field(repr=False)
    "Secret that proves that a process is a worker of this driver."


@dataclass(frozen=True)
class HeartbeatLimit:
    """Message that tells the membership server how many seconds the sender can go without a heartbeat."""

    limit_s: float


@dataclass(frozen=True)
class JoinRequest:
    """Message that asks the membership server to include the sender in the next generation."""

    step: int | None
    "Step of the sender's state, or None if it has no usable state."


@dataclass(frozen=True)
class BarrierReport:
    """Message that tells the membership server how many barriers the sender has passed in a closed generation."""

    number: int
    "Number of the generation."
    passed: int


class MembershipServer:
    """Context manager that runs the `Membership` in the driver.

    `MemberConnections` calls `receive` for each message, and `declare_lost` for each connection that has ended.
    """

    def __init__(self, size: int, control: ControlClient, degree: int = 1, sick_nodes: SickNodes | None = None) -> None:
        """Create a server for `size` processes, with `degree` processes in each replica of the model.

        The server reports through `control` why groups end. `sick_nodes` finds nodes that the run should stop using.
        """
        self._control = control
        self._membership = Membership(size, degree)
        self._lock = threading.Lock()
        self._sick_nodes = sick_nodes or SickNodes()
        self._left: dict[str, str] = {}
        "The sick nodes that were excluded, and the reasons."
        self._limited_because = ""
        "The reason for the limit on the number of members."
        self._connected: dict[MemberConnection, Member] = {}
        "Live processes, by their connections."
        self._connections: dict[str, MemberConnection] = {}
        "Connections of the live processes, by uid."
        host = LOOPBACK if is_own_session() else ray.util.get_node_ip_address()
        key = secrets.token_bytes(16)
        self._accepted = MemberConnections(host, key, size, self)
        # The store is in the driver, because a store in a member would be lost with that member. By default, torch
        # (2.15) listens on all interfaces. It accepts no store written in Python (`Store.clone`), so the store cannot
        # ask for the key.
        listening = create_server(host)
        store_port: int = listening.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            store_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=1),
            master_listen_fd=listening.detach(),
        )
        self.address = MembershipAddress(host, self._accepted.port, store_port, key)
        self._serving = Background(DECIDE_EVERY_S, self._accepted.serve, self._decide)

    def __enter__(self) -> Self:
        self._serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)
        self._accepted.close()

    def snapshot(self) -> MembershipSnapshot:
        """Return the current state of the membership."""
        with self._lock:
            return self._membership.snapshot()

    def drain(self, nodes: Collection[str]) -> None:
        """Exclude the members on these nodes from the group as soon as the current step is complete."""
        with self._lock:
            self._membership.drain(nodes)

    def leave_sick_node(self, windows: list[StepTimes], group: WorkerGroup, kept: str, least: int) -> SickNode | None:
        """Look for a sick node of the group, and exclude its members as soon as the current step is complete.

        The node `kept` is never excluded, and at least `least` members must remain. Returns the sick node, or None.
        """
        with self._lock:
            sick = self._sick_nodes.find(
                windows,
                group,
                lambda node: 0 if node == kept else self._membership.size_without(node),
                least,
                time.monotonic(),
            )
            if sick:
                self._left[sick.node] = sick.why
                self._membership.drain([sick.node])
        return sick

    def limit(self, most: int, why: str) -> None:
        """Limit the number of members. If there are more, some leave between two steps.

        `why` is the reason for the limit, as shown to users.
        """
        with self._lock:
            self._limited_because = why
            self._membership.limit(most)

    def receive(self, connection: MemberConnection, message: Any) -> None:
        """Handle a message from a process."""
        with self._lock:
            if message == ASK_LIVING:
                connection.send(encode(list(self._connections)))
            elif isinstance(message, Member):
                connection.silence_limit_s = PROCESS_LIMIT_S
                self._connected[connection], self._connections[message.uid] = message, connection
                self._membership.enter(message)
                connection.send(encode((self._membership.trains, self._membership.shard_of(message))))
            elif isinstance(message, HeartbeatLimit):
                connection.silence_limit_s = message.limit_s
            elif isinstance(message, JoinRequest):
                uid = self._connected[connection].uid
                self._membership.request_to_join(uid, time.monotonic(), message.step)
            elif isinstance(message, BarrierReport):
                self._membership.report_barriers(self._connected[connection].uid, message.number, message.passed)
            elif message == END:
                self._membership.end(self._connected[connection].uid)

    def declare_lost(self, connection: MemberConnection, error: BaseException | None) -> None:
        """Declare the process at the other end of a connection lost, even if it is still alive.

        The connection has ended with `error`: EOFError or a reset if the process has exited, one of MACHINE_ERRORS if
        its machine did not answer for MACHINE_LIMIT_S, or None if no heartbeat came for PROCESS_LIMIT_S.
        """
        with self._lock:
            member = self._connected.pop(connection, None)
            if member:
                del self._connections[member.uid]
                self._note_loss(member, error)
                self._membership.lose(member.uid, time.monotonic())

    def _note_loss(self, member: Member, error: BaseException | None) -> None:
        """Report the loss of a process, unless the process is not a member or the whole group has already ended.

        `error` is the error that ended the connection, or None if the member was silent for too long.
        """
        rank = self._membership.generation.ranks.get(member.uid)
        if rank is None or self._membership.ended:
            return
        cause, detail = Cause.WORKER_LOST, f"rank {rank} on {member.display_name}"
        if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
            cause, detail = Cause.NODE_LOST, f"{member.display_name} (rank {rank})"
        others_train = any(uid in self._connections for uid in self._membership.generation.ranks)
        incident = Incident(cause, detail, time.time())
        self._control.send(ControlChannel.add_loss, member.node, incident, others_train=others_train)

    def _decide(self) -> None:
        """Send the messages that end a group, announce a change after the current step, or form the next group."""
        with self._lock:
            messages = self._membership.decide(time.monotonic())
            changing = any(isinstance(message, Change) for _, message in messages)
            incident = self._incident_of_change() if changing else None
            number = self._membership.generation.number
        if incident:
            self._control.send(ControlChannel.add_incident_facts, incident)
        self._send(messages)
        if any(isinstance(message, Generation) for _, message in messages):
            start_thread(lambda: self._forget_meetings(number), "meetings")

    def _send(self, messages: list[tuple[str, Message]]) -> None:
        """Send each message to the member with the given uid. A message to all members is encoded once."""
        encoded: dict[int, bytes] = {}
        for uid, message in messages:
            if uid in self._connections:
                if id(message) not in encoded:
                    encoded[id(message)] = encode(message)
                self._connections[uid].send(encoded[id(message)])

    def _incident_of_change(self) -> Incident:
        """Return why the group changes: either some members leave it, or new members join it."""
        leavers = self._membership.leavers
        if leavers:
            preempted = [member for member in leavers if self._membership.drains(member)]
            names = ", ".join(sorted({member.display_name for member in preempted or leavers}))
            sick = [self._left[member.node] for member in preempted if member.node in self._left]
            if sick and len(sick) == len(preempted):
                return Incident(Cause.SICK_NODE, f"{names}: {sick[0]}", time.time())
            if preempted:
                return Incident(Cause.PREEMPTED, names, time.time())
            left = f"{plural(len(leavers), 'worker')} on {names}, {self._limited_because}"
            return Incident(Cause.SCALE_DOWN, left, time.time())
        return Incident(Cause.JOINED, f"{plural(self._membership.newcomers, 'worker')} more", time.time())

    def _forget_meetings(self, newest: int) -> None:
        """Delete the addresses that members of generations before `newest` have put into the store."""
        for key in self._store.list_keys() if hasattr(self._store, "list_keys") else ():  # new in torch 2.15
            generation = key.partition("/")[0]
            if not generation.isdecimal() or int(generation) < newest:
                self._store.delete_key(key)


def ask_living(address: MembershipAddress) -> list[str]:
    """Return the uids of the processes that the membership server considers alive. Raises one of CONNECTION_ERRORS."""
    with open_connection(address.host, address.port, address.key, ANSWER_S) as connection:
        connection.send(ASK_LIVING)
        living: list[str] = connection.receive()
    return living


class RegroupError(Exception):
    """Raised when a worker must leave its group, so that its process can join the next group."""


class DriverUnreachableError(ConnectionError):
    """Raised if the membership server could not be reached for RECONNECT_S."""


@dataclass(frozen=True, eq=False)
class Link:
    """One connection to the membership server, and the generations announced on it."""

    connection: DriverConnection
    uid: str
    "The server's name for this process while the connection lasts."
    formed: queue.Queue[Generation | None] = field(default_factory=queue.Queue)


class MembershipClient:
    """Keeps this process connected to the membership server."""

    def __init__(
        self,
        address: MembershipAddress,
        identity: Member,
        abort_collectives: Callable[[], None],
        step_barrier: StepBarrier | None = None,
    ) -> None:
        """Create a client. Its own thread calls `abort_collectives` when the group of this process has ended.

        `step_barrier` is the process's barrier under hsdp.
        """
        self._address = address
        self._identity = identity
        self._abort_collectives = abort_collectives
        self._step_barrier = step_barrier
        self._connecting = threading.Lock()
        self._link: Link | None = None
        self._left = False
        "True once this process has left permanently."
        self.connections = 0
        "Number of connections so far, which is one plus the number of times that this process was presumed lost."
        self._others_train = False
        self.shard = 0
        "Shard that this process should prepare under hsdp."
        self._heartbeat_limit_s = PROCESS_LIMIT_S
        self._generation = 0
        "Number of the generation that this process is in, or 0."
        self._newest_closed = 0
        "Number of the newest generation that is known to be closed."
        self._closed = threading.Event()
        """Set while this process is in no open generation. Unset until the first call of `join_next`, so that an error
        before it ends the process (`Survivor.outlives`)."""
        self._newest_change = 0
        "Number of the newest generation that was told to change after a step."

    def connect(self) -> bool:
        """Register this process as a newcomer, unless it is already connected.

        Returns True if other processes are training. Raises `DriverUnreachableError`.
        """
        with self._connecting:
            if self._link is None:
                self._open_link()
            return self._others_train

    def _open_link(self) -> None:
        until = time.monotonic() + RECONNECT_S
        address = self._address
        while True:
            connection: DriverConnection | None = None
            uid = f"{self._identity.uid}-{self.connections + 1}"
            try:
                connection = open_connection(address.host, address.port, address.key, ANSWER_S)
                connection.send(replace(self._identity, uid=uid, process=self._identity.uid))
                self._others_train, self.shard = connection.receive()
                connection.limit_wait(None)
                connection.send(HeartbeatLimit(self._heartbeat_limit_s))
                break
            except CONNECTION_ERRORS as error:
                if connection:
                    connection.close()
                if time.monotonic() > until or self._left:
                    raise DriverUnreachableError(
                        f"the driver at {address.host}:{address.port} could not be reached for {RECONNECT_S:.0f} s "
                        f"({error or type(error).__name__}); check that it is running, and that this node can reach it"
                    ) from error
                time.sleep(RETRY_S)
        self.connections += 1
        link = self._link = Link(connection, uid)
        if self._left:  # this process has left in the meantime, and the others would wait for it
            connection.end()
        start_thread(lambda: self._stay_connected(link), "membership")
        start_thread(lambda: self._beat(link), "heartbeat")

    def join_next(self, step: int | None, left_out: Callable[[], None] = lambda: None) -> tuple[Generation, int] | None:
        """Leave the current generation, and return the next one that includes this process, with the process's rank.

        `step` is the step of this process's state, or None if it has no usable state. `left_out` is called when the
        other processes form a group without this one, because the number of members is limited. Returns None if no next
        generation will form. Raises `DriverUnreachableError`.
        """
        self._leave_generation()
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
                    if link.uid not in generation.ranks:
                        left_out()
                        continue
                    self._generation = generation.number
                    self._closed.clear()
                    if self._step_barrier:
                        self._step_barrier.open(generation.number)
                    # The listening thread may have seen the end of this generation before `_generation` was set.
                    if self._newest_closed >= generation.number or self._link is not link:
                        self._leave_generation()
                        break  # ask to join again
                    return generation, generation.ranks[link.uid]

    def _leave_generation(self) -> None:
        self._generation = 0
        self._closed.set()

    @property
    def changing(self) -> bool:
        """True if the group will change after the current step."""
        return self._newest_change == self._generation > 0

    def closed(self, wait_s: float) -> bool:
        """Return True if the generation has ended, or ends within `wait_s` seconds."""
        return self._closed.wait(wait_s) if wait_s else self._closed.is_set()

    @contextlib.contextmanager
    def heartbeat_limit(self, limit_s: float) -> Iterator[None]:
        """Context manager that lets this process go without a heartbeat for `limit_s` seconds.

        Use it around code that can hold the GIL for long. A `limit_s` of 0 means no limit.
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
        """Report that the whole group is ending, so that no other group follows."""
        self._send(END)

    def close(self) -> None:
        """Leave the group permanently."""
        self._left = True
        if self._link:
            self._link.connection.end()

    def _send(self, message: BarrierReport | HeartbeatLimit | JoinRequest | str, link: Link | None = None) -> bool:
        link = link or self._link
        return link is not None and self._try(link, lambda: link.connection.send(message))

    def _beat(self, link: Link) -> None:
        while self._link is link:
            self._try(link, link.connection.beat)
            time.sleep(HEARTBEAT_EVERY_S)

    def _try(self, link: Link, send: Callable[[], None]) -> bool:
        """Call `send`, and return True if it succeeds. Otherwise, drop the link."""
        try:
            send()
        except OSError:
            self._drop(link)
            return False
        return True

    def _stay_connected(self, link: Link) -> None:
        """Listen until the connection ends, and reconnect at once, so that this process counts as alive."""
        self._listen(link)
        if not self._left:
            with contextlib.suppress(DriverUnreachableError):  # `join_next` tries again and raises it
                self.connect()

    def _listen(self, link: Link) -> None:
        try:
            while True:
                message: Message = link.connection.receive()
                if message is None or isinstance(message, Generation):
                    link.formed.put(message)
                elif isinstance(message, Change):
                    self._newest_change = message.number
                elif isinstance(message, PassBarriers):
                    if self._step_barrier:
                        self._step_barrier.answer(message.number, message.barriers)
                else:
                    self._newest_closed = message.number
                    if self._step_barrier:
                        self._send(BarrierReport(message.number, self._step_barrier.close(message.number)), link)
                    if message.number == self._generation:
                        self._end_generation()
        except (EOFError, OSError):
            self._drop(link)
        finally:
            link.connection.close()

    def _drop(self, link: Link) -> None:
        """Drop a broken link, and end the generation.

        Unless the driver itself is gone, the server presumes this process lost, or soon will.
        """
        if self._link is link:
            self._link = None
            link.connection.end()
            if self._step_barrier:
                self._step_barrier.disconnect(self._generation)
            self._end_generation()

    def _end_generation(self) -> None:
        self._closed.set()
        try:
            self._abort_collectives()
        except Exception:  # the listening thread must continue
            log.exception("could not abort the collectives of a group that has ended")
