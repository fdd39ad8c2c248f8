"""A task so small that only the loop counts: one linear layer, on rows that are made from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from sunspot.data.source import Batch
from sunspot.settings import Settings

ROWS = 1 << 17
GROUP_ROWS = 8192
FEATURES = 10


@dataclass(frozen=True)
class MadeRows:
    """Rows with a label that depends on the sum of their features."""

    classes: int = 2
    fingerprint: str = "made"

    @property
    def row_groups(self) -> tuple[int, ...]:
        return (GROUP_ROWS,) * (ROWS // GROUP_ROWS)

    @property
    def shape(self) -> tuple[int, ...]:
        return (FEATURES,)

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        features = np.random.default_rng(group).standard_normal((GROUP_ROWS, FEATURES)).astype(np.float32)
        columns = {"features": features, "label": (features.sum(1) > 0).astype(np.int64)}
        return columns if rows is None else {name: column[rows] for name, column in columns.items()}

    def where(self, group: int, row: int) -> str:
        return f"made row {group * GROUP_ROWS + row}"


def find_sources(settings: Settings) -> tuple[Any, None]:
    return MadeRows(), None


def build_model(settings: Settings, source: Any) -> torch.nn.Module:
    return torch.nn.Linear(FEATURES, source.classes)


def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    return functional.cross_entropy(model(batch["features"]), batch["label"], reduction="none"), {}
