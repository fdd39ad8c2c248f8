"""Runs a job's workers as threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from sunspot.data.shared_rows import LocalWorkers, load_shared
from sunspot.data.source import Batch

MEET_WITHIN_S = 60.0


def load_in_threads(sources: list[Any], nodes: Sequence[str]) -> list[list[Batch]]:
    """Return the rows that workers on these nodes load from the sources with LOADER=torch, by rank."""
    barrier, said = Barrier(len(nodes), timeout=MEET_WITHIN_S), [None] * len(nodes)

    def load(rank: int) -> list[Batch]:
        def gather(mine: Any) -> list[Any]:
            said[rank] = mine
            barrier.wait()
            everyone = list(said)
            barrier.wait()
            return everyone

        def finish(act: Callable[[], None]) -> None:
            act()
            barrier.wait()

        return load_shared(sources, LocalWorkers(rank, len(nodes), nodes[rank], gather, finish))

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(load, range(len(nodes))))
