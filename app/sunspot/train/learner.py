"""What computes a step on one worker: its model, its optimizer and its rows, and where it stands among the others."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from sunspot.checkpoint.average import WeightAverage
from sunspot.data.order import MIN_ROWS
from sunspot.data.ray_loader import RayLoader
from sunspot.data.source import Batch, Source
from sunspot.data.torch_loader import FullBatchLoader, TorchLoader
from sunspot.plan import Plan
from sunspot.tasks import Task


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's place in its group."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    "Carries decisions and numbers between workers, on the CPU and apart from the gradients."


@dataclass
class Learner:
    """All that computes a step on this worker; nothing of what is saved or reported."""

    plan: Plan
    task: Task
    place: WorkerPlace
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage
    loader: TorchLoader | RayLoader | FullBatchLoader

    def __post_init__(self) -> None:
        self.padding_batch = make_padding_batch(self.plan.source, self.place.device)


def make_padding_batch(source: Source, device: torch.device) -> Batch:
    """Make the batch of a worker whose share of a step is empty: the first row, as often as batch norm needs it."""
    group = next(number for number, rows in enumerate(source.row_groups) if rows)
    first = np.zeros(MIN_ROWS, np.int64)
    columns = {"row": first, **source.read(group, first)}
    return {name: torch.from_numpy(values).to(device) for name, values in columns.items()}
