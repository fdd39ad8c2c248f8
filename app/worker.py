"""One worker's part in a run: what it trains with, where it starts, and how what it did is recorded."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, cast

import numpy as np
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError

from app.agreement import Due
from app.background import Background
from app.board import BOARD_TIMEOUT_S, Wishes
from app.checkpoint import Files, Saver, describe, load_weights, write_whole
from app.data.batch import Batch
from app.data.order import LEAST_ROWS, Steps
from app.data.ray_loader import RayLoader
from app.data.source import Source
from app.data.torch_loader import TorchLoader
from app.errors import SettingsError, StorageError, SupersededError, find_in
from app.hang import Watchdog
from app.layout import Run, open_run
from app.layout.attempts import Attempt, record_error
from app.layout.checkpoints import Checkpoint
from app.layout.failures import Failure, describe_failure, record_failure
from app.layout.history import Journal
from app.layout.incidents import Cause
from app.layout.status import STATUS_EVERY_S
from app.ledger import Ledger
from app.memory import NodeMemory
from app.metrics import Window, scalars
from app.news import News, first_status
from app.output import shipped_worker_output
from app.parallel import place_model, spread_like_parameters
from app.patience import with_patience
from app.recovery import LEFT
from app.restore import Start, State, agree_on_start, load_start, read_init, versions
from app.settings import Settings
from app.sharded import PartWriter, load_parts, parameter_names
from app.snapshot import Snapshot, Snapshots
from app.tasks import Task, load_task
from app.telemetry import EXPORT_EVERY_S, Telemetry

REPORT_TO_RAY_EVERY_S = 2
"""Ray takes one report for each poll of its controller, and makes the workers wait for it."""

LEAVE_S = 60
"""The most that storage is waited for when the workers make way, no node is going, and memory has the state anyway."""

GONE_AFTER_S = 5.0
"""Then workers that have left end. Ray keeps their processes until it has room for a new group, and with them a node
that is to go: Kubernetes replaces a pod only when it is gone."""

FAILURE_S = 5.0
"""The most that a worker which has failed waits for storage to take its traceback."""

DEADLINE_MARGIN_S = 1.0
"""Left of a notice when the workers leave, committed or not: the survivors have the state in memory."""


@dataclass
class Worker:
    """What the training loop needs, the same names on every worker."""

    settings: Settings
    task: Task
    source: Source
    "The training rows."
    steps: Steps
    total_steps: int
    attempt: Attempt
    start: int
    "Optimizer steps taken where this group starts."
    evaluated: bool
    "False: an epoch ends at `start`, and is still to be evaluated."
    metrics: dict[str, Any]
    "Of the state that this group starts from."
    rank: int
    world_size: int
    device: torch.device
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loader: TorchLoader | RayLoader
    has_test: bool
    stand_in: Batch
    "Two rows for a worker whose share of a step is empty."
    control_group: dist.ProcessGroup
    "Carries decisions and numbers between workers, on the CPU and apart from the gradients."
    wishes: Wishes
    watchdog: Watchdog
    ledger: Ledger
    telemetry: Telemetry
    snapshots: Snapshots | None
    "On one worker of each node, as under DDP each has the whole state; under FSDP on all."
    saver: Saver | None = None
    "On rank 0; under FSDP on all."
    news: News | None = None
    "On rank 0 only."
    _reported: float = 0.0

    @property
    def in_parts(self) -> bool:
        """Whether each worker has, and saves, only its part of the state."""
        return self.settings.parallel == "fsdp"

    def due(self, step: int, step_time: float) -> Due:
        """What rank 0 wants done after `step`, which took `step_time` seconds; nothing, on the others."""
        if not self.news or not self.snapshots:
            return Due()
        news, wish = self.news, self.wishes.look()
        busy = self.in_parts and self.saver is not None and self.saver.busy
        return Due(
            save=not busy and news.save_timer.due(news.save_every_s),
            busy=busy,
            copy=self.snapshots.memory.shared and news.pace.due(step, step_time, self.snapshots.costs),
            report=news.report_timer.due(self.settings.report_every_s),
            stop=wish.stop,
            leave=wish.leave,
        )

    def took_step(self, step: int, rows: torch.Tensor | None, window: Window, epoch_ends: bool) -> None:
        """Note that a step has been taken, and which rows it consumed."""
        self.watchdog.beat(step)
        self.ledger.add_step(step, rows)
        self.telemetry.took_step(step, window.last_step_s)
        if self.snapshots:
            self.snapshots.memory.beat(self.attempt.number, step)
        if self.news:
            self.news.took_step(step, window, epoch_ends)

    def beat(self) -> None:
        """Note that some rows have been evaluated."""
        self.watchdog.beat()
        self.telemetry.evaluated()
        if self.news:
            self.news.beat()

    def wait_for_copy(self) -> None:
        """Return when parameters may change again; raises what ended the commits for good, if anything did."""
        if self.snapshots:
            self.snapshots.wait_for_copy()
        if self.saver:
            self.saver.raise_if_failed()

    def keep(self, step: int, metrics: dict[str, Any], evaluated: bool, for_storage: bool) -> None:
        """Begin to copy the state at `step`, which all workers do together; `for_storage` makes it a checkpoint."""
        began = time.thread_time()  # waiting for slower workers is no cost: the next gradients would
        if self.settings.snapshot_cost:
            sync_buffers(self.model)
        windows = self.ledger.gather(step)
        together = time.thread_time() - began
        if not self.snapshots or not (self.snapshots.memory.shared or (self.saver and for_storage)):
            return
        if self.in_parts:
            self._finish_commit()
        about = describe(self.attempt, step, self.steps.per_epoch, self.total_steps, scalars(metrics), evaluated)
        commits = for_storage and self.saver is not None
        snapshot = self.snapshots.take(
            about,
            self.model,
            self.optimizer,
            self._extra_state(about) if commits else {},  # a copy in memory is read by this very run
            windows,
            needed=for_storage,
            for_storage=commits,
        )
        self.snapshots.charge(together)
        if self.saver and snapshot and commits:
            self.saver.commit(snapshot)

    def _finish_commit(self) -> None:
        """Wait for the commit of the snapshot before, on all workers: one that was taken in parts is never dropped for
        a newer one, as another worker might not. Only a checkpoint that cannot wait comes so early (`Due.busy`).
        """
        if self.saver:
            with self.watchdog.paused():
                self.saver.drain()
                dist.barrier(group=self.control_group)

    def _extra_state(self, about: Checkpoint) -> dict[str, Any]:
        """What a checkpoint says of where it comes from, besides its manifest."""
        return {
            "step": about.step,
            "epoch": about.epoch,
            # The loader's position and the generators' states are functions of these and the step.
            "loader": {"name": self.settings.loader, **dataclasses.asdict(self.steps)},
            "rng": {"seed": self.settings.seed, "step": about.step},
            "settings": self.settings.environment(),
            # What the task builds its model for (EmptySource): with it a checkpoint is all that a prediction needs.
            "data": {"shape": list(self.source.shape), "classes": self.source.classes},
            "versions": versions(),
        }

    def report(self, record: dict[str, Any]) -> None:
        """Add a record to the metric history, and tell Ray; all workers call this with the same record."""
        self.telemetry.report(record)
        if self.news:
            self.news.report(record)
        if record["time"] - self._reported >= REPORT_TO_RAY_EVERY_S:
            self._reported = record["time"]
            ray.train.report(scalars(record))

    def catch_up(self, step: int, results: dict[str, float] | None) -> None:
        """Record the evaluation that the workers before could not make; leave when these cannot either."""
        if results is None:
            self.leave()
        metrics = {**self.metrics, **results, "time": time.time()}
        if self.news:
            self.news.catch_up(metrics)
        self.keep(step, metrics, evaluated=True, for_storage=True)

    def leave(self) -> NoReturn:
        """Wait until the newest copy is safe, and end this worker group: Ray starts one on the nodes there are then."""
        with self.watchdog.paused():
            if self.snapshots:
                self.snapshots.wait_until_whole()
            if self.news:
                self.news.leave(self._time_to_leave())
            dist.barrier(group=self.control_group)  # the first to end takes the others along
        gone = threading.Timer(GONE_AFTER_S, os._exit, (0,))
        gone.daemon = True
        gone.start()
        raise RayActorError(error_msg=LEFT, preempted=True)

    def _time_to_leave(self) -> float | None:
        """Seconds that the commit of the last checkpoint may take; None: as long as it takes."""
        deadline = self.wishes.look().deadline
        if deadline is not None:
            return max(0.0, deadline - time.time() - DEADLINE_MARGIN_S)
        return LEAVE_S if self.snapshots and self.snapshots.memory.shared else None

    def finish(self) -> None:
        """Wait until the newest checkpoint is committed; what lies in memory is not needed any more."""
        with self.watchdog.paused():
            if self.saver:
                self.saver.finish()
            if self.snapshots:
                self.snapshots.wait_until_whole()
            dist.barrier(group=self.control_group)
            if self.snapshots:
                self.snapshots.memory.remove()


@contextmanager
def join_run(config: dict[str, Any]) -> Iterator[Worker | None]:
    """Make this process a worker of the run; None when the run is no longer this job's to train.

    An error that no retry can mend is recorded, so that the next worker group of this job ends at once: on the board,
    as it may be storage that has failed, and in storage, for the job's next driver.
    """
    settings: Settings = config["settings"]
    run = open_run(settings.storage_path, settings.run_name)
    torch.set_num_threads(config["threads"])
    quiet_ray_train()
    # Rank 0 may wait for storage while the others wait for it.
    limit = timedelta(seconds=settings.storage_timeout_s + config["collective_timeout_s"])
    control_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=limit))
    board = config["board"]

    def warn(text: str) -> None:
        print(f"warning: {text}", flush=True)
        board.say.remote(f"warning: {text}")

    if ray.get(board.verdict.remote(), timeout=BOARD_TIMEOUT_S):
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
        watchdog = Watchdog(run, attempt, rank, settings.hang_timeout_s, functools.partial(_hung, board))
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
            if LEFT in str(error):
                raise  # it goes on with the next group
            if final:
                with suppress(RayError):  # the driver is gone, and with it the board
                    ray.get(board.fail.remote(final), timeout=BOARD_TIMEOUT_S)
            if isinstance(final, SupersededError):
                raise  # it writes nothing more
            if final:
                with suppress(StorageError):
                    record_error(run, attempt.number, final)
            _keep_failure(run, describe_failure(error, attempt.number, rank, watchdog.step))
            raise


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


def _hung(board: Any, detail: str) -> None:
    """Which rank is to blame, all ranks' events tell together."""
    board.note.remote(cause=Cause.HUNG, noticed=time.time())


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
    model = place_model(model, settings, device)
    optimizer = task.build_optimizer(model, settings)
    peaks = [group["lr"] for group in optimizer.param_groups]  # by today's LEARNING_RATE, not the checkpoint's
    if state.optimizer:
        optimizer.load_state_dict(spread_like_parameters(optimizer, state.optimizer))
    elif state.parts:
        limit_s, parts = settings.storage_timeout_s, state.parts
        with_patience(lambda: load_parts(run, parts, model, optimizer), limit_s, "reading a checkpoint's parts", warn)
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
        stand_in={name: column.to(device) for name, column in _stand_in(source).items()},
        control_group=control_group,
        wishes=Wishes(config["board"]),
        watchdog=watchdog,
        ledger=Ledger(control_group, attempt.number, attempt.step, state.ledger, settings.audit),
        telemetry=Telemetry(settings.run_name, rank, device, snapshots),
        snapshots=snapshots,
    )
    write: Callable[[Run, Snapshot], Files | None] = write_whole
    if worker.in_parts:
        names = parameter_names(model, optimizer)
        write = PartWriter(rank, world_size, names, settings.storage_timeout_s, warn)
        worker.saver = Saver(run, attempt, settings, {}, warn, write=write) if rank else None
    if rank == 0 and worker.snapshots:
        journals = {kind: Journal(run, kind, attempt.number) for kind in ("events", "metrics")}  # type: ignore[arg-type]
        for text in attempt.skipped:
            journals["events"].append(
                {"step": attempt.step, "time": time.time(), "event": "checkpoint skipped", "detail": text}
            )
            warn(f"skipped {text}")
        worker.saver = Saver(run, attempt, settings, journals, warn, worker.ledger.write, write)
        first = first_status(start, worker.total_steps, steps.per_epoch)
        worker.news = News(
            run, settings, start, state, config["board"], journals, worker.snapshots, worker.saver, first
        )
        worker.telemetry.about_run = worker.news.gauges
    return worker


def _stand_in(source: Source) -> Batch:
    group = next(number for number, rows in enumerate(source.row_groups) if rows)
    columns = source.read(group, np.zeros(LEAST_ROWS, np.int64))
    return {
        "row": torch.zeros(LEAST_ROWS, dtype=torch.int64),
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
