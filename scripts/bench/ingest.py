"""Measures how fast rows from S3 become torch batches with `LOADER=ray` and other readers, each in its own process.

All readers read the same images once from the same server into normalized batches, shuffled in their own way. Readers
with their own format read a copy in that format. The clock starts after WARM_UP rows. `make readers` installs LitData
and MosaicML Streaming. A reader whose package is missing is left out.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from scripts.bench import Figures, in_turns
from scripts.bench.product import start_ray
from sunspot.data.image_table import SAMPLE, open_images
from sunspot.data.order import Steps
from sunspot.data.source import DataPlan, read_rows, rows_in
from sunspot.plan import READING_TASK_CPUS
from sunspot.tasks.images import normalize

ROUNDS = 3
COPIES = 20
"""Number of copies of the bundled digits."""

WARM_UP = 20_000
FILES, ROW_GROUP = 8, 2048
CHUNK_BYTES = 16 << 20
"""Size of LitData's and Streaming's files, which is about that of the Parquet files."""

BATCH = 128
SHUFFLED = 2048
"""Number of rows in Ray Data's shuffle buffer."""

WORKERS = 2
"""Number of workers in a DataLoader."""

BUCKET = "bench"
READERS = {
    "Sunspot, `LOADER=ray`": "ours",
    "Ray Data, `read_parquet`, `map_batches`, `iter_torch_batches`": "ray_data",
    f"DataLoader, {WORKERS} workers, a row group at a time by pyarrow": "torch_data",
    f"LitData, {WORKERS} workers, its own format": "litdata",
    f"MosaicML Streaming, {WORKERS} workers, its own format": "streaming",
}


def measure(most: int) -> Figures:
    """Return the rows per second of each reader."""
    readers = dict(islice(READERS.items(), most))
    call("write", "parquet")
    for name, reader in list(readers.items()):
        if reader in WRITERS and not call("write", reader):
            del readers[name]
    return in_turns({name: partial(call, "read", reader) for name, reader in readers.items()}, ROUNDS)


def call(act: str, way: str) -> float:
    """Run this module in another process and return the number that it prints.

    If a format cannot be written, print the reason on stderr and return 0.
    """
    path = [f"{sys.prefix}/readers", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "scripts.bench.ingest", act, way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        why = f"{act} {way}: {done.stderr.strip().splitlines()[-1]}"
        if act == "read" or way == "parquet":
            raise RuntimeError(why)
        print(f"left out: {why}", file=sys.stderr)
        return 0.0
    return float(done.stdout.splitlines()[-1])


def main(act: str, way: str) -> None:
    """Write the rows to the bucket in a reader's format and print their number, or read them and print the speed."""
    images, labels = digits()
    if act == "write":
        with tempfile.TemporaryDirectory() as folder:
            WRITERS[way](folder, np.tile(images, (COPIES, 1, 1)), np.tile(labels, COPIES))
            pyarrow.fs.copy_files(folder, f"{BUCKET}/ingest/{way}", destination_filesystem=s3())
        print(COPIES * len(labels))
        return
    rows = first = 0
    began = 0.0
    for batch in globals()[way]():
        rows += len(batch)
        if not first and rows >= WARM_UP:
            first, began = rows, time.perf_counter()
    seconds = time.perf_counter() - began
    assert rows == COPIES * len(labels), f"{rows} rows"
    print((rows - first) / seconds)


# ---------------------------------------------------------------------------------------------------------------- rows


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels, [n, 28, 28], and the labels of the bundled digits."""
    source = open_images(str(SAMPLE))
    rows = read_rows(source, 0, rows_in(source))
    return rows["image"][:, 0], rows["label"]


def write_parquet(folder: str, images: np.ndarray, labels: np.ndarray) -> None:
    for number, chosen in enumerate(np.array_split(np.arange(len(labels)), FILES)):
        tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images[chosen])
        table = pa.table({"image": tensors, "label": labels[chosen]})
        pq.write_table(table, f"{folder}/{number}.parquet", row_group_size=ROW_GROUP)


def write_litdata(folder: str, images: np.ndarray, labels: np.ndarray) -> None:
    from litdata.streaming import Cache  # type: ignore[import-not-found]

    cache = Cache(folder, chunk_bytes=CHUNK_BYTES)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        cache[number] = {"image": torch.from_numpy(image), "label": int(label)}
    cache.done()
    cache.merge()


def write_streaming(folder: str, images: np.ndarray, labels: np.ndarray) -> None:
    from streaming import MDSWriter  # type: ignore[import-not-found]

    columns = {"image": "ndarray:uint8:28,28", "label": "int"}
    with MDSWriter(out=folder, columns=columns, size_limit=CHUNK_BYTES) as out:
        for image, label in zip(images, labels, strict=True):
            out.write({"image": image, "label": int(label)})


WRITERS = {"parquet": write_parquet, "litdata": write_litdata, "streaming": write_streaming}


# ------------------------------------------------------------------------------------------------------------- readers


def ours() -> Iterator[torch.Tensor]:
    """Yield the batches of a training run with one worker, normalized as its task does."""
    import ray.train

    from sunspot.data.ray_loader import RayLoader, StepStreams

    start_ray()
    source = open_images(f"s3://{BUCKET}/ingest/parquet")
    steps = Steps(rows_in(source), BATCH)
    data = DataPlan(source, None, steps, 0)
    [shard] = StepStreams(data, steps.per_epoch, lambda: 0, READING_TASK_CPUS).configure({"train": None}, 1)
    with patch.object(ray.train, "get_dataset_shard", shard.get):
        loader = RayLoader(steps, 1, 0, torch.device("cpu"), has_test=False)
    for batch in loader.train(1, 0, steps.per_epoch):
        yield normalize(batch["image"])


def ray_data() -> Iterator[torch.Tensor]:
    """Yield batches as in Ray's guides: files in random order, a function for each batch, and a shuffle buffer."""
    import ray.data

    def prepare(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"image": batch["image"][:, None].astype(np.float32) / 127.5 - 1, "label": batch["label"]}

    start_ray()
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = ray.data.read_parquet(f"{BUCKET}/ingest/parquet", filesystem=s3(), shuffle="files").map_batches(prepare)
    options: dict[str, Any] = {"prefetch_batches": 4, "local_shuffle_buffer_size": SHUFFLED}
    for batch in rows.iter_torch_batches(batch_size=BATCH, **options):
        yield batch["image"]


class RowGroups(IterableDataset[dict[str, torch.Tensor]]):
    """Yields batches from one row group after another. Each worker has its own groups."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        assert info
        files = [pq.ParquetFile(s3().open_input_file(f"{BUCKET}/ingest/parquet/{n}.parquet")) for n in range(FILES)]
        groups = [(file, group) for file in files for group in range(file.metadata.num_row_groups)]
        order = np.random.default_rng(0).permutation(len(groups))[info.id :: info.num_workers]
        for file, group in (groups[place] for place in order):
            table = file.read_row_group(group).combine_chunks()
            images = torch.from_numpy(table["image"].chunk(0).to_numpy_ndarray())
            labels = torch.from_numpy(table["label"].to_numpy())
            for chosen in torch.randperm(len(labels)).split(BATCH):
                yield {"image": images[chosen], "label": labels[chosen]}


def torch_data() -> Iterator[torch.Tensor]:
    """Yield the batches of a DataLoader with workers."""
    for batch in DataLoader(RowGroups(), batch_size=None, num_workers=WORKERS, multiprocessing_context="spawn"):
        yield normalize(batch["image"][:, None])


def litdata() -> Iterator[torch.Tensor]:
    """Yield the batches of LitData's own dataset and loader."""
    from litdata import StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found]

    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    with tempfile.TemporaryDirectory() as cache:
        rows = StreamingDataset(f"s3://{BUCKET}/ingest/litdata", cache_dir=cache, shuffle=True, storage_options=options)
        for batch in StreamingDataLoader(rows, batch_size=BATCH, num_workers=WORKERS):
            yield normalize(batch["image"][:, None])


def streaming() -> Iterator[torch.Tensor]:
    """Yield the batches of MosaicML's own dataset in a DataLoader."""
    from streaming import StreamingDataset

    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    with tempfile.TemporaryDirectory() as cache:
        place = {"remote": f"s3://{BUCKET}/ingest/streaming", "local": cache}
        rows = StreamingDataset(**place, shuffle=True, batch_size=BATCH)
        for batch in DataLoader(rows, batch_size=BATCH, num_workers=WORKERS):
            yield normalize(batch["image"][:, None])


def s3() -> pyarrow.fs.S3FileSystem:
    """Return the file system of the server in the AWS environment."""
    return pyarrow.fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"])


if __name__ == "__main__":
    main(*sys.argv[1:])
