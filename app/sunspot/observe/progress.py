"""Shows progress on the driver's terminal as a bar, or as plain lines if the output is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from sunspot.background import Background
from sunspot.formatting import visible
from sunspot.metric_names import MetricRecord
from sunspot.run.history import format_metric, model_metrics
from sunspot.run.logs import log_shipper

PROGRESS_EVERY_S = 1.0
"""Seconds between updates."""

PLAIN_EVERY_S = 10.0
"""Seconds between plain lines, besides the line at the end of each epoch."""


@dataclass(frozen=True)
class Progress:
    """The progress of a worker group."""

    attempt: int = 0
    "The number of the attempt, or 0 if no group has taken a step yet."
    step: int = 0
    loss: float | None = None
    committed: int = 0
    "The step of the newest checkpoint."
    time: float = 0.0
    "The time at which the step was taken, in seconds since the Unix epoch."
    doing: str = ""
    "An activity other than training steps, such as an evaluation, or an empty string."


class News(NamedTuple):
    """Updates for the terminal."""

    progress: Progress
    metrics: list[MetricRecord]
    "New records of the metric history."
    lines: list[str]
    ended: str = ""
    "Why the newest worker group ended. Empty once the next group begins."


@contextmanager
def shown_progress(fetch: Callable[[], News], total_steps: int, steps_per_epoch: int) -> Iterator[None]:
    """Context manager that shows the updates returned by `fetch`."""
    screen = Bar(total_steps, steps_per_epoch) if sys.stdout.isatty() else Lines(total_steps, steps_per_epoch)

    def update() -> None:
        with suppress(Exception):  # a display error must never end a run
            screen.update(fetch())

    try:
        with Background(PROGRESS_EVERY_S, update):
            yield
    finally:
        with suppress(OSError):  # the terminal might be closed
            screen.close()


class Lines:
    """Shows progress as plain lines, for logs."""

    def __init__(self, total_steps: int, steps_per_epoch: int) -> None:
        self._total, self._per_epoch = total_steps, steps_per_epoch
        self._printed = time.monotonic()
        self._shown = Progress()
        self._first = Progress()
        "The first progress of the worker group, from which the speed is computed."

    def update(self, news: News) -> None:
        """Show the updates."""
        for text in news.lines:
            self.print(text)
        for record in news.metrics:
            self.record(record)
        if news.lines:  # for example, about a lost rank, which makes the progress outdated
            self._shown = news.progress
        elif news.progress.attempt:
            self.show(news.progress)

    def record(self, record: MetricRecord) -> None:
        if record["step"] % self._per_epoch == 0 or record["step"] == self._total:
            self.print(epoch_line(record))

    def show(self, progress: Progress) -> None:
        if progress != self._shown and time.monotonic() - self._printed >= PLAIN_EVERY_S:
            self._shown = progress
            self.print(self.describe(progress))

    def close(self) -> None:
        """Do nothing, because no bar is open."""

    def describe(self, progress: Progress) -> str:
        """Return a line with the step, loss, speed, time left and last checkpoint, or with the current activity."""
        if progress.doing:
            return f"step {progress.step}/{self._total}  {progress.doing}"
        loss = "" if progress.loss is None else f"  loss {progress.loss:.4f}"
        text = f"step {progress.step}/{self._total}{loss}"
        if progress.attempt != self._first.attempt:
            self._first = progress
        elif progress.step > self._first.step:
            per_step = (progress.time - self._first.time) / (progress.step - self._first.step)
            left = per_step * (self._total - progress.step)
            text += f"  {1 / per_step:.1f} steps/s  {int(left // 60)}:{int(left % 60):02d} left"
        return f"{text}  checkpoint at {progress.committed}"

    def print(self, text: str) -> None:
        """Print a line for the user."""
        print(visible(text), flush=True)
        self._printed = time.monotonic()


class Bar(Lines):
    """Shows progress as a bar, with other lines above it."""

    def __init__(self, total_steps: int, steps_per_epoch: int) -> None:
        super().__init__(total_steps, steps_per_epoch)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        # The bar is only shown on the terminal, because it does not belong in a log.
        self._ship = log_shipper()
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), console=Console(file=sys.__stdout__))
        self._task = self._bar.add_task("starting the workers", total=total_steps)
        self._bar.start()

    def show(self, progress: Progress) -> None:
        self._bar.update(self._task, completed=progress.step, description=self.describe(progress))

    def close(self) -> None:
        self._bar.stop()

    def print(self, text: str) -> None:
        self._bar.console.print(visible(text), highlight=False, markup=False)
        self._ship(text + "\n")


def epoch_line(record: MetricRecord) -> str:
    """Return a line for the record at the end of an epoch."""
    numbers = [f"{name} {format_metric(value)}" for name, value in model_metrics(record).items()]
    return f"epoch {record['epoch']}  step {record['step']}  {'  '.join(numbers)}  {record['rows_per_s']:.0f} rows/s"
