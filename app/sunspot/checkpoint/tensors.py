"""Lists a training state's tensors in a fixed order, lays them out in a buffer, and replaces them by names and back.

Names have the form `model.NAME` or `optimizer.state.PARAMETER.NAME`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sunspot.parallel.sharding import parameters_of

ALIGNMENT = 64
"""Alignment in bytes of each tensor in a buffer, so that any dtype can be viewed there."""


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with every leaf replaced by `change(leaf)`. The order of calls is fixed."""
    if isinstance(value, Mapping):
        return {key: map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(item, change) for item in value)
    return change(value)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a nested structure with every tensor replaced by `change(tensor)`."""
    return map_leaves(value, lambda item: change(item) if isinstance(item, torch.Tensor) else item)


def leaves_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path of keys and the value of each leaf, in the order of `map_leaves`."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))
    else:
        yield path, value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a structure, in the order of `map_tensors`."""
    return [item for _, item in leaves_of(value) if isinstance(item, torch.Tensor)]


# ---------------------------------------------------------------------------------------------------------- in a buffer


def size_of(structure: Any) -> int:
    """Return the size in bytes of a buffer for all tensors in `structure`."""
    return sum(padded(tensor) for tensor in tensors_in(structure))


def padded(tensor: torch.Tensor) -> int:
    """Return the number of bytes that a tensor takes in a buffer."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def in_buffer(structure: Any, buffer: Any) -> Any:
    """Return `structure` with its tensors replaced by tensors of the same shapes and dtypes in `buffer`.

    Each new tensor has its own `torch.UntypedStorage`.
    """
    offset = 0

    def place(like: torch.Tensor) -> torch.Tensor:
        nonlocal offset
        begin = offset
        offset += padded(like)
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        return torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=begin).view(like.shape)

    return map_tensors(structure, place)


# -------------------------------------------------------------------------------------------------------------- by name


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its state_dict.

    A parameter that does not belong to the model has an empty name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(parameter), "") for parameter in parameters_of(optimizer)]


def keys_of(state: Mapping[str, Any], names: list[str]) -> list[str]:
    """Return the names of all tensors in a state, in the order of `tensors_in`."""
    keys = []
    for path in [path for path, item in leaves_of(state) if isinstance(item, torch.Tensor)]:
        if path[:2] == ("optimizer", "state"):
            path = (*path[:2], names[path[2]], *path[3:])
        keys.append(".".join(map(str, path)))
    return keys


def make_outline(state: Mapping[str, Any], names: list[str]) -> Any:
    """Return a state with each tensor replaced by its name."""
    keys = iter(keys_of(state, names))
    return map_tensors(state, lambda _: next(keys))


def fill(outline: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return an outline (`make_outline`) with each name replaced by its tensor."""
    return map_leaves(outline, lambda item: tensors.get(item, item) if isinstance(item, str) else item)
