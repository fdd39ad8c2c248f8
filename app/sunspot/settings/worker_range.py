"""The number of training workers. Under PARALLEL=hsdp, the workers form whole replicas of the model."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from sunspot.errors import SettingsError
from sunspot.formatting import plural


class WorkerRange(NamedTuple):
    """The allowed numbers of training workers. `least == most` unless the run is elastic."""

    least: int
    most: int
    multiple: int = 1
    "Number of workers that hold one replica of the model. Every allowed number of workers is a multiple of it."

    @property
    def elastic(self) -> bool:
        return self.least != self.most

    @property
    def replicas(self) -> "WorkerRange":
        """The same range, counted in replicas."""
        return WorkerRange(self.least // self.multiple, self.most // self.multiple)

    def __str__(self) -> str:
        return f"{self.least}..{self.most}" if self.elastic else str(self.least)

    def in_multiples_of(self, number: int) -> "WorkerRange":
        """Return the nearest range whose bounds are multiples of `number`, within this range if possible."""
        most = max(number, self.most - self.most % number)
        least = min(most, self.least + -self.least % number)
        return WorkerRange(least, most, number)

    def fit(self, room: int) -> int:
        """Return the largest number of workers that form whole replicas and exceed neither `most` nor `room`.

        The result can be less than `least`.
        """
        workers = min(self.most, room)
        return workers - workers % self.multiple


def parse_workers(value: Any) -> WorkerRange:
    """Return a number of workers, or a range such as `2..8`. Raises `ValueError` if the value is neither."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", str(value))
    if not match:
        raise ValueError("not a number or a range")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        raise ValueError("out of range")
    return WorkerRange(least, most)


def choose_shard_degree(workers: WorkerRange, given: int, rooms: Iterable[int] = ()) -> int:
    """Return the number of workers that hold one replica of the model under PARALLEL=hsdp.

    `given` is SHARD_DEGREE. If it is 0, the workers of one node hold a replica, and `rooms` contains the number of
    workers that fit on each node. Raises `SettingsError` if the workers cannot form such replicas.
    """
    degree = given
    why = f"SUNSPOT_SHARD_DEGREE={given}"
    if not given:
        sizes = sorted(set(rooms))
        if len(sizes) != 1:
            different = f"the nodes have room for different numbers of workers ({', '.join(map(str, sizes))})"
            raise SettingsError(
                f"SUNSPOT_PARALLEL=hsdp: {different if sizes else 'no node has room for a worker yet'}; set "
                "SUNSPOT_SHARD_DEGREE to the number of workers that hold one replica of the model"
            )
        degree = min(sizes[0], workers.least)
        why = f"each node has room for {plural(sizes[0], 'worker')}"
        if degree == 1 and workers.most > 1:
            alone = why if sizes[0] == 1 else f"SUNSPOT_NUM_WORKERS={workers} allows a single worker"
            raise SettingsError(
                f"SUNSPOT_PARALLEL=hsdp: {alone}, so each worker would hold the whole model; set SUNSPOT_SHARD_DEGREE "
                "to the number of workers that hold one replica, which can span several nodes, or set "
                "SUNSPOT_PARALLEL=ddp"
            )
    nearest = workers.in_multiples_of(degree)
    if str(nearest) != str(workers):
        raise SettingsError(
            f"SUNSPOT_NUM_WORKERS={workers}: {why}, and each replica of the model needs {degree}; use multiples of "
            f"{degree}, such as {nearest}, or set a different SUNSPOT_SHARD_DEGREE"
        )
    return degree
