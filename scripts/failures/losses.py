"""The losses of the benchmark of failures: nodes that go, with notice and without, and come back."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Event
from typing import NamedTuple

from scripts.cluster import begin, finish
from sunspot.background import start_thread


class Loss(NamedTuple):
    """A node that goes."""

    at_s: float
    "Seconds since all workers trained."
    kind: str
    "reclaim: with notice; kill: without."
    node: str


def schedule(seed: int, every_s: float, nodes: Sequence[str]) -> Iterator[Loss]:
    """Losses without end, `every_s` seconds apart give or take a half; of each two, one comes with notice."""
    chance, at_s = random.Random(seed), 0.0
    while True:
        for kind in chance.sample(["reclaim", "kill"], 2):
            at_s += every_s * chance.uniform(0.5, 1.5)
            yield Loss(at_s, kind, nodes[chance.randrange(len(nodes))])


@contextmanager
def dealt(
    losses: Iterator[Loss], told: list[tuple[float, str, str]], commands: dict[str, str], away_s: float, began: float
) -> Iterator[Future[None]]:
    """Deal the losses in a thread while the context lasts; each node comes back after `away_s`, before the next goes.

    `began` is when all workers trained; the seconds since, the kind and the node are added to `told`. The future is
    done when a command of the user's has failed, which is raised at the end.
    """
    stop = Event()

    def deal() -> None:
        for loss in losses:
            if stop.wait(max(0.0, began + loss.at_s - time.time())):
                return
            print(f"== {time.strftime('%H:%M:%S')} {loss.kind} {loss.node}", flush=True)
            told.append((round(time.time() - began, 1), loss.kind, loss.node))
            finish(begin(commands[loss.kind], loss.node))
            stop.wait(away_s)
            finish(begin(commands["add"], loss.node))

    dealing = start_thread(deal, "losses")
    try:
        yield dealing
    finally:
        stop.set()
        dealing.result()
