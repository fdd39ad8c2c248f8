"""Measures a step of ResNet-18 on made digits, in Sunspot and in a plain loop.

This module is also the task. TASK_ARGS: `rows`, the number of rows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from scripts.bench.gpu.session import Session, compare, count_launches, in_turns, most_steps
from scripts.bench.in_process import group_of_one, our_steps, plan_steps
from scripts.bench.made_rows import MadeRows
from scripts.bench.plain import plain_steps
from sunspot.settings import Settings
from sunspot.tasks.mnist import build_model, build_optimizer, loss, schedule
from sunspot.train.joining import set_tf32

__all__ = ["build_model", "build_optimizer", "find_sources", "loss", "measure", "schedule"]


class Digits(MadeRows):
    """Random images of 28 x 28 pixels with random labels."""

    def make(self, generator: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        images = generator.integers(0, 256, (rows, *self.shape), np.uint8)
        return {"image": images, "label": generator.integers(0, self.classes, rows)}


def find_sources(settings: Settings) -> tuple[Any, None]:
    return Digits(settings.task_args["rows"], (1, 28, 28), 10), None


def measure(session: Session) -> None:
    """Write a table for each batch size. The first way is measured a second time, to show the random variation."""
    set_tf32(allowed=True)  # as in all ways here, and as PyTorch does in convolutions by default
    for batch_rows, steps, turns in ((128, 200, 9), (1024, 60, 9)) if session.on_gpu else ((4, 1, 2),):
        with group_of_one(), tempfile.TemporaryDirectory() as folder:
            args = json.dumps({"rows": batch_rows * most_steps(steps, turns)})
            plan = partial(plan_steps, task=__name__, batch_rows=batch_rows, TASK_ARGS=args, PRECISION="tf32")
            ways: dict[str, Iterator[None]] = {
                "plain": plain_steps(plan(f"{folder}/1"), session.device),
                "plain again": plain_steps(plan(f"{folder}/2"), session.device),
                "Sunspot, `SURVIVORS=off`": our_steps(plan(f"{folder}/3"), False, session.device),
                "Sunspot": our_steps(plan(f"{folder}/4"), True, session.device),
            }
            figures = in_turns(session, ways, steps, turns)
            compare(session, f"ResNet-18, {batch_rows:,} rows, tf32", figures, ("rows/s", batch_rows))
            launches = {name: count_launches(session, ways[name]) for name in figures}
            session.store("launches", launches)
            session.say(
                f"\nlaunches per step: {', '.join(f'{name} {count:.0f}' for name, count in launches.items())}\n"
            )
