"""Periodic tasks in a thread beside the training, which never waits for them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType

from app.errors import SunspotError

CLOSE_TIMEOUT_S = 30
"""How long the end of the context waits for tasks that hang before it abandons them."""


class Background:
    """Runs tasks every `every_s` seconds while the context lasts, and once more at its end.

    A task that raises a `SunspotError` (most often, storage is away) is tried again the next time.
    """

    def __init__(self, every_s: float, *tasks: Callable[[], None]) -> None:
        self._every_s, self._tasks = every_s, tasks
        self._closing = False
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._work, name="background", daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._due.set()
        self._thread.join(CLOSE_TIMEOUT_S)

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
                try:
                    task()
                except SunspotError:
                    continue


class Timer:
    """Is due every so many seconds."""

    def __init__(self, overdue: bool = False) -> None:
        self._last = -math.inf if overdue else time.monotonic()

    def due(self, every_s: float) -> bool:
        """Whether `every_s` seconds (0: never) have passed; True begins the next interval."""
        if not every_s or time.monotonic() - self._last < every_s:
            return False
        self._last = time.monotonic()
        return True
