"""Measures how long a checkpoint stalls the training thread, compared with PyTorch's asynchronous save.

Both save the same state to the same local disk, with the same passes between the save and the next optimizer step.
"""

from __future__ import annotations

import tempfile
import time
from statistics import median
from typing import Any

import torch

from scripts.bench.checkpoint import Dcp, Ours, Way, nothing
from scripts.bench.gpu.session import Session
from scripts.bench.in_process import group_of_one
from sunspot.checkpoint import SavedObjects

SAVES = 4
"""Number of saves measured for each way on a GPU. One more save comes before them, because it allocates memory."""

WORK_S = 0.15
"""Seconds of forward and backward passes between a save and the next optimizer step."""


def measure(session: Session) -> None:
    """Write a line for each way, while time is left."""
    width, layers = (4096, 8) if session.on_gpu else (64, 2)
    most = SAVES if session.on_gpu else 1
    training = Training(session, width, layers)
    session.say(f"| {12 * layers * width**2 / 1e9:.2g} GB of weights and averages | stall, ms | stored after, s |")
    session.say("|---|---|---|")
    with group_of_one(), tempfile.TemporaryDirectory() as folder:  # dcp.async_save needs a group
        ours = Ours(folder, SavedObjects(training.model, training.optimizer))
        ways: dict[str, Way] = {"Sunspot": ours, "`dcp.async_save`, written by a thread": Dcp("THREAD")}
        for name, way in ways.items():
            saves: list[tuple[float, float]] = []
            while len(saves) <= most and session.left_s > 3 * max((save[1] for save in saves), default=0):
                saves.append(training.save(way, len(saves) + 1))
            session.store(name, {"stall_and_end_s": saves})
            measured = saves[1:]
            if measured:
                stall_s, end_s = (median(save[side] for save in measured) for side in (0, 1))
                session.say(f"| {name} | {1000 * stall_s:.1f} | {end_s:.2f} |")
            else:
                session.say(f"| {name} | left out for lack of time | |")


class Training:
    """Training of square layers."""

    def __init__(self, session: Session, width: int, layers: int) -> None:
        linear = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        self.model = torch.nn.Sequential(*linear).to(session.device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self._rows = torch.randn(64, width, device=session.device)
        self._session = session
        self._finish_step(nothing)

    def save(self, way: Way, step: int) -> tuple[float, float]:
        """Return the seconds for which a save stalls the training, and the seconds until it is stored."""
        self._pass()
        undisturbed_s = self._finish_step(nothing)
        state: dict[str, Any] = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        began = time.perf_counter()
        copied, stored = way.save(step, state)
        stall_s = time.perf_counter() - began
        self._pass()
        stall_s += self._finish_step(copied) - undisturbed_s
        stored()
        return stall_s, time.perf_counter() - began

    def _pass(self) -> None:
        """Compute for WORK_S seconds, as the passes of a large model do."""
        began = time.perf_counter()
        while True:
            self.model(self._rows).square().mean().backward()
            self._session.synchronize()
            if time.perf_counter() - began > WORK_S:
                return

    def _finish_step(self, wait: Any) -> float:
        """Return the seconds of an optimizer step that first waits until the state may change."""
        began = time.perf_counter()
        wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._session.synchronize()
        return time.perf_counter() - began
