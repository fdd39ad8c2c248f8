"""A value that is read again if it is old when it is requested."""

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
"""Seconds without an answer from storage after which a read is given up."""

PAUSE = 2
"""Factor between the duration of a read and the time until the next one, so that a long history does not keep a core
busy."""

MAX_THREADS = 200
"""Largest number of threads with which another read may start. More threads mean that storage does not answer."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Reading(Generic[Value]):
    """The result of the newest read of a value."""

    value: Value | None
    "Value of the newest successful read, or None before it."
    trouble: str = ""
    "Reason why the newest read failed, or empty if it succeeded."
    missing: bool = False
    "True if it failed because the object does not exist."


class RefreshingValue(Generic[Value]):
    """A value that one thread at a time reads from storage in the background, and only while it is requested."""

    def __init__(self, what: str, read: Callable[[], Value], every_s: float, limited: bool = True) -> None:
        """`limited` may be False if `read` ends by itself when storage does not answer."""
        self._what = what
        self._read = read
        self._every_s = every_s
        self._limited = limited
        self._reading = Reading[Value](None)
        self._future: Future[None] | None = None
        self._due = -math.inf
        self._lock = threading.Lock()

    def get(self, wait_s: float) -> Reading[Value]:
        """Return the newest reading, after waiting up to `wait_s` seconds for a read that is due or running."""
        with self._lock:
            if (self._future is None or self._future.done()) and time.monotonic() >= self._due:
                self._future = start_thread(self._refresh, "refresh")
            future = self._future
        if future:
            wait([future], wait_s)
        return self._reading

    def _refresh(self) -> None:
        began = time.monotonic()
        before = self._reading.value
        try:
            if threading.active_count() > MAX_THREADS:
                raise SunspotError(f"{self._what}: {MAX_THREADS} threads are waiting for storage that does not answer")
            read = partial(with_deadline, DEADLINE_S, self._what, self._read) if self._limited else self._read
            self._reading = Reading(read())
        except SunspotError as error:
            self._reading = Reading(before, str(error), isinstance(error, NotFoundError))
        except Exception as error:
            log.exception("%s failed", self._what)
            self._reading = Reading(before, shorten(error))
        finally:
            now = time.monotonic()
            # If storage does not answer, it is asked again soon. If a page cannot be made, it has still used its time.
            pauses = not self._reading.trouble or not self._limited
            self._due = now + max(self._every_s, PAUSE * (now - began) if pauses else 0.0)
