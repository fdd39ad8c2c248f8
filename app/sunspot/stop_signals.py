"""Signals that ask a process to end: SIGTERM of service managers and batch systems, SIGHUP of a closed terminal."""

import signal
from types import FrameType

from sunspot.errors import TerminatedError


def end_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to end, without SIGHUP where it is ignored, as under `nohup`."""
    return [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]


def raise_end_signals() -> None:
    """Have SIGTERM and SIGHUP raise `TerminatedError` in the main thread, as SIGINT raises `KeyboardInterrupt`.

    Only the first of them does. Senders often repeat a signal, and the process then records how it ended.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in end_signals():
            signal.signal(each, signal.SIG_IGN)
        raise TerminatedError(f"ended by {signal.Signals(number).name}; the same command goes on", number)

    for number in end_signals():
        signal.signal(number, end)
