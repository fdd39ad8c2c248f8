"""A slow version of the small task that raises a GPU memory error on all nodes except the head."""

from __future__ import annotations

import ray
import torch

from sunspot.data.source import Batch
from tests.tasks import slow
from tests.tasks.tiny import build_model, build_optimizer, schedule

__all__ = ["build_model", "build_optimizer", "loss", "schedule"]

BREAKS_AT = 40
calls = 0


def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    global calls
    calls += 1
    if calls == BREAKS_AT and not on_head():
        error = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        error.error_code = 214  # as set by torch's C++ code
        raise error
    return slow.loss(model, batch)


def on_head() -> bool:
    here = ray.get_runtime_context().get_node_id()
    return any("node:__internal_head__" in node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
