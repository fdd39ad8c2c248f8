"""Tests that models with unused parameters get the gradients of a single process with all rows."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from sunspot.parallel.collectives import sync_buffers
from sunspot.parallel.data_parallel import DataParallel
from sunspot.parallel.gradients import add_gradients
from tests.harness.loop import train_ranks
from tests.harness.process_group import in_processes

ROWS, STEPS = 12, 12

KINDS = ([0] * 6 + [1] * 6, [0] * 12, [2] * 6 + [0] * 6, [1] * 3 + [2] * 3 + [0] * 6, [0] * 6 + [2] * 6, [3] * 12)
"""The kinds of rows in each step. Ranks use the same experts, different experts, or one that was not used before."""


class Experts(nn.Module):
    """A model with one expert per kind of rows, another head, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.penalty = torch.zeros(())

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> dict[str, torch.Tensor]:
        shared = self.trunk(x)
        chosen = torch.zeros_like(shared)
        for kind in kinds.unique().tolist():
            [places] = (kinds == kind).nonzero(as_tuple=True)
            chosen = chosen.index_put((places,), self.experts[kind](shared[places]))
        self.penalty = self.experts[0](x).square().sum()
        return {"chosen": chosen.square().sum(), "head": self.head(x).square().sum()}


def plain(model: Any, inner: Experts, x: torch.Tensor, kinds: torch.Tensor, weight: float) -> None:
    (model(x, kinds)["chosen"] * weight).backward()


def in_two_parts(model: Any, inner: Experts, x: torch.Tensor, kinds: torch.Tensor, weight: float) -> None:
    half = len(x) // 2
    with model.no_sync() if isinstance(model, DataParallel) else contextlib.nullcontext():
        plain(model, inner, x[:half], kinds[:half], weight)
    plain(model, inner, x[half:], kinds[half:], weight)


def by_output(model: Any, inner: Experts, x: torch.Tensor, kinds: torch.Tensor, weight: float) -> None:
    for loss in model(x, kinds).values():
        (loss * weight).backward()


def by_the_sum_of_outputs(model: Any, inner: Experts, x: torch.Tensor, kinds: torch.Tensor, weight: float) -> None:
    (sum(model(x, kinds).values()) * weight).backward()


def by_output_of_one_graph(model: Any, inner: Experts, x: torch.Tensor, kinds: torch.Tensor, weight: float) -> None:
    loss = model(x, kinds)["chosen"] * weight
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def after_two_passes(model: Any, inner: Experts, x: torch.Tensor, kinds: torch.Tensor, weight: float) -> None:
    first, second = model(x, kinds)["chosen"], model(2 * x, (kinds + 1) % 3)["chosen"]
    ((first + second) * weight).backward()


def one_by_one_after_two_passes(
    model: Any, inner: Experts, x: torch.Tensor, kinds: torch.Tensor, weight: float
) -> None:
    first, second = model(x, kinds)["chosen"], model(2 * x, kinds)["chosen"]
    (first * weight).backward()
    (second * weight).backward()


def with_a_penalty_on_gradients(
    model: Any, inner: Experts, x: torch.Tensor, kinds: torch.Tensor, weight: float
) -> None:
    loss = model(x.requires_grad_(), kinds)["chosen"]
    [gradient] = torch.autograd.grad(loss, x, create_graph=True)
    ((loss + gradient.square().sum()) * weight).backward()


def of_a_loss_beside_the_output(
    model: Any, inner: Experts, x: torch.Tensor, kinds: torch.Tensor, weight: float
) -> None:
    model(x, kinds)
    (inner.penalty * weight).backward()
    if isinstance(model, DataParallel):
        model.complete()  # like a run before it clips gradients and before each optimizer step


def train(style: str, model: Any, inner: Experts, rows: slice, world_size: int) -> Iterator[tuple[set[str], Any]]:
    """Yield for each step the parameters without a gradient, and all parameters' values after the step."""
    optimizer = torch.optim.AdamW(inner.parameters(), 0.1, weight_decay=0.3)
    for step in range(STEPS):
        torch.manual_seed(step)
        x, kinds = torch.randn(ROWS, 4)[rows], torch.tensor(KINDS[step % len(KINDS)])[rows]
        if style == "freezing":
            inner.trunk.requires_grad_(step % 4 != 3)
        if style == "unfreezing":
            inner.head.requires_grad_(step > STEPS // 2)
        take = {"freezing": plain, "unfreezing": by_the_sum_of_outputs}.get(style) or globals()[style]
        take(model, inner, x, kinds, world_size / ROWS)
        nn.utils.clip_grad_norm_(inner.parameters(), 0.5)  # like a user's own loop
        unused = {name for name, each in inner.named_parameters() if each.grad is None}
        optimizer.step()
        optimizer.zero_grad()
        yield unused, {name: each.detach().clone() for name, each in inner.named_parameters()}


def test_the_add_gradients_function_adds_the_same_gradients_as_a_backward_pass() -> None:
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    found = []
    for run_backward in (add_gradients, lambda losses, weight: (losses.sum() * weight).backward()):
        model.zero_grad()
        for part in rows.split(2):  # gradients are added to those of earlier passes
            run_backward(model(part).square().flatten(), 0.3)
        found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    assert len(found[0]) == 4
    assert all(map(torch.equal, *found))


STYLES = (
    *(plain, in_two_parts, by_output, by_output_of_one_graph, after_two_passes, one_by_one_after_two_passes),
    *(with_a_penalty_on_gradients, of_a_loss_beside_the_output),
)


def compare_with_one_process(group: dist.ProcessGroup) -> list[str]:
    """Return the loop styles in which this rank's results differ from those of a single process with all rows."""
    differing = []
    for style in [*(each.__name__ for each in STYLES), "freezing", "unfreezing"]:
        torch.manual_seed(1)
        alone = Experts()
        alone.head.requires_grad_(style != "unfreezing")
        together = copy.deepcopy(alone)
        model = DataParallel(together, style, bucket_cap_mb=1e-5)  # one bucket per parameter
        share = ROWS // group.size()
        rows = slice(group.rank() * share, (group.rank() + 1) * share)
        steps = zip(
            train(style, alone, alone, slice(None), 1),
            train(style, model, together, rows, group.size()),
            strict=True,
        )
        for number, ((unused, values), (found_unused, found)) in enumerate(steps, start=1):
            if found_unused != unused or any((values[name] - found[name]).abs().max() > 2e-6 for name in values):
                differing.append(f"{style}, step {number}")
                break
    dist.barrier()
    return differing


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_use_different_parameters_train_like_a_single_process(world_size: int, tmp_path: Path) -> None:
    assert in_processes(tmp_path, world_size, compare_with_one_process) == [[]] * world_size


class Words(nn.Module):
    """A model with an embedding between two layers. The embedding has sparse gradients, from only one kind of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.words = nn.Embedding(5, 4, sparse=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if kinds.any():
            hidden = hidden + self.words(kinds) * kinds.gt(0).unsqueeze(1)
        return self.last(hidden).square().sum()


def compare_sparse_gradients(group: dist.ProcessGroup) -> list[str]:
    """Return the parameters with gradients that differ from those of a single process with all rows."""
    torch.manual_seed(1)
    alone = Words()
    together = copy.deepcopy(alone)
    model = DataParallel(together, bucket_cap_mb=1e-5)
    differing = []
    for kinds in ([0, 0, 3, 4], [0, 0, 0, 0], [1, 2, 3, 1]):
        x, kind = torch.randn(4, 4), torch.tensor(kinds)
        alone.zero_grad()
        model.zero_grad()
        alone(x, kind).backward()
        rows = slice(2 * group.rank(), 2 * group.rank() + 2)
        (model(x[rows], kind[rows]) * group.size()).backward()
        for (name, one), other in zip(alone.named_parameters(), together.parameters(), strict=True):
            same = one.grad is None or torch.allclose(one.grad.to_dense(), other.grad.to_dense(), rtol=1e-4, atol=1e-5)
            if not same or (one.grad is None) != (other.grad is None):
                differing.append(f"{name} for {kinds}")
    dist.barrier()
    return differing


class TwoOutputs(Words):
    """A model like `Words`, but with two outputs."""

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        first = super().forward(x, kinds)
        return first, super().forward(2 * x, kinds)


def average_of_other_outputs(group: dist.ProcessGroup) -> list[int]:
    """Return how often each of two backward passes calls `all_reduce`. Only rank 0 uses both outputs."""
    torch.manual_seed(1)
    model = DataParallel(TwoOutputs())
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *given, **named: reduced.append(given))
        for _ in range(2):
            reduced = list[Any]()
            outputs = model(torch.randn(4, 4), torch.tensor([1, 2, 3, 1]))
            torch.stack(outputs[: 2 - group.rank()]).sum().backward()
            counts.append(len(reduced))
    return counts


def test_ranks_can_compute_losses_from_different_outputs(tmp_path: Path) -> None:
    """All ranks must average sparse gradients equally often, otherwise they would wait for each other."""
    assert in_processes(tmp_path, 2, average_of_other_outputs) == [[2, 2], [2, 2]]


def test_layers_below_a_sparse_embedding_get_averaged_gradients(tmp_path: Path) -> None:
    assert in_processes(tmp_path, 2, compare_sparse_gradients) == [[], []]


@pytest.mark.parametrize(("parallel", "micro_batch_size"), [("ddp", 0), ("ddp", 2), ("fsdp", 0)])
def test_a_model_with_experts_gets_the_same_weights_on_any_number_of_workers(
    parallel: str, micro_batch_size: int, tmp_path: Path
) -> None:
    """Some steps have fewer rows than workers. The rows that only keep a rank busy must not use an expert."""
    settings: dict[str, Any] = {"global_batch_size": 5, "max_steps": 6, "micro_batch_size": micro_batch_size}
    alone, together = (
        train_ranks(tmp_path / str(ranks), ranks, task="tests.tasks.experts", parallel=parallel, **settings)
        for ranks in (1, 4)
    )
    for name, weights in alone.items():
        np.testing.assert_allclose(together[name], weights, rtol=0, atol=1e-6)


class Scaled(nn.BatchNorm1d):
    """A norm with a buffer of its own, which changes the outputs in training mode."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize(
    ("norm", "sent"),
    [(nn.BatchNorm1d(2), False), (nn.BatchNorm1d(2).eval(), True), (Scaled(2), True), (nn.InstanceNorm1d(2), False)],
)
def test_buffers_are_sent_before_each_pass_unless_all_of_them_belong_to_batch_norms(
    norm: nn.Module, sent: bool, tmp_path: Path
) -> None:
    """A checkpoint and an evaluation get rank 0's buffers in any case."""

    def act(group: Any) -> tuple[bool, list[float]]:
        module = copy.deepcopy(norm)
        with torch.no_grad():
            for each in module.buffers():
                each.fill_(dist.get_rank())
        model = DataParallel(nn.Sequential(nn.Linear(2, 2), module), init_sync=False)
        model(torch.randn(4, 2))
        sync_buffers(model, None)
        return model.will_sync_module_buffers(), [float(each.flatten()[0]) for each in module.buffers()]

    (here, values), (there, same) = in_processes(tmp_path, 2, act)
    assert here is there is (sent and bool(list(norm.buffers())))
    assert values == same
