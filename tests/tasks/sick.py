"""The slow task with one node that takes much longer for each step.

TASK_ARGS names a `folder`. If it has a file `sick`, the file contains the node's ID.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

import ray
import torch

from sunspot.data.source import Batch, Source
from sunspot.settings import Settings
from tests.tasks import tiny
from tests.tasks.slow import build_optimizer, schedule
from tests.tasks.slow import loss as slow_loss

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]

sick = Path()
"""The file with Ray's id of the node, if it exists."""


def build_model(settings: Settings, source: Source) -> torch.nn.Module:
    global sick
    sick = Path(settings.task_args["folder"], "sick")
    return tiny.build_model(settings, source)


@functools.cache
def own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    if sick.exists() and sick.read_text() == own_node():
        time.sleep(0.1)
    return slow_loss(model, batch)
