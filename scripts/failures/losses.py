"""Injects losses for the failure benchmark. Nodes are removed with or without notice, and come back."""

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
    """The loss of a node."""

    at_s: float
    "The time of the loss, in seconds since all workers trained."
    kind: str
    "The kind of loss: `reclaim` with notice, or `kill` without."
    node: str


def schedule(seed: int, every_s: float, nodes: Sequence[str]) -> Iterator[Loss]:
    """Yield losses endlessly, on average `every_s` seconds apart. One of every two losses comes with notice."""
    chance = random.Random(seed)
    at_s = 0.0
    while True:
        for kind in chance.sample(["reclaim", "kill"], 2):
            at_s += every_s * chance.uniform(0.5, 1.5)
            yield Loss(at_s, kind, nodes[chance.randrange(len(nodes))])


@contextmanager
def injected(
    losses: Iterator[Loss], record: list[tuple[float, str, str]], commands: dict[str, str], away_s: float, began: float
) -> Iterator[Future[None]]:
    """Inject the losses in a thread inside the context. Each node comes back after `away_s`, before the next loss.

    `began` is the time at which all workers trained. The seconds since then, the kind and the node of each loss are
    added to `record`. The future is done early if a user's command fails, and the end of the context raises its error.
    """
    stop = Event()

    def inject() -> None:
        for loss in losses:
            if stop.wait(max(0.0, began + loss.at_s - time.time())):
                return
            print(f"== {time.strftime('%H:%M:%S')} {loss.kind} {loss.node}", flush=True)
            record.append((round(time.time() - began, 1), loss.kind, loss.node))
            finish(begin(commands[loss.kind], loss.node))
            stop.wait(away_s)
            finish(begin(commands["add"], loss.node))

    injecting = start_thread(inject, "losses")
    try:
        yield injecting
    finally:
        stop.set()
        injecting.result()
