"""Writes predictions for all rows of a dataset as Parquet.

Ray Data reads the rows, and a pool of workers predicts them.

    <output>/
        _predictions.json           identifies the checkpoint and the data
        rows-00000000-00002048.parquet
                                    predictions for rows 0 to 2047, with the columns `row` (int64), `label` (if the
                                    data has labels), `prediction` (int64), `class` (the class name, if classes have
                                    names) and `probabilities` (list of float). Without classes, `prediction` is the
                                    model's output.

A file is either complete or missing, so a killed command can be run again and writes only the missing files.
"""

import io
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray.data

from sunspot.background import Timer, map_parallel
from sunspot.checkpoint.parts import weights_digest
from sunspot.data.order import MIN_ROWS
from sunspot.data.source import PredictionSettings, Source, notes_on, read_rows, rows_in
from sunspot.data.task_rows import open_rows_of_task, open_without_test_share
from sunspot.errors import (
    ConflictError,
    DamageError,
    GaveUpError,
    NotFoundError,
    SettingsError,
    SunspotError,
    find_in,
    shorten,
)
from sunspot.predict.actor import absolute_path, wants_gpu
from sunspot.predict.classifier import Classifier, ModelCheckpoint, print_warnings
from sunspot.ray_internals.output import hide_warning_of_restarts
from sunspot.ray_session import ray_session
from sunspot.run import to_json
from sunspot.run.checkpoints import CheckpointDirectory
from sunspot.run.identity import read_identity
from sunspot.run.objects import parse, read_content, read_if_exists
from sunspot.settings import Settings, differences
from sunspot.storage import open_storage
from sunspot.storage.base import Storage
from sunspot.tasks import load_predict, load_task

IDENTITY = "_predictions.json"
"""Name of the file that identifies the checkpoint and the data of the predictions."""

PART_ROWS = 2048
"""Largest number of rows in a file. If the command is killed, only a few files have to be repeated."""

PART_BYTES = 32 << 20
"""Largest size in bytes of the images and probabilities for a file. Ray Data splits blocks above 128 MiB."""

STALLED_S = 600
"""Seconds without progress after which prediction fails. If that happens, storage hangs or the cluster lacks a core for
a worker or a reader."""

PROGRESS_EVERY_S = 10
"""Seconds between progress lines."""


class OutputFile(NamedTuple):
    """A file with the predictions of rows `first` .. `last` - 1."""

    first: int
    last: int

    @property
    def key(self) -> str:
        """The file's name in the output folder."""
        return f"rows-{self.first:08d}-{self.last:08d}.parquet"


def read_part(part: dict[str, np.ndarray], source: Source) -> dict[str, np.ndarray]:
    """Return the rows to predict for one output file. Runs in a Ray Data task."""
    return read_rows(source, int(part["first"][0]), int(part["last"][0]))


class PartPredictor(Classifier):
    """A worker in the pool. It predicts the rows of one output file at a time."""

    def __call__(self, rows: dict[str, np.ndarray]) -> pa.Table:
        predictions, probabilities = self.predict_rows(rows)
        columns: dict[str, Any] = {name: to_lists(rows[name]) for name in ("row", "label") if name in rows}
        columns["prediction"] = to_lists(predictions)
        if self.class_names:
            columns["class"] = [self.data.name(label) for label in predictions.tolist()]
        return pa.table(columns | ({"probabilities": to_lists(probabilities)} if self.classes else {}))


def to_lists(values: np.ndarray) -> pa.Array:
    """Return an array as a column. The column contains numbers, or a flat list per row if the rows are arrays."""
    return pa.array(values if values.ndim == 1 else list(values.reshape(len(values), -1)))


def predict_dataset(
    settings: Settings, model: ModelCheckpoint, split: str | None, output: str, workers: int = 0
) -> dict[str, Any]:
    """Predict the rows of DATASET that are missing in `output`, and return a summary of all predictions in `output`.

    `split` is train or test. The default is test, or train if there are no held-out rows. If `workers` is 0, there is
    one worker per GPU, or per core if Ray has no GPU. The summary contains `checkpoint`, `step`, `dataset`, `split`,
    `rows`, `accuracy` (None if the rows have no labels), `output`, `parts` (the number of files), and `kept` (how many
    of the files already existed).

    Raises `ConflictError` if `output` contains other predictions, and `GaveUpError` if there is no progress. Also
    raises `SettingsError`, `DataError` or `DamageError`.
    """
    print_warnings(model.warnings)
    load_predict(model.settings)  # fails early if the task has no predict
    source, split = choose_rows(settings, model, split)
    storage = open_storage(absolute_path(output, name=False))
    parts = split_rows(rows_in(source), math.prod(source.shape) + 4 * model.data.classes)
    kept = open_output(storage, model, source, parts)
    missing = [part for part in parts if part not in kept]
    if missing:
        with ray_session():
            hide_warning_of_restarts()
            predictions = predict_parts(source, model, settings, missing, workers)
            write_parts(storage, predictions, missing, rows_in(source))
    labeled, correct = count_correct(storage, parts) if model.data.classes else (False, 0)
    return {
        "checkpoint": model.checkpoint.name,
        "step": model.checkpoint.step,
        "dataset": settings.dataset,
        "split": split,
        "rows": rows_in(source),
        "accuracy": correct / rows_in(source) if labeled else None,
        "output": storage.locate("").rstrip("/"),
        "parts": len(parts),
        "kept": len(kept),
    }


def choose_rows(settings: Settings, model: ModelCheckpoint, split: str | None) -> tuple[Source, str]:
    """Return the rows to predict and the name of their split. Raises `SettingsError` if no rows fit the model."""
    task: Any = load_task(model.settings)
    chosen = {name: getattr(settings, name) for name in ("dataset", "test_dataset", "data_root")}
    opened = PredictionSettings.of(model.settings.model_copy(update=chosen), model.data)
    train, test = open_without_test_share(opened, task)
    if opened.test_share and rows_in(train) > MIN_ROWS:
        parts = open_rows_of_task(opened, task)
        if trained_on(model, parts[0]):
            train, test = parts
    split = split or ("test" if test else "train")
    source = test if split == "test" else train
    if source is None:
        raise SettingsError(f"--split test: {settings.dataset} has no held-out rows; use --split train")
    print_warnings(notes_on(source))
    if source.shape != model.data.shape:
        raise SettingsError(
            f"{source.where(0, 0)} has the shape {list(source.shape)} (channels, height, width), but the model of "
            f"{model.checkpoint.name} needs {list(model.data.shape)}"
        )
    return source, split


def trained_on(model: ModelCheckpoint, rows: Source) -> bool:
    """Return True if the model's run is known to have trained on exactly these rows."""
    if isinstance(model.run, CheckpointDirectory):
        return False
    identity = read_if_exists(lambda: read_identity(model.run))
    return bool(identity and identity.rows and identity.rows.data == rows.fingerprint)


def split_rows(rows: int, row_bytes: int) -> list[OutputFile]:
    """Return the files for `rows` rows, each within PART_ROWS and PART_BYTES."""
    each = max(1, min(PART_ROWS, PART_BYTES // row_bytes))
    return [OutputFile(first, min(first + each, rows)) for first in range(0, rows, each)]


def open_output(
    storage: Storage, model: ModelCheckpoint, source: Source, parts: Sequence[OutputFile]
) -> set[OutputFile]:
    """Claim the output folder if it is empty, and return those of the `parts` that it already contains.

    Raises `ConflictError` if the existing predictions are for another checkpoint or other rows, and `SettingsError` if
    the folder contains anything else.
    """
    present = {entry.key for entry in storage.list("")}
    if present and IDENTITY not in present:
        raise SettingsError(f"{storage.locate('')} is not empty, but contains no predictions; choose another --output")
    identity = {
        "checkpoint": model.checkpoint.name,
        "weights": weights_digest(model.checkpoint),
        "data": source.fingerprint,
        "rows": str(rows_in(source)),
        "rows of a file": str(parts[0].last),
    }
    if not storage.create(IDENTITY, to_json(identity)):
        before: dict[str, str] = parse(dict[str, str], read_content(storage, IDENTITY), storage.locate(IDENTITY))
        changed = "\n".join(f"  {line}" for line in differences(before, identity))
        if changed:
            raise ConflictError(
                f"{storage.locate('')} contains predictions other than the requested ones (existing -> requested):\n"
                f"{changed}\nchoose another --output, or use the --checkpoint of the existing predictions"
            )
    return {part for part in parts if part.key in present}


def predict_parts(
    source: Source, model: ModelCheckpoint, settings: Settings, parts: Sequence[OutputFile], workers: int
) -> ray.data.Dataset:
    """Return a lazy dataset of predictions, with one block per output file, in any order."""
    cluster = ray.cluster_resources()
    gpu = wants_gpu(settings.use_gpu)
    cores = cluster.get("CPU", 0.0)
    workers = min(len(parts), workers or max(1, int(cluster["GPU"] if gpu else cores)))
    # Cores are left for readers. Otherwise, readers and workers would wait for each other forever.
    each = min(1.0, math.floor(100 * cores / (workers + 1)) / 100)
    index = ray.data.from_items([part._asdict() for part in parts], override_num_blocks=len(parts))
    index.context.execution_no_progress_timeout_s = STALLED_S
    index.context.enable_progress_bars = False
    index.context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = index.map_batches(read_part, fn_kwargs={"source": source}, batch_size=None, num_cpus=each)
    return rows.map_batches(
        PartPredictor,
        fn_constructor_kwargs={**model.arguments, "folder": os.getcwd(), "use_gpu": "true" if gpu else "false"},
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=each,
        num_gpus=float(gpu),
    )


def write_parts(storage: Storage, predictions: ray.data.Dataset, parts: Sequence[OutputFile], rows: int) -> None:
    """Write each file as soon as its rows are predicted, and print the progress."""
    missing = set(parts)
    timer = Timer()
    for table in _tables(predictions):
        part = OutputFile(table["row"][0].as_py(), table["row"][-1].as_py() + 1)
        if part not in missing or len(table) != part.last - part.first:
            raise SunspotError(f"{part.key}: Ray Data returned {len(table)} rows that were not requested")
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd")
        storage.write(part.key, buffer.getvalue())
        missing.remove(part)
        if timer.due(PROGRESS_EVERY_S):
            left = sum(part.last - part.first for part in missing)
            print(f"  {rows - left} of {rows} rows predicted", file=sys.stderr, flush=True)


def _tables(predictions: ray.data.Dataset) -> Iterator[pa.Table]:
    """Yield the dataset's blocks. Errors in Ray are raised as `SunspotError`."""
    from ray.data.exceptions import ExecutionTimeoutError

    try:
        yield from predictions.iter_batches(batch_size=None, batch_format="pyarrow")
    except ExecutionTimeoutError as error:
        raise GaveUpError(
            f"no row was read or predicted for {STALLED_S} s; check that Ray has free cores, and run the same command "
            "to resume"
        ) from error
    except ray.exceptions.RayError as error:
        raise find_in(error) or SunspotError(f"a model worker failed: {shorten(error)}") from error


def count_correct(storage: Storage, parts: Sequence[OutputFile]) -> tuple[bool, int]:
    """Return whether the rows have labels, and the number of correct predictions.

    Raises `DamageError` if a file is damaged.
    """

    def count(part: OutputFile) -> int | None:
        try:
            table = pq.read_table(io.BytesIO(storage.read(part.key)))
            if table["row"].to_numpy().tolist() != list(range(*part)):
                raise ValueError("the row numbers do not match the range in the file's name")
            if "label" not in table.column_names:
                return None
            return int(pc.sum(pc.equal(table["label"], table["prediction"])).as_py())
        except NotFoundError as error:
            raise SunspotError(
                f"{storage.locate(part.key)} was deleted in the meantime; run the same command to write it again"
            ) from error
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise DamageError(
                f"{storage.locate(part.key)} cannot be used: {shorten(error)}; delete it, and run the same command to "
                "write it again"
            ) from error

    counts = map_parallel(count, parts)
    return None not in counts, sum(count or 0 for count in counts)
