"""`sunspot check`: tries a task in this process, within seconds.

This runs the training code without a Ray cluster, as rank 0 of the run's workers. It takes the first step of an epoch,
saves a checkpoint, and restores it. Then it takes the last step of the epoch and evaluates the task. Only the rows of
these two steps are read, from a few row groups.
"""

import linecache
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

from sunspot.checkpoint import CheckpointManager
from sunspot.checkpoint.files import load_state
from sunspot.data.order import locate_rows
from sunspot.data.source import Batch, Source, notes_on, rows_in
from sunspot.elastic.messages import Command
from sunspot.elastic.restore import TrainingState, load_initial
from sunspot.elastic.watchdog import Watchdog
from sunspot.errors import ConflictError, SettingsError, SunspotError
from sunspot.formatting import plural, some_of
from sunspot.metric_names import HELD_OUT, MetricRecord
from sunspot.observe.prometheus import Telemetry
from sunspot.parallel.collectives import WorkerPlace
from sunspot.plan import Plan, make_plan, with_absolute_paths
from sunspot.predict.forward import forward_rows
from sunspot.ray_internals.output import quiet_ray_train
from sunspot.ray_session import RAY_ENVIRONMENT
from sunspot.run import open_run
from sunspot.run.attempts import Attempt, claim
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.failures import describe_failure
from sunspot.run.history import format_metric, model_metrics
from sunspot.settings import PREFIX, Settings
from sunspot.tasks import describe_misspelled, load_predict, load_task
from sunspot.tasks.defaults import optimizers_in
from sunspot.tracking.process import refuse_unusable
from sunspot.train.build import build_learner
from sunspot.train.evaluate import describe_absent, evaluation_mode
from sunspot.train.learner import Learner, row_losses
from sunspot.train.loop import train
from sunspot.train.start_report import describe_rates
from sunspot.train.worker import GroupStart, Step, Worker

log = logging.getLogger(__name__)

GROUPS_READ = 4
"""Number of row groups from which rows are read. They are spread over the data, which may be sorted by label."""

MAX_ROWS = 4096
"""Maximum number of rows in a step."""

NOT_CHECKED = {"parallel": ("ddp", "it takes several processes"), "compile": ("off", "it takes minutes")}
"""Settings that a check ignores, each with the value used instead and the reason."""

INSTEAD = {"checkpoint_every_steps": 1, "snapshot_cost": 0.0, "audit": False}
"""Settings that every check overrides, to save each step and to turn off what a check does not need."""

AT_FIRST = " at first"
"""Suffix of the names of the first step's metrics."""


@dataclass
class TaskCheck:
    """The results of a check: the duration of each of its parts, the metrics, and what was not checked."""

    task: str
    not_checked: list[str]
    "Each setting that the check ignored, with the reason."
    device: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    "Duration of each part."
    metrics: dict[str, float] = field(default_factory=dict)
    "Metrics of both steps, and of held-out rows."
    learning_rates: list[str] = field(default_factory=list)
    "Lines about the learning rates of the whole run."
    checkpoint_bytes: int = 0
    batch: Batch = field(default_factory=dict)
    "The newest rows that were read, for messages."

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the check.

        An error in this part is raised as a `SunspotError` that names the line in the user's code.
        """
        began = time.monotonic()
        try:
            yield
        except ConflictError as error:
            raise SunspotError(f"{PREFIX}TASK={self.task}: {name}: {error}") from error
        except SunspotError:
            raise
        except Exception as error:
            raise SunspotError(f"{PREFIX}TASK={self.task}: {name}: {self._explain(error)}") from error
        self.seconds[name] = time.monotonic() - began

    def _explain(self, error: Exception) -> str:
        failure = describe_failure(error, 0, None, 0)
        line = linecache.getline(failure.file, failure.line).strip()
        columns = [
            f"{name} {str(column.dtype).removeprefix('torch.')} {list(column.shape)} {low:g}..{high:g}"
            for name, column in self.batch.items()
            if name != "row" and column.numel()
            for low, high in [column.double().aminmax()]  # torch has no minimum or maximum of uint16
        ]
        rows = f"\n  with the rows {some_of(columns)}" if columns else ""
        return (
            f"{failure.type}: {' '.join(failure.message.split())}\n"
            f"  in {failure.function} at {failure.file}:{failure.line}: {line}{rows}"
        )

    def _describe_metrics(self) -> Iterator[str]:
        """Yield a line of metrics for each set of rows, because losses of different rows are not comparable."""
        groups: dict[str, list[str]] = {"rows of the first step": [], "rows of the last step": [], "held-out rows": []}
        for name, value in self.metrics.items():
            of_last = "held-out rows" if name.startswith(HELD_OUT) else "rows of the last step"
            rows = "rows of the first step" if name.endswith(AT_FIRST) else of_last
            groups[rows].append(f"{name.removesuffix(AT_FIRST)} {format_metric(value)}")
        yield from (f"  {rows}: {'  '.join(metrics)}" for rows, metrics in groups.items() if metrics)

    def describe(self) -> Iterator[str]:
        """Yield lines for the terminal."""
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        yield f"task {self.task} on {self.device}: {parts}"
        yield from self._describe_metrics()
        yield from (f"  {line}" for line in self.learning_rates)
        yield f"  a checkpoint has {self.checkpoint_bytes / 1e6:.3g} MB"
        if self.not_checked:
            yield f"  not checked: {'; '.join(self.not_checked)}"
        evaluated = any(name.startswith(HELD_OUT) for name in self.metrics)
        done = (
            "trains, evaluates, saves and restores"
            if evaluated
            else "trains, saves and restores, and evaluates nothing"
        )
        yield f"checked in {sum(self.seconds.values()):.1f} s: it {done}"


def check(settings: Settings) -> TaskCheck:
    """Check the task named in the settings. Raises `SunspotError` if a part of the check fails.

    The error gives the line in the user's code, or a fix.
    """
    refuse_unusable(settings)
    checked = TaskCheck(
        settings.task,
        [
            f"{name.upper()}={getattr(settings, name)}, because {why}"
            for name, (instead, why) in NOT_CHECKED.items()
            if getattr(settings, name) != instead
        ],
    )
    if settings.use_gpu == "true" and not torch.cuda.is_available():
        checked.not_checked.append("SUNSPOT_USE_GPU=true, because torch sees no GPU here")
    quiet_ray_train()
    os.environ.update({name: value for name, value in RAY_ENVIRONMENT.items() if name not in os.environ})
    with checked.part("import and data"):
        task = load_task(settings)
        plan = make_plan(with_absolute_paths(settings), task)
        for note in (*describe_misspelled(task), *notes_on(plan.source, plan.test)):
            log.warning(note)
    with tempfile.TemporaryDirectory() as scratch:
        instead = {name: value for name, (value, _) in NOT_CHECKED.items()} | INSTEAD | {"storage_path": scratch}
        plan = replace(plan, settings=plan.settings.model_copy(update=instead))
        # With num_workers=0, Ray Train runs the function in this process, where its own functions work.
        TorchTrainer(partial(check_plan, plan, checked), scaling_config=ScalingConfig(num_workers=0)).fit()
    return checked


def check_plan(plan: Plan, checked: TaskCheck) -> None:
    """Take the first step, save a checkpoint and restore it. Then take the epoch's last step, evaluate and predict."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        workers = 1 if load_task(plan.settings).full_batch else plan.settings.num_workers.least
        device = torch.device("cpu") if plan.settings.use_gpu == "false" else ray.train.torch.get_device()
        group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        place, checked.device = WorkerPlace(group, 0, workers, device), str(device)
        rows = FewRows(plan, place, checked)
        attempt = Attempt(1, "check", None, 0, nonce="00000000")
        claim(rows.run, [], attempt)
        with checked.part("model and optimizer"):
            worker = build(rows, attempt, load_initial(plan.settings, None))
            checked.learning_rates = describe_rates(worker.learner)
        with checked.part("first step and save"):
            saved = take_step(worker)
        with checked.part("evaluation mode"):
            before = find_losses(worker.learner)
        with checked.part("restore"):
            last = min(plan.total_steps, max(2, plan.steps.per_epoch)) - 1
            restored = build(
                rows,
                replace(attempt, starts_from=saved.name, step=last),
                TrainingState(**{name: load_state(rows.run, saved, f"{name}.pt") for name in ("model", "optimizer")}),
            )
            refuse_other_losses(before, find_losses(restored.learner), checked.task)
        with checked.part("last step" + (" and evaluation" if plan.test else "")):
            saved = take_step(restored)
        with checked.part("predict"):
            predict(restored.learner, checked)
        if restored.learner.undo.early:
            log.warning(f"{PREFIX}TASK={checked.task}: {restored.learner.undo.describe_early()}")
        unread = rows.plan.settings.task_args.describe_unread()
        if unread:
            log.warning(f"{PREFIX}TASK_ARGS: {unread}")
        idle = worker.describe_idle()
        if idle:
            log.warning(f"{PREFIX}TASK={checked.task}: {idle}")
        absent = describe_absent(rows.plan.settings.checkpoint_metric, restored.metrics)
        task = restored.learner.task
        if absent and (task.train or task.library_loop or task.compute_metrics):
            log.warning(absent)  # other steps or rows may have further metrics
        elif absent:
            raise SettingsError(absent)
        checked.metrics = {f"{name}{AT_FIRST}": value for name, value in worker.metrics.items()} | restored.metrics
        checked.checkpoint_bytes = saved.bytes
    finally:
        dist.destroy_process_group()


def build(rows: "FewRows", attempt: Attempt, state: TrainingState) -> "CheckedWorker":
    """Build a worker with this state, as `build_worker` does for a worker in a group."""
    plan = rows.plan
    place = rows.place
    run = rows.run
    learner = build_learner(plan, place, attempt, state, lambda *_: rows)
    checkpoints = CheckpointManager(run, attempt, plan, learner.saved(), place=WorkerPlace(place.group))
    telemetry = Telemetry(plan.settings.run_name, 0, place.device, lambda: 0.0, None)
    commands: Any = SimpleNamespace(poll=Command)  # a check gets no commands from a driver
    watchdog = Watchdog(run, 0, 1, 0, lambda *_: None)
    group_start = GroupStart(attempt.step, True, {})
    worker = CheckedWorker(learner, group_start, checkpoints, commands, watchdog, telemetry, None, ExitStack())
    if not learner.task.library_loop:  # a library may compute gradients inside the optimizer's step
        for optimizer in optimizers_in(learner.optimizer):
            optimizer.register_step_pre_hook(lambda each, *_: worker.note_step(each))
    return worker


def take_step(worker: Worker) -> Checkpoint:
    """Take one step, and return the checkpoint after it."""
    train(worker)
    worker.checkpoints.close(finished=True)
    return cast(Checkpoint, worker.checkpoints.newest)


class CheckedWorker(Worker):
    """A worker that stops after one step, and keeps the step's metrics."""

    metrics: dict[str, float]
    _idle: set[str] | None = None
    "Names of parameters without a gradient, or None before the first step of an optimizer."

    def begin_step(self, step: Step) -> None:
        self.learner.undo.keep()
        self.learner.undo.begin_step()
        super().begin_step(step)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record which parameters have changed too early or have no gradient. Called before each optimizer's step."""
        self.learner.undo.before_change(optimizer)
        named = self.learner.model.named_parameters()
        idle = {name for name, each in named if each.requires_grad and each.grad is None}
        self._idle = idle if self._idle is None else self._idle & idle

    @property
    def averages(self) -> bool:
        """True if the run will have several workers. If so, the check also uses DDP, which can raise its own errors."""
        plan = self.learner.plan
        return plan.settings.num_workers.most > 1 and not self.learner.task.full_batch

    def describe_idle(self) -> str:
        """Return a warning that names the parameters without a gradient, or an empty string if all have one."""
        if not self._idle:
            return ""
        return (
            f"{plural(len(self._idle), 'parameter')} got no gradient in the first step, such as {min(self._idle)}: "
            "parameters keep their values in steps whose rows do not use them"
        )

    def finish_step(self, taken: Step) -> bool:
        refuse_infinite(self.learner, taken)
        super().finish_step(taken)
        return True

    def report(self, record: MetricRecord) -> None:
        self.metrics = model_metrics(record)


class FewRows:
    """A loader that reads only a few rows, for a check."""

    ids: torch.Tensor | None = None

    def __init__(self, plan: Plan, place: WorkerPlace, checked: TaskCheck) -> None:
        self.plan = plan
        self.place = place
        self._checked = checked
        self.run = open_run(plan.settings.storage_path, plan.settings.run_name)

    def train(self, epoch: int, first: int, last: int) -> Iterator[Batch]:
        for step in range(first, last):
            begin, end = self.plan.steps.share(step, self.place.world_size, 0)
            yield self._read(self.plan.source, min(end - begin, MAX_ROWS))

    def test(self, batch_size: int) -> Iterator[Batch]:
        test = cast(Source, self.plan.test)
        yield self._read(test, min(batch_size, rows_in(test)))

    def _read(self, source: Source, rows: int) -> Batch:
        """Read `rows` rows, evenly spread over GROUPS_READ row groups. The column `row` holds their IDs."""
        starts = np.cumsum([0, *source.row_groups])
        filled = np.flatnonzero(source.row_groups)
        groups = filled[np.unique(np.linspace(0, len(filled) - 1, GROUPS_READ).astype(int))]
        there = np.concatenate([np.arange(starts[group], starts[group + 1]) for group in groups])
        chosen = there[np.linspace(0, len(there) - 1, rows).astype(int)]
        found, places = locate_rows(source.row_groups, chosen)
        parts = [{"row": chosen[found == group], **source.read(int(group), places[found == group])} for group in groups]
        self._checked.batch = {name: torch.tensor(np.concatenate([part[name] for part in parts])) for name in parts[0]}
        return {name: column.to(self.place.device) for name, column in self._checked.batch.items()}


# ---------------------------------------------------------------------------------------------------------- the checks


def refuse_infinite(learner: Learner, taken: Step) -> None:
    """Raise `SunspotError` if a row's loss is not finite. The error names the first such row."""
    losses = torch.cat([values["loss"] for values in taken.values if "loss" in values] or [torch.empty(0)])
    bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
    if bad and taken.rows is not None:
        source = learner.plan.source
        row = int(taken.rows[bad[0]])
        [group], [position] = locate_rows(source.row_groups, np.array([row]))
        raise SunspotError(
            f"{PREFIX}TASK={learner.plan.settings.task}: in step {taken.number}, the loss is not finite for {len(bad)} "
            f"of {plural(len(losses), 'row')}; for example, it is {losses[bad[0]]} for "
            f"{source.where(int(group), int(position))}; check this row, or lower "
            f"{PREFIX}LEARNING_RATE={learner.plan.settings.learning_rate:g}"
        )


def find_losses(learner: Learner) -> torch.Tensor:
    """Return the losses of the first step's rows in evaluation mode, or an empty tensor if the task has no `loss`."""
    if not learner.task.loss:
        return torch.empty(0)
    [batch] = learner.loader.train(1, 0, 1)
    torch.manual_seed(0)
    with learner.average.in_place(learner.model), evaluation_mode(learner.model), torch.no_grad():
        return row_losses(learner, learner.model, batch)[0].float().cpu()


def refuse_other_losses(before: torch.Tensor, after: torch.Tensor, task: str) -> None:
    """Raise `SunspotError` if the losses of the same rows differ before and after the model was restored."""
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-5, equal_nan=True):
        worst = int((before - after).abs().nan_to_num().argmax())
        raise SunspotError(
            f"{PREFIX}TASK={task}: a row has a loss of {before[worst]:.6g}, but {after[worst]:.6g} after the model was "
            "restored from its checkpoint, so the model has state that its state_dict does not contain; store this "
            "state in a parameter or in a buffer (register_buffer)"
        )


def predict(learner: Learner, checked: TaskCheck) -> None:
    """Call the task's `predict` on the rows that were read last. Raises `SettingsError` if the scores are invalid."""
    if not learner.task.predict:
        return
    settings = learner.plan.settings
    rows = {name: column.to(learner.place.device) for name, column in checked.batch.items()}
    with evaluation_mode(learner.model), torch.no_grad():
        forward_rows(load_predict(settings), learner.model, rows, settings, learner.plan.source.classes)
