"""Rows from Parquet into torch batches by Ray Data, against a row-by-row pipeline through PIL."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
import torch

from app.data.mnist import open_mnist
from app.data.order import Steps
from app.data.parquet import open_parquet
from app.data.ray_loader import StepStreams
from app.data.source import read_rows, rows_in
from app.tasks.images import normalize

PAIRS = 3
WARM_UP = 60_000
"""Rows before the measurement: one epoch, so that it begins and ends with an epoch of the yardstick."""

ROWS, YARDSTICK_ROWS = 240_000, 60_000
"""Rows of one measurement. An epoch of the yardstick takes a minute."""

FILES = 8
"""Files of the yardstick's data: Ray reads each in its own task."""

BATCH = 128


def measure() -> list[tuple[float, float]]:
    """Rows a second, (row by row, ours), in turns."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        write_data(folder)
        lists, tensors = f"{folder}/lists", f"{folder}/tensors.parquet"
        return [(rate(row_by_row(lists), YARDSTICK_ROWS), rate(ours(tensors), ROWS)) for _ in range(PAIRS)]


def rate(batches: Iterator[torch.Tensor], wanted: int) -> float:
    """Rows a second of float images, over `wanted` rows after the warm-up."""
    rows, first, began = 0, 0, 0.0
    for images in batches:
        rows += len(images)
        if not first and rows >= WARM_UP:
            first, began = rows, time.perf_counter()
        elif first and rows - first >= wanted:
            break
    assert rows - first >= wanted
    return (rows - first) / (time.perf_counter() - began)


def ours(path: str) -> Iterator[torch.Tensor]:
    """The stream of a training run with one worker, normalized as by its task."""
    source = open_parquet(path)
    steps = Steps(rows_in(source), BATCH)
    epochs = 2 * ROWS // steps.rows + 1
    streams = StepStreams(source, None, steps, 0, epochs * steps.per_epoch, lambda: 0)
    [shard] = streams.configure({"train": None}, 1)
    for batch in shard["train"].iter_torch_batches(batch_size=BATCH, prefetch_batches=4):
        yield normalize(batch["image"])


def row_by_row(path: str) -> Iterator[torch.Tensor]:
    """As in tutorials: a map over rows, each image through PIL and torchvision's transforms."""
    from PIL import Image
    from torchvision import transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        image = Image.fromarray(np.array(row["image"], dtype=np.uint8))
        return {"image": transform(image).numpy(), "label": row["label"]}

    while True:
        for batch in ray.data.read_parquet(path).map(prepare).iter_torch_batches(batch_size=BATCH, prefetch_batches=4):
            yield batch["image"]


def write_data(folder: str) -> None:
    """MNIST twice: as lists of lists, and as tensors in row groups."""
    source, _ = open_mnist(os.environ.get("SUNSPOT_DATA_ROOT", "data"))
    rows = read_rows(source, 0, rows_in(source))
    images, labels = rows["image"][:, 0], rows["label"]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    pq.write_table(pa.table({"image": tensors, "label": labels}), f"{folder}/tensors.parquet", row_group_size=2048)
    os.mkdir(f"{folder}/lists")
    for number, chosen in enumerate(np.array_split(np.arange(len(labels)), FILES)):
        lists = pa.array(images[chosen].tolist(), pa.list_(pa.list_(pa.int64())))
        pq.write_table(pa.table({"image": lists, "label": labels[chosen]}), f"{folder}/lists/{number}.parquet")
