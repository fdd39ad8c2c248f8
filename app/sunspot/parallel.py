"""What all workers do together: shard a model, average gradients, agree on what comes after a step.

Each worker has a copy of the model (ddp) or a part of each of its tensors (fsdp). Both average gradients over the
workers, once for each optimizer step.

What only fsdp needs is imported where it is used, as it takes seconds at the start of every process.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from sunspot.background import start_thread
from sunspot.errors import SettingsError
from sunspot.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

Result = TypeVar("Result")

ROUND_S = 5.0
"""Seconds between two words of workers that wait for each other: far below the limit of any collective."""

_listeners: list[Callable[[], Any]] = []
"""They hear of each round (`rounds_told_to`)."""

ASK_EVERY_S = 0.1
"""Seconds between two decisions of rank 0: little beside what a notice leaves."""

MOST_STEPS = 16
"""Between two of them, however fast: steps that suddenly take seconds must not keep a notice waiting."""

AT_ONCE_S = 0.3
"""Steps that take longer wait for the decision after them: a broadcast to 64 ranks takes less than a millisecond."""

LEAST_BLOCK = 10_000
"""Parameters of a block that is gathered by itself; smaller ones (40 kB) are not worth a message of their own."""


NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Those of torch (`is_norm`); what its batch and instance norms have in common has no public name."""


CHANNELS_LAST = ("cuda",)
"""Kinds of devices whose convolutions are faster in that layout."""


class Place(NamedTuple):
    """Where a worker's part lies in the whole tensor."""

    shape: tuple[int, ...]
    "Of the whole tensor."
    offset: tuple[int, ...]
    "Of the part's first element."


def build_without_values(build: Callable[[], nn.Module]) -> nn.Module | None:
    """What `build` returns, but with parameters on the meta device: they take no memory, and no time to initialize.

    For a model that gets its state_dict next. None where that would not make it what `build` returns: then it has
    tensors outside of its state_dict that depend on the parameters' values, or may be random.
    """
    metas = WeakTensorKeyDictionary()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        if parameter not in metas:  # or else two modules share it
            metas[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return metas[parameter]

    before = torch.default_generator.get_state()
    hook = register_module_parameter_registration_hook(on_meta)
    try:
        model = build()
    except Exception:  # it needs the values, or fails with them, too
        return None
    finally:
        hook.remove()
    if not dict(model.named_parameters()).keys() <= model.state_dict().keys():
        return None  # it keeps weights to itself that no state_dict brings, such as a frozen base
    others = list(_outside_of_state(model))
    drawn = not torch.equal(torch.default_generator.get_state(), before)
    return None if others and (drawn or any(tensor.is_meta for tensor in others)) else model


def _outside_of_state(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that modules hold, but no state_dict has."""
    for module in model.modules():
        # No public API tells which buffers are not persistent.
        held: list[Any] = [module._buffers[name] for name in module._non_persistent_buffers_set]
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                several = isinstance(value, (dict, list, tuple))
                held += (value.values() if isinstance(value, dict) else value) if several else [value]
        yield from (item for item in held if isinstance(item, torch.Tensor))


def shard_model(model: nn.Module, settings: Settings, device: torch.device) -> nn.Module:
    """Move a model, identical on the CPUs of all workers, to their devices: all of it, or each worker's part.

    Call before making the optimizer, which keeps its state where the parameters are. Under fsdp the model changes in
    place (FSDP2, `fully_shard`): parameters become DTensors cut along their first dimension, and keep their names. A
    block is gathered just before it computes, and freed after. Parameters on the meta device get memory, no values.
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

        mesh = DeviceMesh.from_group(_world(), device.type)
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
    if any(parameter.is_meta for parameter in model.parameters()):
        # The public `to_empty` would take the values of all other tensors, too.
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if has_images_last(model, settings, device) else model


def has_images_last(model: nn.Module, settings: Settings, device: torch.device) -> bool:
    """Whether convolutions compute in the layout [B, H, W, C], cuDNN's own; under fsdp parts have no such layout."""
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    return convolves and settings.parallel == "ddp" and device.type in CHANNELS_LAST


def find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules to gather one at a time: the outermost items of lists and sequences, unless they are small.

    That is where models keep repeated layers. Everything else belongs to the model's root.
    """
    for child in module.children():
        repeated = isinstance(module, (nn.ModuleList, nn.Sequential))
        if repeated and sum(parameter.numel() for parameter in child.parameters()) >= LEAST_BLOCK:
            yield child
        else:
            yield from find_blocks(child)


def is_norm(module: nn.Module) -> bool:
    """Whether a module computes with weights of fp32 under PRECISION=bf16, too: as a norm of torch's, or by its name,
    as models of Hugging Face have their own (`LlamaRMSNorm`).
    """
    named = type(module).__name__.endswith("Norm") and not any(module.children())
    return named or isinstance(module, NORMS)


def has_several(model: nn.Module) -> TypeIs[nn.ModuleDict | nn.ModuleList]:
    """Whether a model is only a container of several, which a task's own loop calls."""
    return type(model) in (nn.ModuleDict, nn.ModuleList)


def prepare(model: nn.Module, settings: Settings) -> nn.Module:
    """The model to train with, from `shard_model`'s: its gradients are averaged over the workers. Of several, each."""
    if is_fsdp(model) or dist.get_world_size() == 1 or not any(each.requires_grad for each in model.parameters()):
        return model
    if isinstance(model, nn.ModuleDict) and has_several(model):
        return nn.ModuleDict({name: prepare(part, settings) for name, part in model.items()})
    if has_several(model):
        return nn.ModuleList(prepare(part, settings) for part in model.children())
    # A static graph would only save a search for unused parameters, which is off, and forbid passes that differ.
    prepared = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if settings.gradient_precision == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        prepared.register_comm_hook(None, bf16_compress_hook)
    return prepared


@contextmanager
def gradient_sync(model: nn.Module, now: bool) -> Iterator[None]:
    """A forward and backward pass of a prepared model that averages gradients `now`, or only adds them up locally."""
    if is_fsdp(model):
        model.set_requires_gradient_sync(now)
        yield
    else:
        with ExitStack() as stack:
            for part in model.children() if has_several(model) else [model]:
                if isinstance(part, DistributedDataParallel) and not now:
                    stack.enter_context(part.no_sync())
            yield


class FiniteGradients:
    """While `on`, keeps what is not finite out of the gradients of a model's passes, whose rows do not count.

    A weight of 0 is not enough: 0 times the infinite loss of a row is NaN, and then on all workers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []

    def set(self, on: bool) -> None:
        if not on:
            while self._handles:
                self._handles.pop().remove()
        elif not self._handles:
            gathered = [module for module in self._model.modules() if is_fsdp(module)]
            self._handles = [module.register_forward_pre_hook(self._watch) for module in gathered]
            if not gathered:
                self._watch(self._model)

    def _watch(self, module: nn.Module, *_: Any) -> None:
        """Of a module whose parameters are whole now."""
        whole = [each for each in module.parameters() if each.requires_grad and not is_dtensor(each)]
        self._handles += [parameter.register_hook(_without_infinite) for parameter in whole]


def _without_infinite(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def clip_gradients(model: nn.Module, longest: float) -> None:
    """Scale the gradient of a step down to the length `longest` (0: off), over all parameters and, under fsdp, parts.

    Once for a step, when gradients are averaged. All workers call this together; none waits for its device.
    """
    if longest:
        nn.utils.clip_grad_norm_(model.parameters(), longest)


def is_fsdp(model: object) -> TypeIs[FSDPModule]:
    """Whether `shard_model` has cut the model into parts."""
    return isinstance(model, _class("torch.distributed.fsdp", "FSDPModule"))


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether a tensor is cut into parts."""
    return isinstance(tensor, _class("torch.distributed.tensor", "DTensor"))


def _class(module: str, name: str) -> Any:
    """The class, or none at all while its module is not imported: then nothing is of that class."""
    return getattr(sys.modules.get(module), name, ())


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a DTensor, or all of another tensor; not a copy."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def find_places(tensors: list[torch.Tensor]) -> list[Place | None]:
    """Where this worker's part of each tensor lies; None for tensors that every worker has whole."""
    parts = {str(number): tensor for number, tensor in enumerate(tensors) if is_dtensor(tensor)}
    # Of a tensor with fewer rows than there are workers, the last ones have an empty part, which the plan leaves out.
    places = [Place(tuple(each.shape), tuple(each.shape)) if is_dtensor(each) else None for each in tensors]
    if not parts:
        return places
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    for item in create_default_local_save_plan(parts, is_coordinator=True).items:
        assert item.tensor_data
        places[int(item.index.fqn)] = Place(tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets))
    return places


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters in the order of an optimizer's state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shard_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A whole state_dict of the optimizer with each tensor cut like its parameter; under ddp in its layout at most."""
    parameters = parameters_of(optimizer)

    def shard(value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            return value
        if not is_dtensor(parameter):  # fused optimizers want one layout
            same = value.stride() == parameter.stride()
            return value if same else torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
        from torch.distributed.tensor import distribute_tensor

        # Every worker has the whole tensor, so none has to send it.
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

    sharded = {
        number: {name: shard(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": sharded}


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world
    return world


class StepActions(NamedTuple):
    """What the workers do after a step."""

    save: bool = False
    "Save a checkpoint to storage."
    copy: bool = False
    "Copy the state to shared memory."
    report: bool = False
    "Add a record to the metric history."
    stop: bool = False
    "Save and return: the run ends here."
    restart: bool = False
    "Save and end, for Ray to start a new worker group."
    busy: bool = False
    "Under FSDP, while a checkpoint is being committed: begin no other that can wait."
    next_in: int = MOST_STEPS
    "Steps after which there may be something to do again."


class StepConsensus:
    """Brings rank 0's decisions to all workers, for the same step: about every ASK_EVERY_S, or with each longer step.

    The broadcast of short steps runs behind the next one. Its result comes a step late and so costs nothing: no worker
    waits for the slowest one, except where gradients make it wait anyway. After a step of AT_ONCE_S all wait for it:
    of a notice, another step may be the most. It says, too, which of the two, and after how many steps, comes next.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._message = torch.zeros(len(StepActions._fields) + 1, dtype=torch.uint8)
        self._pending: dist.Work | None = None
        self._busy = self._at_once = False
        self._every = self._left = 1
        "Steps between the last two broadcasts, and until the next."
        self._asked = time.monotonic()

    def agree(self, decide: Callable[[], StepActions]) -> StepActions:
        """The actions that rank 0 decided on, after this step or the one before, the same on all workers.

        All call this after each step. `decide` returns the worker's own; it is called when the next broadcast is due.
        """
        agreed = StepActions(busy=self._busy)
        if self._pending:
            agreed = self._receive()
            if self._at_once:  # one result a step
                return agreed
        self._left -= 1
        if self._left == 0:
            mine = decide()
            every, at_once = self._choose_interval(mine)
            self._message = torch.tensor([at_once, *mine._replace(next_in=every)], dtype=torch.uint8)
            self._pending = dist.broadcast(self._message, group=self._group, group_src=0, async_op=True)
            if self._at_once:
                return self._receive()
        return agreed

    def _receive(self) -> StepActions:
        assert self._pending
        self._pending.wait()
        self._pending = None
        at_once, *actions, self._left = self._message.tolist()
        agreed = StepActions(*map(bool, actions))
        self._at_once, self._busy = bool(at_once), agreed.busy
        return agreed

    def _choose_interval(self, mine: StepActions) -> tuple[int, bool]:
        """Steps until the next broadcast, and whether these are long.

        At most twice as many as to this one: a pause tells little of the pace.
        """
        now = time.monotonic()
        step_s = max(now - self._asked, 1e-9) / self._every
        by_pace = int(ASK_EVERY_S / step_s)
        self._every, self._asked = max(1, min(by_pace, 2 * self._every, mine.next_in, MOST_STEPS)), now
        return self._every, step_s > AT_ONCE_S


class EndConsensus:
    """Ends an evaluation on all workers after the same round, while each evaluates its rows at its own pace.

    Who has rows left does not wait for a round, which comes about every ASK_EVERY_S. Who has none waits, but for no
    longer than the slowest worker's next batch: rounds go on until nobody has any, or somebody is to stop or restart.
    """

    def __init__(self, group: dist.ProcessGroup, together: bool) -> None:
        """`together`: all make each forward pass together, and so a round before each."""
        self._group, self._together = group, together
        self._flags = torch.zeros(3, dtype=torch.uint8)
        self._pending: dist.Work | None = None
        self._began = -math.inf
        self.stop = self.restart = False
        "Whether it was cut short, for which of the two, once it has ended."

    def reached(self, stop: bool, restart: bool, more: bool) -> bool:
        """Whether it ends here, given what this worker was told and whether it has `more` rows.

        To be called before each batch, and again and again without one.
        """
        waits = self._together or not more
        if not self._pending and (waits or time.monotonic() - self._began >= ASK_EVERY_S):
            self._began, self._flags = time.monotonic(), torch.tensor([stop, restart, more], dtype=torch.uint8)
            self._pending = dist.all_reduce(self._flags, dist.ReduceOp.MAX, self._group, async_op=True)
        if not self._pending or not (waits or self._pending.is_completed()):
            return False
        self._pending.wait()
        self._pending = None
        self.stop, self.restart, more = map(bool, self._flags.tolist())
        return self.stop or self.restart or not more


def sync_buffers(model: torch.nn.Module) -> None:
    """Give every worker rank 0's buffers, as a checkpoint has them; all workers call this together.

    Each has batch norm's averages of its own rows until DDP does the same before the next forward pass.
    """
    buffers = list(model.buffers())
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):  # in the same order on all workers, unlike a set
        same = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = torch.cat([buffer.reshape(-1) for buffer in same])  # one message, not one for each
        dist.broadcast(flat, src=0)
        for buffer, values in zip(same, flat.split([buffer.numel() for buffer in same]), strict=True):
            buffer.copy_(values.view_as(buffer))


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every worker's object, by rank; `group` None: one worker alone. All workers call this together."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def any_rank(group: dist.ProcessGroup, *mine: bool) -> list[bool]:
    """For each flag, whether it is set on any worker; all workers call this together."""
    flags = torch.tensor(mine, dtype=torch.uint8)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    return [bool(flag) for flag in flags.tolist()]


@contextmanager
def rounds_told_to(listener: Callable[[], Any]) -> Iterator[None]:
    """Call `listener` after each round of `finish_together` while the context lasts: all workers have taken part in it,
    and so are alive, however long one of them takes.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def finish_together(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """What `act` returns, once it has returned on all workers, which call this together; `group` None: a worker alone.

    However long the slowest takes, no collective waits for longer than ROUND_S, and none runs into its limit. What
    `act` raises is raised at once: the end of this worker ends the others.
    """
    if group is None:
        return act()
    mine = start_thread(act, "finish-together")
    while True:
        wait([mine], ROUND_S)
        finished = mine.done()
        if finished and (error := mine.exception()):
            raise error
        [waiting] = any_rank(group, not finished)
        for listener in _listeners:
            listener()
        if not waiting:
            return mine.result()


def from_rank_0(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> Result:
    """What `act` returns on rank 0, on all workers, which call this together, however long it takes."""
    if group is None:
        return act()
    result: list[Any] = [finish_together(group, act if dist.get_rank(group) == 0 else lambda: None)]
    dist.broadcast_object_list(result, src=0, group=group)
    returned: Result = result[0]
    return returned
