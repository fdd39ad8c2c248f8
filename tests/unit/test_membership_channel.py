"""When the decider takes a process for lost: at once if it has ended, and after a while if it is silent."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection
from unittest.mock import Mock, patch

import pytest

from sunspot.elastic import membership_channel
from sunspot.elastic.membership import Change, Close, Generation, Member
from sunspot.elastic.membership_channel import MembershipAddress, MembershipClient, MembershipServer
from tests.harness.waiting import wait_until


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MembershipServer]:
    monkeypatch.setattr(membership_channel, "PROCESS_LIMIT_S", 1.0)
    with patch("ray.util.get_node_ip_address", lambda: "127.0.0.1"), MembershipServer(2, Mock()) as server:
        yield server


def enter(server: MembershipServer, uid: str) -> Connection:
    """A process that has come, and stands."""
    address = server.address
    connection = Client((address.host, address.port), authkey=address.key)
    connection.send(Member(uid, "node"))
    connection.recv()
    connection.send("stand")
    return connection


def next_word(connection: Connection) -> object:
    """What the decider says next, beside its heartbeats."""
    while isinstance(word := connection.recv(), str):
        continue
    return word


def beat(connection: Connection, until: threading.Event) -> None:
    while not until.wait(0.1):
        connection.send("beat")


def test_who_says_nothing_keeps_nobody_waiting(server: MembershipServer) -> None:
    address = server.address
    with socket.create_connection((address.host, address.port)):
        client = MembershipClient(address, Member("one", "node"), lambda: None)
        client.connect()
        assert client._connection
        with socket.socket(fileno=os.dup(client._connection.fileno())) as own:
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000, "a cut network is noticed soon"
        client.close()


def test_a_stranger_is_not_heard(server: MembershipServer) -> None:
    with pytest.raises(AuthenticationError):
        Client((server.address.host, server.address.port), authkey=b"another")
    assert not server._connections


def test_a_server_that_is_closed_leaves_no_thread() -> None:
    with patch("ray.util.get_node_ip_address", lambda: "127.0.0.1"), MembershipServer(2, Mock()):
        pass
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "members"], seconds=5)


def test_a_change_that_is_told_right_after_the_group_counts() -> None:
    """The thread that trains may be slower than the one that listens."""
    client = MembershipClient(MembershipAddress("nowhere", 0, 0, b""), Member("one", "node"), lambda: None)
    client._connection, theirs = Pipe()
    for word in (Generation(1, (Member("one-0", "node"),)), Change(1)):
        theirs.send(word)
    threading.Thread(target=client._listen, args=(client._connection,), daemon=True).start()
    wait_until(lambda: client._newest_change, seconds=5)
    assert not client.changing
    assert client.stand() is not None
    assert client.changing
    client._generation = 2
    assert not client.changing, "it was of the generation before"


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "silent"])
def test_the_others_hear_of_a_process_that_is_lost(server: MembershipServer, ends: bool) -> None:
    first, second = enter(server, "first"), enter(server, "second")
    done = threading.Event()
    beating = threading.Thread(target=beat, args=(first, done))
    beating.start()
    try:
        assert [type(next_word(one)) for one in (first, second)] == [Generation, Generation]
        if ends:
            second.close()
        assert isinstance(next_word(first), Close)
        assert server.state.trains
    finally:
        done.set()
        beating.join()
        first.close()
        second.close()
