"""Renames weights saved by another program to match the names in the task's model.

Some programs store tied weights under only one of their names (safetensors' `save_model` and transformers'
`save_pretrained`). Others prefix the names (`DistributedDataParallel` and `torch.compile`).
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from sunspot.errors import SettingsError

WRAPPER_PREFIX = "module."
"""Prefix that DistributedDataParallel and DataParallel add to names."""

COMPILED_PREFIX = "_orig_mod."
"""Prefix that torch.compile adds to names."""


def fit_names(model: torch.nn.Module, state: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return a state_dict with the model's names, where they can be inferred.

    Raises `SettingsError` if the weights are in a nested state_dict, or if tied weights have different values.
    """
    own = model.state_dict(keep_vars=True)
    refuse_nested(own, state, origin)
    return with_tied(own, without_wrappers(own, state), origin)


def refuse_nested(own: Mapping[str, Any], state: Mapping[str, Any], origin: str) -> None:
    """Raise `SettingsError` if the weights are in a state_dict nested in `state`."""
    inner = [name for name, value in state.items() if isinstance(value, Mapping) and name not in own]
    if inner and not state.keys() & own.keys():
        raise SettingsError(
            f"SUNSPOT_INIT_FROM={origin} contains {', '.join(map(str, state))}; save only the state_dict, for example "
            f"with torch.save(torch.load(FILE)[{inner[0]!r}], NEW_FILE)"
        )


def without_wrappers(own: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict without the wrapper prefixes that the model's own names lack."""
    best = state
    names = {name: str(name).replace(COMPILED_PREFIX, "") for name in state}
    while names:
        renamed = {short: state[name] for name, short in names.items()}
        if len(renamed) == len(state) and len(renamed.keys() & own.keys()) > len(best.keys() & own.keys()):
            best = renamed
        if not all(short.startswith(WRAPPER_PREFIX) for short in names.values()):
            break
        names = {name: short.removeprefix(WRAPPER_PREFIX) for name, short in names.items()}
    return best


def with_tied(own: Mapping[str, Any], state: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return a copy of `state` in which each tied weight that is present under one name is present under all names.

    Raises `SettingsError` if tied weights have different values.
    """
    tensors = {name: id(value) for name, value in own.items() if isinstance(value, torch.Tensor)}
    stored: dict[int, str] = {}
    for name in sorted(state.keys() & tensors.keys()):
        other = stored.setdefault(tensors[name], name)
        if not are_same(state[name], state[other]):
            raise SettingsError(
                f"SUNSPOT_INIT_FROM={origin}: {other} and {name} differ, but the model ties them, so one would be "
                "lost; build the model without tying them, or remove one of them from the file"
            )
    completed = copy.copy(state)  # keeps the metadata, which torch stores in an attribute
    for name in tensors.keys() - state.keys():
        if tensors[name] in stored:
            completed[name] = state[stored[tensors[name]]]
    return completed


def are_same(one: Any, other: Any) -> bool:
    """Return True if two values of a state_dict are the same tensor, or equal tensors."""
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return one is other or (are_tensors and torch.equal(one, other))
