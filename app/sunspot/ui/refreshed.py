"""A value that is read again when somebody asks for it and it is old."""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from sunspot.background import start_thread
from sunspot.errors import NotFoundError, SunspotError, shorten
from sunspot.storage.limits import with_deadline

log = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""How long storage may be silent before a read of it is given up."""

PAUSE = 2
"""Times the seconds that a read takes until the next one: a long history does not keep a core busy."""

MAX_THREADS = 200
"""With more, nothing is read: those that storage has let hang have to end first."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Reading(Generic[Value]):
    """What is known of a value."""

    value: Value | None
    "None: it was not read yet."
    trouble: str = ""
    "Why the newest read failed; empty when it did not."
    missing: bool = False
    "Whether that was because nothing is there."


class RefreshingValue(Generic[Value]):
    """A value of storage, read in the background by one thread at a time, and only while somebody asks for it."""

    def __init__(self, what: str, read: Callable[[], Value], every_s: float, limited: bool = True) -> None:
        """If `read` ends by itself when storage does not answer, `limited` may be False."""
        self._what, self._read, self._every_s = what, read, every_s
        self._limited = limited
        self._reading = Reading[Value](None)
        self._future: Future[None] | None = None
        self._due = -math.inf
        self._lock = threading.Lock()

    def get(self, wait_s: float) -> Reading[Value]:
        """Return what is known; waits so long for a read that is due or under way."""
        with self._lock:
            if (self._future is None or self._future.done()) and time.monotonic() >= self._due:
                self._future = start_thread(self._refresh, "refresh")
            future = self._future
        if future:
            wait([future], wait_s)
        return self._reading

    def _refresh(self) -> None:
        began, before = time.monotonic(), self._reading.value
        try:
            if threading.active_count() > MAX_THREADS:
                raise SunspotError(f"{self._what}: {MAX_THREADS} threads still wait for storage that does not answer")
            read = partial(with_deadline, DEADLINE_S, self._what, self._read) if self._limited else self._read
            self._reading = Reading(read())
        except SunspotError as error:
            self._reading = Reading(before, str(error), isinstance(error, NotFoundError))
        except Exception as error:
            log.exception("%s failed", self._what)
            self._reading = Reading(before, shorten(error))
        finally:
            now = time.monotonic()
            # Storage that does not answer is asked again soon. A page that cannot be made has used its share of time.
            pauses = not self._reading.trouble or not self._limited
            self._due = now + max(self._every_s, PAUSE * (now - began) if pauses else 0.0)
