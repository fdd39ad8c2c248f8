"""How a process becomes a worker of the run: the control channel, the claim, the state, and all that the loop needs."""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import numpy as np
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.exceptions import RayError

from app.background import Background
from app.checkpoint.commit import CheckpointCommitter
from app.checkpoint.files import Files, load_weights, write_whole
from app.checkpoint.ledger import Ledger
from app.checkpoint.memory import NodeMemory
from app.checkpoint.sharded import PartWriter, load_parts, parameter_names
from app.checkpoint.snapshot import Snapshot, Snapshots
from app.data.order import MIN_ROWS, Steps
from app.data.ray_loader import RayLoader
from app.data.source import Batch, Source
from app.data.torch_loader import TorchLoader
from app.elastic.control import CONTROL_TIMEOUT_S, CommandPoller
from app.elastic.receipts import RESTARTING
from app.elastic.restore import Start, State, agree_on_start, load_start, read_init
from app.elastic.watchdog import Watchdog
from app.errors import SettingsError, StorageError, SupersededError, find_in
from app.observe.output import shipped_worker_output
from app.observe.prometheus import EXPORT_EVERY_S, Telemetry
from app.parallel import shard_model, shard_optimizer_state
from app.run import Run, open_run
from app.run.attempts import record_error
from app.run.failures import Failure, describe_failure, record_failure
from app.run.history import Journal
from app.run.incidents import Cause
from app.run.status import STATUS_EVERY_S
from app.settings import Settings
from app.storage.base import retry_storage
from app.tasks import load_task
from app.train.reporter import Reporter, first_status
from app.train.worker import Worker

FAILURE_S = 5.0
"""The most that a worker which has failed waits for storage to take its traceback."""


@contextmanager
def join_run(config: dict[str, Any]) -> Iterator[Worker | None]:
    """Make this process a worker of the run; None when the run is no longer this job's to train.

    An error that no retry can mend is recorded, so that the next worker group of this job ends at once: on the control
    channel, as it may be storage that has failed, and in storage, for the job's next driver.
    """
    settings: Settings = config["settings"]
    run = open_run(settings.storage_path, settings.run_name)
    torch.set_num_threads(config["threads"])
    quiet_ray_train()
    # Rank 0 may wait for storage while the others wait for it.
    limit = timedelta(seconds=settings.storage_timeout_s + config["collective_timeout_s"])
    control_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=limit))
    control = config["control"]

    def warn(text: str) -> None:
        print(f"warning: {text}", flush=True)
        control.say.remote(f"warning: {text}")

    if ray.get(control.fatal_error.remote(), timeout=CONTROL_TIMEOUT_S):
        yield None
        return
    memory = _node_memory(settings, run, warn)
    dist.barrier(group=control_group)  # what a node's processes before left has been put in order
    start, found = agree_on_start(run, config["owner"], settings, control_group, warn)
    if start is None:
        yield None
        return
    attempt, rank = start.attempt, ray.train.get_context().get_world_rank()
    with ExitStack() as stack:
        stack.enter_context(shipped_worker_output(run, attempt.number, rank))
        watchdog = Watchdog(run, attempt, rank, settings.hang_timeout_s, functools.partial(_hung, control))
        try:
            state = load_start(run, settings, start, found, control_group, warn)
            stack.enter_context(watchdog)
            worker = _make_worker(config, run, start, state, control_group, memory, watchdog, warn)
            place = f"{worker.device} of {socket.gethostname()}"
            print(
                f"attempt {attempt.number}: rank {rank} of {worker.world_size} on {place}, from step {worker.start}, "
                f"{state.tier}"
            )
            if worker.news:
                every = min(settings.report_every_s, STATUS_EVERY_S)
                worker.news.hurry = stack.enter_context(Background(every, worker.news.publish)).hurry
            stack.enter_context(Background(EXPORT_EVERY_S, worker.telemetry.export))
            yield worker
        except Exception as error:
            final = find_in(error)
            if RESTARTING in str(error):
                raise  # it goes on with the next group
            if final:
                with suppress(RayError):  # the driver is gone, and with it the control channel
                    ray.get(control.fail.remote(final), timeout=CONTROL_TIMEOUT_S)
            if isinstance(final, SupersededError):
                raise  # it writes nothing more
            if final:
                with suppress(StorageError):
                    record_error(run, attempt.number, final)
            _keep_failure(run, describe_failure(error, attempt.number, rank, watchdog.step))
            raise


def quiet_ray_train() -> None:
    """Keep Ray's line for every report out of the rank's log; its loggers are named by their files (Ray 2.60)."""
    for name in list(logging.root.manager.loggerDict):
        if "/ray/train/" in name:
            logging.getLogger(name).setLevel(logging.WARNING)


def _keep_failure(run: Run, failure: Failure) -> None:
    """Leave the error in storage, which may be what has failed; the others wait for this one's end."""
    thread = threading.Thread(target=_record_quietly, args=(run, failure), daemon=True)
    thread.start()
    thread.join(FAILURE_S)


def _record_quietly(run: Run, failure: Failure) -> None:
    with suppress(StorageError):
        record_failure(run, failure)


def _hung(control: Any, detail: str) -> None:
    """Which rank is to blame, all ranks' events tell together."""
    control.note.remote(cause=Cause.HUNG, noticed=time.time())


def _node_memory(settings: Settings, run: Run, warn: Callable[[str], Any]) -> NodeMemory | None:
    """Where this worker keeps its copies; None under DDP on all but one worker of each node."""
    if settings.parallel == "fsdp":
        return NodeMemory(run.location, False, warn)  # a node's parts are no state, and the others' are none without
    if ray.train.get_context().get_local_rank() != 0:
        return None
    return NodeMemory(run.location, bool(settings.snapshot_cost), warn)


def _make_worker(
    config: dict[str, Any],
    run: Run,
    start: Start,
    state: State,
    control_group: dist.ProcessGroup,
    memory: NodeMemory | None,
    watchdog: Watchdog,
    warn: Callable[[str], Any],
) -> Worker:
    settings: Settings = config["settings"]
    source: Source = config["train"]
    test: Source | None = config["test"]
    steps: Steps = config["steps"]
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()
    attempt = start.attempt
    task = load_task(settings)

    torch.manual_seed(settings.seed)  # the same first weights on every worker and at any world size
    model = task.build_model(settings, source)
    if state.model:
        load_weights(model, state.model, str(attempt.starts_from))
    elif settings.init_from and not state.parts:
        load_weights(model, read_init(settings), settings.init_from)
    refuse_small_micro_batches(model, settings)
    model = shard_model(model, settings, device)
    optimizer = task.build_optimizer(model, settings)
    peaks = [group["lr"] for group in optimizer.param_groups]  # by today's LEARNING_RATE, not the checkpoint's
    if state.optimizer:
        optimizer.load_state_dict(shard_optimizer_state(optimizer, state.optimizer))
    elif state.parts:
        limit_s, parts = settings.storage_timeout_s, state.parts
        retry_storage(lambda: load_parts(run, parts, model, optimizer), limit_s, "reading a checkpoint's parts", warn)
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["initial_lr"] = peak

    if settings.loader == "ray":
        loader: TorchLoader | RayLoader = RayLoader(steps, world_size, rank, device, test is not None)
    else:
        loader = TorchLoader(source, test, steps, settings.seed, world_size, rank)
    snapshots = Snapshots(memory) if memory else None
    worker = Worker(
        settings=settings,
        task=task,
        source=source,
        steps=steps,
        total_steps=config["total_steps"],
        attempt=attempt,
        start=attempt.step,
        evaluated=state.evaluated,
        metrics=state.metrics,
        rank=rank,
        world_size=world_size,
        device=device,
        model=model,
        optimizer=optimizer,
        loader=loader,
        has_test=test is not None,
        stand_in={name: column.to(device) for name, column in _padding_batch(source).items()},
        control_group=control_group,
        commands=CommandPoller(config["control"]),
        watchdog=watchdog,
        ledger=Ledger(control_group, attempt.number, attempt.step, state.ledger, settings.audit),
        telemetry=Telemetry(settings.run_name, rank, device, lambda: snapshots.spent_s if snapshots else 0.0),
        snapshots=snapshots,
    )
    write: Callable[[Run, Snapshot], Files | None] = write_whole
    if worker.in_parts:
        names = parameter_names(model, optimizer)
        write = PartWriter(rank, world_size, names, settings.storage_timeout_s, warn)
        worker.saver = CheckpointCommitter(run, attempt, settings, {}, warn, write=write) if rank else None
    if rank == 0 and worker.snapshots:
        journals = {kind: Journal(run, kind, attempt.number) for kind in ("events", "metrics")}  # type: ignore[arg-type]
        for text in attempt.skipped:
            journals["events"].append(
                {"step": attempt.step, "time": time.time(), "event": "checkpoint skipped", "detail": text}
            )
            warn(f"skipped {text}")
        worker.saver = CheckpointCommitter(run, attempt, settings, journals, warn, worker.ledger.write, write)
        first = first_status(start, worker.total_steps, steps.per_epoch)
        worker.news = Reporter(
            run, settings, start, state, config["control"], journals, worker.snapshots, worker.saver, first
        )
        worker.telemetry.about_run = worker.news.gauges
    return worker


def _padding_batch(source: Source) -> Batch:
    group = next(number for number, rows in enumerate(source.row_groups) if rows)
    columns = source.read(group, np.zeros(MIN_ROWS, np.int64))
    return {
        "row": torch.zeros(MIN_ROWS, dtype=torch.int64),
        **{name: torch.from_numpy(v) for name, v in columns.items()},
    }


def refuse_small_micro_batches(model: torch.nn.Module, settings: Settings) -> None:
    """Three rows cut into parts of at most two would leave batch norm one alone; from three on, no cut does."""
    norms = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    if settings.micro_batch_size in (1, 2) and any(isinstance(module, norms) for module in model.modules()):
        raise SettingsError(
            f"SUNSPOT_MICRO_BATCH_SIZE={settings.micro_batch_size}: the model has batch norm, which needs two rows in "
            "every forward pass; set it to 3 or more, or to 0"
        )
