"""The regression of `table`, in which a read of rows stalls once in the middle of a run."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sunspot.data.source import Batch, Source
from sunspot.settings import Settings
from tests.tasks import table
from tests.tasks.table import build_model, build_optimizer

__all__ = ["build_model", "build_optimizer", "find_sources", "loss"]

STALL_AT, STALL_S = 40, 60.0
"""Number of the read that stalls, and the maximum seconds that it takes. It occupies one of Ray's CPUs."""


class StallingSource:
    """A source that leaves a file in `folder` for each read."""

    def __init__(self, source: Source, folder: str) -> None:
        self._source, self._folder = source, folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle looks up such names before the source exists
            raise AttributeError(name)
        return getattr(self._source, name)

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        (Path(self._folder) / uuid.uuid4().hex).touch()
        if len(list(Path(self._folder).iterdir())) == STALL_AT:
            time.sleep(STALL_S)
        return self._source.read(group, rows)


def find_sources(settings: Settings) -> tuple[Source, Source | None]:
    source, test = table.find_sources(settings)
    stalling: Any = StallingSource(source, settings.task_args["folder"])
    return stalling, test


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    time.sleep(0.05)  # keeps steps in progress when the read stalls
    return table.loss(model, batch)
