"""Averages gradients over the workers, once per optimizer step, and clips them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from sunspot.parallel.data_parallel import DataParallel
from sunspot.parallel.replica_groups import ReplicaGroups
from sunspot.parallel.sharding import has_several, is_dtensor, is_fsdp, models_in, part_of
from sunspot.settings import Settings

CLIP_EPSILON = 1e-6
"""Number that `torch.nn.utils.clip_grad_norm_` adds to the norm before it divides (torch 2.15)."""


def prepare(model: nn.Module, settings: Settings, name: str = "", **options: bool) -> nn.Module:
    """Wrap the result of `shard_model` so that its gradients are averaged over the workers.

    `name` must be unique among the task's models. `options` are those of `DataParallel`. With `init_sync` (the
    default), rank 0's parameters are copied to all workers.
    """
    if is_fsdp(model) or not any(each.requires_grad for each in model.parameters()):
        return model
    if isinstance(model, nn.ModuleDict) and has_several(model):
        named = model.items()
        return nn.ModuleDict({key: prepare(part, settings, f"{name}/{key}", **options) for key, part in named})
    if has_several(model):
        parts = enumerate(model.children())
        return nn.ModuleList(prepare(part, settings, f"{name}/{number}", **options) for number, part in parts)
    prepared = DataParallel(model, name, **options)
    if settings.gradient_precision == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        prepared.register_comm_hook(None, bf16_compress_hook)
    return prepared


def release(model: nn.Module) -> None:
    """Make a prepared model stop averaging gradients, so that the wrapped model can be prepared for another group.

    This removes DDP's gradient hooks, which would stay active if a loop kept a reference to the prepared model.
    torch 2.15 has no public API for this.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module._remove_autograd_hooks()


def add_gradients(losses: torch.Tensor, weight: float) -> None:
    """Run the backward pass of the rows' losses, [B], like `(losses.sum() * weight).backward()`.

    This calls the function that `torch.autograd.backward` calls once it has checked its arguments (torch 2.15). In a
    small step, these checks take as long as the backward pass.
    """
    gradients = torch.full_like(losses, weight)
    _engine_run_backward((losses,), (gradients,), False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextmanager
def gradient_sync(model: nn.Module, now: bool) -> Iterator[None]:
    """Context manager for a forward or backward pass of a prepared model.

    Gradients are averaged over the workers if `now` is True. Otherwise, they are only accumulated locally.
    """
    if is_fsdp(model):
        model.set_requires_gradient_sync(now)
        yield
    else:
        with ExitStack() as stack:
            for part in models_in(model):
                if isinstance(part, DistributedDataParallel) and not now:
                    stack.enter_context(part.no_sync())
            yield


def models_with_averaging(model: nn.Module) -> list[DataParallel]:
    """Return the parts of a prepared model that average their gradients over the workers."""
    return [part for part in models_in(model) if isinstance(part, DataParallel)]


class FiniteGradients:
    """A switch that keeps rows with weight 0 from affecting the gradients.

    Multiplying the loss of these rows by 0 is not enough, for two reasons. First, 0 times an infinite loss is NaN, and
    averaging would spread NaN to all workers. Second, a parameter used only by these rows would get a gradient of zeros
    instead of None, so weight decay and momentum would change the parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._averaging = [module for module in model.modules() if isinstance(module, DataParallel)]
        self._handles: list[RemovableHandle] = []

    def set(self, on: bool) -> None:
        for module in self._averaging:
            module.count_rows(not on)
        if not on:
            while self._handles:
                self._handles.pop().remove()
        elif not self._handles:
            gathered = [module for module in self._model.modules() if is_fsdp(module)]
            self._handles = [module.register_forward_pre_hook(self._watch) for module in gathered]
            if not gathered:
                self._watch(self._model)

    def _watch(self, module: nn.Module, *_: Any) -> None:
        """Add hooks that zero non-finite gradients of a module's currently unsharded parameters."""
        whole = [each for each in module.parameters() if each.requires_grad and not is_dtensor(each)]
        self._handles += [parameter.register_hook(_without_infinite) for parameter in whole]


def _without_infinite(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def clip_gradients(model: nn.Module, max_norm: float, replicas: ReplicaGroups | None = None) -> None:
    """Clip the norm of all averaged gradients to `max_norm`, or do nothing if `max_norm` is 0.

    All workers must call this together, once per step. Under fsdp and hsdp, the norm covers all parts of the model.
    `replicas` are the worker's groups under hsdp. This does not wait for the device.
    """
    if not max_norm:
        return
    if not replicas:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return
    parts = [part_of(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    norm = replicas.sum_in_replica(nn.utils.get_total_norm(parts).square()).sqrt()
    scale = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1)
    for part in parts:
        part.mul_(scale)
