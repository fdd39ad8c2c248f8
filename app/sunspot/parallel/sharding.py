"""Moves a whole model and its optimizer's state to each worker (ddp), or one part of each tensor (fsdp).

Imports that only fsdp needs are made where they are used, because they take seconds at the start of every process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from sunspot.errors import SettingsError
from sunspot.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

MIN_BLOCK_PARAMETERS = 10_000
"""Smallest number of parameters (40 kB) of a block that is gathered by itself. A smaller block is not worth a
message."""
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Normalization layers of torch (`is_norm`). The base of its batch and instance norms has no public name."""
CHANNELS_LAST = ("cuda",)
"""Types of devices on which convolutions are faster in cuDNN's own layout, [B, H, W, C]."""


class TensorSlice(NamedTuple):
    """Position of a worker's part in the whole tensor."""

    shape: tuple[int, ...]
    "Shape of the whole tensor."
    offset: tuple[int, ...]
    "Index of the part's first element."


def build_without_values(build: Callable[[], nn.Module]) -> nn.Module | None:
    """Return the model that `build` returns, with parameters on the meta device. They take no memory, and no time to
    initialize.

    Use it for a model that gets its state_dict next. Returns None if the state_dict would not complete the model,
    because it has other tensors that depend on the parameters' values or may be random.
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
    except Exception:  # the model needs the values, or fails with them, too
        return None
    finally:
        hook.remove()
    if not dict(model.named_parameters()).keys() <= model.state_dict().keys():
        return None  # some weights are not in the state_dict, such as those of a frozen base
    others = list(_outside_of_state(model))
    drawn = not torch.equal(torch.default_generator.get_state(), before)
    return None if others and (drawn or any(tensor.is_meta for tensor in others)) else model


def _outside_of_state(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of modules that are not in the state_dict."""
    for module in model.modules():
        # No public API tells which buffers are not persistent.
        held: list[Any] = [module._buffers[name] for name in module._non_persistent_buffers_set]
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                several = isinstance(value, (dict, list, tuple))
                held += (value.values() if isinstance(value, dict) else value) if several else [value]
        yield from (item for item in held if isinstance(item, torch.Tensor))


def shard_model(model: nn.Module, settings: Settings, device: torch.device) -> nn.Module:
    """Move a model, identical on the CPUs of all workers, to their devices: the whole model, or each worker's part.

    Call it before creating the optimizer, which keeps its state where the parameters are. Under fsdp, the model changes
    in place (FSDP2, `fully_shard`): parameters become DTensors cut along their first dimension, and keep their names. A
    block is gathered just before it computes, and freed afterwards. Parameters on the meta device get memory, but no
    values.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if settings.parallel == "fsdp":
        if has_several(model):
            raise SettingsError(
                f"SUNSPOT_PARALLEL=fsdp: {settings.task} has several models ({type(model).__name__}), and each worker "
                "needs all of them; set it to ddp"
            )
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        assert dist.group.WORLD
        mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
        travel = torch.bfloat16 if settings.gradient_precision == "bf16" else torch.float32
        whole = MixedPrecisionPolicy(reduce_dtype=travel)
        # Half of the bytes, and the arithmetic of ddp, where autocast rounds the same weights after the gathering.
        rounded = replace(whole, param_dtype=torch.bfloat16, cast_forward_inputs=False)
        for block in find_blocks(model):
            policy = rounded if settings.precision == "bf16" and not is_norm(block) else whole
            for norm in [module for module in block.modules() if policy is rounded and is_norm(module)]:
                fully_shard(norm, mesh=mesh, mp_policy=whole)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=whole)
        if is_fsdp(model) and hasattr(model, "set_reduce_scatter_unused_params"):  # new in torch 2.15
            # Otherwise ranks that use different parameters of a block would add up gradients of different parameters.
            model.set_reduce_scatter_unused_params(True)
    if any(parameter.is_meta for parameter in model.parameters()):
        # The public `to_empty` would take the values of all other tensors, too.
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    model = model.to(device)
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if convolves and settings.parallel == "ddp" and device.type in CHANNELS_LAST:  # under fsdp, parts have no layout
        return model.to(memory_format=torch.channels_last)
    return model


def find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules to gather one at a time: the outermost items of lists and sequences, unless they are small.

    Models keep repeated layers there. All other modules belong to the model's root.
    """
    for child in module.children():
        repeated = isinstance(module, (nn.ModuleList, nn.Sequential))
        if repeated and sum(parameter.numel() for parameter in child.parameters()) >= MIN_BLOCK_PARAMETERS:
            yield child
        else:
            yield from find_blocks(child)


def is_norm(module: nn.Module) -> bool:
    """Return True if a module keeps fp32 weights under PRECISION=bf16.

    It does so if it is a normalization layer of torch, or is named like one. Models of Hugging Face have their own
    (`LlamaRMSNorm`).
    """
    named = type(module).__name__.endswith("Norm") and not any(module.children())
    return named or isinstance(module, NORMS)


def has_several(model: nn.Module) -> TypeIs[nn.ModuleDict | nn.ModuleList]:
    """Return True if a model is only a container of several models, which a task's own loop calls."""
    return type(model) in (nn.ModuleDict, nn.ModuleList)


def is_fsdp(model: object) -> TypeIs[FSDPModule]:
    """Return True if `shard_model` has cut the model into parts."""
    return isinstance(model, _class("torch.distributed.fsdp", "FSDPModule"))


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Return True if a tensor is cut into parts."""
    return isinstance(tensor, _class("torch.distributed.tensor", "DTensor"))


def _class(module: str, name: str) -> Any:
    """Return a class, or () if its module is not imported, because then nothing can be an instance of it."""
    return getattr(sys.modules.get(module), name, ())


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's part of a DTensor, or the whole of any other tensor, without copying it."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def find_slices(tensors: list[torch.Tensor]) -> list[TensorSlice | None]:
    """Return the position of this worker's part of each tensor, or None for a tensor that is not cut."""
    parts = {str(number): tensor for number, tensor in enumerate(tensors) if is_dtensor(tensor)}
    # The plan leaves out empty parts. The last workers have them if a tensor has fewer rows than there are workers.
    slices = [TensorSlice(tuple(each.shape), tuple(each.shape)) if is_dtensor(each) else None for each in tensors]
    if not parts:
        return slices
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    for item in create_default_local_save_plan(parts, is_coordinator=True).items:
        assert item.tensor_data
        slices[int(item.index.fqn)] = TensorSlice(tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets))
    return slices


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order of an optimizer's state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shard_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Cut each tensor of an optimizer's whole state_dict like its parameter. Under ddp, only adapt its layout."""
    parameters = parameters_of(optimizer)

    def shard(value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            return value
        if not is_dtensor(parameter):  # fused optimizers want one layout
            same = value.stride() == parameter.stride()
            return value if same else torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
        from torch.distributed.tensor import distribute_tensor

        # Every worker has the whole tensor, so that no worker has to send it.
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

    sharded = {
        number: {name: shard(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": sharded}
