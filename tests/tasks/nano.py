"""A language model on bytes with its own loop. This is tests/tasks/nano_script.py as a task."""

import math

import torch
from torch import nn
from torch.nn import functional

from sunspot.data.source import Source
from sunspot.data.text import open_text
from sunspot.settings import Settings
from sunspot.tasks import TrainingRun
from sunspot.tasks.gpt import GPT

CONTEXT = 32
STEPS, WARMUP = 200, 10
PEAK = 1e-3


def find_sources(settings: Settings) -> tuple[Source, Source | None]:
    return open_text(settings.dataset, CONTEXT)


def build_model(settings: Settings, source: Source) -> nn.Module:
    return GPT(vocabulary=256, layers=2, width=32, heads=2, context=CONTEXT, tied=True)


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)


def rate(step: int) -> float:
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return PEAK * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def mean_loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    scores = model(text[:, :-1])
    return functional.cross_entropy(scores.transpose(1, 2), text[:, 1:])


def train(run: TrainingRun) -> None:
    model, optimizer = run.model, run.optimizer
    for batch in run.batches():
        for group in optimizer.param_groups:
            group["lr"] = rate(run.position)
        for part in run.parts(batch):
            loss = mean_loss(model, part["text"].long())
            (loss * len(part["text"]) * run.weight).backward()
            run.log({"loss": loss})
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.step()
