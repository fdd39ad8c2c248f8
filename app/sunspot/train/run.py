"""A run as its training loop sees it: ours (sunspot/train/loop.py), and the `train` that a task brings."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sunspot.data.order import MIN_ROWS, forward_passes, micro_batches, share
from sunspot.data.source import Batch
from sunspot.errors import SettingsError
from sunspot.parallel.decisions import StepDecisionBroadcast
from sunspot.parallel.gradients import FiniteGradients, clip_gradients, gradient_sync, prepare
from sunspot.tasks.optimizers import optimizers_in
from sunspot.train.augment import augment
from sunspot.train.forward import in_precision, row_losses
from sunspot.train.step import after_step, make_up_evaluation, seed_generators, seed_of, timed
from sunspot.train.worker import Worker

OF_DRAWS = 2
"""Tells the seeds of `draw` from those of steps and of rows (augment.py), or rank 0's dropout would draw the same."""


class TrainingRun:
    """What `sunspot.tasks.TrainingRun` promises, by one worker.

    A step is one optimizer step, counted over the whole run. Step k of an epoch consumes the same rows on any number of
    workers, and every row has the same weight in the gradient.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.settings, self.total_steps = worker.plan.settings, worker.plan.total_steps
        self.rank, self.world_size, self.device = worker.rank, worker.world_size, worker.device
        self.model, self.optimizer = prepare(worker.model, self.settings), worker.optimizer
        self.position = worker.start
        self.weight = 0.0
        self._consensus, self._window = StepDecisionBroadcast(worker.control_group), worker.open_window()
        self._shared: Batch | None = None
        "This worker's share of the step that is being taken; None between two steps."
        self._values: list[Batch] = []
        "What the loop has logged of the rows of this step."
        self._random: torch.Generator | None = None
        self._finite = FiniteGradients(self.model)
        self._stopped = False
        for optimizer in optimizers_in(worker.optimizer):  # from there on parameters change
            optimizer.register_step_pre_hook(lambda *_: worker.checkpoints.wait_for_copy())

    @property
    def epoch(self) -> int:
        return min(self.position, self.total_steps - 1) // self._worker.plan.steps.per_epoch + 1

    def batches(self) -> Iterator[Batch]:
        worker, steps = self._worker, self._worker.plan.steps
        self._stopped = make_up_evaluation(worker)
        while self.position < self.total_steps and not self._stopped:
            first = self.position % steps.per_epoch
            last = min(steps.per_epoch, first + self.total_steps - self.position)
            for shared, data_wait, began in timed(worker.loader.train(self.epoch, first, last)):
                self._data_wait, self._began = data_wait, began
                set_learning_rate(worker.optimizer, worker.task.schedule(self.position, self.total_steps))
                begin, end = steps.bounds(self.position % steps.per_epoch)
                self._shared, self._rows_in_step, self._values, self._random = shared, end - begin, [], None
                batch = shared if self._has_rows else worker.padding_batch
                self._begin_pass(batch, self.world_size / (end - begin) if self._has_rows else 0.0)
                batch = augment(worker.task, batch, self.settings.seed, self.epoch, self.draw)
                seed_generators(self.settings.seed, self.position, self.rank)
                yield batch
                if self._shared is not None:
                    raise self._error("took a batch and did not call run.step() after it")
                if self._stopped:
                    return

    def parts(self, batch: Batch) -> Iterator[Batch]:
        limit = self._worker.plan.pass_limit
        weighted = passes(self.model, batch, self._rows_in_step, self.world_size, limit, empty=not self._has_rows)
        for part, weight in weighted:
            self._begin_pass(part, weight)
            yield part

    def draw(self, *shape: int) -> torch.Tensor:
        if self._random is None:
            self._random = torch.Generator().manual_seed(seed_of(self.settings.seed, self.position, 0, OF_DRAWS))
        every = torch.rand(self._rows_in_step, *shape, generator=self._random)
        own = share(self._rows_in_step, self.world_size, self.rank) if self._has_rows else (0, MIN_ROWS)
        return every[slice(*own)].to(self.device, non_blocking=True)

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._window.forward, in_precision(self._worker):
            yield

    def losses(self, batch: Batch) -> tuple[torch.Tensor, Batch]:
        with self._window.forward:
            return row_losses(self._worker, self.model, batch)

    def log(self, values: Batch) -> None:
        if not self.weight:
            return
        for name, value in values.items():
            if value.shape not in ((), (self._rows,)):
                shape = list(value.shape)
                raise self._error(
                    f"logged {name} of shape {shape}; log one number, or one for each of {self._rows} rows"
                )
        self._values.append({name: value.detach().expand(self._rows) for name, value in values.items()})

    def clip(self, model: torch.nn.Module | None = None) -> None:
        clip_gradients(self.model if model is None else model, self.settings.clip_norm)

    def step(self) -> None:
        if self._shared is None:
            raise self._error("called run.step() twice for one batch")
        if self._has_rows and not self._values:
            raise self._error("""logged nothing of a batch; call run.log({"loss": losses}) before run.step()""")
        learning_rate = float(self._worker.optimizer.param_groups[0]["lr"])
        self._window.add_step(self._values, time.perf_counter() - self._began, self._data_wait)
        self.position += 1
        ids, self._shared = self._shared.get("row"), None
        self._stopped = after_step(self._worker, self._consensus, self._window, self.position, ids, learning_rate)

    def refuse_early_end(self) -> None:
        """Raise `SettingsError` if a loop has returned before the run ends or is stopped."""
        if self.position < self.total_steps and not self._stopped:
            raise self._error(f"returned at step {self.position} of {self.total_steps}; take all of run.batches()")

    @property
    def _has_rows(self) -> bool:
        return bool(self._shared and len(self._shared["row"]))

    def _begin_pass(self, batch: Batch, weight: float) -> None:
        self._rows, self.weight = len(batch["row"]), weight
        self._finite.set(not weight)

    def _error(self, text: str) -> SettingsError:
        return SettingsError(f"SUNSPOT_TASK={self.settings.task}: its train(run) {text}")


def passes(
    model: torch.nn.Module, batch: Batch, rows_in_step: int, world_size: int, limit: int, *, empty: bool
) -> Iterator[tuple[Batch, float]]:
    """The forward and backward passes of this worker's share of a step: the rows of each, and the weight of their loss.

    Gradients are averaged over the workers, so a row's loss is weighted by world size / rows in the step: the result is
    the mean over all rows of the step, whatever each worker's share. More than `limit` rows are accumulated, and
    gradients are averaged once, with the last part. All workers make the same number of passes, as FSDP needs all in
    each: a worker with fewer parts, or whose share is `empty`, makes some with weight 0.
    """
    own = [] if empty else list(micro_batches(len(batch["row"]), limit))
    idle = forward_passes(rows_in_step, world_size, limit) - len(own)
    slices = [*[slice(MIN_ROWS)] * idle, *own]
    for number, rows in enumerate(slices):
        with gradient_sync(model, now=number == len(slices) - 1):
            weight = world_size / rows_in_step if number >= idle else 0.0
            yield {name: column[rows] for name, column in batch.items()}, weight


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Scale each group's peak rate. It is a function of the step, so nothing has to be stored.

    A task's schedule may compute `factor` with NumPy, whose numbers no checkpoint could bring back.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * float(factor)
