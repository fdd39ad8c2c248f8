"""Counts the rows that the final model of each contender has learned from, with the code of `sunspot audit`.

The loops in scripts/bench write `rows/START-after-PARENT-at-STEP/STEP-RANK.json` next to their checkpoints. START is a
start of the workers, which continued from the checkpoint at STEP that the workers of PARENT had saved. The file holds
the number of `rows` in the data, the `time`, and for each step `taken` its epoch, its number, and the ids of this
worker's rows. After each step, a replica of TorchFT writes the rows of all replicas into a file with a common name.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import NamedTuple

from scripts.subjects import Stock, Subject, Torchft, starts_over
from sunspot.background import map_parallel
from sunspot.errors import NotFoundError
from sunspot.run.epochs import EpochLayout
from sunspot.storage import Storage, open_storage
from sunspot.storage.base import Entry
from sunspot.submitter.proof import Epoch, count_rows, prove

NAME = re.compile(r".*/rows/(?P<start>[0-9.]+)-after-(?P<parent>none|[0-9.]+)-at-(?P<at>\d+)/\d+-\d+\.json")


class Taken(NamedTuple):
    """A step that a worker took."""

    epoch: int
    step: int
    rows: list[int]


class WorkerRecord(NamedTuple):
    """The content of a file written by a worker."""

    rows: int
    time: float
    taken: list[Taken]


def rows_of(subject: Subject) -> list[Epoch]:
    """Return each epoch's rows that a contender's model learned from, or an empty list before its first checkpoint."""
    if isinstance(subject, Stock):
        of_loop = of_replicas if isinstance(subject, Torchft) else of_checkpoints
        return of_loop(open_storage(subject.storage_path), subject.job)
    with suppress(NotFoundError):
        return prove(subject.run).epochs
    return []


def of_checkpoints(storage: Storage, folder: str) -> list[Epoch]:
    """Return the epochs of a loop that restarts from its newest checkpoint, counting the steps that led to it."""
    found = _find(storage, folder)
    starts = {name["start"]: (name["parent"], int(name["at"])) for _, name in found}
    upto: dict[str, float] = {}
    start, until = max(starts, key=float, default="none"), float("inf")
    while start in starts:
        upto[start] = until
        start, until = starts[start]
    files = [(entry, upto[name["start"]]) for entry, name in found if name["start"] in upto]
    records = _read(storage, [entry for entry, _ in files])
    steps = [
        step for record, (_, most) in zip(records, files, strict=True) for step in record.taken if step.step <= most
    ]
    return count(steps, records)


def of_replicas(storage: Storage, folder: str) -> list[Epoch]:
    """Return the epochs of replicas that continue without the lost ones, counting all steps that were not repeated."""
    records = sorted(_read(storage, [entry for entry, _ in _find(storage, folder)]), key=lambda record: record.time)
    kept: list[Taken] = []
    reached = 0
    for step in (step for record in records for step in record.taken):
        if starts_over(step.step, reached):
            kept = [earlier for earlier in kept if earlier.step < step.step]
            reached = step.step
        kept.append(step)
        reached = max(reached, step.step)
    return count(kept, records)


def count(steps: list[Taken], records: list[WorkerRecord]) -> list[Epoch]:
    """Return the rows that each epoch consumed. The newest epoch counts as unfinished."""
    import pyarrow as pa

    if not steps:
        return []
    end = max(step.epoch for step in steps)
    # Pretend that an epoch has two steps. count_rows considers it finished when the second step is reached.
    numbers = [2 * step.epoch - 1 for step in steps for _ in step.rows]
    table = pa.table({"step": pa.array(numbers, pa.int32()), "row": [row for step in steps for row in step.rows]})
    return list(count_rows([table], EpochLayout(records[0].rows, 2, 1), 2 * end - 1))


def _find(storage: Storage, folder: str) -> list[tuple[Entry, re.Match[str]]]:
    return [(entry, name) for entry in storage.list(f"{folder}/rows") if (name := NAME.fullmatch(entry.key))]


def _read(storage: Storage, entries: list[Entry]) -> list[WorkerRecord]:
    contents = [json.loads(text) for text in map_parallel(lambda entry: storage.read(entry.key), entries)]
    return [WorkerRecord(found["rows"], found["time"], [Taken(*step) for step in found["taken"]]) for found in contents]
