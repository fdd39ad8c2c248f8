"""Small chores behind the training: whatever storage does meanwhile, training does not wait for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType

from app.errors import SunspotError

CLOSE_TIMEOUT_S = 30
"""How long the end of the context waits for chores that hang, before it leaves them behind."""


class Background:
    """Does some chores every so many seconds while the context lasts, and once more at its end.

    A chore that fails with a `SunspotError` (storage that is away, most often) is tried again the next time.
    """

    def __init__(self, every_s: float, *chores: Callable[[], None]) -> None:
        self._every_s, self._chores = every_s, chores
        self._over = False
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._work, name="background", daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._due.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def hurry(self) -> None:
        """Do them now, and not when it is time."""
        self._due.set()

    def _work(self) -> None:
        last_time = False
        while not last_time:
            self._due.wait(self._every_s)
            self._due.clear()
            last_time = self._over
            for chore in self._chores:
                try:
                    chore()
                except SunspotError:
                    continue


class Timer:
    """Says yes every so many seconds."""

    def __init__(self, overdue: bool = False) -> None:
        self._last = -math.inf if overdue else time.monotonic()

    def due(self, every_s: float) -> bool:
        """Whether `every_s` (0: never) have passed; a yes starts the next interval."""
        if not every_s or time.monotonic() - self._last < every_s:
            return False
        self._last = time.monotonic()
        return True
