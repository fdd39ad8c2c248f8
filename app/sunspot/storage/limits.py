"""Deadlines for reading and writing storage, and retries while storage fails.

`work` is a function that reads or writes storage, and `what` describes it in messages. Two functions call `work`:

    with_deadline(limit_s, what, work, *arguments)   calls `work` once, and aborts it if storage stops responding
    retry_storage(limit_s, what, work, *arguments)   also calls `work` again while it raises `StorageError`

The limit and the retries apply to the work as a whole, not to single requests, for two reasons. Most work reads
something before it writes, such as the run's owner, so a retry has to read it again. And a request for a stream cannot
be repeated once the caller has used the first bytes.

A hung thread cannot be stopped, so the work runs in a daemon thread, which does not keep the process from exiting.
Once the work has been aborted, it cannot begin any operation (`operation`) or publish an object (`refuse_if_given_up`).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from sunspot.background import start_thread
from sunspot.errors import StorageError

log = logging.getLogger(__name__)

MIN_RATE = 100_000
"""Slowest transfer that counts as progress, in bytes per second."""

OPERATION_S = 10.0
"""Seconds that each response from storage adds to a deadline, regardless of its size."""

WARN_AFTER_S = 30.0
"""Seconds without progress before a warning says what the process is waiting for."""

BACKOFF_S = (1, 2, 4, 8, 16, 30)
"""Seconds between attempts. The last value repeats until the time limit."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ProgressDeadline:
    """A deadline of `limit_s` seconds for work on storage. Progress extends it.

    Each response adds OPERATION_S seconds and each byte 1 / MIN_RATE seconds, but the time left never exceeds
    `limit_s`. Work therefore ends at most `limit_s` after storage stops responding.
    """

    def __init__(self, limit_s: float, what: str) -> None:
        """Create a deadline. `what` describes the work in messages, for example "reading the run"."""
        self._limit_s = limit_s
        self._what = what
        self._progress = time.monotonic()
        "The time of the last progress, in `time.monotonic` seconds."
        self._ends = self._progress + limit_s
        self._running: dict[object, str] = {}
        "The objects of the operations in progress, beginning with the oldest operation."
        self._lock = threading.Lock()
        self.passed = False
        "True once the work has been aborted."

    def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`. Raises `StorageError` with the object's location if the deadline passes."""

        def marked_work() -> Result:
            CURRENT_DEADLINE.set(self)
            return work()

        done = start_thread(marked_work, "storage")
        warned = False
        try:
            while not wait([done], min(max(0.01, self._ends - time.monotonic()), WARN_AFTER_S / 4)).done:
                now = time.monotonic()
                with self._lock:
                    where = next(iter(self._running.values()), self._what)
                    left_s = self._ends - now
                    silent_s = now - self._progress
                silent = f"{where}: no answer from storage for {silent_s:.0f} s"
                if left_s <= 0:
                    slow = f"{where}: storage transfers less than {MIN_RATE / 1000:.0f} kB/s"
                    raise StorageError(silent if silent_s > self._limit_s / 2 else slow)
                if silent_s > WARN_AFTER_S and not warned:
                    warned = True
                    log.warning(f"{self._what}: {silent}; waiting up to {left_s:.0f} s more")
        except BaseException:
            self.passed = True
            raise
        return done.result()

    @contextlib.contextmanager
    def operation(self, where: str, gives_s: float) -> Iterator[None]:
        """Context manager for an operation on the object at `where`.

        When the operation ends, the deadline is extended by up to `gives_s` seconds.
        """
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
        """Record progress, and extend the deadline by up to `seconds`. Do nothing if `seconds` is zero."""
        if seconds:
            with self._lock:
                self._progress = time.monotonic()
                self._ends = min(self._progress + self._limit_s, self._ends + seconds)


def with_deadline(
    limit_s: float,
    what: str,
    work: Callable[Arguments, Result],
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> Result:
    """Return the result of `work(*arguments)`, which runs under a `ProgressDeadline` in a separate thread.

    `what` describes the work in messages. Raises `StorageError` once the deadline has passed.
    """
    return ProgressDeadline(limit_s, what).run(lambda: work(*arguments, **named))


CURRENT_DEADLINE: ContextVar[ProgressDeadline | None] = ContextVar("deadline", default=None)
"""The deadline of the work that the current thread belongs to.

It is a context variable because the operations of one piece of work are spread over many calls and threads
(`start_thread` copies the context). As a parameter, it would have to be passed through every function between
`with_deadline` and a backend's requests.
"""


def operation(where: str, gives_s: float = OPERATION_S) -> contextlib.AbstractContextManager[None]:
    """Context manager for an operation on the object at `where`. The response adds `gives_s` seconds to the deadline.

    Pass 0 as `gives_s` if `record_progress` counts the operation's bytes. Raises `StorageError` if the current work was
    aborted.
    """
    refuse_if_given_up(where)
    deadline = CURRENT_DEADLINE.get()
    return deadline.operation(where, gives_s) if deadline else contextlib.nullcontext()


def record_progress(size: int) -> None:
    """Record that `size` bytes were read or written."""
    deadline = CURRENT_DEADLINE.get()
    if deadline:
        deadline.give_back(size / MIN_RATE)


def refuse_if_given_up(where: str) -> None:
    """Raise `StorageError` if the current thread belongs to work that was aborted.

    Call this right before publishing an object.
    """
    deadline = CURRENT_DEADLINE.get()
    if deadline and deadline.passed:
        raise StorageError(f"{where}: the operation was not started, because the work that it belongs to was aborted")


class RetryWindow:
    """The period in which work on storage is retried. It begins with the first failure and ends after a limit."""

    def __init__(self) -> None:
        self.tries = 0
        "The number of failed attempts."
        self.over = False
        "True once attempts have failed or made no progress for the whole time limit."
        self._since = 0.0
        self._deadline: ProgressDeadline | None = None
        "The deadline of the newest attempt."

    @property
    def seconds(self) -> float:
        """Seconds since the first failure, or 0 if no attempt has failed."""
        return time.monotonic() - self._since if self.tries else 0.0

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt."""
        return pause_after(self.tries - 1)

    def attempt(self, limit_s: float, what: str, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, which runs in a separate thread. An error counts as a failed attempt.

        The first attempt has `limit_s` seconds. A later attempt has `limit_s` seconds minus the time since the
        first failure, but at least a tenth of `limit_s`. Raises `StorageError` if the attempt takes longer.
        """
        began = time.monotonic()
        deadline = ProgressDeadline(max(limit_s - self.seconds, limit_s / 10), what)
        self._deadline = deadline
        try:
            return deadline.run(work)
        except Exception:
            if not self.tries:
                self._since = began if deadline.passed else time.monotonic()
            self.tries += 1
            self.over = deadline.passed or self.seconds >= limit_s
            raise

    def give_up(self) -> None:
        """Prevent the current attempt from starting further operations on storage. Can be called from any thread."""
        if self._deadline:
            self._deadline.passed = True


def retry_storage(
    limit_s: float,
    what: str,
    work: Callable[Arguments, Result],
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> Result:
    """Call `work(*arguments)` until it raises no `StorageError`, and return its result.

    The work runs in a separate thread, and `what` describes the work in messages. Raises `StorageError` once storage
    has failed or made no progress for `limit_s` seconds.
    """
    window = RetryWindow()
    while True:
        try:
            return window.attempt(limit_s, what, lambda: work(*arguments, **named))
        except StorageError as error:
            if window.over:
                raise StorageError(
                    f"{what}: storage has failed for {window.seconds:.0f} s "
                    f"(SUNSPOT_STORAGE_TIMEOUT_S={limit_s:g}): {error}"
                ) from error
            log.warning(f"{what}: {error}; retrying in {window.pause_s:g} s")
        time.sleep(window.pause_s)


def pause_after(tries: int) -> float:
    """Return how many seconds to wait after a failed attempt. `tries` is the number of earlier attempts."""
    return BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
