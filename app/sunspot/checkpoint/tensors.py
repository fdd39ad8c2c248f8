"""The tensors of a training state: in their fixed order, by their names, and as they lie in one buffer.

Names are `model.NAME` and `optimizer.state.NAME OF THE PARAMETER.NAME`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sunspot.parallel.sharding import parameters_of

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes, where any dtype can be viewed."""


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same nested dicts, lists and tuples, with `change(tensor)` for every tensor, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List every tensor, in the order of `map_tensors`."""
    return [tensor for _, tensor in _paths(value)]


# ------------------------------------------------------------------------------------------------------ in a buffer


def size_of(structure: Any) -> int:
    """Count the bytes of a buffer that holds these tensors."""
    return sum(padded(tensor) for tensor in tensors_in(structure))


def padded(tensor: torch.Tensor) -> int:
    """Count the bytes that a tensor takes in a buffer."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def in_buffer(structure: Any, buffer: Any) -> Any:
    """Return `structure` with tensors of the same shapes and dtypes that lie in `buffer`, each with its own storage."""
    offset = 0

    def place(like: torch.Tensor) -> torch.Tensor:
        nonlocal offset
        begin, offset = offset, offset + padded(like)
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        return torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=begin).view(like.shape)

    return map_tensors(structure, place)


# ---------------------------------------------------------------------------------------------------------- by name


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """List the names of the optimizer's parameters, in the order in which its state_dict numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in parameters_of(optimizer)]


def keys_of(state: Mapping[str, Any], names: list[str]) -> list[str]:
    """List the name of each tensor of `model` and `optimizer`, in the order of `tensors_in`."""
    keys = []
    for path, _ in _paths(state):
        if path[:2] == ("optimizer", "state"):
            path = (*path[:2], names[path[2]], *path[3:])
        keys.append(".".join(map(str, path)))
    return keys


def make_outline(state: Mapping[str, Any], names: list[str]) -> Any:
    """Return the state with each tensor replaced by its name."""
    keys = iter(keys_of(state, names))
    return map_tensors(state, lambda _: next(keys))  # type: ignore[arg-type, return-value]  # a name for each tensor


def fill(outline: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that `make_outline` was given, with these tensors."""
    if isinstance(outline, Mapping):
        return {key: fill(item, tensors) for key, item in outline.items()}
    if isinstance(outline, (list, tuple)):
        return type(outline)(fill(item, tensors) for item in outline)
    return tensors.get(outline, outline) if isinstance(outline, str) else outline


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield everything in nested dicts, lists and tuples that is none of these."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield each tensor with the keys that lead to it, in the order of `map_tensors`."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _paths(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _paths(item, (*path, number))
