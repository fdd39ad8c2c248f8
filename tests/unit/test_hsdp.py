"""Tests that PARALLEL=hsdp trains the same weights as ddp and fsdp, for any number of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sunspot.parallel.replica_groups import ReplicaGroups
from sunspot.parallel.sharding import find_slices, is_dtensor, part_of, shard_model
from sunspot.settings import Settings
from tests.harness.loop import find_place, make_worker, plan_without_evaluation, train_ranks
from tests.harness.process_group import in_processes

GPT: dict[str, Any] = {
    "task": "tests.tasks.double",
    # The width is odd, so that the shards have different sizes, and a block has more than `MIN_BLOCK_PARAMETERS`.
    "task_args": {"layers": 2, "width": 51, "heads": 3, "context": 16},
    "global_batch_size": 13,
    "max_steps": 3,
    "learning_rate": 0.01,
}


def test_all_parallel_layouts_train_the_same_weights(tmp_path: Path) -> None:
    """The ranks have different numbers of rows. Gradients are accumulated, averaged and clipped."""
    more = {"micro_batch_size": 2, "clip_norm": 0.05, "ema": 0.9}
    plain = train_ranks(tmp_path / "ddp", 4, **GPT, **more)
    sharded = train_ranks(tmp_path / "fsdp", 4, **GPT, **more, parallel="fsdp")
    for degree in (1, 2):
        replicated = train_ranks(tmp_path / f"{degree}", 4, **GPT, **more, parallel="hsdp", shard_degree=degree)
        for name, weights in plain.items():
            np.testing.assert_allclose(replicated[name], weights, rtol=0, atol=1e-12)
            np.testing.assert_allclose(sharded[name], weights, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_three_replicas_train_the_same_weights_as_one_worker(tmp_path: Path) -> None:
    more = {"micro_batch_size": 2, "clip_norm": 0.05, "ema": 0.9}
    plain = train_ranks(tmp_path / "ddp", 1, **GPT, **more)
    replicated = train_ranks(tmp_path / "hsdp", 6, **GPT, **more, parallel="hsdp", shard_degree=2)
    for name, weights in plain.items():
        np.testing.assert_allclose(replicated[name], weights, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_bf16_gradients_are_about_as_precise_with_hsdp_as_with_other_layouts(tmp_path: Path) -> None:
    exact = train_ranks(tmp_path / "exact", 1, **GPT)
    layouts: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {}, "hsdp": {"shard_degree": 2}}
    apart = {}
    for parallel, more in layouts.items():
        rounded = train_ranks(tmp_path / parallel, 4, **GPT, **more, parallel=parallel, gradient_precision="bf16")
        apart[parallel] = np.mean([np.abs(rounded[name] - weights).mean() for name, weights in exact.items()])
    assert 0 < apart["hsdp"] < 2 * min(apart["ddp"], apart["fsdp"])


def test_gradient_clipping_by_torch_itself_raises_an_error_instead_of_using_a_wrong_norm(tmp_path: Path) -> None:
    plan = plan_without_evaluation(Settings(**GPT, parallel="hsdp", shard_degree=2))

    def clip(group: Any) -> None:
        worker = make_worker(plan, group)
        for parameter in worker.learner.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(RuntimeError, match="process group"):
            torch.nn.utils.clip_grad_norm_(worker.learner.model.parameters(), 1.0)

    in_processes(tmp_path, 2, clip)


class TwoBlocks(nn.Module):
    """A model with two blocks of more than `MIN_BLOCK_PARAMETERS`, and a head that belongs to the root module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(101, 101) for _ in range(2))
        self.head = nn.Linear(101, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = torch.tanh(block(rows))
        return self.head(rows)


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp"])
def test_parameters_that_stay_gathered_give_the_same_gradients(parallel: str, tmp_path: Path) -> None:
    head, blocks = {"head.weight", "head.bias"}, {f"blocks.{n}.{name}" for n in "01" for name in ("weight", "bias")}
    kept = {"auto": head, "true": set(), "false": {*head, *blocks}}

    def compare(group: Any) -> None:
        gradients = []
        for value, expected in kept.items():
            settings = Settings(parallel=parallel, shard_degree=2, reshard_after_forward=value)
            torch.manual_seed(0)
            model = shard_model(TwoBlocks(), settings, torch.device("cpu"), find_place(settings, group).replicas)
            loss = model(torch.randn(5, 101)).square().sum()
            assert {name for name, each in model.named_parameters() if not is_dtensor(each)} == expected
            loss.backward()
            gradients.append([part_of(each.grad) for each in model.parameters() if each.grad is not None])
        assert len(gradients[0]) == 6
        for found in gradients[1:]:
            assert all(map(torch.equal, found, gradients[0]))

    in_processes(tmp_path, 2, compare)


def test_a_process_that_shards_a_model_again_uses_the_position_of_its_new_shard() -> None:
    """Torch reuses an equal mesh, which may have the position of the process's first shard."""

    def offsets(shard: int) -> list[tuple[int, ...]]:
        replicas = ReplicaGroups(2)
        with replicas.pretend(shard):
            model = shard_model(
                nn.Linear(4, 10), Settings(parallel="hsdp", shard_degree=2), torch.device("cpu"), replicas
            )
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        state = [each["exp_avg"] for each in optimizer.state.values()]
        slices = find_slices([*model.parameters(), *model.state_dict().values(), *state])
        return [each.offset for each in slices if each]

    assert offsets(1) == 3 * [(5, 0), (5,)]
    assert offsets(0) == 3 * [(0, 0), (0,)]
    assert offsets(1) == 3 * [(5, 0), (5,)]
