"""A value that is read again when it is requested, if it is out of date."""

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
"""Seconds without an answer from storage after which a read is aborted."""

PAUSE = 2
"""Smallest ratio of the pause between two reads to the duration of a read, so that slow reads do not occupy a core."""

MAX_THREADS = 200
"""Largest number of live threads with which a read starts. More threads mean that storage does not answer."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Reading(Generic[Value]):
    """The result of the latest attempt to read a value."""

    value: Value | None
    "The value from the latest successful read, or None before the first successful read."
    trouble: str = ""
    "The reason why the latest attempt failed, or an empty string if it succeeded."
    missing: bool = False
    "True if the latest attempt failed because the object does not exist."


class RefreshingValue(Generic[Value]):
    """A value that is read from storage in a background thread when it is requested and out of date."""

    def __init__(self, what: str, read: Callable[[], Value], every_s: float, limited: bool = True) -> None:
        """Prepare to call `read` at most every `every_s` seconds. `what` describes the read in messages.

        A read has a time limit, unless `limited` is False. Pass False only if `read` always returns, even if storage
        does not answer.
        """
        self._what = what
        self._read = read
        self._every_s = every_s
        self._limited = limited
        self._reading = Reading[Value](None)
        self._future: Future[None] | None = None
        self._due = -math.inf
        self._lock = threading.Lock()

    def get(self, wait_s: float) -> Reading[Value]:
        """Return the newest reading. If a read is due or running, wait up to `wait_s` seconds for it."""
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
            # A failed read of storage only waited, so no pause is needed. A page that failed to render occupied a core.
            pauses = not self._reading.trouble or not self._limited
            self._due = now + max(self._every_s, PAUSE * (now - began) if pauses else 0.0)
