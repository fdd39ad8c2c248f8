"""How a model is spread over the workers: a whole copy on each (ddp), or a part of each of its tensors (fsdp).

Both sum gradients alike: averaged over the workers, once for each optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from app.settings import Settings

LEAST_BLOCK = 10_000
"""Parameters of a block that travels by itself; fewer (40 kB) go with what surrounds them, as messages cost time."""


class Place(NamedTuple):
    """Where a worker's part lies in the whole tensor."""

    shape: tuple[int, ...]
    "Of the whole."
    offset: tuple[int, ...]
    "Of the part's first element."


def shard_model(model: nn.Module, settings: Settings, device: torch.device) -> nn.Module:
    """Move a model, the same on the CPUs of all workers, to their devices: whole, or each worker's part of it.

    Comes before the optimizer, which keeps its state where it finds the parameters. Under fsdp the model changes in
    place (FSDP2, `fully_shard`): parameters become DTensors cut along their first dimension, their names stay. A block
    is gathered whole just before it computes, and freed after.
    """
    if settings.parallel == "fsdp":
        if device.type == "cuda":
            torch.cuda.set_device(device)
        mesh = DeviceMesh.from_group(_world(), device.type)
        # Parameters are gathered in fp32, as ddp has them; PRECISION=bf16 is autocast's, with the same arithmetic.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in [*find_blocks(model), model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return model.to(device)


def find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that are gathered one at a time: the outermost items of lists and sequences, unless they are small.

    That is where models keep the layers that they repeat. What is in none of them belongs to the model's root.
    """
    for child in module.children():
        repeated = isinstance(module, (nn.ModuleList, nn.Sequential))
        if repeated and sum(parameter.numel() for parameter in child.parameters()) >= LEAST_BLOCK:
            yield child
        else:
            yield from find_blocks(child)


def prepare(model: nn.Module) -> nn.Module:
    """The model that is trained through: a placed one, whose gradients are averaged over the workers."""
    if isinstance(model, FSDPModule):
        return model
    import ray.train.torch  # here, as who reads a checkpoint needs no Ray

    prepared: nn.Module = ray.train.torch.prepare_model(model)
    return prepared


@contextmanager
def gradient_sync(model: nn.Module, now: bool) -> Iterator[None]:
    """For a forward and backward pass of a prepared model: average its gradients, or only add them up here."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        yield
    elif isinstance(model, DistributedDataParallel) and not now:
        with model.no_sync():
            yield
    else:
        yield


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this worker has of a tensor: its part of a DTensor, or all of it. No copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def find_places(tensors: list[torch.Tensor]) -> list[Place | None]:
    """Where this worker's part of each tensor lies; None for those of which every worker has the whole."""
    parts = {str(number): tensor for number, tensor in enumerate(tensors) if isinstance(tensor, DTensor)}
    places: list[Place | None] = [None] * len(tensors)
    for item in create_default_local_save_plan(parts, is_coordinator=True).items:
        assert item.tensor_data
        places[int(item.index.fqn)] = Place(tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets))
    return places


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters in the order in which an optimizer's state_dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shard_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A whole state_dict of the optimizer with each tensor cut as its parameter is; as it was, under ddp."""
    parameters = parameters_of(optimizer)

    def spread(value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            return value
        # Every worker has the whole, so that none has to send it.
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

    spread_state = {
        number: {name: spread(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": spread_state}


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world
    return world


class StepActions(NamedTuple):
    """What is to be done after a step."""

    save: bool = False
    "A checkpoint in storage."
    copy: bool = False
    "A copy of the state in shared memory."
    report: bool = False
    "A record of the metric history."
    stop: bool = False
    "Save and return: the run is to end here."
    restart: bool = False
    "Save and end, for Ray to start a new worker group."
    busy: bool = False
    "A checkpoint is still being committed, and one that can wait is not begun: under FSDP none replaces another."


class StepConsensus:
    """A few yes-or-no questions asked at every step; any worker's yes, one step later, is everybody's.

    The all-reduce runs behind the next step. Taking the answer a step late is what makes it free: no worker waits
    for the slowest one at a moment when gradients do not already make it wait.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._answers = torch.zeros(len(StepActions._fields), dtype=torch.uint8)
        self._asked: dist.Work | None = None

    def exchange(self, mine: StepActions) -> StepActions:
        """What all agreed on in the step before; asks `mine` of all workers for the step after."""
        if self._asked:
            self._asked.wait()
        agreed = StepActions(*(bool(answer) for answer in self._answers.tolist()))
        self._answers = torch.tensor(mine, dtype=torch.uint8)
        self._asked = dist.all_reduce(self._answers, dist.ReduceOp.MAX, self._group, async_op=True)
        return agreed


def sync_buffers(model: torch.nn.Module) -> None:
    """Give every worker rank 0's buffers, which are those of a checkpoint: each has batch norm's averages of its own
    rows, until DDP does the same before the next forward pass. All workers call this together.
    """
    buffers = list(model.buffers())
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):  # in one order on all workers, which a set has not
        same = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = torch.cat([buffer.reshape(-1) for buffer in same])  # one message, not one for each
        dist.broadcast(flat, src=0)
        for buffer, values in zip(same, flat.split([buffer.numel() for buffer in same]), strict=True):
            buffer.copy_(values.view_as(buffer))


def gather_floats(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def any_rank(group: dist.ProcessGroup, *mine: bool) -> list[bool]:
    """For each question whether any worker says yes; all call this together."""
    answers = torch.tensor(mine, dtype=torch.uint8)
    dist.all_reduce(answers, dist.ReduceOp.MAX, group)
    return [bool(answer) for answer in answers.tolist()]
