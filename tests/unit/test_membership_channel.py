"""Tests that a process counts as lost at once if it has ended, and after a while if it is silent."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from ctypes import addressof, create_string_buffer
from datetime import timedelta
from itertools import cycle
from multiprocessing import AuthenticationError
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sunspot.background import start_thread
from sunspot.elastic import member_connections, membership_channel
from sunspot.elastic.member_connections import (
    HEARTBEAT,
    DriverConnection,
    FrameReader,
    MemberConnection,
    MemberConnections,
    decode,
    encode,
    open_connection,
)
from sunspot.elastic.membership import Change, Close, Generation, Member
from sunspot.elastic.membership_channel import (
    DriverUnreachableError,
    HeartbeatLimit,
    JoinRequest,
    Link,
    MembershipAddress,
    MembershipClient,
    MembershipServer,
    ask_living,
)
from sunspot.elastic.messages import Incident, StepTimes
from sunspot.run.incidents import Cause
from tests.harness.constants import SetConstants
from tests.harness.control import LocalControl, worker_group
from tests.harness.waiting import wait_until

BPF_RET, SO_ATTACH_FILTER = 0x06, 26
"""Numbers of Linux for a socket filter. Python has no constants for them."""


@pytest.fixture
def server(set_constants: SetConstants) -> Iterator[MembershipServer]:
    set_constants(membership_channel, PROCESS_LIMIT_S=1.0)
    with open_server(2) as server:
        yield server


@contextmanager
def open_server(size: int) -> Iterator[MembershipServer]:
    """Yield a server that expects `size` processes on this machine."""
    with patch("ray.util.get_node_ip_address", lambda: "127.0.0.1"), MembershipServer(size, Mock()) as server:
        yield server


def enter(server: MembershipServer, uid: str, node: str = "node", step: int | None = None) -> DriverConnection:
    """Connect a process with a state at `step` that asks to be in the next generation."""
    address = server.address
    connection = open_connection(address.host, address.port, address.key, 5.0)
    connection.send(Member(uid, node))
    connection.receive()
    connection.send(JoinRequest(step))
    return connection


def beat(connection: DriverConnection, until: threading.Event) -> None:
    while not until.wait(0.1):
        connection.beat()


def reported(server: MembershipServer) -> list[Incident]:
    """Return the incidents that a server has reported."""
    assert isinstance(server._control, Mock)
    return [call.args[-1] for call in server._control.send.call_args_list]


@contextmanager
def serve_one(handler: Mock) -> Iterator[tuple[MemberConnections, MemberConnection, DriverConnection]]:
    """Yield the connections of a driver that has one member, and both ends of its connection."""
    connections = MemberConnections("127.0.0.1", b"key", 1, handler)
    with closing(connections):
        opening = start_thread(lambda: open_connection("127.0.0.1", connections.port, b"key", 5.0), "member")
        while not opening.done():
            connections.serve()
        [accepted] = connections._authenticated
        with opening.result() as member:
            yield connections, accepted, member


def serve_once(connections: MemberConnections) -> bool:
    """Let a driver serve its connections once, and return True."""
    connections.serve()
    return True


def readable(own: socket.socket) -> bool:
    """Return True if a socket can be read without waiting."""
    return bool(select.select([own], [], [], 0)[0])


@contextmanager
def bare(connection: DriverConnection | MemberConnection) -> Iterator[socket.socket]:
    """Yield the socket of a connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        yield own


def cut(connection: DriverConnection | MemberConnection) -> None:
    """Make the kernel drop all packets that arrive on a connection, as if this machine were gone."""
    drop_all = create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
    with bare(connection) as own:
        own.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, addressof(drop_all)))


def test_a_silent_connection_does_not_delay_other_processes(server: MembershipServer) -> None:
    address = server.address
    with socket.create_connection((address.host, address.port)):
        client = MembershipClient(address, Member("one", "node"), lambda: None)
        client.connect()
        assert client._link
        with bare(client._link.connection) as own:
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000, "a cut network is noticed soon"
        client.close()


def test_a_process_without_the_key_is_rejected(server: MembershipServer) -> None:
    with pytest.raises(AuthenticationError):
        open_connection(server.address.host, server.address.port, b"another", 5.0)
    assert not server._connections


def test_a_process_tells_the_server_which_state_it_has(server: MembershipServer) -> None:
    """Otherwise, the server would prefer a staying newcomer to the only member that has the state."""
    leaving, staying = enter(server, "leaving", node="old", step=7), enter(server, "staying")
    for connection in (leaving, staying):
        assert isinstance(connection.receive(), Generation)
    server.drain({"old"})
    assert isinstance(leaving.receive(), Change)
    for connection, step in ((leaving, 8), (staying, None)):
        connection.send(JoinRequest(step))
    with leaving, staying:
        formed = server.snapshot().generation
        wait_until(lambda: server.snapshot().generation is not formed, seconds=5)
        assert [member.uid for member in server.snapshot().generation.members] == ["leaving", "staying"]


def test_closing_the_server_stops_its_threads() -> None:
    before = set(threading.enumerate())
    with open_server(2):
        pass
    wait_until(lambda: set(threading.enumerate()) <= before, seconds=5)


def test_a_change_announced_right_after_a_group_forms_is_not_missed() -> None:
    """The training thread can be slower than the listening thread."""
    client = MembershipClient(MembershipAddress("nowhere", 0, 0, b""), Member("one", "node"), lambda: None)
    ours, theirs = socket.socketpair()
    link = client._link = Link(DriverConnection(ours), "one-1")
    for word in (Generation(1, (Member("one-1", "node"),)), Change(1)):
        theirs.sendall(encode(word))
    threading.Thread(target=client._listen, args=(link,), daemon=True).start()
    wait_until(lambda: client._newest_change, seconds=5)
    assert not client.changing
    assert client.join_next(None) is not None
    assert client.changing
    client._generation = 2
    assert not client.changing, "the change belonged to the previous generation"


@given(
    st.lists(st.one_of(st.just(HEARTBEAT), st.binary(max_size=300).map(encode)), max_size=20),
    st.lists(st.integers(1, 200), min_size=1, max_size=50),
)
def test_messages_are_read_correctly_however_their_bytes_are_split(sent: list[bytes], sizes: list[int]) -> None:
    reader = FrameReader()
    stream = b"".join(sent)
    received: list[bytes] = []
    for size in cycle(sizes):
        if not stream:
            break
        received += reader.read(stream[:size])
        stream = stream[size:]
    assert [encode(decode(message)) for message in received] == [data for data in sent if data != HEARTBEAT]


def test_a_suspended_member_that_reads_nothing_does_not_delay_other_members(server: MembershipServer) -> None:
    with enter(server, "stopped") as stopped:
        stopped.send(HeartbeatLimit(60.0))
        server._connections["stopped"].send(bytes(100_000_000))
        with enter(server, "other") as other:
            assert isinstance(other.receive(), Generation)
            assert "other" in ask_living(server.address)


def test_the_server_sends_heartbeats_only_to_quiet_members() -> None:
    with serve_one(Mock()) as (connections, _, member), bare(member) as received:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            member.beat()
            connections.serve()
        with pytest.raises(BlockingIOError):
            received.recv(1, socket.MSG_DONTWAIT)
        wait_until(lambda: serve_once(connections) and readable(received), seconds=5)
        assert received.recv(1) == HEARTBEAT


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is an option of Linux")
def test_a_dead_machine_is_reported_as_lost_after_about_a_second(server: MembershipServer) -> None:
    with enter(server, "dead") as dead, enter(server, "other") as other:
        dead.send(HeartbeatLimit(60.0))
        other.send(HeartbeatLimit(60.0))
        wait_until(lambda: server.snapshot().trains, seconds=5)
        cut(dead)
        began = time.monotonic()
        wait_until(lambda: ask_living(server.address) == ["other"], seconds=5)
        assert 0.9 < time.monotonic() - began < 2.5
    assert [incident.cause for incident in reported(server)] == [Cause.NODE_LOST]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is an option of Linux")
def test_a_member_notices_after_about_a_second_that_the_machine_of_the_driver_died(server: MembershipServer) -> None:
    ended = threading.Event()
    client = MembershipClient(server.address, Member("one", "node"), ended.set)
    client.connect()
    began = time.monotonic()
    cut(server._connections["one-1"])
    assert ended.wait(5)
    assert 0.9 < time.monotonic() - began < 2.5
    client.close()


def test_a_driver_that_was_suspended_does_not_declare_its_members_lost() -> None:
    """Their heartbeats have arrived in the meantime, but have not been read."""
    handler = Mock()
    with serve_one(handler) as (connections, accepted, member):
        accepted.silence_limit_s = 0.5
        for _ in range(10):
            time.sleep(0.1)
            member.beat()
        connections.serve()
        assert not handler.declare_lost.called
        wait_until(lambda: serve_once(connections) and handler.declare_lost.called, seconds=5)
        assert handler.declare_lost.call_args.args == (accepted, None)


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "silent"])
def test_the_other_members_are_told_about_a_lost_process(server: MembershipServer, ends: bool) -> None:
    first, second = enter(server, "first"), enter(server, "second")
    done = threading.Event()
    beating = threading.Thread(target=beat, args=(first, done))
    beating.start()
    try:
        assert [type(one.receive()) for one in (first, second)] == [Generation, Generation]
        if ends:
            second.close()
        assert isinstance(first.receive(), Close)
        assert server.snapshot().trains
    finally:
        done.set()
        beating.join()
        first.close()
        second.close()


def test_a_process_presumed_lost_reconnects_before_its_step_completes() -> None:
    """A process alone in its group can spend a long time in a step, and the driver aborts if no process is left.

    The process reconnects even if its collectives could not be aborted.
    """
    ends = Mock(side_effect=RuntimeError("NCCL cannot be aborted"))
    with open_server(1) as server:
        client = MembershipClient(server.address, Member("one", "node"), ends)
        client.connect()
        formed = client.join_next(None)
        assert formed
        assert formed[0].number == 1
        for connection in list(server._connections.values()):
            with bare(connection) as own:
                own.shutdown(socket.SHUT_RDWR)
        assert client.closed(5.0)
        wait_until(lambda: ask_living(server.address) == ["one-2"], seconds=5)
        assert not server.snapshot().has_no_members
        formed = client.join_next(None)
        assert formed
        assert formed[0].number == 2
        assert not client.closed(0.0)
        client.close()


def test_a_process_that_leaves_while_connecting_does_not_count_as_alive(
    server: MembershipServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, its group would wait for its request to join."""
    client = MembershipClient(server.address, Member("one", "node"), lambda: None)

    def open_and_leave(*given: Any) -> DriverConnection:
        client.close()
        return member_connections.open_connection(*given)

    with monkeypatch.context() as patched:
        patched.setattr(membership_channel, "open_connection", open_and_leave)
        client.connect()
    assert client.connections == 1
    wait_until(lambda: ask_living(server.address) == [], seconds=0.9)


def test_a_process_can_be_silent_for_longer_while_it_builds_its_model(server: MembershipServer) -> None:
    builder, other = enter(server, "builder"), enter(server, "other")
    builder.send(HeartbeatLimit(60.0))
    wait_until(lambda: server.snapshot().generation.number == 1, seconds=5)
    with builder, other:
        wait_until(lambda: ask_living(server.address) == ["builder"], seconds=5)
        builder.send(HeartbeatLimit(0.1))
        wait_until(lambda: ask_living(server.address) == [], seconds=5)


def test_a_member_does_not_wait_forever_for_an_unresponsive_driver(set_constants: SetConstants) -> None:
    """The driver's kernel accepts the connection, but the driver never answers."""
    set_constants(membership_channel, RECONNECT_S=0.3, ANSWER_S=0.2)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = MembershipAddress("127.0.0.1", stopped.getsockname()[1], 0, b"")
        client = MembershipClient(address, Member("one", "node"), lambda: None)
        began = time.monotonic()
        with pytest.raises(DriverUnreachableError, match=r"127\.0\.0\.1.*check that it is running"):
            client.connect()
        assert time.monotonic() - began < 10


def test_unauthenticated_connections_are_limited_in_number_and_time(
    server: MembershipServer, set_constants: SetConstants
) -> None:
    set_constants(member_connections, AUTHENTICATE_S=0.5)
    address = (server.address.host, server.address.port)
    strangers = [socket.create_connection(address) for _ in range(30)]
    with enter(server, "one"):
        assert ask_living(server.address) == ["one"], "unauthenticated connections do not block members"
        assert len(server._accepted._unauthenticated) <= 2 * 2 + 16
        wait_until(lambda: not server._accepted._unauthenticated, seconds=5)
    for stranger in strangers:
        stranger.settimeout(5)
        with suppress(ConnectionError):
            assert len(stranger.recv(1024)) < 1024
            assert stranger.recv(1024) == b"", "the server has closed the connection"
        stranger.close()


def test_the_server_pauses_after_failing_to_accept_a_connection() -> None:
    """Each attempt to accept fails at once if the process can open no more files."""
    tried = list[float]()

    def accept() -> None:
        tried.append(time.monotonic())
        raise OSError("Too many open files")

    connections = MemberConnections("127.0.0.1", b"key", 2, Mock())
    with closing(connections), socket.create_connection(("127.0.0.1", connections.port)):
        until = time.monotonic() + 0.5
        with patch.object(connections, "_listening", Mock(wraps=connections._listening, accept=accept)):
            while time.monotonic() < until:
                connections.serve()
    assert 1 <= len(tried) <= 10


def test_the_store_and_the_listener_are_bound_only_to_the_address_of_the_server(server: MembershipServer) -> None:
    address = server.address
    for port in (address.port, address.store_port):
        socket.create_connection((address.host, port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)


def test_the_repr_of_an_address_hides_the_key(server: MembershipServer) -> None:
    assert repr(server.address.key) not in repr(server.address)


def test_the_store_keeps_only_the_addresses_of_the_newest_generation(server: MembershipServer) -> None:
    first, second = enter(server, "first"), enter(server, "second")
    store = dist.TCPStore(server.address.host, server.address.store_port, timeout=timedelta(seconds=5))  # type: ignore[attr-defined]
    done = threading.Event()
    beating = threading.Thread(target=beat, args=(first, done))
    beating.start()
    with first:
        assert isinstance(first.receive(), Generation)
        for rank in range(2):
            store.set(f"1/{rank}", "address")
        second.close()
        assert isinstance(first.receive(), Close)
        store.set("2/0", "address")
        first.send(JoinRequest(None))
        assert isinstance(first.receive(), Generation)
        wait_until(lambda: store.list_keys() == ["2/0"], seconds=5)
        done.set()
        beating.join()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (None, Cause.WORKER_LOST),
        (EOFError(), Cause.WORKER_LOST),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Cause.WORKER_LOST),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), Cause.NODE_LOST),
        (OSError(errno.EHOSTUNREACH, "no route"), Cause.NODE_LOST),
    ],
    ids=["silent", "ended", "killed", "no answer", "no route"],
)
def test_an_unresponsive_machine_counts_as_a_lost_node(
    server: MembershipServer, error: Exception | None, cause: Cause
) -> None:
    with enter(server, "first"), enter(server, "second"):
        wait_until(lambda: server.snapshot().trains, seconds=5)
        server.declare_lost(server._connections["first"], error)
    assert [incident.cause for incident in reported(server)][:1] == [cause]


def test_a_loss_report_does_not_promise_that_training_continues_if_no_worker_is_left(server: MembershipServer) -> None:
    control = LocalControl()
    with enter(server, "first"), enter(server, "second"):
        wait_until(lambda: server.snapshot().trains, seconds=5)
        server._control = control
        for uid in ("first", "second"):
            server.declare_lost(server._connections[uid], None)
    assert control.heard("add_loss") == ["node", "node"]
    lines = [line.partition("; ")[2] for line in control.channel.fetch_news().lines]
    assert lines == ["the other workers keep training", "no worker is left"]


def test_a_run_excludes_a_sick_node_between_two_steps_and_records_the_reason(server: MembershipServer) -> None:
    group = worker_group(1, "old", "new")
    slow = [StepTimes(1, 60.0 * n, 60.0, 1.0, (0.9, 0.2)) for n in range(10)]
    with enter(server, "leaving", node="old") as leaving, enter(server, "staying", node="new") as staying:
        assert isinstance(leaving.receive(), Generation)
        assert isinstance(staying.receive(), Generation)
        assert not server.leave_sick_node(slow, group, "old", 1), "the driver's own node is never excluded"
        assert not server.leave_sick_node(slow, group, "head", 2), "too few workers would remain"
        sick = server.leave_sick_node(slow, group, "head", 1)
        assert sick
        assert sick.node == "old"
        assert isinstance(leaving.receive(), Change)
        [incident] = reported(server)
        assert (incident.cause, incident.detail) == (Cause.SICK_NODE, f"node old: {sick.why}")
        leaving.send(JoinRequest(6))
        staying.send(JoinRequest(6))
        received = [staying.receive() for _ in range(3)]
        assert received[:2] == [Change(1), Close(1)]
        assert list(received[2].ranks) == ["staying"]


def test_a_group_change_caused_by_a_draining_node_is_recorded_as_a_preemption(server: MembershipServer) -> None:
    with enter(server, "leaving", node="old") as leaving, enter(server, "staying"):
        assert isinstance(leaving.receive(), Generation)
        server.drain({"old"})
        assert isinstance(leaving.receive(), Change)
        [incident] = reported(server)
        assert (incident.cause, incident.detail) == (Cause.PREEMPTED, "node old")
