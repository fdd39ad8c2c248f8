"""Tests that a process counts as lost at once if it has ended, and after a while if it is silent."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from sunspot.elastic import member_connections, membership_channel
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
from sunspot.run.incidents import Cause
from tests.harness.constants import SetConstants
from tests.harness.waiting import wait_until


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


def enter(server: MembershipServer, uid: str, node: str = "node", step: int | None = None) -> Connection:
    """Connect a process with a state at `step` that asks to be in the next generation."""
    address = server.address
    connection = Client((address.host, address.port), authkey=address.key)
    connection.send(Member(uid, node))
    connection.recv()
    connection.send(JoinRequest(step))
    return connection


def next_message(connection: Connection) -> object:
    """Return the server's next message that is not a heartbeat."""
    while isinstance(message := connection.recv(), str):
        continue
    return message


def beat(connection: Connection, until: threading.Event) -> None:
    while not until.wait(0.1):
        connection.send("beat")


def test_a_silent_connection_does_not_delay_other_processes(server: MembershipServer) -> None:
    address = server.address
    with socket.create_connection((address.host, address.port)):
        client = MembershipClient(address, Member("one", "node"), lambda: None)
        client.connect()
        assert client._link
        with socket.socket(fileno=os.dup(client._link.connection.fileno())) as own:
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000, "a cut network is noticed soon"
        client.close()


def test_a_process_without_the_key_is_rejected(server: MembershipServer) -> None:
    with pytest.raises(AuthenticationError):
        Client((server.address.host, server.address.port), authkey=b"another")
    assert not server._connections


def test_a_process_tells_the_server_which_state_it_has(server: MembershipServer) -> None:
    """Otherwise, the server would prefer a staying newcomer to the only member that has the state."""
    leaving, staying = enter(server, "leaving", node="old", step=7), enter(server, "staying")
    for connection in (leaving, staying):
        assert isinstance(next_message(connection), Generation)
    server.drain({"old"})
    assert isinstance(next_message(leaving), Change)
    for connection, step in ((leaving, 8), (staying, None)):
        connection.send(JoinRequest(step))
    with leaving, staying:
        formed = server.snapshot().generation
        wait_until(lambda: server.snapshot().generation is not formed, seconds=5)
        assert [member.uid for member in server.snapshot().generation.members] == ["leaving", "staying"]


def test_closing_the_server_ends_its_threads() -> None:
    with open_server(2):
        pass
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "members"], seconds=5)


def test_a_change_announced_right_after_a_group_forms_is_not_missed() -> None:
    """The training thread can be slower than the listening thread."""
    client = MembershipClient(MembershipAddress("nowhere", 0, 0, b""), Member("one", "node"), lambda: None)
    ours, theirs = Pipe()
    link = client._link = Link(ours, "one-1")
    for word in (Generation(1, (Member("one-1", "node"),)), Change(1)):
        theirs.send(word)
    threading.Thread(target=client._listen, args=(link,), daemon=True).start()
    wait_until(lambda: client._newest_change, seconds=5)
    assert not client.changing
    assert client.join_next(None) is not None
    assert client.changing
    client._generation = 2
    assert not client.changing, "the change belonged to the previous generation"


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "silent"])
def test_the_other_members_are_told_about_a_lost_process(server: MembershipServer, ends: bool) -> None:
    first, second = enter(server, "first"), enter(server, "second")
    done = threading.Event()
    beating = threading.Thread(target=beat, args=(first, done))
    beating.start()
    try:
        assert [type(next_message(one)) for one in (first, second)] == [Generation, Generation]
        if ends:
            second.close()
        assert isinstance(next_message(first), Close)
        assert server.snapshot().trains
    finally:
        done.set()
        beating.join()
        first.close()
        second.close()


def test_a_process_presumed_lost_reconnects_before_its_step_completes() -> None:
    """A process alone in its group can spend a long time in a step, and the driver aborts if no process is left.

    The process reconnects even if its collectives could not be broken.
    """
    ends = Mock(side_effect=RuntimeError("NCCL cannot be aborted"))
    with open_server(1) as server:
        client = MembershipClient(server.address, Member("one", "node"), ends)
        client.connect()
        formed = client.join_next(None)
        assert formed
        assert formed[0].number == 1
        for connection in list(server._connections.values()):
            with socket.socket(fileno=os.dup(connection.fileno())) as own:
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

    def open_and_leave(*given: Any) -> Connection:
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
        with pytest.raises(DriverUnreachableError, match=r"127\.0\.0\.1.*check that it runs"):
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
        assert len(server._listener._unauthenticated) <= 2 * 2 + 16
        wait_until(lambda: not server._listener._unauthenticated, seconds=5)
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

    listener = member_connections.MemberListener("127.0.0.1", b"key", 2, lambda connection: None)
    with patch.object(listener, "_socket", Mock(accept=accept, __enter__=Mock(), __exit__=Mock())), listener:
        time.sleep(0.5)
    assert 1 <= len(tried) <= 10


def test_the_store_and_the_listener_are_bound_to_one_address(server: MembershipServer) -> None:
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
        assert isinstance(next_message(first), Generation)
        for rank in range(2):
            store.set(f"1/{rank}", "address")
        second.close()
        assert isinstance(next_message(first), Close)
        store.set("2/0", "address")
        first.send(JoinRequest(None))
        assert isinstance(next_message(first), Generation)
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
    member = Member("first", "node")
    with enter(server, "first"), enter(server, "second"):
        wait_until(lambda: server.snapshot().trains, seconds=5)
        server._note_loss(member, error)
    incidents = [call.args[2] for call in server._control.send.call_args_list]
    assert [incident.cause for incident in incidents][:1] == [cause]


def test_a_group_change_caused_by_a_draining_node_is_recorded_as_a_preemption(server: MembershipServer) -> None:
    with enter(server, "leaving", node="old") as leaving, enter(server, "staying"):
        assert isinstance(next_message(leaving), Generation)
        server.drain({"old"})
        assert isinstance(next_message(leaving), Change)
        [incident] = [call.args[1] for call in server._control.send.call_args_list]
        assert (incident.cause, incident.detail) == (Cause.PREEMPTED, "node old")
