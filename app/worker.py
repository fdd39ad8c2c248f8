"""One worker's part in a run: what it trains with, where it starts, and how what it did is recorded."""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pyarrow
import ray
import ray.train.collective
import ray.train.torch
import torch
import torch.distributed as dist

from app.background import Background
from app.checkpoint import Saver, describe, load_state
from app.data.batch import Batch
from app.data.order import LEAST_ROWS, Steps
from app.data.ray_loader import RayLoader
from app.data.source import Source
from app.data.torch_loader import TorchLoader
from app.errors import SettingsError, SupersededError, find_in
from app.layout import Run, open_run
from app.layout.attempts import Attempt, ensure_owner, record_error
from app.layout.checkpoints import Checkpoint
from app.layout.history import Journal
from app.layout.status import STATUS_EVERY_S, RunState, Status, read_status, write_status
from app.metrics import Window
from app.output import shipped_worker_output
from app.progress import PROGRESS_EVERY_S
from app.restore import begin_attempt, load_weights, read_init, versions
from app.settings import Settings
from app.tasks import Task, load_task

REPORT_TO_RAY_EVERY_S = 2
"""Ray takes one report for each poll of its controller, and makes the workers wait for it."""


@dataclass
class Worker:
    """What the training loop needs, the same names on every worker."""

    settings: Settings
    task: Task
    steps: Steps
    total_steps: int
    start: int
    "Optimizer steps taken in the checkpoint that this group starts from."
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
    attempt: Attempt
    journals: dict[str, Journal]
    saver: Saver | None
    "On rank 0 only: under DDP it has the whole state."
    progress: Any
    status: Status
    "The newest news of the run, which rank 0 keeps in storage."
    _run: Run
    _answer: Any = None
    "What the progress board will say to the last news: whether the run is to stop."
    _shown: float = 0.0
    _reported: float = 0.0

    def wait_for_copy(self) -> None:
        """Return when parameters may change again; raises what ended the commits for good, if anything did."""
        if self.saver:
            self.saver.wait_for_copy()
            self.saver.raise_if_failed()

    def save(self, step: int, metrics: dict[str, Any]) -> None:
        """Begin a checkpoint of this step."""
        if not self.saver:
            return
        about = describe(self.attempt, step, self.steps.per_epoch, self.total_steps, _scalars(metrics))
        extra_state = {
            "step": step,
            "epoch": about.epoch,
            # The loader's position and the generators' states are functions of these and the step.
            "loader": {"name": self.settings.loader, **dataclasses.asdict(self.steps)},
            "rng": {"seed": self.settings.seed, "step": step},
            "settings": self.settings.environment(),
            "versions": versions(),
        }
        self.saver.save(about, self.model, self.optimizer, extra_state)

    def report(self, record: dict[str, Any], consumed: pyarrow.Table | None) -> None:
        """Add a record to the metric history, and tell Ray; all workers call this with the same record."""
        if self.saver:
            self.journals["metrics"].append(record)
            if consumed is not None:
                self.saver.record_audit(record["step"] - record["steps"] + 1, record["step"], consumed)
            self.progress.record.remote(_scalars(record))
            self.status = replace(
                self.status,
                step=record["step"],
                epoch=record["epoch"],
                loss=record["loss"],
                rows_per_s=record["rows_per_s"],
                step_time_s=record["seconds"] / record["steps"],
            )
        if record["time"] - self._reported >= REPORT_TO_RAY_EVERY_S:
            self._reported = record["time"]
            ray.train.report(_scalars(record))

    def show_progress(self, step: int, window: Window, now: bool) -> None:
        """Tell the driver's terminal how far the run is, about once a second."""
        if self.saver and (now or time.monotonic() - self._shown >= PROGRESS_EVERY_S):
            self._shown = time.monotonic()
            committed = self.saver.last_committed.step if self.saver.last_committed else self.start
            self._answer = self.progress.show.remote(
                {"step": step, "loss": window.mean_loss, "committed": committed, "time": time.time()}
            )

    def told_to_stop(self) -> bool:
        """Whether the driver wants the workers to save and return; on rank 0 only, at most once for each wish."""
        if self._answer is None or not ray.wait([self._answer], timeout=0)[0]:
            return False
        answer, self._answer = self._answer, None
        return bool(ray.get(answer))

    def publish(self) -> None:
        """Write the newest numbers to storage, on rank 0; raises `SupersededError` when they are no news any more."""
        ensure_owner(self._run, self.attempt)
        for journal in self.journals.values():
            journal.flush()
        committed = self.saver.last_committed if self.saver else None
        if committed:
            self.status = replace(self.status, checkpoint=committed.name, checkpoint_time=committed.time)
        write_status(self._run, self.status)

    def finish(self) -> None:
        """Wait until the newest checkpoint is committed."""
        if self.saver:
            self.saver.finish()


@contextmanager
def join_run(config: dict[str, Any]) -> Iterator[Worker | None]:
    """Make this process a worker of the run; None when the run is no longer this job's to train.

    An error that no retry can mend is recorded, so that the next worker group of this job ends at once.
    """
    settings: Settings = config["settings"]
    run = open_run(settings.storage_path, settings.run_name)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    torch.set_num_threads(config["threads"])
    quiet_ray_train()

    begun = begin_attempt(run, config["owner"], settings, context.get_world_size()) if rank == 0 else None
    attempt, checkpoint = ray.train.collective.broadcast_from_rank_zero(begun)
    if attempt is None:
        yield None
        return
    with ExitStack() as stack:
        stack.enter_context(shipped_worker_output(run, attempt.number, rank))
        try:
            worker = _make_worker(config, run, attempt, checkpoint)
            place = f"{worker.device} of {socket.gethostname()}"
            print(f"attempt {attempt.number}: rank {rank} of {worker.world_size} on {place}, from step {worker.start}")
            if rank == 0:
                stack.enter_context(Background(min(settings.report_every_s, STATUS_EVERY_S), worker.publish))
            yield worker
        except Exception as error:
            final = find_in(error)
            if final and not isinstance(final, SupersededError):  # which writes nothing more
                record_error(run, attempt.number, final)
            raise


def quiet_ray_train() -> None:
    """Keep Ray's line for every report out of the rank's log; its loggers are named by their files (Ray 2.60)."""
    for name in list(logging.root.manager.loggerDict):
        if "/ray/train/" in name:
            logging.getLogger(name).setLevel(logging.WARNING)


def _make_worker(config: dict[str, Any], run: Run, attempt: Attempt, checkpoint: Checkpoint | None) -> Worker:
    settings: Settings = config["settings"]
    source: Source = config["train"]
    test: Source | None = config["test"]
    steps: Steps = config["steps"]
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()
    task = load_task(settings)

    torch.manual_seed(settings.seed)  # the same first weights on every worker and at any world size
    model = task.build_model(settings, source)
    if checkpoint:
        load_weights(model, load_state(run, checkpoint, "model.pt"), checkpoint.name)
    elif settings.init_from:
        load_weights(model, read_init(settings), settings.init_from)
    refuse_small_micro_batches(model, settings)
    model.to(device)  # before the optimizer: it keeps its state where it finds the parameters
    optimizer = task.build_optimizer(model, settings)
    peaks = [group["lr"] for group in optimizer.param_groups]  # by today's LEARNING_RATE, not the checkpoint's
    if checkpoint:
        optimizer.load_state_dict(load_state(run, checkpoint, "optimizer.pt"))
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["initial_lr"] = peak

    if settings.loader == "ray":
        loader: TorchLoader | RayLoader = RayLoader(steps, world_size, rank, device, test is not None)
    else:
        loader = TorchLoader(source, test, steps, settings.seed, world_size, rank)
    journals = {kind: Journal(run, kind, attempt.number) for kind in ("metrics", "events")}  # type: ignore[arg-type]
    for text in attempt.skipped:
        journals["events"].append(
            {"step": attempt.step, "time": time.time(), "event": "checkpoint skipped", "detail": text}
        )
        if rank == 0:
            config["progress"].warn.remote(f"skipped {text}")
    return Worker(
        settings=settings,
        task=task,
        steps=steps,
        total_steps=config["total_steps"],
        start=attempt.step,
        rank=rank,
        world_size=world_size,
        device=device,
        model=model,
        optimizer=optimizer,
        loader=loader,
        has_test=test is not None,
        stand_in={name: column.to(device) for name, column in _stand_in(source).items()},
        control_group=cast(dist.ProcessGroup, dist.new_group(backend="gloo")),
        attempt=attempt,
        journals=journals,
        saver=Saver(run, attempt, settings, journals, config["progress"].warn.remote) if rank == 0 else None,
        progress=config["progress"],
        status=replace(
            read_status(run) or Status(RunState.RUNNING, attempt.owner),
            state=RunState.RUNNING,
            reason="",
            attempt=attempt.number,
            world_size=world_size,
            step=attempt.step,
            checkpoint=attempt.starts_from,
            total_steps=config["total_steps"],
            steps_per_epoch=steps.per_epoch,
        ),
        _run=run,
    )


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


def _scalars(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not isinstance(value, (list, dict))}
