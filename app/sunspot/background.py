"""Runs work in threads: once, for each of many items, or again and again. All threads are daemons."""

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
"""How long a task may take once the context ends; one that hangs, maybe since before, is then abandoned."""

AT_ONCE = 16
"""Items that are worked on at once: most wait for an answer of storage, and not for bytes."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def start_thread(work: Callable[[], Result], name: str) -> Future[Result]:
    """Begin `work` in a daemon thread called `name`, with the caller's context variables.

    A ThreadPoolExecutor's threads are waited for when Python exits, also one that hangs for ever.
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
    """Return what `act` returns for each item, in their order. After the first error, no further item is started."""
    todo, results = deque(enumerate(items)), {}

    def work() -> None:
        while todo:
            try:
                number, item = todo.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                results[number] = act(item)
            except BaseException:
                todo.clear()
                raise

    workers = [start_thread(work, "parallel") for _ in range(min(at_once, len(todo)))]
    wait(workers)
    for worker in workers:
        worker.result()
    return [results[number] for number in sorted(results)]


class Background:
    """Runs tasks every `every_s` seconds while the context lasts, and once more at its end.

    A task that raises is tried again the next time. What is no `SunspotError` (most often, storage is away) is a
    defect, and logged, once for each kind of error in a row.
    """

    def __init__(self, every_s: float, *tasks: Callable[[], None]) -> None:
        self._every_s, self._tasks = every_s, tasks
        self._closing = False
        self._began = math.inf
        "When the task began that runs now."
        self._due = threading.Event()
        self._defects: dict[Callable[[], None], type[Exception]] = {}
        "The kind of the newest one of each task, until it succeeds again."
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
        """Run the tasks at once, instead of when they are due."""
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
                logging.getLogger(__name__).exception("%s failed, and is tried again every %g s", name, self._every_s)
        else:
            self._defects.pop(task, None)


class Timer:
    """True once per interval."""

    def __init__(self, since: float | None = None) -> None:
        """`since` is the beginning of the first interval, in seconds of the monotonic clock; by default that is now."""
        self._last = time.monotonic() if since is None else since

    def due(self, every_s: float) -> bool:
        """Whether `every_s` seconds (0: never) have passed; True begins the next interval."""
        if not every_s or time.monotonic() - self._last < every_s:
            return False
        self._last = time.monotonic()
        return True


class TokenBucket:
    """Token bucket: `burst` at once, and on average one every `every_s` seconds."""

    def __init__(self, burst: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._every_s, self._clock = burst, every_s, clock
        self._tokens, self._filled = float(burst), clock()

    def take(self) -> bool:
        """Whether it is allowed now; True counts."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) / self._every_s)
        self._filled = now
        allowed = self._tokens >= 1
        self._tokens -= allowed
        return allowed
