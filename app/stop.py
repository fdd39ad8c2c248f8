"""The wish that a run stops: from its marker in storage, or because the driver itself was told to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from app.background import Background
from app.layout import Run
from app.layout.status import stop_requested

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the signal: a stopped Ray job has RAY_JOB_STOP_WAIT_TIME_S left to save."""

READ_EVERY_S = 5.0
"""Seconds between two looks at the marker: each is a request to storage."""


class StopWish:
    """Why the run is to stop; both are false while it is not."""

    def __init__(self) -> None:
        self.marked = False
        "`sunspot stop` left its marker: no later start may train either."
        self.terminated = False
        "This process got SIGTERM: a later start goes on."

    def __bool__(self) -> bool:
        return self.marked or self.terminated


@contextmanager
def watched_stop(run: Run, board: Any, wish: StopWish) -> Iterator[None]:
    """Fill in `wish` and tell the workers, over the board, as soon as there is one: they save and return."""
    read = 0.0

    def look() -> None:
        nonlocal read
        if time.monotonic() - read >= READ_EVERY_S:
            read = time.monotonic()
            wish.marked = wish.marked or stop_requested(run)
        if wish:
            board.stop.remote()

    def terminate(number: int, frame: FrameType | None) -> None:
        wish.terminated = True  # no more: a signal may come in the middle of anything

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if in_main_thread else None
    try:
        with Background(LOOK_EVERY_S, look):
            yield
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
