"""Batches of rows in memory, against a DataLoader over torchvision's MNIST with its transforms."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from sunspot.data.mnist import open_mnist
from sunspot.data.order import Order, Steps
from sunspot.data.source import rows_in
from sunspot.data.torch_loader import Selections, load_rows
from sunspot.tasks.images import normalize

PAIRS = 5
BATCH = 128


def measure() -> list[tuple[float, float]]:
    """Rows a second of one epoch, (torchvision, ours), alternately."""
    from torchvision import datasets, transforms

    root = os.environ.get("SUNSPOT_DATA_ROOT", "data")
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    theirs = DataLoader(datasets.MNIST(root, transform=transform), BATCH, shuffle=True)
    source, _ = open_mnist(root)
    rows, steps = load_rows(source), Steps(rows_in(source), BATCH)
    order = Order((steps.rows,), 0, steps.rows)

    def ours(epoch: int) -> Iterator[torch.Tensor]:
        permutation = order.permutation(epoch, order.windows(epoch)[0])
        shares = [permutation[slice(*steps.share(step, 1, 0))] for step in range(steps.per_epoch)]
        for batch in DataLoader(Selections(rows, shares), batch_size=None):
            yield normalize(batch["image"])

    return [(rate(images for images, _ in theirs), rate(ours(epoch))) for epoch in range(1, 1 + PAIRS)]


def rate(batches: Iterator[torch.Tensor]) -> float:
    """Rows a second."""
    began = time.perf_counter()
    rows = sum(len(images) for images in batches)
    return rows / (time.perf_counter() - began)
