"""Gives each worker the whole model and optimizer state (ddp), or a part of each tensor (fsdp).

Modules that only fsdp needs are imported when they are first used, because importing them takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from sunspot.errors import SettingsError
from sunspot.parallel.mesh import mesh_of
from sunspot.parallel.replica_groups import ReplicaGroups
from sunspot.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

MIN_BLOCK_PARAMETERS = 10_000
"""Smallest number of parameters in a block that is gathered separately. Smaller blocks are not worth a message."""
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""torch's normalization layers. The base class of batch and instance norms is not public."""
RESHARD = {"auto": None, "true": True, "false": False}
"""FSDP2's argument for each value of RESHARD_AFTER_FORWARD. With None, only the root keeps its gathered parameters."""
CHANNELS_LAST = ("cuda",)
"""Device types on which convolutions are faster with the memory layout [B, H, W, C], which cuDNN prefers."""


class TensorSlice(NamedTuple):
    """The position of a worker's part in the whole tensor."""

    shape: tuple[int, ...]
    "The shape of the whole tensor."
    offset: tuple[int, ...]
    "The index of the part's first element."


def build_without_values(build: Callable[[], nn.Module]) -> nn.Module | None:
    """Return the model from `build` with parameters on the meta device, which need no memory or initialization.

    Use this for a model that will load a state_dict. Returns None if the state_dict might not restore the model
    completely, for example because a tensor outside the state_dict depends on parameters or on random numbers.
    """
    metas = WeakTensorKeyDictionary()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        if parameter not in metas:  # otherwise two modules share the parameter
            metas[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return metas[parameter]

    before = torch.default_generator.get_state()
    hook = register_module_parameter_registration_hook(on_meta)
    try:
        model = build()
    except Exception:  # the model needs the values, or is faulty anyway
        return None
    finally:
        hook.remove()
    if not dict(model.named_parameters()).keys() <= model.state_dict().keys():
        return None  # the state_dict lacks some weights, such as those of a frozen base model
    others = list(_outside_of_state(model))
    drawn = not torch.equal(torch.default_generator.get_state(), before)
    return None if others and (drawn or any(tensor.is_meta for tensor in others)) else model


def _outside_of_state(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors in the model and its submodules that are not in the model's state_dict."""
    for module in model.modules():
        # No public API returns the names of buffers that are not persistent.
        held: list[Any] = [module._buffers[name] for name in module._non_persistent_buffers_set]
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                several = isinstance(value, (dict, list, tuple))
                held += (value.values() if isinstance(value, dict) else value) if several else [value]
        yield from (item for item in held if isinstance(item, torch.Tensor))


def shard_model(
    model: nn.Module, settings: Settings, device: torch.device, replicas: ReplicaGroups | None = None
) -> nn.Module:
    """Move a model from the CPU to the worker's device. Under fsdp and hsdp, each worker gets only a part of it.

    The model must be identical on all workers. Call this before creating the optimizer. Under fsdp and hsdp (FSDP2,
    `fully_shard`), the model changes in place: parameters become DTensors, sharded along their first dimension, with
    the same names. Each block is gathered before it computes, and freed afterwards. Parameters on the meta device get
    uninitialized memory. `replicas` are the worker's groups under hsdp.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if settings.sharded:
        if has_several(model):
            raise SettingsError(
                f"SUNSPOT_PARALLEL={settings.parallel} does not support several models, but {settings.task} has a "
                f"{type(model).__name__} of models; set SUNSPOT_PARALLEL=ddp"
            )
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        assert dist.group.WORLD
        mesh = replicas.mesh(device.type) if replicas else mesh_of(dist.group.WORLD, device.type)
        doubles = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        exact = torch.float64 if doubles else torch.float32
        whole = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if settings.gradient_precision == "bf16" else exact)
        # This halves the communication. Results match ddp, where autocast rounds the same weights after gathering.
        rounded = replace(whole, param_dtype=torch.bfloat16, cast_forward_inputs=False)
        kept = {weight for module in model.modules() if is_norm(module) for weight in module.parameters()}
        apart = not hasattr(whole, "param_dtype_override_fn")  # before torch 2.15, norms need their own collectives
        if not apart:
            rounded = replace(rounded, param_dtype_override_fn=lambda each: each.dtype if each in kept else None)
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=RESHARD[settings.reshard_after_forward])
        for block in find_blocks(model):
            policy = rounded if settings.precision == "bf16" and not is_norm(block) else whole
            for norm in [module for module in block.modules() if policy is rounded and apart and is_norm(module)]:
                shard(norm, mp_policy=whole)
            shard(block, mp_policy=policy)
        shard(model, mp_policy=whole)
        if is_fsdp(model) and hasattr(model, "set_reduce_scatter_unused_params"):  # new in torch 2.15
            # Otherwise, ranks that use different parameters of a block would sum unrelated gradients.
            model.set_reduce_scatter_unused_params(True)
        if replicas:
            replicas.connect(module for module in model.modules() if is_fsdp(module))
    if any(parameter.is_meta for parameter in model.parameters()):
        # The public `to_empty` would discard the values of all other tensors too.
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    model = model.to(device)
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if convolves and settings.parallel == "ddp" and device.type in CHANNELS_LAST:  # parts have no memory layout
        return model.to(memory_format=torch.channels_last)
    return model


def find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules to gather separately: the large items of the outermost `ModuleList`s and `Sequential`s.

    An item is large if it has at least MIN_BLOCK_PARAMETERS parameters. Models keep repeated layers in these
    containers. All other modules are gathered with the root.
    """
    for child in module.children():
        repeated = isinstance(module, (nn.ModuleList, nn.Sequential))
        if repeated and sum(parameter.numel() for parameter in child.parameters()) >= MIN_BLOCK_PARAMETERS:
            yield child
        else:
            yield from find_blocks(child)


def is_norm(module: nn.Module) -> bool:
    """Return True if a module is a normalization layer, which keeps fp32 weights under PRECISION=bf16.

    Layers of other libraries, such as `LlamaRMSNorm`, are recognized by their names.
    """
    named = type(module).__name__.endswith("Norm") and not any(module.children())
    return named or isinstance(module, NORMS)


def has_several(model: nn.Module) -> TypeIs[nn.ModuleDict | nn.ModuleList]:
    """Return True if a model is only a container of several models, which the task's own loop calls."""
    return type(model) in (nn.ModuleDict, nn.ModuleList)


def models_in(model: nn.Module) -> list[nn.Module]:
    """Return the models in `model` if it is a container of several models, otherwise a list with only `model`."""
    return list(model.children()) if has_several(model) else [model]


def is_fsdp(model: object) -> TypeIs[FSDPModule]:
    """Return True if `shard_model` has sharded the model."""
    return isinstance(model, _class("torch.distributed.fsdp", "FSDPModule"))


def discard_pass(model: nn.Module) -> None:
    """Free the memory that an interrupted forward or backward pass of a sharded model has allocated."""
    if is_fsdp(model):
        with suppress(AttributeError):  # torch 2.15 raises it before the first pass, when there is nothing to discard
            model.reset_iter_state()


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Return True if a tensor is sharded."""
    return isinstance(tensor, _class("torch.distributed.tensor", "DTensor"))


def _class(module: str, name: str) -> Any:
    """Return a class for `isinstance`, or () if its module is not imported, because no instances can exist then."""
    return getattr(sys.modules.get(module), name, ())


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's part of a DTensor, or any other tensor unchanged. Nothing is copied."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def find_slices(tensors: list[torch.Tensor]) -> list[TensorSlice | None]:
    """Return the position of this worker's part of each tensor, with None for tensors that are not sharded."""
    parts = {str(number): tensor for number, tensor in enumerate(tensors) if is_dtensor(tensor)}
    # The plan omits empty parts, which the last workers have if a tensor has fewer rows than there are workers.
    slices = [TensorSlice(tuple(each.shape), tuple(each.shape)) if is_dtensor(each) else None for each in tensors]
    if not parts:
        return slices
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    for item in create_default_local_save_plan(parts, is_coordinator=True).items:
        assert item.tensor_data
        slices[int(item.index.fqn)] = TensorSlice(tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets))
    return slices


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters in the order of its state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shard_like(value: Any, parameter: Any) -> Any:
    """Shard a tensor like a parameter. Under ddp, only adapt the memory layout.

    `value` can be the complete tensor, or it can already be this worker's shard. Any other value is
    returned unchanged. The ranks do not communicate, and the result may share memory with `value`.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, torch.Tensor):
        return value
    if value.shape not in (parameter.shape, part_of(parameter).shape):
        return value
    if not is_dtensor(parameter):  # fused optimizers need the same layout
        same = value.stride() == parameter.stride()
        return value if same else torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    if value.shape == parameter.shape:
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)


def shard_model_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Shard each tensor of a state_dict like the tensor of the same name in the model."""
    own = model.state_dict()
    return {name: shard_like(value, own.get(name)) for name, value in state.items()}


def shard_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Shard each tensor of an optimizer's state_dict like its parameter. Under ddp, only adapt the memory layout.

    The tensors may be complete, or they may already be this worker's shards, if they were received from another worker
    with the same shard.
    """
    parameters = parameters_of(optimizer)
    sharded = {
        number: {name: shard_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": sharded}
