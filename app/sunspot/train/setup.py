"""Makes a process a worker of the run: claims it with the group, loads the state, builds what a step needs."""

import logging
import math
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import takewhile
from typing import Any, cast

import numpy as np
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from sunspot.background import Background, start_thread
from sunspot.checkpoint import CheckpointManager, NodeMemory, SavedObjects
from sunspot.checkpoint.average import WeightAverage
from sunspot.checkpoint.files import load_weights
from sunspot.checkpoint.tensors import map_tensors
from sunspot.data.ray_loader import RayLoader
from sunspot.data.shared_rows import LocalWorkers
from sunspot.data.torch_loader import FullBatchLoader, TorchLoader
from sunspot.elastic.claim import Start, agree_on_start
from sunspot.elastic.control import CommandPoller, ControlChannel, ControlClient
from sunspot.elastic.failures import describe_end
from sunspot.elastic.receipts import Phases, first_incident
from sunspot.elastic.restore import State, load_start
from sunspot.elastic.watchdog import Watchdog
from sunspot.errors import ConflictError, SettingsError, StorageError, SunspotError, SupersededError, find_in
from sunspot.log import print_logs, sent_warnings
from sunspot.observe.output import shipped_worker_output
from sunspot.observe.prometheus import EXPORT_EVERY_S, Telemetry
from sunspot.parallel.collectives import GroupMember, gather_objects, listening_to_rounds, run_on_all_ranks
from sunspot.parallel.sharding import build_without_values, has_several, shard_model, shard_optimizer_state
from sunspot.plan import Plan
from sunspot.ray_internals.backend import processes_up
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.ray_internals.output import quiet_ray_train
from sunspot.ray_internals.workers import launch_time, raylet_process
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt, record_error
from sunspot.run.failures import record_failure
from sunspot.run.hangs import Hang
from sunspot.run.history import Journal
from sunspot.settings import Settings, differences
from sunspot.tasks import Task, load_task
from sunspot.train.device_memory import await_device_memory
from sunspot.train.forward import compile_model
from sunspot.train.learner import Learner, WorkerPlace
from sunspot.train.reporter import Reporter, first_status, show_claim
from sunspot.train.worker import Beginning, Worker
from sunspot.warm.keeper import kept_server

log = logging.getLogger(__name__)

FAILURE_S, FATAL_S = 5.0, 60.0
"""The longest that a failed worker waits for storage to take its traceback, or an error that no retry can fix."""

OF_TODAY = ("lr", "weight_decay", "fused")
"""Of an optimizer's groups: what settings or the device decide anew at each start of a run."""

EVALUATION_TRIES = 3
"""Worker groups that begin an evaluation before it is left out: it may take longer than there is between notices."""


@contextmanager
def join_run(config: dict[str, Any]) -> Iterator[Worker | None]:
    """Make this process a worker of the run; None when the run is no longer this job's to train.

    `config` is that of train/trainer.py. An error that no retry can fix is recorded, so that the next worker group
    of this job ends at once.
    """
    plan, control = config["plan"], config["control"]
    settings: Settings = plan.settings
    run = open_run(settings.storage_path, settings.run_name)
    print_logs()
    torch.set_num_threads(config["threads"])
    round_products(settings.precision == "tf32")
    quiet_ray_train()
    # One that waits for storage in a step keeps the others waiting (elsewhere, they do so in `run_on_all_ranks`).
    limit = timedelta(seconds=settings.storage_timeout_s + config["collective_timeout_s"])
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=limit))
    phases = Phases(launched=launch_time(), up=processes_up(), formed=time.time())

    def note_hang(hang: Hang, late: bool) -> None:  # those of all ranks tell which one is to blame
        control.tell(ControlChannel.add_hang, replace(hang, stacks=""), late)

    if control.ask(ControlChannel.fatal_error):
        yield None
        return
    rank, world_size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    with ExitStack() as stack:
        stack.enter_context(sent_warnings(partial(control.tell, ControlChannel.log)))
        watchdog = Watchdog(run, rank, world_size, settings.hang_timeout_s, note_hang)
        stack.enter_context(watchdog)
        stack.enter_context(listening_to_rounds(watchdog.heartbeat))
        memory = open_memory(run, settings)
        dist.barrier(group=group)  # on every node, what earlier processes left has been tidied
        try:
            start, found = agree_on_start(run, config["owner"], settings, group, config["driver"])
        except SunspotError as error:
            control.try_ask(ControlChannel.set_fatal_error, error)
            raise
        if start is None:
            yield None
            return
        attempt = start.attempt
        watchdog.claimed(attempt)
        if memory:
            memory.keep_parts_of(start.snapshot.checkpoint if start.snapshot else None)
        if rank == 0:
            control.tell(ControlChannel.explain_start, first_incident(start))
            show_claim(run, first_status(start, plan))
        outputs = stack.enter_context(ExitStack())
        outputs.enter_context(shipped_worker_output(run, attempt.number, rank))
        try:
            state = load_start(run, settings, start, found, group)
            worker = make_worker(plan, run, start, state, group, memory, watchdog, control, outputs)
            place = f"{worker.learner.place.device} of {socket.gethostname()}"
            print(
                f"attempt {attempt.number}: rank {rank} of {world_size} on {place}, from step {attempt.step}, "
                f"{state.tier}"
            )
            del state, found  # as large as the model and its optimizer
            if worker.reporter:
                worker.reporter.phases = Phases(**phases, loaded=time.time())
                outputs.enter_context(worker.reporter.publisher)
                outputs.callback(worker.reporter.end)
                stack.enter_context(worker.commands)
            if config["warm_key"] and ray.train.get_context().get_local_rank() == 0:
                node, after_s = ray.get_runtime_context().get_node_id(), settings.warm_restart_after_s
                stack.enter_context(kept_server(config["warm_key"], node, raylet_process(), after_s))
            stack.enter_context(Background(EXPORT_EVERY_S, worker.telemetry.export))
            yield worker
        except GroupRestartError:
            raise  # training goes on with the next group
        except Exception as error:
            record_end(error, run, control, start, rank, watchdog.step)
            raise


def round_products(rounded: bool) -> None:
    """Have a GPU round the factors of products of fp32 numbers (TF32) or not, of matrices and of convolutions."""
    torch.set_float32_matmul_precision("high" if rounded else "highest")
    torch.backends.cudnn.allow_tf32 = rounded  # which torch has on, unlike that of matrices


def open_memory(run: Run, settings: Settings) -> NodeMemory | None:
    """Where this worker's copies outlive it: under DDP on one worker of each node, as each has the whole state."""
    first = ray.train.get_context().get_local_rank() == 0
    if not settings.snapshot_cost or (settings.parallel == "ddp" and not first):
        return None
    return NodeMemory(run.location, told=first)


def record_end(error: Exception, run: Run, control: ControlClient, start: Start, rank: int, step: int) -> None:
    """Record the error that ends this worker, unless another process owns the run.

    One that no retry can fix goes to the control channel, as storage may be what failed, and to storage, for the job's
    next driver.
    """
    fatal = find_in(error)
    if fatal:
        control.try_ask(ControlChannel.set_fatal_error, fatal)
    if isinstance(fatal, SupersededError):
        return
    attempt = start.attempt
    end = describe_end(error, attempt, rank, step, start.nodes[rank])
    control.tell(ControlChannel.add_rank_error, end)

    def record() -> None:
        with suppress(StorageError):
            if fatal:
                record_error(run, attempt.number, fatal)
            record_failure(run, end.failure)

    # The others wait for this worker's end, and not for storage, least of all when that is what failed.
    with suppress(TimeoutError):
        limit_s = FATAL_S if fatal and not isinstance(fatal, StorageError) else FAILURE_S
        start_thread(record, "record-end").result(limit_s)


# ------------------------------------------------------------------------------------------------- making the worker


def make_worker(
    plan: Plan,
    run: Run,
    start: Start,
    state: State,
    group: dist.ProcessGroup,
    memory: NodeMemory | None,
    watchdog: Watchdog,
    control: ControlClient,
    outputs: ExitStack,
) -> Worker:
    """Build all that a step needs, from the state that the group starts from."""
    settings, attempt, context = plan.settings, start.attempt, ray.train.get_context()
    rank, world_size, device = context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device()
    task, place = load_task(settings), WorkerPlace(rank, world_size, device, group)
    with watchdog.paused():  # weights that are fetched and rows that are read take as long as they need
        await_device_memory(device, start.nodes[rank], control, partial(run_on_all_ranks, group))
        model = build_model(plan, task, state, attempt, place)
        optimizer, average = build_optimizer(settings, task, model, state)
        loader = make_loader(plan, task, place)
    journals = open_journals(run, start) if rank == 0 else {}
    left_out = not state.evaluated and leaves_out_evaluation(start, plan.total_steps)
    if left_out and rank == 0:
        record_left_out(start.attempt.step, journals["events"])
    if rank == 0 and (change := describe_new_length(task, attempt.step, state.total_steps, plan.total_steps)):
        log.warning(change)
    more_files = getattr(task, "checkpoint_files", None)
    checkpoints = CheckpointManager(
        run,
        attempt,
        plan,
        SavedObjects(model, optimizer, average, partial(more_files, model) if more_files else None),
        member=GroupMember(group, rank, world_size, list(start.nodes.values())),
        memory=memory,
        windows=state.ledger,
        journals=journals,
    )
    telemetry = Telemetry(settings.run_name, rank, device, lambda: checkpoints.stall_s)
    reporter = Reporter(run, plan, start, state, control, journals, checkpoints) if rank == 0 else None
    if reporter:
        telemetry.run_gauges = reporter.gauges
    return Worker(
        Learner(plan, task, place, model, optimizer, average, loader),
        Beginning(attempt.step, state.evaluated or left_out, state.metrics),
        checkpoints,
        CommandPoller(control),
        watchdog,
        telemetry,
        reporter,
        outputs,
    )


def build_model(plan: Plan, task: Task, state: State, attempt: Attempt, place: WorkerPlace) -> torch.nn.Module:
    """The task's model on its device, with the state's weights, or those that the seed gives it.

    Of a state in parts, its weights come later (`build_optimizer`).
    """
    settings = plan.settings
    model = build_without_values(lambda: task.build_model(settings, plan.source)) if state.load_parts else None
    if model is None:
        torch.manual_seed(settings.seed)  # the same first weights on every worker and at any world size
        model = task.build_model(settings, plan.source)
    if state.model is not None:
        load_weights(model, state.model, attempt.starts_from or settings.init_from)
    for part in model.children() if has_several(model) else [model]:
        if not part.training:  # as `from_pretrained` returns it; of one that trains, modules stay in their modes
            part.train()
    if fixed := sum(not module.training for module in model.modules()):
        print(f"model: {fixed} of its modules stay in evaluation mode, as build_model returns them")
    refuse_small_micro_batches(model, settings)
    model = shard_model(model, settings, place.device)
    compile_model(model, plan, place.world_size, place.device)
    return model


def build_optimizer(
    settings: Settings, task: Task, model: torch.nn.Module, state: State
) -> tuple[Optimizer, WeightAverage]:
    """The task's optimizer with the state's, and the average of the weights; a state in parts is read here, into the
    model too.
    """
    optimizer = task.build_optimizer(model, settings)
    todays = [{name: group[name] for name in OF_TODAY if name in group} for group in optimizer.param_groups]

    def keep_todays(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in state["param_groups"]]
        for group, today in zip(groups, todays, strict=False):  # the optimizer itself refuses other groups
            group.update(today)
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(keep_todays)
    average = WeightAverage(optimizer, settings.ema)
    if state.optimizer:
        values = state.optimizer
        if optimizer.param_groups[0]["params"][0].is_cpu:
            # There the optimizer goes on with the very tensors it is given: not with pages of a whole file.
            values = map_tensors(values, torch.clone)
        optimizer.load_state_dict(shard_optimizer_state(optimizer, values))
    elif state.load_parts:
        state.load_parts(model, optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer, average


def make_loader(plan: Plan, task: Task, place: WorkerPlace) -> TorchLoader | RayLoader | FullBatchLoader:
    """This worker's loader, as LOADER says; raises `ConflictError` if it would not have the driver's order of rows."""
    if plan.order and plan.find_order() != plan.order:
        raise ConflictError(
            f"{socket.gethostname()}: NumPy {np.__version__} gives another order of the rows than the driver's, so "
            "some would be repeated and others left out; run the same image on all nodes"
        )
    rank, world_size, device = place.rank, place.world_size, place.device
    if plan.settings.loader == "ray":
        return RayLoader(plan.steps, world_size, rank, device, plan.test is not None)
    workers = LocalWorkers(
        rank=rank,
        world_size=world_size,
        node=ray.get_runtime_context().get_node_id(),
        gather=lambda mine: gather_objects(mine, place.group),
        finish=lambda act: run_on_all_ranks(place.group, act),
    )
    loader = TorchLoader(plan.data, device, workers)
    if device.type == "cuda":
        print(f"rows: on {device}" if loader.resident else f"rows: in memory, as {device} has too little room for them")
    return FullBatchLoader(loader) if hasattr(task, "full_batch") else loader


def open_journals(run: Run, start: Start) -> dict[str, Journal]:
    """The attempt's metric history and its events, which begin with what differs from the attempt before.

    That is the checkpoints it skipped, and the versions of what the run's numbers may depend on.
    """
    attempt = start.attempt
    journals = {kind: Journal(run, kind, attempt.number) for kind in ("events", "metrics")}  # type: ignore[arg-type]

    def record(event: str, detail: str) -> None:
        journals["events"].append({"step": attempt.step, "time": time.time(), "event": event, "detail": detail})

    for text in attempt.skipped:
        record("checkpoint skipped", text)
        log.warning(f"skipped {text}")
    before = start.before[-1].metadata.get("versions", {}) if start.before else {}
    now = attempt.metadata.get("versions", {})
    if changed := differences(before, {name: now[name] for name in before if name in now}):
        record("versions changed", ", ".join(changed))
        log.warning(f"other versions than attempt {start.before[-1].number} had: {', '.join(changed)}")
    return journals


def describe_new_length(task: Task, step: int, before: int, now: int) -> str:
    """What it does to the learning rate that the run no longer has `before` steps (0: not known); empty: nothing."""
    if before in (0, now) or hasattr(task, "begin_schedule"):  # Lightning's schedulers are objects
        return ""
    old, new = (task.schedule(min(step, total - 1), total) for total in (before, now))
    if math.isclose(old, new):
        return ""
    return (
        f"{now} steps by EPOCHS and MAX_STEPS, {before} before: the learning rate goes on at {new:.3g} of its peak, "
        f"not at {old:.3g}"
    )


def leaves_out_evaluation(start: Start, total_steps: int) -> bool:
    """Whether to train on without the evaluation of the epoch that ends here: EVALUATION_TRIES groups did not end it.

    The one at the end of the run is made up however often: no step waits for it.
    """
    here = takewhile(lambda attempt: attempt.step == start.attempt.step, reversed(start.before))
    return start.attempt.step < total_steps and 1 + len(list(here)) >= EVALUATION_TRIES


def record_left_out(step: int, events: Journal) -> None:
    """Say that the epoch that ends at `step` has no evaluation."""
    detail = (
        f"the epoch that ends at step {step} is not evaluated: {EVALUATION_TRIES} groups of workers in a row ended "
        "before its evaluation did, and training goes on"
    )
    events.append({"step": step, "time": time.time(), "event": "evaluation left out", "detail": detail})
    log.warning(detail)


def refuse_small_micro_batches(model: torch.nn.Module, settings: Settings) -> None:
    """Refuse micro batches of 1 or 2 rows with batch norm: three rows would be split into 2 + 1."""
    norms = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    if settings.micro_batch_size in (1, 2) and any(isinstance(module, norms) for module in model.modules()):
        raise SettingsError(
            f"SUNSPOT_MICRO_BATCH_SIZE={settings.micro_batch_size}: the model has batch norm, which needs two rows in "
            "every forward pass; set it to 3 or more, or to 0"
        )
