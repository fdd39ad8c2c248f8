"""Tests that RECOMPUTE=blocks frees activations and changes neither gradients nor buffers."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sunspot.errors import SettingsError
from sunspot.parallel.recompute import recompute_blocks
from sunspot.parallel.sharding import part_of, shard_model
from sunspot.settings import Settings
from tests.harness.process_group import in_processes

CPU = torch.device("cpu")


class Block(nn.Module):
    """A residual block with dropout and batch norm, which keeps a weak reference to its newest activation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(50, 150), nn.Linear(150, 50)
        self.norm = nn.BatchNorm1d(150)
        self.dropout = nn.Dropout(0.3)
        self.activation: Any = None

    def forward(self, stream: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.norm(self.enter(stream))))
        self.activation = weakref.ref(hidden)
        return stream + self.leave(hidden) * mask


class SquaredMean(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.square().mean()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.loss = SquaredMean()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows, mask=torch.ones(50))
        return self.loss(rows)


@pytest.fixture
def models() -> tuple[Blocks, Blocks]:
    """Return two models with the same weights. The second one recomputes its blocks."""
    torch.manual_seed(0)
    plain = Blocks()
    recomputed = copy.deepcopy(plain)
    recompute_blocks(recomputed)
    return plain, recomputed


def take_passes(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients, the buffers and the state of the random generator after two forward and backward passes."""
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(16, 50)).backward()
    parameters = list(model.parameters())
    gradients = [part_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters)
    return [*gradients, *model.buffers(), torch.get_rng_state()]


def test_recomputed_blocks_give_exactly_the_same_gradients(models: tuple[Blocks, Blocks]) -> None:
    plain, recomputed = models
    assert all(map(torch.equal, take_passes(recomputed), take_passes(plain)))
    assert list(recomputed.state_dict()) == list(plain.state_dict())


def test_the_activations_of_recomputed_blocks_are_freed(models: tuple[Blocks, Blocks]) -> None:
    for model, kept in zip(models, (True, False), strict=True):
        loss = model(torch.randn(16, 50))
        assert [block.activation() is not None for block in model.blocks] == [kept] * 3
        loss.backward(retain_graph=True)
        loss.backward()


def test_a_model_is_evaluated_without_recomputing_activations(models: tuple[Blocks, Blocks]) -> None:
    with torch.no_grad():
        expected, found = (model.eval()(torch.ones(2, 50)) for model in models)
    assert torch.equal(found, expected)


def test_a_recomputed_block_is_compiled_as_one_graph() -> None:
    inner = nn.Sequential(nn.Linear(50, 250), nn.BatchNorm1d(250), nn.Tanh(), nn.Linear(250, 50))
    plain = nn.Sequential(inner)
    recomputed = copy.deepcopy(plain)
    recompute_blocks(recomputed)
    recomputed[0].compile(backend="aot_eager", fullgraph=True)
    found, expected = (take_passes(nn.Sequential(model, SquaredMean())) for model in (recomputed, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_recomputed_blocks_give_the_same_gradients_with_ddp_and_fsdp(parallel: str, tmp_path: Path) -> None:
    def compare(_: object) -> bool:
        passes = []
        for recompute in (False, True):
            torch.manual_seed(0)
            model = Blocks()
            if recompute:
                recompute_blocks(model)
            passes.append(take_passes(shard_model(model, Settings(parallel=parallel), CPU)))
        return all(map(torch.equal, *passes))

    assert in_processes(tmp_path, 2, compare) == [True, True]


def test_a_model_without_blocks_is_rejected() -> None:
    with pytest.raises(
        SettingsError, match=r"SUNSPOT_RECOMPUTE=blocks: Linear has no blocks .*; set SUNSPOT_RECOMPUTE=off"
    ):
        recompute_blocks(nn.Linear(200, 200))
