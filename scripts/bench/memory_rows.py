"""Measures batches of rows in memory, compared with a DataLoader over torchvision's MNIST with its transforms."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from itertools import count

import torch
from torch.utils.data import DataLoader

from scripts.bench import Figures, in_turns
from scripts.bench.product import load_rows
from sunspot.data.mnist import open_mnist
from sunspot.data.order import Order, Steps
from sunspot.data.source import rows_in
from sunspot.data.torch_loader import Selections
from sunspot.tasks.images import normalize

PAIRS = 5
BATCH = 128


def measure(most: int) -> Figures:
    """Return the rows per second in one epoch."""
    from torchvision import datasets, transforms

    root = os.environ.get("SUNSPOT_DATA_ROOT", "data")
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    theirs = DataLoader(datasets.MNIST(root, transform=transform), BATCH, shuffle=True)
    source, _ = open_mnist(root)
    rows, steps = load_rows(source), Steps(rows_in(source), BATCH)
    order = Order((steps.rows,), 0, steps.rows)
    epochs = count(1)

    def ours() -> Iterator[torch.Tensor]:
        epoch = next(epochs)
        permutation = order.permutation(epoch, order.windows(epoch)[0])
        shares = [permutation[slice(*steps.share(step, 1, 0))] for step in range(steps.per_epoch)]
        for batch in DataLoader(Selections(rows, shares), batch_size=None):
            yield normalize(batch["image"])

    ways = {
        "Sunspot": lambda: rate(ours()),
        "DataLoader over torchvision's MNIST": lambda: rate(images for images, _ in theirs),
    }
    return in_turns(ways, PAIRS)


def rate(batches: Iterable[torch.Tensor]) -> float:
    """Return the rows per second."""
    began = time.perf_counter()
    rows = sum(len(images) for images in batches)
    return rows / (time.perf_counter() - began)
