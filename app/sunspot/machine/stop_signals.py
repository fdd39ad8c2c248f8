"""Handles the signals that ask a process to exit: SIGTERM, for example from a service manager, and SIGHUP."""

import signal
from types import FrameType

from sunspot.errors import TerminatedError


def end_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to exit, except those that it ignores, for example under `nohup`."""
    return [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]


def raise_end_signals() -> None:
    """Make SIGTERM and SIGHUP raise `TerminatedError` in the main thread, as SIGINT raises `KeyboardInterrupt`.

    Later signals are ignored, because senders often repeat a signal while the process is recording why it stopped.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in end_signals():
            signal.signal(each, signal.SIG_IGN)
        raise TerminatedError(f"ended by {signal.Signals(number).name}; run the same command to continue", number)

    for number in end_signals():
        signal.signal(number, end)
