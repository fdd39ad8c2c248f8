"""The run, as it is passed to a training loop: Sunspot's own (loop.py), a library's, or a task's `train(run)`."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch.utils.hooks import RemovableHandle

from sunspot.data.mixed_source import MixedSource
from sunspot.data.order import MIN_ROWS, forward_passes, micro_batches, share
from sunspot.data.source import Batch
from sunspot.errors import SettingsError
from sunspot.metric_names import LOSS, refuse_names
from sunspot.parallel.gradients import (
    FiniteGradients,
    clip_gradients,
    gradient_sync,
    models_with_averaging,
    prepare,
    release,
)
from sunspot.tasks.defaults import is_scheduled, optimizers_in
from sunspot.tasks.signatures import place_of_function
from sunspot.train.learner import in_precision, row_losses
from sunspot.train.learning_rates import set_options
from sunspot.train.randomness import DRAW_STREAM, augment, draw_uniform, seed_generators, seed_of
from sunspot.train.worker import Step, Worker


class TrainingRun:
    """One worker's implementation of `sunspot.tasks.TrainingRun`.

    A step is one optimizer step, counted over the whole run. Step k of an epoch consumes the same rows with any number
    of workers, and every row has the same weight in the gradient.
    """

    def __init__(self, worker: Worker) -> None:
        learner = worker.learner
        self._worker = worker
        self._learner = learner
        self.settings = learner.plan.settings
        self.total_steps = learner.plan.total_steps
        self.rank = learner.place.rank
        self.world_size = learner.place.world_size
        self.device = learner.place.device
        self._hooks: list[RemovableHandle] = []
        self.use_model(self.prepare_model())
        self.optimizer = learner.optimizer
        self.position = worker.group_start.step
        self.stopped = False
        self.weight = 0.0
        self.pass_rows = 0
        "Number of rows in the current batch, or in the current part of it."
        self._open: Step | None = None
        "The step that has begun, or None between two steps."
        self._drawn = 0
        "Number of random numbers that `draw` has used so far, for all rows of the open step."
        self._sets_rates = learner.task.train is not None or learner.task.library_loop is not None
        "True if a loop other than Sunspot's own has the optimizer, and could change its learning rates."
        self._rates = self._learning_rates()
        "Learning rate of each group in the newest step."

    def prepare_model(self) -> torch.nn.Module:
        """Return the model to train, and register a hook that runs before each optimizer step."""
        # Hooks are registered last, so that none is left in the optimizers if a worker is lost before that.
        worker, model = self._worker, self._learner.model
        if worker.averages:
            own_loop = self._learner.task.train is not None
            model = prepare(model, self.settings, in_own_loop=own_loop, init_sync=not worker.group_start.in_place)
        for optimizer in optimizers_in(self._learner.optimizer):
            self._hooks.append(optimizer.register_step_pre_hook(lambda each, *_: self.before_change(each)))
        return model

    def use_model(self, model: torch.nn.Module) -> None:
        """Set the run's model. Its gradients are averaged over the workers."""
        self.model = model
        self._finite = FiniteGradients(model)
        self._averaging = models_with_averaging(model)

    @property
    def epoch(self) -> int:
        return min(self.position, self.total_steps - 1) // self._learner.plan.steps.per_epoch + 1

    @property
    def in_step(self) -> bool:
        """True if a step has begun and has not ended."""
        return self._open is not None

    def batches(self) -> Iterator[Batch]:
        steps = self._learner.plan.steps
        self.stopped = self._worker.repeat_evaluation()
        while self.position < self.total_steps and not self.stopped:
            first = self.position % steps.per_epoch
            last = min(steps.per_epoch, first + self.total_steps - self.position)
            began = time.perf_counter()
            loader = self._learner.loader
            for own in loader.train(self.epoch, first, last):
                begin, end = steps.bounds(self.position % steps.per_epoch)
                step = Step(self.position + 1, own, end - begin, began, time.perf_counter() - began)
                if loader.ids is not None:
                    step.rows = loader.ids
                yield self._begin(step)
                if self.in_step:
                    raise self._error("took a batch, but did not call run.step() for it")
                if self.stopped:
                    return
                began = time.perf_counter()

    def _begin(self, step: Step) -> Batch:
        """Start a step, set its learning rates and random seeds, and return its batch."""
        self._open = step
        self._drawn = 0
        self.set_learning_rates()
        step.learning_rate = self._rates[0]
        self._worker.begin_step(step)
        batch = step.share if step.own_rows else self._learner.padding_batch
        self._begin_pass(step.own_rows or MIN_ROWS, self.world_size / step.size if step.own_rows else 0.0)
        ids = step.rows if step.own_rows else None
        # In a mixture, an epoch can repeat a row.
        when = self.position if isinstance(self._learner.plan.source, MixedSource) else self.epoch
        batch = augment(self._learner.task, batch, (self.settings.seed, when), self.draw, ids)
        seed_generators(self.settings.seed, self.position, self.rank)
        return batch

    def set_learning_rates(self) -> None:
        """Set the learning rates and other scheduled options of the step. They are not stored in checkpoints."""
        if self._sets_rates:
            self._refuse_own_rates()
        set_options(self.optimizer, self._learner.rates.at(self.position, self.total_steps))
        self._rates = self._learning_rates()

    def _refuse_own_rates(self) -> None:
        """Raise `SettingsError` if the task has set learning rates that the next step would overwrite."""
        rates = self._learning_rates()
        scheduled = is_scheduled(self.optimizer)
        if rates == self._rates and not scheduled:
            return
        task = f"SUNSPOT_TASK={self.settings.task}"
        fix = "return a scheduler from build_scheduler(optimizer, settings, total_steps)"
        if scheduled:
            raise SettingsError(
                f"{task}: a scheduler was created with run.optimizer, but run.batches() overwrites the scheduler's "
                f"learning rates; {fix} instead, and the run will step the scheduler"
            )
        changed = [pair for pair in zip(self._rates, rates, strict=True) if pair[0] != pair[1]]
        if changed:
            before, now = changed[0]
            raise SettingsError(
                f"{task}: the learning rate was changed from {before:.3g} to {now:.3g} between two steps, but "
                f"run.batches() overwrites it; {fix}, or change it between taking a batch and the optimizer's step"
            )

    def parts(self, batch: Batch) -> Iterator[Batch]:
        all_rows = batch["row"].shape[0]
        for rows, weight in self.weigh_passes():
            number = rows.stop - rows.start
            self._begin_pass(number, weight)
            yield batch if number == all_rows else {name: column[rows] for name, column in batch.items()}

    def passes(self) -> Iterator[slice]:
        """Yield the rows of each forward and backward pass. The caller runs a pass before it requests the next one."""
        for rows, weight in self.weigh_passes():
            self._begin_pass(rows.stop - rows.start, weight)
            yield rows

    def weigh_passes(self) -> Iterable[tuple[slice, float]]:
        """Return each pass's rows in the batch, and the weight of each row's loss."""
        step, limit = self._step(), self._learner.plan.pass_limit
        return passes(self.model, step.own_rows, step.size, self.world_size, limit)

    def draw(self, *shape: int) -> torch.Tensor:
        step = self._step()
        first, last = share(step.size, self.world_size, self.rank) if step.own_rows else (0, MIN_ROWS)
        each = math.prod(shape)
        seed = seed_of(self.settings.seed, self.position, DRAW_STREAM)
        drawn = draw_uniform(seed, self._drawn + first * each, (last - first) * each)
        self._drawn += step.size * each
        return drawn.reshape(last - first, *shape).to(self.device, non_blocking=True)

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._worker.window.forward, in_precision(self._learner):
            yield

    def losses(self, batch: Batch) -> tuple[torch.Tensor, Batch]:
        with self._worker.window.forward:
            return row_losses(self._learner, self.model, batch)

    def refuse_detached(self, losses: torch.Tensor) -> None:
        """Raise `SettingsError` if the loss has no gradient. PyTorch's own error would not name the task."""
        if not losses.requires_grad:
            place = place_of_function(self._learner.task.loss)
            raise SettingsError(
                f"SUNSPOT_TASK={self.settings.task}: its loss{place and f'{place},'} returned values without a "
                "gradient; compute them from the model's output without detach(), item(), NumPy or torch.no_grad(), "
                "and do not freeze all parameters"
            )

    def log(self, values: Batch) -> None:
        refuse_names((name for name in values if name != LOSS), f"SUNSPOT_TASK={self.settings.task}: it logs")
        if not self.weight:
            return
        rows = self.pass_rows
        logged = {}
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                raise self._error(f"logged {name} of type {type(value).__name__}; log a tensor")
            if value.shape not in ((), (rows,)):
                shape = list(value.shape)
                raise self._error(f"logged {name} of shape {shape}; log one number, or one for each of {rows} rows")
            logged[name] = value.detach() if value.shape else value.detach().expand(rows)
        self._step().values.append(logged)

    def clip(self, model: torch.nn.Module | None = None) -> None:
        self._complete_gradients()
        replicas = self._worker.learner.place.replicas
        clip_gradients(self.model if model is None else model, self.settings.clip_norm, replicas)

    def before_change(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Complete the gradients, and block until parameters may change (`Worker.wait_before_change`).

        `optimizer` is the optimizer that is about to take a step, if there is one.
        """
        self._complete_gradients()
        self._worker.wait_before_change(optimizer)
        if self._open and self._sets_rates:
            self._rates = self._learning_rates()
            self._open.learning_rate = self._rates[0]

    def _complete_gradients(self) -> None:
        """Average the gradients if DDP has not done so.

        DDP does not average gradients if the loss does not use the model's output.
        """
        for model in self._averaging:
            model.complete()

    def step(self) -> None:
        if self._open is None:
            raise self._error("called run.step() twice for one batch")
        if self._open.own_rows and not self._open.values:
            raise self._error("""logged nothing for a batch; call run.log({"loss": losses}) before run.step()""")
        step = self._open
        self._open = None
        self.position += 1
        step.seconds = time.perf_counter() - step.began
        self.stopped = self._worker.finish_step(step)

    def close(self) -> None:
        """Undo the changes of `prepare_model`, so that this process can use the model in another group."""
        self._finite.set(False)
        release(self.model)
        for hook in self._hooks:
            hook.remove()

    def refuse_early_end(self) -> None:
        """Raise `SettingsError` if the task's loop returned before the run ended or was stopped."""
        if self.position < self.total_steps and not self.stopped:
            raise self._error(f"returned at step {self.position} of {self.total_steps}; use all of run.batches()")

    def _step(self) -> Step:
        if self._open is None:
            raise self._error("called a run method that needs an open batch; take a batch from run.batches() first")
        return self._open

    def _begin_pass(self, rows: int, weight: float) -> None:
        self.pass_rows, self.weight = rows, weight
        self._finite.set(not weight)

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _error(self, text: str) -> SettingsError:
        return SettingsError(f"SUNSPOT_TASK={self.settings.task}: its train(run) {text}")


class LibraryRun(TrainingRun):
    """A run in which a library controls the steps, the precision, the schedulers and the hooks.

    The library's loop requests the next batch after all hooks of a step have run.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.steps_per_epoch = worker.learner.plan.steps.per_epoch
        self._batches = self.batches()

    def prepare_model(self) -> torch.nn.Module:
        """Return the model unchanged. The library wraps the model itself, and has its own hook before a step."""
        return self._learner.model

    def set_learning_rates(self) -> None:
        """Read the learning rates from the optimizer, because the library steps its own schedulers."""
        self._rates = self._learning_rates()

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._worker.window.forward:
            yield

    def rest_of_epoch(self) -> Iterator[Batch]:
        """Yield this worker's rows of each step until the end of the epoch.

        Each step ends when the rows of the next step are requested. Call `end_step` after the last step.
        """
        end = min((self.position // self.steps_per_epoch + 1) * self.steps_per_epoch, self.total_steps)
        while self.position < end and not self.stopped:
            yield next(self._batches)
            self.end_step()

    def end_step(self) -> None:
        """End the current step, if any. Changes that the library's hooks have made belong to this step."""
        if self.in_step:
            self.step()


def passes(
    model: torch.nn.Module, own_rows: int, step_rows: int, world_size: int, limit: int
) -> Iterable[tuple[slice, float]]:
    """Split this worker's rows of a step into passes. Return each pass's rows and the weight of each row's loss.

    Gradients are averaged over the workers. Each row's loss is therefore multiplied by `world_size / step_rows`, which
    gives the mean over all rows of the step, no matter how they are distributed. If a worker has more than `limit`
    rows, it accumulates their gradients over several passes, and averages them over the workers in the last pass. All
    workers run the same number of passes, because under FSDP each pass needs all workers. A worker with fewer rows runs
    some passes with weight 0.
    """
    weighted = cut_into_passes(own_rows, step_rows, world_size, limit)
    return weighted if len(weighted) == 1 else accumulate(model, weighted)


@lru_cache
def cut_into_passes(own_rows: int, step_rows: int, world_size: int, limit: int) -> tuple[tuple[slice, float], ...]:
    """Return the rows of each pass, and the weight of each row's loss. Passes with weight 0 come first."""
    own = [(rows, world_size / step_rows) for rows in micro_batches(own_rows, limit)] if own_rows else []
    idle = forward_passes(step_rows, world_size, limit) - len(own)
    return *[(slice(0, MIN_ROWS), 0.0)] * idle, *own


def accumulate(model: torch.nn.Module, weighted: tuple[tuple[slice, float], ...]) -> Iterator[tuple[slice, float]]:
    """Yield the passes. The accumulated gradients are averaged over the workers in the last pass."""
    for number, each in enumerate(weighted, 1):
        with gradient_sync(model, now=number == len(weighted)):
            yield each
