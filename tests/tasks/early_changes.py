"""A loop whose steps change more than the weights. The loop fails in a step that the test chooses.

TASK_ARGS: `way` names the state that a step changes besides the weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from sunspot.data.source import Batch, Source
from sunspot.settings import Settings
from sunspot.tasks import TrainingRun

broken_off_at: set[int] = set()
"""Step in which the last `backward` raises an error once."""


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.student, self.head = nn.Linear(8, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("table", torch.zeros(0), persistent=way == "state that grows")
        self.way = way

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for taught, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.way == "teacher":
                    taught.lerp_(weight, 0.1)
                elif self.way == "teacher by .data":
                    taught.data = taught.data.lerp(weight, 0.1)
            if self.way == "weights":
                self.student.weight.clamp_(-0.3, 0.3)
            elif self.way == "weights by .data":
                self.student.weight.data.mul_(0.99)
            elif self.way in ("table", "state that grows"):
                self.table = torch.zeros(len(self.table) + 1)
        told: torch.Tensor = self.head(self.student(rows) - self.teacher(rows))
        return told


def build_model(settings: Settings, source: Source) -> nn.Module:
    return Model(settings.task_args["way"])


def build_optimizer(model: Model, settings: Settings) -> Any:
    if settings.task_args["way"] == "optimizers":
        return {name: torch.optim.Adam(getattr(model, name).parameters(), 0.01) for name in ("student", "head")}
    return torch.optim.Adam(model.parameters(), 0.01)


def train(run: TrainingRun) -> None:
    model = run.model
    for batch in run.batches():
        if model.way == "weights of one step" and run.position + 1 in broken_off_at:
            with torch.no_grad():
                model.student.weight.add_(0.1)
        for turn in ("student", "head") if model.way == "optimizers" else ("",):
            losses = measure(model, batch)
            if turn != "student" and run.position + 1 in broken_off_at:
                broken_off_at.clear()
                raise RuntimeError("Connection closed by peer")
            (losses.sum() * run.weight).backward()
            (run.optimizer[turn] if turn else run.optimizer).step()
            run.optimizer.zero_grad()
        run.log({"loss": losses})
        run.step()


def measure(model: nn.Module, batch: Batch) -> torch.Tensor:
    told = model(batch["image"].flatten(1)[:, 200:208].float() / 255)
    return nn.functional.cross_entropy(told, batch["label"].long() % 2, reduction="none")
