"""Interleaves the storage operations of a run's processes in an order that the test decides.

Each process is a thread that stops before every operation. The test lets one process continue, and decides if the
operation is carried out now, later or never, and if its caller gets the answer, gets an error, or dies.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import io
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, BinaryIO, NamedTuple

from sunspot.errors import NotFoundError, StorageError, SunspotError
from sunspot.storage.base import Entry, Storage, UnfinishedWrite, Writer, complete_or_abort

STUCK_S = 60
"""Seconds without an operation after which a process is considered stuck."""


class MemoryStorage(Storage):
    """A storage in this process. With `grows`, an upload replaces the object at once and is visible while it grows."""

    def __init__(self, storage_path: str = "memory", grows: bool = False) -> None:
        self._path, self.grows = storage_path, grows
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._writes = 0

    def put(self, key: str, data: bytes) -> None:
        self._writes += 1
        self._objects[key] = (data, self._writes)

    def locate(self, key: str) -> str:
        return f"{self._path}/{key}"

    @contextlib.contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        if key not in self._objects:
            raise NotFoundError(f"{self.locate(key)}: not found")
        yield io.BytesIO(self._objects[key][0][offset:])

    def write(self, key: str, data: bytes) -> None:
        self.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        if key in self._objects:
            return False
        self.put(key, data)
        return True

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        with complete_or_abort(_MemoryWriter(self, key)) as writer:
            yield writer

    def list(self, prefix: str) -> list[Entry]:
        return [
            Entry(key, len(data), time.time(), str(version))
            for key, (data, version) in sorted(self._objects.items())
            if key == prefix or key.startswith(prefix.rstrip("/") + "/")
        ]

    def delete(self, key: str, version: str = "") -> None:
        if key in self._objects and version in ("", str(self._objects[key][1])):
            del self._objects[key]

    def delete_folders(self, prefix: str) -> None:
        """Do nothing, because this storage has no folders."""

    def exists(self, key: str) -> bool:
        return key in self._objects

    def list_unfinished(self, prefix: str) -> Sequence[UnfinishedWrite]:
        return []

    def discard(self, unfinished: UnfinishedWrite) -> None:
        """Do nothing, because this storage has no unfinished writes."""


class _MemoryWriter(Writer):
    def __init__(self, storage: MemoryStorage, key: str) -> None:
        super().__init__()
        self._storage = storage
        self._key = key
        self._data = b""
        self._store(memoryview(b""))

    def _store(self, view: memoryview) -> None:
        self._data += view
        if self._storage.grows:
            self._storage.put(self._key, self._data)

    def complete(self) -> None:
        self._storage.put(self._key, self._data)

    def abort(self) -> None:
        if self._storage.grows:
            self._storage.delete(self._key)


class Effect(enum.Enum):
    """The effect of an operation on the storage. LATER leaves the time to the test, and AGAIN carries it out twice."""

    NOW = enum.auto()
    AGAIN = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class Answer(enum.Enum):
    """The answer that an operation's caller gets."""

    RESULT = enum.auto()
    ERROR = enum.auto()
    DEATH = enum.auto()


class Fate(NamedTuple):
    """The effect of an operation, and what its caller gets."""

    effect: Effect = Effect.NOW
    answer: Answer = Answer.RESULT


CARRIED_OUT = Fate()

FAULTS = [Fate(effect, answer) for effect in Effect for answer in (Answer.ERROR, Answer.DEATH)]
FAULTS.append(Fate(Effect.AGAIN))  # a client without an answer repeats its request


class Operation(NamedTuple):
    """A storage operation."""

    verb: str
    "Name of a method of `Storage`. An upload is `upload`, followed by `complete`."
    key: str

    def __str__(self) -> str:
        return f"{self.verb} {self.key}"

    @property
    def changes(self) -> bool:
        """True if the operation changes the stored objects."""
        return self.verb not in ("open", "list", "exists")


class Killed(BaseException):
    """Ends a process's thread without any cleanup, like a real kill."""


class Process:
    """A thread that represents a process, and stops before each of its storage operations."""

    def __init__(self, world: World, name: str, body: Callable[[Process], None]) -> None:
        self.name, self._world = name, world
        self.storage: Storage = ProcessStorage(world.storage, self)
        self.next: Operation | None = None
        "Next operation, or None if the process has ended."
        self.superseded = False
        "True if the process has noticed that it was superseded and must not commit. `body` sets it."
        self.at_end: list[Callable[[], Any]] = []
        "Functions that the system calls when the process has ended in any way."
        self.killed = False
        self._error: BaseException | None = None
        self._fates: SimpleQueue[Fate] = SimpleQueue()
        self._arrivals: SimpleQueue[Operation | None] = SimpleQueue()
        threading.Thread(target=self._run, args=(body,), name=name, daemon=True).start()
        self._wait()

    def go(self, fate: Fate = CARRIED_OUT) -> None:
        """Let the process carry out its next operation and stop before the one after it. Raises the process's error."""
        self._world.trace.append(f"{self.name}: {self.next}" + ("" if fate == CARRIED_OUT else f"  {_spell(fate)}"))
        self._fates.put(fate)
        self._wait()

    def kill(self) -> None:
        """End the process before its next operation."""
        if self.next:
            self.go(Fate(Effect.NEVER, Answer.DEATH))

    def perform(self, operation: Operation, act: Callable[[], Any]) -> Any:
        """Wait until the test allows an operation, and carry it out. Called in the process's thread."""
        if self.killed:
            raise Killed
        self._arrivals.put(operation)
        fate = self._fates.get()
        result = None
        if fate.effect in (Effect.NOW, Effect.AGAIN):
            result = self._world.carry_out(self, operation, act)
        if fate.effect in (Effect.LATER, Effect.AGAIN) and self._world.may_be_late(operation):
            self._world.late.append((self, operation, act))
        if fate.answer is Answer.DEATH:
            self.killed = True
            raise Killed
        if fate.answer is Answer.ERROR:
            raise StorageError(f"{operation}: no answer")
        return result

    def _run(self, body: Callable[[Process], None]) -> None:
        try:
            body(self)
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        for act in self.at_end:
            act()
        self._arrivals.put(None)

    def _wait(self) -> None:
        self.next = self._arrivals.get(timeout=STUCK_S)
        if self._error:
            self._world.trace.append(f"{self.name}: {type(self._error).__name__}: {self._error}")
            raise self._error


class World:
    """Processes and their shared storage."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.processes: list[Process] = []
        self.late: list[tuple[Process, Operation, Callable[[], Any]]] = []
        "Operations that have been sent but not carried out."
        self.trace: list[str] = []
        "Trace of the test, with one line per operation."
        self.changed: Callable[[Process, Operation, bool], None] = lambda process, operation, late: None
        "Function called after each operation that changed an object. The last argument is True if it was late."

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes if process.next]

    def start(self, name: str, body: Callable[[Process], None]) -> Process:
        self.trace.append(f"{name}: starts")
        process = Process(self, name, body)
        self.processes.append(process)
        return process

    def may_be_late(self, operation: Operation) -> bool:
        """Return True if an operation is a change that can come late. The start of an upload is never late."""
        return operation.changes and operation.verb != "upload"

    def carry_out(self, process: Process, operation: Operation, act: Callable[[], Any], late: bool = False) -> Any:
        result = act()
        if operation.changes and result is not False:  # False means that another process created the object first
            self.changed(process, operation, late)
        return result

    def land(self, number: int, but: Container[str] = ()) -> None:
        """Carry out a late operation, and discard its result. Drop the operation if it writes a key in `but`."""
        process, operation, act = self.late.pop(number)
        if operation.verb == "write" and operation.key in but:
            return
        self.trace.append(f"late: {process.name}: {operation}")
        with contextlib.suppress(SunspotError, ValueError):  # ValueError if the file was closed when its writer aborted
            self.carry_out(process, operation, act, late=True)

    def end(self) -> None:
        for process in self.processes:
            process.kill()


class ProcessStorage(Storage):
    """Shared storage as a process sees it. Before each operation, the process waits for its turn."""

    def __init__(self, shared: Storage, process: Process) -> None:
        self.shared, self.process = shared, process
        self.writers: list[Any] = []
        "Uploads that the process has started."

    def locate(self, key: str) -> str:
        return self.shared.locate(key)

    @contextlib.contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        def read() -> bytes:
            with self.shared.open(key, offset) as stream:
                return stream.read()

        yield io.BytesIO(self.perform("open", key, read))

    def write(self, key: str, data: bytes) -> None:
        self.perform("write", key, lambda: self.shared.write(key, data))

    def create(self, key: str, data: bytes) -> bool:
        return bool(self.perform("create", key, lambda: self.shared.create(key, data)))

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        with complete_or_abort(_ProcessWriter(self, key)) as writer:
            yield writer

    def list(self, prefix: str) -> list[Entry]:
        return list(self.perform("list", prefix, lambda: self.shared.list(prefix)))

    def delete(self, key: str, version: str = "") -> None:
        self.perform("delete", key, lambda: self.shared.delete(key, version))

    def delete_folders(self, prefix: str) -> None:
        self.shared.delete_folders(prefix)

    def exists(self, key: str) -> bool:
        return bool(self.perform("exists", key, lambda: self.shared.exists(key)))

    def list_unfinished(self, prefix: str) -> Sequence[UnfinishedWrite]:
        return self.shared.list_unfinished(prefix)

    def discard(self, unfinished: UnfinishedWrite) -> None:
        self.shared.discard(unfinished)

    def perform(self, verb: str, key: str, act: Callable[[], Any]) -> Any:
        return self.process.perform(Operation(verb, key), act)


class _ProcessWriter(Writer):
    """An upload, which consists of two operations: its beginning, and its completion with all bytes."""

    def __init__(self, storage: ProcessStorage, key: str) -> None:
        super().__init__()
        self._storage, self._key = storage, key
        self._shared: Writer = storage.perform("upload", key, self._begin)

    def _begin(self) -> Writer:
        context = self._storage.shared.writer(self._key)
        # Keep the uploads. Otherwise the garbage collector would close a dead process's files, which would complete
        # them.
        self._storage.writers.append(context)
        return context.__enter__()

    def _store(self, view: memoryview) -> None:
        self._shared.write(view)

    def complete(self) -> None:
        self._storage.perform("complete", self._key, self._shared.complete)

    def abort(self) -> None:
        if not self._storage.process.killed:
            self._shared.abort()


def run_inline(work: Callable[[], Any], name: str) -> Future[Any]:
    """Do the work immediately in the caller's thread. Replaces `sunspot.background.start_thread`."""
    future: Future[Any] = Future()
    try:
        future.set_result(contextvars.copy_context().run(work))
    except BaseException as error:
        future.set_exception(error)
    return future


def _spell(fate: Fate) -> str:
    effect = {
        Effect.NOW: "carried out",
        Effect.AGAIN: "carried out now and again later",
        Effect.LATER: "carried out later",
        Effect.NEVER: "not carried out",
    }
    answer = {Answer.RESULT: "answered", Answer.ERROR: "its caller gets an error", Answer.DEATH: "its caller dies"}
    return f"({effect[fate.effect]}; {answer[fate.answer]})"
