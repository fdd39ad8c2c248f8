"""A worker process as a member of groups: it lives on while others go, and stands for one generation after another."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection

from sunspot.background import start_thread
from sunspot.elastic.membership import Change, End, Generation, Word
from sunspot.elastic.membership import Member as Identity
from sunspot.elastic.membership_server import HEARTBEAT_EVERY_S, MembershipAddress

RECONNECT_S = 10.0
"""How long a member that lost its decider tries to come back; the driver is gone then, and ends it."""


class DeciderLostError(ConnectionError):
    """The decider cannot be reached: no error of the run, as Ray ends this process when the driver is gone."""


class MembershipClient:
    """This process's connection to the decider."""

    def __init__(self, address: MembershipAddress, identity: Identity, on_close: Callable[[], None]) -> None:
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
        self.changing = False
        "Whether the group is to change once a step is done."
        self.others_train = False
        "Whether a group had formed when it connected."

    def connect(self) -> None:
        """Enter the decider's list, as a newcomer; raises `DeciderLostError`."""
        self._connect(time.monotonic() + RECONNECT_S)

    def stand(self) -> tuple[Generation, int] | None:
        """Leave the present generation, and return the next one and the rank in it, however long that takes.

        None: there is no next one. Raises `DeciderLostError`.
        """
        self._leave()
        until = time.monotonic() + RECONNECT_S
        while True:
            if self._connection is None:
                self._connect(until)
            if not self._send("stand"):
                continue
            while self._connection is not None:
                with contextlib.suppress(queue.Empty):
                    generation = self._formed.get(timeout=0.1)
                    if generation is None:
                        return None
                    self._generation, self.changing = generation.number, False
                    self._closed.clear()
                    if self._newest_closed >= generation.number:
                        self._leave()
                        break  # and stand again
                    rank = generation.place_of(self.uid)
                    assert rank is not None
                    return generation, rank
            until = time.monotonic() + RECONNECT_S

    def _leave(self) -> None:
        self._generation = 0
        self._closed.set()

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

    def _connect(self, until: float) -> None:
        address = self._address
        while True:
            try:
                connection = Client((address.host, address.port), authkey=address.key)
                self._uid += 1
                connection.send(Identity(self.uid, self._identity.node))
                self.others_train = connection.recv()
                break
            except Exception as error:
                if time.monotonic() > until:
                    raise DeciderLostError(f"the driver at {address.host} cannot be reached: {error}") from error
                time.sleep(0.2)
        self._formed = queue.Queue()
        self._connection = connection
        start_thread(lambda: self._listen(connection), "membership")
        start_thread(lambda: self._beat(connection), "heartbeat")

    def _send(self, word: str) -> bool:
        connection = self._connection
        try:
            with self._sending:
                if connection:
                    connection.send(word)
                    return True
        except OSError:
            self._drop(connection)
        return False

    def _beat(self, connection: Connection) -> None:
        while self._connection is connection:
            self._send("beat")
            time.sleep(HEARTBEAT_EVERY_S)

    def _listen(self, connection: Connection) -> None:
        formed = self._formed
        try:
            while True:
                word: Word = connection.recv()
                if isinstance(word, Generation | End):
                    formed.put(word if isinstance(word, Generation) else None)
                elif isinstance(word, Change):
                    self.changing = word.number == self._generation
                else:
                    self._newest_closed = word.number
                    if word.number == self._generation:
                        self._end_generation()
        except (EOFError, OSError):
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
