"""Computes the activations of blocks again in the backward pass, instead of keeping them (RECOMPUTE=blocks).

Only the inputs of a block are kept. The backward pass runs the block's forward pass a second time, with the same random
numbers, so gradients are the same.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sunspot.errors import SettingsError
from sunspot.parallel.sharding import find_blocks, models_in


def recompute_blocks(model: nn.Module) -> None:
    """Make the blocks of a model (`find_blocks`) compute their activations again in the backward pass.

    Call this before the model is sharded. FSDP then gathers a block's parameters only once in the backward pass, for
    both the repeated forward pass and the gradients. Raises `SettingsError` if the model has no blocks.
    """
    blocks = [block for part in models_in(model) for block in find_blocks(part)]
    if not blocks:
        raise SettingsError(
            f"SUNSPOT_RECOMPUTE=blocks: {type(model).__name__} has no blocks (the large items of an "
            "nn.ModuleList or nn.Sequential); set SUNSPOT_RECOMPUTE=off, or use torch.utils.checkpoint in the model"
        )
    for block in blocks:
        _recompute(block)


def _recompute(block: nn.Module) -> None:
    compute = block.forward

    @functools.wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        def call(*values: Any) -> Any:
            return compute(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

        # All arguments are positional, because only these tell torch which device's random numbers to draw again.
        values = (*args, *kwargs.values())
        # Compiled code changes buffers only in its forward pass.
        if torch.compiler.is_compiling() or not any(True for _ in block.buffers()):
            return checkpoint(call, *values, use_reentrant=False)
        return checkpoint(call, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), KeptBuffers(block)))

    block.forward = forward  # type: ignore[method-assign]


class KeptBuffers(AbstractContextManager[None]):
    """Context manager that undoes all changes to a block's buffers, such as the running statistics of batch norm.

    It can be entered several times, because a graph may be used for several backward passes.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._kept = [(buffer, buffer.clone()) for buffer in self._block.buffers()]

    def __exit__(self, *error: object) -> None:
        for buffer, values in self._kept:
            buffer.data.copy_(values)  # a change through `.data` is not counted, because it restores the values
        self._kept = []
