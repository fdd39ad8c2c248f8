"""Rows from S3 into torch batches: `LOADER=ray` beside what others read with, each in turn in a process of its own.

All read the same pictures once from the same server, shuffled in their own way, into normalized batches; those with a
format of their own read a copy in it. The clock starts after WARM_UP rows. `make readers` installs LitData and MosaicML
Streaming; a way whose package is missing is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from scripts.bench.ways import Figures
from sunspot.data.image_table import SAMPLE, open_images
from sunspot.data.order import Steps
from sunspot.data.source import DataPlan, read_rows, rows_in
from sunspot.tasks.images import normalize

ROUNDS = 3
COPIES = 20
"""Of the bundled digits."""

WARM_UP = 20_000
FILES, ROW_GROUP = 8, 2048
CHUNK_BYTES = 16 << 20
"""Of LitData's and Streaming's files: as large as a file of Parquet."""

BATCH = 128
SHUFFLED = 2048
"""Rows among which Ray Data shuffles."""

WORKERS = 2
"""Of a DataLoader."""

BUCKET = "bench"
OURS, RAY_DATA = "Sunspot, `LOADER=ray`", "Ray Data, `read_parquet`, `map_batches`, `iter_torch_batches`"
READERS = {
    OURS: "ours",
    RAY_DATA: "ray_data",
    f"DataLoader, {WORKERS} workers, a row group at a time by pyarrow": "torch_data",
    f"LitData, {WORKERS} workers, its own format": "litdata",
    f"MosaicML Streaming, {WORKERS} workers, its own format": "streaming",
}


def measure() -> list[tuple[float, float]]:
    """Rows a second, (Ray Data, ours), in turns."""
    figures = measure_ways(OURS, RAY_DATA)
    return [(theirs[0], ours[0]) for theirs, ours in zip(figures[RAY_DATA], figures[OURS], strict=True)]


def measure_ways(*names: str) -> Figures:
    """Rows a second, each way in turns."""
    readers = {name: READERS[name] for name in names or READERS}
    with tempfile.TemporaryDirectory() as folder:
        call("write", "parquet", folder)
        for name, reader in list(readers.items()):
            if reader in WRITERS and call("write", reader, folder) is None:
                print(f"left out: {name}", flush=True)
                del readers[name]
    figures: Figures = {name: [] for name in readers}
    for _ in range(ROUNDS):
        for name, reader in readers.items():
            said = call("read", reader)
            if said:
                figures[name].append((json.loads(said.splitlines()[-1]),))
    return {name: turns for name, turns in figures.items() if turns}


def call(*words: str) -> str | None:
    """What this module prints in a process of its own; None, and why on stdout, when it fails."""
    path = [f"{sys.prefix}/readers", *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "scripts.bench.ingest", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(words)}: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return None
    return done.stdout


def main(act: str, way: str, folder: str = "") -> None:
    """Write the rows in a way's format, or read them and print the figures."""
    if act == "write":
        WRITERS[way](f"{folder}/{way}", *pictures())
        upload(f"{folder}/{way}", way)
        return
    rows, first, began = 0, 0, 0.0
    for images in globals()[way]():
        rows += len(images)
        if not first and rows >= WARM_UP:
            first, began = rows, time.perf_counter()
    seconds = time.perf_counter() - began
    assert rows == COPIES * len(bundled()[1]), f"{rows} rows"
    print((rows - first) / seconds)


# ---------------------------------------------------------------------------------------------------------------- rows


def bundled() -> tuple[np.ndarray, np.ndarray]:
    """The digits' pixels, [n, 28, 28], and labels."""
    source = open_images(str(SAMPLE))
    rows = read_rows(source, 0, rows_in(source))
    return rows["image"][:, 0], rows["label"]


def pictures() -> tuple[np.ndarray, np.ndarray]:
    """Pixels, [n, 28, 28], and labels."""
    images, labels = bundled()
    return np.tile(images, (COPIES, 1, 1)), np.tile(labels, COPIES)


def write_parquet(folder: str, images: np.ndarray, labels: np.ndarray) -> None:
    os.mkdir(folder)
    for number, chosen in enumerate(np.array_split(np.arange(len(labels)), FILES)):
        tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images[chosen])
        table = pa.table({"image": tensors, "label": labels[chosen]})
        pq.write_table(table, f"{folder}/{number}.parquet", row_group_size=ROW_GROUP)


def write_litdata(folder: str, images: np.ndarray, labels: np.ndarray) -> None:
    from litdata.streaming import Cache  # type: ignore[import-not-found]

    os.mkdir(folder)
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


def upload(folder: str, name: str) -> None:
    """Put the files of a folder into the bucket."""
    import boto3

    client = boto3.client("s3")
    for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        client.upload_file(str(file), BUCKET, f"ingest/{name}/{file.relative_to(folder)}")


# ------------------------------------------------------------------------------------------------------------- readers


def ours() -> Iterator[torch.Tensor]:
    """The batches of a training run with one worker, normalized as by its task."""
    import ray.train

    from sunspot.data.ray_loader import RayLoader, StepStreams

    start_ray()
    source = open_images(f"s3://{BUCKET}/ingest/parquet")
    steps = Steps(rows_in(source), BATCH)
    [shard] = StepStreams(DataPlan(source, None, steps, 0), steps.per_epoch, lambda: 0).configure({"train": None}, 1)
    with patch.object(ray.train, "get_dataset_shard", shard.get):
        loader = RayLoader(steps, 1, 0, torch.device("cpu"), has_test=False)
    for batch in loader.train(1, 0, steps.per_epoch):
        yield normalize(batch["image"])


def ray_data() -> Iterator[torch.Tensor]:
    """As in Ray's guides: files in random order, batches through a function, and rows shuffled among some of them."""
    import ray.data

    def prepare(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"image": batch["image"][:, None].astype(np.float32) / 127.5 - 1, "label": batch["label"]}

    start_ray()
    rows = ray.data.read_parquet(f"{BUCKET}/ingest/parquet", filesystem=s3(), shuffle="files").map_batches(prepare)
    options: dict[str, Any] = {"prefetch_batches": 4, "local_shuffle_buffer_size": SHUFFLED}
    for batch in rows.iter_torch_batches(batch_size=BATCH, **options):
        yield batch["image"]


class RowGroups(IterableDataset[dict[str, torch.Tensor]]):
    """Batches of the rows of each group in turn, each worker with groups of its own."""

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
    """A DataLoader with workers."""
    for batch in DataLoader(RowGroups(), batch_size=None, num_workers=WORKERS, multiprocessing_context="spawn"):
        yield normalize(batch["image"][:, None])


def litdata() -> Iterator[torch.Tensor]:
    """LitData's own dataset and loader."""
    from litdata import StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found]

    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    with tempfile.TemporaryDirectory() as cache:
        rows = StreamingDataset(f"s3://{BUCKET}/ingest/litdata", cache_dir=cache, shuffle=True, storage_options=options)
        for batch in StreamingDataLoader(rows, batch_size=BATCH, num_workers=WORKERS):
            yield normalize(batch["image"][:, None])


def streaming() -> Iterator[torch.Tensor]:
    """MosaicML's own dataset, in a DataLoader."""
    from streaming import StreamingDataset

    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    with tempfile.TemporaryDirectory() as cache:
        place = {"remote": f"s3://{BUCKET}/ingest/streaming", "local": cache}
        rows = StreamingDataset(**place, shuffle=True, batch_size=BATCH)
        for batch in DataLoader(rows, batch_size=BATCH, num_workers=WORKERS):
            yield normalize(batch["image"][:, None])


def start_ray() -> None:
    """Ray with all processors."""
    import logging

    import ray

    from sunspot.ray_session import RAY_ENVIRONMENT

    os.environ.update(RAY_ENVIRONMENT)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def s3() -> pyarrow.fs.S3FileSystem:
    """The server of the AWS environment."""
    return pyarrow.fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"])


if __name__ == "__main__":
    main(*sys.argv[1:])
