"""When the decider takes a process for lost: at once if it has ended, and after a while if it is silent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from unittest.mock import Mock, patch

import pytest

from sunspot.elastic import membership_channel
from sunspot.elastic.membership import Close, Generation, Member
from sunspot.elastic.membership_channel import MembershipServer


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
        assert server.trains
    finally:
        done.set()
        beating.join()
        first.close()
        second.close()
