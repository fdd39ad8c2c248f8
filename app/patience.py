"""How storage that refuses is met: again and again, ever more slowly, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from app.errors import StorageError

BACKOFF_S = (1, 2, 4, 8, 16, 30)
"""Pauses between tries; the last one is repeated until the limit."""

Result = TypeVar("Result")


def pause_after(tries: int) -> float:
    """Seconds to wait after so many tries, from 0."""
    return BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]


def with_patience(act: Callable[[], Result], limit_s: float, what: str, warn: Callable[[str], Any]) -> Result:
    """The result of `act`, tried again while storage refuses; raises `StorageError` after about `limit_s` seconds."""
    began = time.monotonic()
    tries = 0
    while True:
        try:
            return act()
        except StorageError as error:
            failing_for = time.monotonic() - began
            if failing_for >= limit_s:
                raise StorageError(
                    f"{what}: storage has refused for {failing_for:.0f} s "
                    f"(SUNSPOT_STORAGE_TIMEOUT_S={limit_s:g}): {error}"
                ) from error
            warn(f"{what}: {error}; trying again in {pause_after(tries):g} s")
        time.sleep(pause_after(tries))
        tries += 1
