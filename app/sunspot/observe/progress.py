"""Progress on the driver's terminal: a bar, or plain lines when it is not a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from sunspot.formatting import visible
from sunspot.observe.output import log_only
from sunspot.run.history import in_digits, measured

PROGRESS_EVERY_S = 1.0
"""Seconds between two updates."""

PLAIN_EVERY_S = 10.0
"""Seconds between two plain lines, besides one at the end of each epoch."""


@contextmanager
def shown_progress(control: Any, total_steps: int, steps_per_epoch: int) -> Iterator[None]:
    """Show, while the context lasts, what rank 0 sends to the control channel."""
    closing = threading.Event()
    screen = _Terminal(total_steps, steps_per_epoch) if sys.stdout.isatty() else _Lines(total_steps, steps_per_epoch)
    thread = threading.Thread(target=_watch, args=(control, screen, closing), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join(timeout=10)


def _watch(control: Any, screen: _Lines, closing: threading.Event) -> None:
    last_time = False
    while not last_time:
        last_time = closing.wait(PROGRESS_EVERY_S)
        try:
            state, records, lines = ray.get(control.fetch.remote(), timeout=5)
        except Exception:  # a display must never end a run
            continue
        for text in lines:
            screen.print(text)
        for record in records:
            screen.record(record)
        if lines:  # of a lost rank, say: the state is from before
            screen.skip(state)
        elif state:
            screen.state(state)
    screen.close()


class _Lines:
    """Plain lines, for logs."""

    def __init__(self, total_steps: int, steps_per_epoch: int) -> None:
        self._total, self._per_epoch = total_steps, steps_per_epoch
        self._printed = time.monotonic()
        self._shown: dict[str, Any] = {}
        self._first: dict[str, Any] = {}
        "The first state of the worker group, from which its rate counts."

    def record(self, record: dict[str, Any]) -> None:
        if record["step"] % self._per_epoch == 0 or record["step"] == self._total:
            self.print(epoch_line(record))

    def state(self, state: dict[str, Any]) -> None:
        if state != self._shown and time.monotonic() - self._printed >= PLAIN_EVERY_S:
            self._shown = state
            self.print(self.describe(state))

    def skip(self, state: dict[str, Any]) -> None:
        """Do not show this state any more."""
        self._shown = state

    def close(self) -> None:
        """Nothing is open."""

    def describe(self, state: dict[str, Any]) -> str:
        """One line: step, loss, steps per second, time left, last checkpoint; or what is done in place of steps."""
        if state.get("doing"):
            return f"step {state['step']}/{self._total}  {state['doing']}"
        loss = "" if state["loss"] is None else f"  loss {state['loss']:.4f}"
        text = f"step {state['step']}/{self._total}{loss}"
        if not self._first or state.get("attempt") != self._first.get("attempt"):
            self._first = state
        elif state["step"] > self._first["step"]:
            per_step = (state["time"] - self._first["time"]) / (state["step"] - self._first["step"])
            left = per_step * (self._total - state["step"])
            text += f"  {1 / per_step:.1f} steps/s  {int(left // 60)}:{int(left % 60):02d} left"
        return f"{text}  checkpoint at {state['committed']}"

    def print(self, text: str) -> None:
        """One line for the user."""
        print(visible(text), flush=True)
        self._printed = time.monotonic()


class _Terminal(_Lines):
    """A bar, with the lines of the epochs above it."""

    def __init__(self, total_steps: int, steps_per_epoch: int) -> None:
        super().__init__(total_steps, steps_per_epoch)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        # On the terminal alone: a bar does not belong in a log.
        self._ship = log_only()
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), console=Console(file=sys.__stdout__))
        self._task = self._bar.add_task("starting the workers", total=total_steps)
        self._bar.start()

    def state(self, state: dict[str, Any]) -> None:
        self._bar.update(self._task, completed=state["step"], description=self.describe(state))

    def close(self) -> None:
        self._bar.stop()

    def print(self, text: str) -> None:
        self._bar.console.print(visible(text), highlight=False, markup=False)
        self._ship(text + "\n")


def epoch_line(record: dict[str, Any]) -> str:
    """One line: the record at the end of an epoch."""
    numbers = [f"{name} {in_digits(value)}" for name, value in measured(record).items()]
    return f"epoch {record['epoch']}  step {record['step']}  {'  '.join(numbers)}  {record['rows_per_s']:.0f} rows/s"
