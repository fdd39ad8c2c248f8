"""The names of the tensors of a training state: `model.NAME` and `optimizer.state.NAME OF THE PARAMETER.NAME`."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sunspot.checkpoint.snapshot import map_tensors
from sunspot.parallel.sharding import parameters_of


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in the order in which its state_dict numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in parameters_of(optimizer)]


def keys_of(state: Mapping[str, Any], names: list[str]) -> list[str]:
    """The name of each tensor of `model` and `optimizer`, in the order of `tensors_in`."""
    keys = []
    for path in _paths(state):
        if path[:2] == ("optimizer", "state"):
            path = (*path[:2], names[path[2]], *path[3:])
        keys.append(".".join(map(str, path)))
    return keys


def make_outline(state: Mapping[str, Any], names: list[str]) -> Any:
    """The state with each tensor replaced by its name."""
    keys = iter(keys_of(state, names))
    return map_tensors(state, lambda _: next(keys))  # type: ignore[arg-type, return-value]  # a name for each tensor


def fill(outline: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that `make_outline` was given, with these tensors."""
    if isinstance(outline, Mapping):
        return {key: fill(item, tensors) for key, item in outline.items()}
    if isinstance(outline, (list, tuple)):
        return type(outline)(fill(item, tensors) for item in outline)
    return tensors.get(outline, outline) if isinstance(outline, str) else outline


def leaves_of(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each tensor, in the order of `tensors_in`."""
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _paths(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _paths(item, (*path, number))
