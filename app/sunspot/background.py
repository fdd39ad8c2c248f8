"""Runs functions in daemon threads: once, once per item, or repeatedly."""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Self, TypeVar

from sunspot.errors import SunspotError

CLOSE_TIMEOUT_S = 30
"""Seconds that a task may still take when the context exits. After that, it is abandoned."""

AT_ONCE = 16
"""Number of items to process at once. Most of them wait for storage to answer, not for data."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def start_thread(work: Callable[[], Result], name: str) -> Future[Result]:
    """Run `work` in a daemon thread called `name`, with the caller's context variables, and return its future.

    A ThreadPoolExecutor is not suitable, because Python waits for its threads at exit, even if they hang forever.
    """
    future: Future[Result] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(work)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def map_parallel(act: Callable[[Item], Result], items: Iterable[Item], at_once: int = AT_ONCE) -> list[Result]:
    """Call `act` for each item, in up to `at_once` threads, and return the results in the order of the items.

    After an error, no further calls begin, and the error of the first failed item is raised. If `at_once` is 1, no
    thread is started.
    """
    if at_once == 1:
        return [act(item) for item in items]
    todo = deque(enumerate(items))
    results = {}
    errors = {}

    def work() -> None:
        while todo:
            try:
                number, item = todo.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                results[number] = act(item)
            except BaseException as error:
                errors[number] = error
                todo.clear()

    wait([start_thread(work, "parallel") for _ in range(min(at_once, len(todo)))])
    if errors:  # items start in order, so all items before the first error have succeeded
        raise errors[min(errors)]
    return [results[number] for number in sorted(results)]


class Background:
    """Context manager that runs tasks every `every_s` seconds, and once more on exit.

    A task that raises an error is called again at the end of the next interval. A `SunspotError` is not
    logged, because it usually means only that storage cannot be reached. Any other error is a bug, and is logged. If a
    task keeps failing with such errors of the same class, only the first of them is logged.
    """

    def __init__(self, every_s: float, *tasks: Callable[[], None]) -> None:
        self._every_s, self._tasks = every_s, tasks
        self._closing = False
        self._began = math.inf
        "Start of the current task on the monotonic clock, or infinite between tasks."
        self._due = threading.Event()
        self._defects: dict[Callable[[], None], type[Exception]] = {}
        "Class of each task's last unexpected error, until the task succeeds again."
        self._thread = threading.Thread(target=self._work, name="background", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._due.set()
        now = time.monotonic()
        self._thread.join(max(0.0, min(now, self._began) + CLOSE_TIMEOUT_S - now))

    def run_now(self) -> None:
        """Run the tasks now, without waiting for the end of the interval."""
        self._due.set()

    def _work(self) -> None:
        last_time = False
        while not last_time:
            self._due.wait(self._every_s)
            self._due.clear()
            last_time = self._closing
            for task in self._tasks:
                self._began = time.monotonic()
                self._try(task)
            self._began = math.inf

    def _try(self, task: Callable[[], None]) -> None:
        try:
            task()
        except SunspotError:
            return
        except Exception as error:
            if self._defects.get(task) is not type(error):
                self._defects[task] = type(error)
                name = getattr(task, "__qualname__", repr(task))
                logging.getLogger(__name__).exception("%s failed; it is retried every %g s", name, self._every_s)
        else:
            self._defects.pop(task, None)


class Timer:
    """A timer that reports the end of each interval."""

    def __init__(self, since: float | None = None) -> None:
        """Begin the first interval at `since`, as measured by `time.monotonic()`. The default is now."""
        self._last = time.monotonic() if since is None else since

    def due(self, every_s: float) -> bool:
        """Return True and begin the next interval if `every_s` seconds have passed. An interval of 0 is never due."""
        if not every_s or time.monotonic() - self._last < every_s:
            return False
        self._last = time.monotonic()
        return True


class TokenBucket:
    """A rate limit that allows `burst` uses at once, and one use every `every_s` seconds on average."""

    def __init__(self, burst: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._every_s = every_s
        self._clock = clock
        self._tokens = float(burst)
        self._filled = clock()

    def take(self) -> bool:
        """Take a token and return True, or return False if the bucket is empty."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) / self._every_s)
        self._filled = now
        allowed = self._tokens >= 1
        self._tokens -= allowed
        return allowed
