"""How long work on storage may take, and how often it is tried again.

A thread that hangs can only be left behind. So work with a deadline runs in a daemon thread, which keeps no process
from ending, and once its time is over it begins no further operation: what it was about to publish is not published.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextvars import ContextVar
from typing import TypeVar

from sunspot.background import start_thread
from sunspot.errors import StorageError

log = logging.getLogger(__name__)

MIN_RATE = 100_000
"""Bytes a second: the rate at which bytes that were moved give back time."""

OPERATION_S = 10.0
"""Seconds that each answer gives back, whatever its size."""

WARN_AFTER_S = 30.0
"""Seconds without progress after which the user is told what is waited for."""

BACKOFF_S = (1, 2, 4, 8, 16, 30)
"""Pauses between tries; the last one repeats until the limit."""

Result = TypeVar("Result")


class ProgressDeadline:
    """The time that work on storage may take: `limit_s` seconds, some given back by progress.

    An answer gives back OPERATION_S and a byte 1 / MIN_RATE seconds, up to `limit_s` in all. So work ends `limit_s`
    after storage has stopped, and in any case within `limit_s`, OPERATION_S for each of its operations and the time
    that its bytes take at MIN_RATE.
    """

    def __init__(self, limit_s: float, what: str) -> None:
        """`what` is done by the work, for messages."""
        self._limit_s, self._what = limit_s, what
        self._progress = time.monotonic()
        "When there was progress."
        self._ends = self._progress + limit_s
        self._running: dict[object, str] = {}
        "The objects of the operations in progress, the oldest first."
        self._lock = threading.Lock()
        self.passed = False
        "Whether the work was given up."

    def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises. Raises `StorageError`, naming the object, once its time is over."""

        def marked_work() -> Result:
            CURRENT.set(self)
            return work()

        done, warned = start_thread(marked_work, "storage"), False
        try:
            while not wait([done], min(max(0.01, self._ends - time.monotonic()), WARN_AFTER_S / 4)).done:
                now = time.monotonic()
                with self._lock:
                    where = next(iter(self._running.values()), self._what)
                    left_s, silent_s = self._ends - now, now - self._progress
                silent = f"{where}: no answer from storage for {silent_s:.0f} s"
                if left_s <= 0:
                    slow = f"{where}: storage moves less than {MIN_RATE / 1000:.0f} kB/s"
                    raise StorageError(silent if silent_s > self._limit_s / 2 else slow)
                if silent_s > WARN_AFTER_S and not warned:
                    warned = True
                    log.warning(f"{self._what}: {silent}; waiting for at most {left_s:.0f} s more")
        except BaseException:
            self.passed = True
            raise
        return done.result()

    @contextlib.contextmanager
    def operation(self, where: str, gives_s: float) -> Iterator[None]:
        """An operation on the object at `where`, whose answer gives back so much."""
        this = object()
        with self._lock:
            self._running[this] = where
        try:
            yield
        finally:
            with self._lock:
                del self._running[this]
            self.give_back(gives_s)

    def give_back(self, seconds: float) -> None:
        """There was progress, unless `seconds` is 0."""
        if seconds:
            with self._lock:
                self._progress = time.monotonic()
                self._ends = min(self._progress + self._limit_s, self._ends + seconds)


def with_deadline(limit_s: float, what: str, work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, with a `ProgressDeadline`."""
    return ProgressDeadline(limit_s, what).run(work)


CURRENT: ContextVar[ProgressDeadline | None] = ContextVar("deadline", default=None)
"""The deadline of the work that this thread is part of."""


def operation(where: str, gives_s: float = OPERATION_S) -> contextlib.AbstractContextManager[None]:
    """An operation on the object at `where`, for the deadline of the work that it is part of, if there is one.

    `gives_s` is 0 for one whose bytes `record_progress` counts. Raises `StorageError` when the work was given up.
    """
    refuse_if_given_up(where)
    deadline = CURRENT.get()
    return deadline.operation(where, gives_s) if deadline else contextlib.nullcontext()


def record_progress(size: int) -> None:
    """So many bytes were read or written."""
    if deadline := CURRENT.get():
        deadline.give_back(size / MIN_RATE)


def refuse_if_given_up(where: str) -> None:
    """Raise `StorageError` when the work that this thread is part of was given up: call before publishing an object."""
    deadline = CURRENT.get()
    if deadline and deadline.passed:
        raise StorageError(f"{where}: not begun, as the work that it is part of was given up")


class RetryWindow:
    """Storage that fails: since when, how many tries have met it, and whether there should be another."""

    def __init__(self) -> None:
        self.tries = 0
        "That have failed."
        self.over = False
        "Whether it has lasted as long as it may, or the last try made no progress for so long."
        self._since = 0.0
        self._deadline: ProgressDeadline | None = None
        "Deadline of the newest try."

    @property
    def seconds(self) -> float:
        """How long it has lasted; 0 before a try has failed."""
        return time.monotonic() - self._since if self.tries else 0.0

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next try."""
        return pause_after(self.tries - 1)

    def attempt(self, work: Callable[[], Result], limit_s: float, what: str) -> Result:
        """What `work` returns or raises, in a thread of its own; an error counts as a failed try.

        It may last `limit_s`; the last try gets a tenth of that at least. Raises `StorageError` when time is over.
        """
        began = time.monotonic()
        deadline = self._deadline = ProgressDeadline(max(limit_s - self.seconds, limit_s / 10), what)
        try:
            return deadline.run(work)
        except Exception:
            if not self.tries:
                self._since = began if deadline.passed else time.monotonic()
            self.tries += 1
            self.over = deadline.passed or self.seconds >= limit_s
            raise

    def give_up(self) -> None:
        """Make the try that is under way begin no further operation on storage. May be called from any thread."""
        if self._deadline:
            self._deadline.passed = True


def retry_storage(act: Callable[[], Result], limit_s: float, what: str) -> Result:
    """The result of `act`, retried while storage fails, in a thread of its own.

    Raises `StorageError` when storage has failed for `limit_s` seconds, or makes no progress for so long.
    """
    window = RetryWindow()
    while True:
        try:
            return window.attempt(act, limit_s, what)
        except StorageError as error:
            if window.over:
                raise StorageError(
                    f"{what}: storage has failed for {window.seconds:.0f} s "
                    f"(SUNSPOT_STORAGE_TIMEOUT_S={limit_s:g}): {error}"
                ) from error
            log.warning(f"{what}: {error}; trying again in {window.pause_s:g} s")
        time.sleep(window.pause_s)


def pause_after(tries: int) -> float:
    """Seconds to wait after that many tries, counted from 0."""
    return BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
