"""Tries again what storage has refused, until it has failed for too long."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from sunspot.errors import StorageError
from sunspot.storage.deadline import ProgressDeadline

log = logging.getLogger(__name__)

BACKOFF_S = (1, 2, 4, 8, 16, 30)
"""Pauses between tries; the last one repeats until the limit."""

Result = TypeVar("Result")


class Outage:
    """Storage that fails: since when, how many tries have met it, and whether there should be another."""

    def __init__(self) -> None:
        self.tries = 0
        "That have failed."
        self.over = False
        "Whether it has lasted as long as it may, or the last try made no progress for so long."
        self._since = 0.0

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
        deadline = ProgressDeadline(max(limit_s - self.seconds, limit_s / 10), what)
        try:
            return deadline.run(work)
        except Exception:
            if not self.tries:
                self._since = began if deadline.passed else time.monotonic()
            self.tries += 1
            self.over = deadline.passed or self.seconds >= limit_s
            raise


def retry_storage(act: Callable[[], Result], limit_s: float, what: str) -> Result:
    """The result of `act`, retried while storage fails, in a thread of its own.

    Raises `StorageError` when storage has failed for `limit_s` seconds, or makes no progress for so long.
    """
    outage = Outage()
    while True:
        try:
            return outage.attempt(act, limit_s, what)
        except StorageError as error:
            if outage.over:
                raise StorageError(
                    f"{what}: storage has failed for {outage.seconds:.0f} s "
                    f"(SUNSPOT_STORAGE_TIMEOUT_S={limit_s:g}): {error}"
                ) from error
            log.warning(f"{what}: {error}; trying again in {outage.pause_s:g} s")
        time.sleep(outage.pause_s)


def pause_after(tries: int) -> float:
    """Seconds to wait after that many tries, counted from 0."""
    return BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
