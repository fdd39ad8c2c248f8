"""Writes a run with all data that a report shows, without training."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import numpy as np
from PIL import Image

from sunspot.run import Run
from sunspot.run.incidents import Cause
from sunspot.run.predictions import Example, Predictions, write_shown
from sunspot.run.status import RunState, Status, write_status_as_is
from sunspot.settings import Settings
from tests.harness.runs import begin, commit, report, start, write_receipt

BEGUN = 1_790_000_000.0
"""Start of a synthetic run, in seconds since the epoch."""


def record(step: int, time: float, ranks: int = 2, **fields: Any) -> dict[str, Any]:
    """Return a record of the metric history as `sunspot.observe.metrics` makes it."""
    draw = random.Random(step)
    numbers = [
        {
            "rows": 640,
            "seconds": 5.0,
            "step_time_median_s": 0.3 + 0.02 * rank / ranks + 0.02 * draw.random(),
            "step_time_p95_s": 0.4 + 0.1 * draw.random(),
            "forward_s": 1.1 + 0.3 * (rank == 1),
            "data_wait_s": 0.1 * draw.random(),
            "memory_mib": 900.0 + rank,
        }
        for rank in range(ranks)
    ]
    done = {"step": step, "epoch": (step - 1) // 94 + 1, "steps": 10, "rows": 640 * ranks, "time": time, "seconds": 5.0}
    results = {
        "loss": 2.3 * math.exp(-step / 45) + 0.03 + 0.02 * draw.random(),
        "accuracy": 1 - 0.9 * math.exp(-step / 30),
    }
    speed = {"rows_per_s": 640 * ranks / 5.0, "learning_rate": 0.001, "world_size": ranks, "ranks": numbers}
    return {**done, **results, **speed, **fields}


def attempt_metadata(ranks: int = 2, tier: str = "beginning", **settings: Any) -> dict[str, Any]:
    """Return the metadata of an attempt."""
    environment = Settings(**settings).environment()
    nodes = {str(rank): f"node-{rank}" for rank in range(ranks)}
    versions = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.15.0"}
    return {"world_size": ranks, "nodes": nodes, "tier": tier, "settings": environment, "versions": versions}


def png(label: int, side: int = 28) -> bytes:
    """Return a small image in which the label is recognizable."""
    pixels = np.zeros((side, side), dtype=np.uint8)
    pixels[4 : 6 + 2 * label, 6:12] = 255
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def predictions_of(checkpoint: str, classes: int = 10, image: bytes | None = None, wrong: int = 30) -> Predictions:
    """Return predictions for `200 * classes` rows, of which `wrong` are mistakes."""
    confusion = [[200 if label == said else 0 for said in range(classes)] for label in range(classes)]
    mistakes = []
    for number in range(wrong):
        label, said = number % classes, (number * 3 + 1) % classes
        said = said if said != label else (said + 1) % classes
        confusion[label][label] -= 1
        confusion[label][said] += 1
        mistakes.append(Example(number, label, said, 0.99 - number / 100, png(label) if image is None else image))
    rows = 200 * classes
    return Predictions(
        checkpoint=checkpoint,
        step=188,
        rows=rows,
        accuracy=1 - wrong / rows,
        classes=classes,
        confusion=confusion,
        mistakes=mistakes[:48],
        right=[
            Example(100 + n, n % classes, n % classes, 0.9, png(n % classes) if image is None else image)
            for n in range(20)
        ],
        samples=[Example(n, n % classes, None, None, png(n % classes) if image is None else image) for n in range(20)],
    )


def trained(run: Run, ranks: int = 2) -> Run:
    """Write a run of 188 steps that lost a node at step 100 and continued from its checkpoint at step 94."""
    begin(run, rows=12000, batch=128, steps_per_epoch=94)
    first = start(run, "job", at=BEGUN, **attempt_metadata(ranks))
    write_receipt(run, first, 0, Cause.BEGIN, left=BEGUN, first_step=BEGUN + 12)
    steps = [10 * n for n in range(1, 10)]
    report(
        run,
        first,
        *(record(n, BEGUN + n, ranks) for n in steps),
        record(94, BEGUN + 94, ranks, test_loss=0.4, test_accuracy=0.9),
        record(100, BEGUN + 100, ranks, loss=9.0),
    )
    origin = commit(run, first, 94, loss=0.35, accuracy=0.93, test_loss=0.4, test_accuracy=0.9)
    second = start(run, "job", origin.name, at=BEGUN + 130, **attempt_metadata(ranks, "storage", checkpoint_every_s=30))
    times = {"noticed": BEGUN + 110, "left": BEGUN + 94, "first_step": BEGUN + 145, "last_step": 100}
    write_receipt(run, second, 1, Cause.NODE_LOST, detail="node-1 is gone", worker_seconds_lost=80.0, **times)
    report(
        run,
        second,
        *(record(n, BEGUN + 140 + n - 94, ranks) for n in range(100, 188, 10)),
        record(188, BEGUN + 240, ranks, loss=0.0393, accuracy=0.9917, test_loss=0.0586, test_accuracy=0.9805),
    )
    last = commit(run, second, 188, loss=0.0393, accuracy=0.9917, test_loss=0.0586, test_accuracy=0.9805)
    write_shown(run, predictions_of(last.name))
    ended = Status(
        RunState.SUCCEEDED,
        "job",
        step=188,
        epoch=2,
        total_steps=188,
        steps_per_epoch=94,
        attempt=2,
        world_size=ranks,
        checkpoint=last.name,
        time=BEGUN + 245,
    )
    write_status_as_is(run, ended)
    return run
