"""Which rows the final model of each contender has learned from, counted by the code of `sunspot audit`.

The loops of scripts/bench write `rows/START-after-PARENT-at-STEP/STEP-RANK.json` beside their checkpoints: START is of
the workers, which went on from the checkpoint at STEP that the workers of PARENT had saved. In it are the number of
`rows` of the data, the `time`, and of each step `taken` its epoch, its number, and the ids of this worker's rows. A
replica of TorchFT writes those of all replicas, after each step, into a file that is the same for all.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import NamedTuple

from scripts.subjects import Stock, Subject, Torchft, begins_anew
from sunspot.background import map_parallel
from sunspot.errors import NotFoundError
from sunspot.storage import Storage, open_storage
from sunspot.storage.base import Entry
from sunspot.submitter.proof import Epoch, EpochLayout, count_rows, prove

NAME = re.compile(r".*/rows/(?P<start>[0-9.]+)-after-(?P<parent>none|[0-9.]+)-at-(?P<at>\d+)/\d+-\d+\.json")


class Taken(NamedTuple):
    """A step that a worker took."""

    epoch: int
    step: int
    rows: list[int]


class Told(NamedTuple):
    """What a worker wrote."""

    rows: int
    time: float
    taken: list[Taken]


def rows_of(subject: Subject) -> list[Epoch]:
    """What the model of a contender has learned from, each epoch for itself; nothing before its first checkpoint."""
    if isinstance(subject, Stock):
        of_loop = of_replicas if isinstance(subject, Torchft) else of_checkpoints
        return of_loop(open_storage(subject.storage_path), subject.job)
    with suppress(NotFoundError):
        return prove(subject.run).epochs
    return []


def of_checkpoints(storage: Storage, folder: str) -> list[Epoch]:
    """Of a loop that goes back to its newest checkpoint: the steps that led to the newest one."""
    found = _find(storage, folder)
    starts = {name["start"]: (name["parent"], int(name["at"])) for _, name in found}
    upto: dict[str, float] = {}
    start, until = max(starts, key=float, default="none"), float("inf")
    while start in starts:
        upto[start] = until
        start, until = starts[start]
    files = [(entry, upto[name["start"]]) for entry, name in found if name["start"] in upto]
    told = _read(storage, [entry for entry, _ in files])
    return count(
        [step for one, (_, most) in zip(told, files, strict=True) for step in one.taken if step.step <= most], told
    )


def of_replicas(storage: Storage, folder: str) -> list[Epoch]:
    """Of replicas that go on without the lost one: all steps, unless all of them begin anew."""
    told = _read(storage, [entry for entry, _ in _find(storage, folder)])
    kept: list[Taken] = []
    reached = 0
    for step in (step for one in sorted(told, key=lambda one: one.time) for step in one.taken):
        if begins_anew(step.step, reached):
            kept, reached = [earlier for earlier in kept if earlier.step < step.step], step.step
        kept.append(step)
        reached = max(reached, step.step)
    return count(kept, told)


def count(steps: list[Taken], told: list[Told]) -> list[Epoch]:
    """What each epoch consumed; the newest one counts as unfinished."""
    import pyarrow as pa

    if not steps:
        return []
    end = max(step.epoch for step in steps)
    # Two steps an epoch: count_rows takes it for finished once the second one is reached.
    numbers = [2 * step.epoch - 1 for step in steps for _ in step.rows]
    table = pa.table({"step": pa.array(numbers, pa.int32()), "row": [row for step in steps for row in step.rows]})
    return list(count_rows([table], EpochLayout(told[0].rows, 2, told[0].rows), 2 * end - 1))


def _find(storage: Storage, folder: str) -> list[tuple[Entry, re.Match[str]]]:
    return [(entry, name) for entry in storage.list(f"{folder}/rows") if (name := NAME.fullmatch(entry.key))]


def _read(storage: Storage, entries: list[Entry]) -> list[Told]:
    texts = [json.loads(text) for text in map_parallel(lambda entry: storage.read(entry.key), entries)]
    return [Told(text["rows"], text["time"], [Taken(*step) for step in text["taken"]]) for text in texts]
