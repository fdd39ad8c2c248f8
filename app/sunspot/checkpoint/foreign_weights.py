"""Weights that another program has saved, under the names that a model of the task gives them.

Other programs store a tensor once that the model ties to two names (`save_model` of safetensors, `save_pretrained` of
transformers), or put the name of a wrapper in front (`DistributedDataParallel`, `torch.compile`).
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from sunspot.errors import SettingsError

WRAPPER_PREFIX, COMPILED_PREFIX = "module.", "_orig_mod."
"""Added to names by DistributedDataParallel and DataParallel, and by torch.compile."""


def fit_names(model: torch.nn.Module, state: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return a state_dict with the model's names, as far as it can be found out what they are.

    Raises `SettingsError` for a file that holds state_dicts among other things, and for two tensors that the model ties
    although they differ.
    """
    own = model.state_dict(keep_vars=True)
    refuse_nested(own, state, origin)
    return with_tied(own, without_wrappers(own, state), origin)


def refuse_nested(own: Mapping[str, Any], state: Mapping[str, Any], origin: str) -> None:
    """Raise `SettingsError` if the weights are not in `state` itself, but in a state_dict within it."""
    inner = [name for name, value in state.items() if isinstance(value, Mapping) and name not in own]
    if inner and not state.keys() & own.keys():
        raise SettingsError(
            f"SUNSPOT_INIT_FROM={origin}: holds {', '.join(map(str, state))}; save the model's state_dict alone, as in "
            f"torch.save(torch.load(FILE)[{inner[0]!r}], NEW_FILE)"
        )


def without_wrappers(own: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict without as many prefixes of wrappers as it has more than the model's own names."""
    best, names = state, {name: str(name).replace(COMPILED_PREFIX, "") for name in state}
    while names:
        renamed = {short: state[name] for name, short in names.items()}
        if len(renamed) == len(state) and len(renamed.keys() & own.keys()) > len(best.keys() & own.keys()):
            best = renamed
        if not all(short.startswith(WRAPPER_PREFIX) for short in names.values()):
            break
        names = {name: short.removeprefix(WRAPPER_PREFIX) for name, short in names.items()}
    return best


def with_tied(own: Mapping[str, Any], state: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return a state_dict with all names of each tensor of the model, if it has at least one of them.

    Raises `SettingsError` if it has different tensors for them.
    """
    tensors = {name: id(value) for name, value in own.items() if isinstance(value, torch.Tensor)}
    stored: dict[int, str] = {}
    for name in sorted(state.keys() & tensors.keys()):
        other = stored.setdefault(tensors[name], name)
        if not are_same(state[name], state[other]):
            raise SettingsError(
                f"SUNSPOT_INIT_FROM={origin}: {other} and {name} differ, and the model ties them: one would be lost; "
                "build the model without tying them, or leave one of them out of the file"
            )
    completed = copy.copy(state)  # with its metadata, which torch keeps in an attribute
    for name in tensors.keys() - state.keys():
        if tensors[name] in stored:
            completed[name] = state[stored[tensors[name]]]
    return completed


def are_same(one: Any, other: Any) -> bool:
    """Tell whether two values of a state_dict are one tensor, or equal ones."""
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return one is other or (are_tensors and torch.equal(one, other))
