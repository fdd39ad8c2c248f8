"""A task so small that only the loop counts: one linear layer, on rows that are made from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from scripts.bench.made_rows import MadeRows
from sunspot.data.source import Batch
from sunspot.settings import Settings

ROWS = 1 << 18
"""Number of rows. No benchmark reaches the end of an epoch, where a run evaluates, saves and reports."""

FEATURES = 10


class Points(MadeRows):
    """Points with a label that depends on the sum of their features."""

    def make(self, generator: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        features = generator.standard_normal((rows, FEATURES)).astype(np.float32)
        return {"features": features, "label": (features.sum(1) > 0).astype(np.int64)}


def find_sources(settings: Settings) -> tuple[Any, None]:
    return Points(ROWS, (FEATURES,), 2), None


def build_model(settings: Settings, source: Any) -> torch.nn.Module:
    return torch.nn.Linear(FEATURES, source.classes)


def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    return functional.cross_entropy(model(batch["features"]), batch["label"], reduction="none"), {}
