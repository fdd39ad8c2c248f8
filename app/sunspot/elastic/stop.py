"""Requests to stop: from a signal to the driver, the stop marker in storage, or the caller."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from sunspot.background import Background
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.errors import EndAtOnceError, SunspotError, TerminatedError
from sunspot.run import Run
from sunspot.run.requests import stop_requested

STOP_CHECK_EVERY_S = 1.0
"""Seconds between two checks for SIGTERM: a stopped Ray job has RAY_JOB_STOP_WAIT_TIME_S left to save."""

MARKER_READ_EVERY_S = 5.0
"""Seconds between two checks for the stop marker: each is a request to storage."""

INTERRUPTED = (
    "interrupted: it saves and ends, and the same command goes on from there; Ctrl-C again ends it at once, unsaved"
)


class StopRequest:
    """The request that the run stops, with its reason; falsy when nothing is asked."""

    def __init__(self) -> None:
        self.marked = False
        "`sunspot stop` left its marker: later starts may not train either."
        self.terminated = False
        "This process got SIGTERM: a later start resumes the run."
        self.interrupted = False
        "It got SIGINT (Ctrl-C): likewise."

    def __bool__(self) -> bool:
        return self.marked or self.terminated or self.interrupted

    def raise_signal(self, kept: str, job: str) -> None:
        """Raise, once all is saved, what a signal asked for: the run is stopped; `kept` says what is there.

        A cluster's `job` has failed instead: its operator starts it again, elsewhere.
        """
        if self.interrupted:
            raise KeyboardInterrupt(f"interrupted: {kept}")
        if self.terminated:
            raise (SunspotError if job else TerminatedError)(f"told to end by SIGTERM: {kept}")


@contextmanager
def watch_stop(run: Run, control: ControlClient, stop_request: StopRequest) -> Iterator[None]:
    """Watch for SIGTERM, SIGINT and the stop marker while the context lasts, and ask the workers to stop.

    A second SIGINT raises `EndAtOnceError`.
    """
    read, told = 0.0, False

    def check() -> None:
        nonlocal read, told
        if time.monotonic() - read >= MARKER_READ_EVERY_S:
            read = time.monotonic()
            stop_request.marked = stop_request.marked or stop_requested(run)
        if stop_request.interrupted and not told:
            told = True
            print(INTERRUPTED, flush=True)
        if stop_request.terminated and not told:
            told = True
            print("told to end by SIGTERM: it saves, and ends", flush=True)
        if stop_request:
            control.tell(ControlChannel.request_stop)

    def terminate(number: int, frame: FrameType | None) -> None:
        stop_request.terminated = True  # and no more: a signal may interrupt anything

    def interrupt(number: int, frame: FrameType | None) -> None:
        if stop_request.interrupted:
            raise EndAtOnceError
        stop_request.interrupted = True

    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {signal.SIGTERM: terminate, signal.SIGINT: interrupt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with Background(STOP_CHECK_EVERY_S, check):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
