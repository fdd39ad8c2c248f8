"""Loads weights saved by another program, and renames them to match the names in the task's model.

Some programs store tied weights under only one of their names (safetensors' `save_model` and transformers'
`save_pretrained`). Others prefix the names (`DistributedDataParallel` and `torch.compile`), or store the weights
together with an optimizer's state (torch.distributed.checkpoint).
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from sunspot.checkpoint.files import load_weights
from sunspot.errors import SettingsError
from sunspot.parallel.sharding import part_of

WRAPPER_PREFIX = "module."
"""Prefix that DistributedDataParallel and DataParallel add to names."""

OPTIMIZERS = ("optim", "optimizer", "optimizers")
"""Prefixes of the names of an optimizer's tensors in a state that also contains a model."""

COMPILED_PREFIX = "_orig_mod."
"""Prefix that torch.compile adds to names."""


def fit_names(model: torch.nn.Module, state: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return `state` with its weights renamed to the model's names, as far as these can be inferred.

    Raises `SettingsError` if the weights are in a nested state_dict, or if tied weights have different values.
    """
    own = model.state_dict(keep_vars=True)
    refuse_nested(own, state, origin)
    return with_tied(own, without_wrappers(own, state), origin)


def load_by_name(
    model: torch.nn.Module,
    shapes: Mapping[str, Sequence[int]],
    origin: str,
    read: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    """Load weights from `origin` directly into the model's own tensors.

    `shapes` contains the shape of each tensor in `origin`. `read` fills the tensors that it is given, keyed by their
    names in `origin`. In a sharded model, these are DTensors, so that each worker reads only its parts. Raises
    `ConflictError` if the weights do not fit the model.
    """
    own = model.state_dict(keep_vars=True)
    sources = without_wrappers(own, {name: name for name in shapes})
    wanted: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {}
    filled = set[int]()
    for name, source in sources.items():
        like = own.get(name)
        if isinstance(like, torch.Tensor) and list(like.shape) == list(shapes[source]):
            # The second name of a tied weight gets its own tensor, to be compared with the first.
            state[name] = torch.empty_like(like.detach()) if id(like) in filled else like.detach()
            filled.add(id(like))
            wanted[source] = state[name]
        else:
            state[name] = torch.empty(shapes[source], device="meta")  # only for the message of `load_weights`
    read(wanted)
    load_weights(model, with_tied(own, state, origin), origin)


def refuse_nested(own: Mapping[str, Any], state: Mapping[str, Any], origin: str) -> None:
    """Raise `SettingsError` if the weights are in a state_dict nested in `state`."""
    inner = [name for name, value in state.items() if isinstance(value, Mapping) and name not in own]
    if inner and not state.keys() & own.keys():
        raise SettingsError(
            f"SUNSPOT_INIT_FROM={origin} contains {', '.join(map(str, state))}; save only the state_dict, for example "
            f"with torch.save(torch.load(FILE)[{inner[0]!r}], NEW_FILE)"
        )


def without_wrappers(own: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict without wrappers' prefixes, such as `module.`, unless the model's own names have them."""
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


def without_prefix(own: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Map the names of a model's weights to the names of the same weights in a larger state, such as `model.NAME`.

    Names with another prefix, and names in an optimizer's state, are omitted.
    """
    names = {name for name in names if name.partition(".")[0] not in OPTIMIZERS}
    prefixes = {"", *(name.removesuffix(each) for each in own for name in names if name.endswith(f".{each}"))}
    best = max(sorted(prefixes, key=len), key=lambda prefix: sum(prefix + name in names for name in own))
    return {name.removeprefix(best): name for name in sorted(names) if name.startswith(best)}


def with_tied(own: Mapping[str, Any], state: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return a copy of `state` that contains each tied weight under all of its names.

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
    """Return True if two values of a state_dict are the same object or equal tensors.

    If the tensors are sharded, only this worker's parts are compared.
    """
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return one is other or (are_tensors and torch.equal(part_of(one), part_of(other)))
