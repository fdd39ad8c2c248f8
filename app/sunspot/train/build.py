"""Builds a worker's learner: the model, the optimizer and the loader."""

import logging
import os
import shutil
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import ray.train.torch
import torch
from torch.optim import Optimizer

from sunspot.checkpoint.average import WeightAverage
from sunspot.checkpoint.files import load_weights
from sunspot.checkpoint.foreign_weights import fit_names
from sunspot.data.ray_loader import RayLoader
from sunspot.data.shared_rows import LocalWorkers
from sunspot.data.torch_loader import TorchLoader
from sunspot.elastic.control import ControlClient
from sunspot.elastic.restore import TrainingState
from sunspot.errors import ConflictError, SettingsError
from sunspot.formatting import kind_of, plural
from sunspot.parallel.collectives import WorkerPlace, gather_objects, run_on_all_ranks
from sunspot.parallel.recompute import recompute_blocks
from sunspot.parallel.sharding import (
    build_without_values,
    find_blocks,
    is_fsdp,
    models_in,
    shard_model,
    shard_model_state,
)
from sunspot.plan import Plan
from sunspot.run.attempts import Attempt
from sunspot.settings import Settings
from sunspot.tasks import Task, load_task
from sunspot.train.cuda_graphs import use_graphs
from sunspot.train.device_memory import await_device_memory
from sunspot.train.learner import Learner, Loader, load_rest
from sunspot.train.learning_rates import LearningRates

log = logging.getLogger(__name__)

RECOMPUTED_OPTIONS = ("lr", "initial_lr", "weight_decay", "fused")
"""Optimizer options that are not restored, because settings or the device determine them at each start."""

REPEATED_BLOCKS = 4
"""Minimum number of blocks of a model whose blocks are compiled separately. Other models are compiled as a whole."""

COMPILERS = {"cpu": ("CXX", "g++", "clang++"), "cuda": ("CC", "gcc", "clang")}
"""The variable that names torch.compile's compiler, and the default compilers, keyed by device type."""


def build_learner(
    plan: Plan,
    place: WorkerPlace,
    attempt: Attempt,
    state: TrainingState,
    open_rows: Callable[[Plan, Task, WorkerPlace], Loader],
) -> Learner:
    """Build the model, the optimizer and the loader, and load the state that the group starts from."""
    task = load_task(plan.settings)
    model = build_model(plan, task, state, attempt, place)
    optimizer, average = build_optimizer(plan.settings, task, model)
    rates = LearningRates(plan, task, optimizer)
    load_rest(state, model, optimizer)
    return Learner(plan, task, place, model, optimizer, average, open_rows(plan, task, place), rates)


def prepare_learner(plan: Plan, control: ControlClient, place: WorkerPlace | None = None) -> Learner:
    """Build a replacement's learner without the other workers. These workers send its state later.

    Under hsdp, `place` determines the learner's shard.
    """
    alone = WorkerPlace(device=ray.train.torch.get_device())
    if alone.device.type == "cuda":
        await_device_memory(alone.device, ray.get_runtime_context().get_node_id(), control)
    state = TrainingState(load_parts=leave_empty if place else None)
    newest = Attempt(0, "", None, 0)
    learner = build_learner(plan, place or alone, newest, state, lambda plan, task, _: make_loader(plan, task, alone))
    if not place:
        learner.warm_up()  # a sharded model cannot compute alone
    return learner


def leave_empty(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Do nothing, so that a sharded model and its optimizer stay uninitialized until they get their state."""


def build_model(plan: Plan, task: Task, state: TrainingState, attempt: Attempt, place: WorkerPlace) -> torch.nn.Module:
    """Build the task's model on its device, with the state's weights or with initial weights from the seed.

    If the state is sharded (fsdp), the weights are loaded later, by `load_rest`.
    """
    settings = plan.settings
    empty = settings.parallel != "ddp" and (state.load_parts is not None or state.model is not None)
    model = build_without_values(lambda: task.build_model(settings, plan.source)) if empty else None
    restored = model is not None
    if model is None:
        torch.manual_seed(settings.seed)  # the same first weights on every worker and at any world size
        model = task.build_model(settings, plan.source)
    if not isinstance(model, torch.nn.Module):
        raise SettingsError(
            f"SUNSPOT_TASK={settings.task}: its build_model returned {kind_of(model)}; return a torch.nn.Module"
        )
    refuse_uninitialized(model, settings)
    for part in models_in(model):
        if not part.training:  # as `from_pretrained` returns it; otherwise its modules keep their modes
            part.train()
    fixed = sum(not module.training for module in model.modules())
    if fixed:
        print(f"model: {plural(fixed, 'module')} will stay in evaluation mode, as returned by build_model")
    refuse_small_micro_batches(model, settings)
    if settings.recompute == "blocks":
        recompute_blocks(model)
    lacks_values = not restored and any(parameter.is_meta for parameter in model.parameters())
    model = shard_model(model, settings, place.device, place.replicas)
    if lacks_values:
        load_pretrained(task, model)
    if state.model is not None:
        weights = state.model if attempt.starts_from else fit_names(model, state.model, settings.init_from)
        load_weights(model, shard_model_state(model, weights), attempt.starts_from or settings.init_from)
    compile_model(model, plan, place.world_size, place.device)
    for part in models_in(model):
        use_graphs(part, settings, place.device)
    return model


def load_pretrained(task: Task, model: torch.nn.Module) -> None:
    """Fill the parameters that `build_model` left on the meta device.

    Raises `SettingsError` if the task cannot fill them.
    """
    if not task.load_pretrained:
        raise task.error(
            "its build_model returned parameters on the meta device, which have no values; build them on the CPU, or "
            "define load_pretrained(model) to fill them"
        )
    task.load_pretrained(model)


def build_optimizer(settings: Settings, task: Task, model: torch.nn.Module) -> tuple[Optimizer, WeightAverage]:
    """Build the task's optimizer, and the moving average of the weights (EMA).

    The options in RECOMPUTED_OPTIONS do not change when the optimizer loads a state.
    """
    optimizer = task.build_optimizer(model, settings)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    todays = [{name: group[name] for name in RECOMPUTED_OPTIONS if name in group} for group in optimizer.param_groups]

    def keep_todays(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in state["param_groups"]]
        for group, today in zip(groups, todays, strict=False):  # if the groups differ, the optimizer raises an error
            group.update(today)
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(keep_todays)
    return optimizer, WeightAverage(optimizer, settings.ema)


def refuse_uninitialized(model: torch.nn.Module, settings: Settings) -> None:
    """Raise `SettingsError` if a tensor has no shape before the first forward pass, as in `nn.LazyLinear`."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tensors if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise SettingsError(
            f"SUNSPOT_TASK={settings.task}: its build_model returned a model that contains "
            f"{plural(len(lazy), 'tensor')} with no shape yet, such as {lazy[0]}; run a forward pass in build_model, "
            "or give each layer its input size (nn.Linear instead of nn.LazyLinear)"
        )


def refuse_small_micro_batches(model: torch.nn.Module, settings: Settings) -> None:
    """Raise `SettingsError` for batch norm with MICRO_BATCH_SIZE 1 or 2, because some passes could have one row."""
    norms = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    if settings.micro_batch_size in (1, 2) and any(isinstance(module, norms) for module in model.modules()):
        raise SettingsError(
            f"SUNSPOT_MICRO_BATCH_SIZE={settings.micro_batch_size}: batch norm needs at least two rows in every "
            "forward pass, but this setting allows passes with a single row; set it to 3 or more, or to 0"
        )


def compile_model(model: torch.nn.Module, plan: Plan, world_size: int, device: torch.device) -> None:
    """Set up a model to be compiled in its first passes, according to COMPILE. The tensors keep their names.

    Under fsdp, each block is compiled separately, because parameters are gathered between blocks. With COMPILE=default,
    repeated blocks are also compiled separately under ddp. Raises `SettingsError` if no compiler is installed.
    """
    settings = plan.settings
    if settings.compile == "off":
        return
    problem = find_compiler_problem(device)
    if problem:
        raise SettingsError(f"SUNSPOT_COMPILE={settings.compile}: {problem}")
    mode: str = settings.compile
    outlives = settings.survivors != "off" and settings.loader == "torch"
    fewest = 1 if outlives else world_size  # survivors keep their compiled model in a smaller group
    if mode == "max-autotune" and (is_fsdp(model) or plan.passes(fewest) > 1):
        # CUDA graphs need parameters at fixed addresses, and gradients that are used before the next pass.
        mode = "max-autotune-no-cudagraphs"
    for part in models_in(model):
        blocks = list(find_blocks(part))
        alone = is_fsdp(part) or (mode == "default" and are_repeated(blocks))
        for module in blocks if alone and blocks else [part]:
            module.compile(mode=mode, dynamic=False)


def are_repeated(blocks: list[torch.nn.Module]) -> bool:
    """Return True if blocks are so similar that one or two compiled graphs are enough for all of them.

    Compiling such blocks separately is much faster than compiling the whole model. Each block's gradients can also be
    averaged while the backward pass continues in the blocks before it.
    """
    kinds = {(type(block), *(parameter.shape for parameter in block.parameters())) for block in blocks}
    return len(blocks) >= REPEATED_BLOCKS and len(kinds) <= 2 and all(any(block.children()) for block in blocks)


def find_compiler_problem(device: torch.device) -> str:
    """Return the reason why torch.compile would fail on this machine, or an empty string."""
    variable, *names = COMPILERS[device.type]
    if any(map(shutil.which, filter(None, (os.environ.get(variable), *names)))):
        return ""
    return (
        f"torch.compile needs {' or '.join(names)}, which {socket.gethostname()} does not have; install a compiler in "
        f"the image (or name one in {variable}), or set SUNSPOT_COMPILE to off"
    )


def make_loader(plan: Plan, task: Task, place: WorkerPlace) -> Loader:
    """Create the loader that LOADER selects. Raises `ConflictError` if its row order differs from the driver's."""
    if plan.order and plan.find_order() != plan.order:
        raise ConflictError(
            f"{socket.gethostname()}: NumPy {np.__version__} shuffles rows differently than the driver's NumPy, so "
            "some rows would be repeated and others skipped; run the same image on all nodes"
        )
    device = place.device
    if plan.settings.loader == "ray":
        return RayLoader(plan.steps, place.world_size, place.rank, device, plan.test is not None)
    context = ray.get_runtime_context()
    workers = LocalWorkers(
        rank=place.rank,
        world_size=place.world_size,
        node=f"{context.get_job_id()} on {context.get_node_id()}",
        gather=lambda mine: gather_objects(mine, place.group),
        finish=lambda act: run_on_all_ranks(place.group, act),
    )
    loader = TorchLoader(plan.data, device, workers, task.full_batch)
    if device.type == "cuda":
        print(
            f"rows: on {device}"
            if loader.resident
            else f"rows: kept in host memory, because {device} does not have enough free memory"
        )
    return loader
