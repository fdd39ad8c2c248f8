"""Runs Sunspot itself for the benchmarks."""

import io
import logging
import os
from collections.abc import Sequence
from contextlib import redirect_stdout

import ray
import torch

from sunspot.data.source import Batch, Source, read_rows, rows_in
from sunspot.plan import make_plan
from sunspot.ray_session import RAY_ENVIRONMENT, start_local_ray
from sunspot.run import Claimant, open_run
from sunspot.run.history import read_journal
from sunspot.run.identity import record_identity
from sunspot.run.owner import new_owner
from sunspot.run.requests import StopRequest
from sunspot.settings import IDENTITY, Settings
from sunspot.tasks import load_task
from sunspot.train.driver import identify_rows
from sunspot.train.trainer import fit

WARM_UP_S = 3.0
"""Seconds at the beginning of a run that are not measured: cuDNN chooses kernels, and torch.compile compiles."""


def load_rows(source: Source) -> Batch:
    """Return all rows of a source as a tensor for each column. The column `row` has the ids of the rows."""
    return {name: torch.from_numpy(column) for name, column in read_rows(source, 0, rows_in(source)).items()}


def start_ray() -> None:
    """Start Ray quietly on all of this machine's CPUs, unless it is running already."""
    os.environ.update(RAY_ENVIRONMENT)
    if not ray.is_initialized():
        start_local_ray(log_to_driver=False, logging_level=logging.ERROR)


def train_ms(settings: Settings) -> float:
    """Train a run to its end and return the milliseconds per step, including all other work of the loop."""
    start_ray()
    plan = make_plan(settings, load_task(settings))
    run = open_run(settings.storage_path, settings.run_name)
    record_identity(run, settings.environment(), IDENTITY, identify_rows(plan))
    with redirect_stdout(io.StringIO()):
        fit(plan, Claimant(run, new_owner("")), StopRequest())
    records = [record for record in read_journal(run, "metrics") if "rows_per_s" in record]
    return step_ms([(record["step"], record["time"]) for record in records])


def step_ms(marks: Sequence[tuple[int, float]]) -> float:
    """Return the milliseconds per step after the warm-up. A mark is a step and the time at which it was complete."""
    warm = [mark for mark in marks if mark[1] > marks[0][1] + WARM_UP_S]
    (first, began), (last, ended) = (warm or marks)[0], marks[-1]
    return 1000 * (ended - began) / (last - first)
