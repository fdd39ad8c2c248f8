"""Measures a step of GPT-2 small with its real vocabulary, in Sunspot and in plain loops, eager and compiled.

This module is also the task. TASK_ARGS: `rows`, and the sizes of the model.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from scripts.bench.gpu.session import Session, compare, in_turns, most_steps
from scripts.bench.in_process import group_of_one, our_steps, plan_steps
from scripts.bench.made_rows import MadeRows
from scripts.bench.plain import plain_steps
from sunspot.data.source import Batch
from sunspot.settings import Settings
from sunspot.tasks.gpt import GPT, build_optimizer, loss
from sunspot.tasks.images import schedule
from sunspot.train.joining import set_tf32

__all__ = ["build_model", "build_optimizer", "find_sources", "loss", "measure", "schedule"]

SMALL = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304, "batch": 32}
"""GPT-2 small. The vocabulary is padded to a multiple of 128, as in nanoGPT."""

TINY = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 128, "batch": 4}
"""The sizes on a CPU."""


class Tokens(MadeRows):
    """Rows of random tokens. Each has one token more than the model sees."""

    def make(self, generator: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        return {"text": generator.integers(0, self.classes, (rows, *self.shape), np.int32)}


def find_sources(settings: Settings) -> tuple[Any, None]:
    args = settings.task_args
    return Tokens(args["rows"], (args["context"] + 1,), args["vocabulary"]), None


def build_model(settings: Settings, source: Any) -> torch.nn.Module:
    args = settings.task_args
    return GPT(source.classes, args["layers"], args["width"], args["heads"], args["context"], tied=True)


def measure(session: Session) -> None:
    """Write a table of tokens per second, and the share of the measured matrix rate.

    "plain, mean" computes one mean over all tokens, and no accuracy, as other trainers of GPT-2 do.
    """
    set_tf32(allowed=False)
    peak = matrix_rate(session)
    sizes = SMALL if session.on_gpu else TINY
    steps, turns = (10, 7) if session.on_gpu else (2, 2)
    rows, tokens = sizes["batch"], sizes["batch"] * sizes["context"]
    with group_of_one(), tempfile.TemporaryDirectory() as folder:
        args = json.dumps({**sizes, "rows": rows * most_steps(steps, turns)})
        plan = partial(plan_steps, task=__name__, batch_rows=rows, TASK_ARGS=args, PRECISION="bf16")
        device = session.device
        ways: dict[str, Iterator[None]] = {
            "plain": plain_steps(plan(f"{folder}/1"), device),
            "Sunspot": our_steps(plan(f"{folder}/2"), True, device),
            "plain, mean": plain_steps(plan(f"{folder}/3"), device, mean_loss),
            "plain, mean, compiled": plain_steps(plan(f"{folder}/4"), device, torch.compile(mean_loss, dynamic=False)),
            "Sunspot, `COMPILE=default`": our_steps(plan(f"{folder}/5", COMPILE="default"), True, device),
        }
        if hasattr(functional, "linear_cross_entropy"):  # new in torch 2.15
            ways["plain, `linear_cross_entropy`"] = plain_steps(plan(f"{folder}/6"), device, chunked_loss)
        figures = in_turns(session, ways, steps, turns)
    model = "GPT-2 small" if session.on_gpu else "tiny GPT"
    compare(session, f"{model}, {rows} x {sizes['context']:,} tokens, bf16", figures, ("tokens/s", tokens))
    operations = tokens * operations_per_token(sizes)
    shares = {
        name: operations / median(turn.step_ms for turn in taken) * 1000 / peak for name, taken in figures.items()
    }
    session.store("share of the matrix rate", shares)
    listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    session.say(f"\nshare of the measured matrix rate of {peak / 1e12:.3g} TFLOP/s: {listed}")


def mean_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of all tokens."""
    text = batch["text"].long()
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def chunked_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the same mean without the scores of all tokens at once, which saves memory."""
    assert isinstance(model, GPT)
    text = batch["text"].long()
    stream = model.byte(text[:, :-1]) + model.position.weight
    for block in model.blocks:
        stream = block(stream)
    rows, weight = model.norm(stream).flatten(0, 1), model.head.weight
    rounded = torch.get_autocast_dtype(rows.device.type)  # autocast does not round the operands of this function
    options = torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(rows.to(rounded), weight.to(rounded), text[:, 1:].flatten(), options=options)


def operations_per_token(sizes: dict[str, int]) -> int:
    """Return the operations for a token in both passes (Chowdhery et al., PaLM, 2022, appendix B).

    A weight takes 6 operations, and attention takes 12 x layers x width x context operations.
    """
    layers, width = sizes["layers"], sizes["width"]
    weights = 12 * layers * width**2 + sizes["vocabulary"] * width
    return 6 * weights + 12 * layers * width * sizes["context"]


def matrix_rate(session: Session) -> float:
    """Return the operations per second of a square product in bf16: the median of ten after three warm-ups."""
    n = 8192 if session.on_gpu else 64
    left, right = torch.randn(2, n, n, device=session.device, dtype=torch.bfloat16)
    times = []
    for _ in range(13):
        began = time.perf_counter()
        left @ right
        session.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * n**3 / median(times[3:])
