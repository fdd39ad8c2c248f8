"""A language model on bytes with its own loop for torchrun. tests/tasks/nano.py is the same script as a task."""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from sunspot.tasks.gpt import GPT

CONTEXT = 32
BATCH, ACCUMULATION = 16, 2
STEPS, WARMUP = 200, 10
PEAK = 1e-3
SAVE_EVERY = 50


def build_model() -> nn.Module:
    return GPT(vocabulary=256, layers=2, width=32, heads=2, context=CONTEXT, tied=True)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)


def rate(step: int) -> float:
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return PEAK * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def mean_loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    scores = model(text[:, :-1])
    return functional.cross_entropy(scores.transpose(1, 2), text[:, 1:])


def load_text(path: str) -> torch.Tensor:
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


def draw_batch(text: torch.Tensor) -> torch.Tensor:
    starts = torch.randint(len(text) - CONTEXT, (BATCH,)).tolist()
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, path: str) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)


def train(path: str, folder: str, steps: int) -> float:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text, saved = load_text(path), os.path.join(folder, "checkpoint.pt")
    model = build_model()
    optimizer = build_optimizer(model)
    first = 0
    if os.path.exists(saved):
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    model = DistributedDataParallel(model)
    torch.manual_seed(first + rank)
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for part in range(ACCUMULATION):
            model.require_backward_grad_sync = part == ACCUMULATION - 1
            loss = mean_loss(model, draw_batch(text))
            (loss / ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % SAVE_EVERY == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
            save(model.module, optimizer, step + 1, saved)
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], STEPS)
