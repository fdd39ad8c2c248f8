"""The training loop for tasks with a Trainer from transformers.

Accelerate wraps the model, as in an ordinary script, and uses Ray Train's process group and environment. The Trainer's
arguments control precision and DDP.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from sunspot.adapters.transformers import TrainedModel, TrainerTask, measured
from sunspot.data.order import MIN_ROWS
from sunspot.errors import SettingsError
from sunspot.settings import PREFIX
from sunspot.train.run import LibraryRun
from sunspot.train.worker import Worker

UNCOUNTED = -100
"""Label of tokens that PyTorch and transformers ignore in the loss."""


def train(worker: Worker, task: TrainerTask) -> None:
    """Train with the task's Trainer."""
    if worker.repeat_evaluation() or worker.group_start.step >= worker.learner.plan.total_steps:
        return
    run = TrainerRun(worker, task)
    with closing(run):
        run.trainer.train()
    if run.position < run.total_steps and not run.stopped:
        raise SettingsError(
            f"{PREFIX}TASK={run.settings.task}: the Trainer stopped at step {run.position} of {run.total_steps}, "
            f"perhaps because of a callback; set {PREFIX}MAX_STEPS, {PREFIX}EPOCHS or {PREFIX}EARLY_STOP_EVALUATIONS "
            "to end a run early"
        )


class TrainerRun(LibraryRun):
    """A run that feeds its rows to a Trainer, which takes the steps.

    The Trainer accumulates gradients over the passes of a step. All workers run the same number of passes per step.
    """

    def __init__(self, worker: Worker, task: TrainerTask) -> None:
        super().__init__(worker)
        plan = worker.learner.plan
        self._model = cast(TrainedModel, self.model)
        self.trainer = trainer = self._model.trainer
        self._per_step = plan.passes(self.world_size)
        self._ahead: deque[tuple[int, float]] = deque()
        "The number of rows and the weight of each pass that the Trainer has fetched but not begun."
        trainer.args.max_steps = self.total_steps
        trainer.args.gradient_accumulation_steps = self._per_step
        self._count = trainer.get_batch_samples
        self._pass = trainer.training_step
        self._loss = trainer.compute_loss
        trainer.get_train_dataloader = lambda: self
        trainer.get_batch_samples = self.count_samples
        trainer.training_step = self.make_pass
        trainer.compute_loss = self.weighted_loss
        # Metrics are not gathered here. The history averages them, because workers can have different numbers of rows.
        trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda values, *_, **__: values
        trainer.add_callback(StepCallback(self, task))

    def __len__(self) -> int:
        """Return the number of passes in an epoch."""
        return self.steps_per_epoch * self._per_step

    def __iter__(self) -> Iterator[Any]:
        """Yield the inputs of each pass until the end of the epoch."""
        for batch in self.rest_of_epoch():
            own = list(self.weigh_passes())
            for rows, weight in [(slice(0, MIN_ROWS), 0.0)] * (self._per_step - len(own)) + own:
                self._ahead.append((rows.stop - rows.start, weight))
                inputs = self._model.collate({name: column[rows] for name, column in batch.items()})
                for name in ("labels", "shift_labels"):
                    if not weight and name in inputs:
                        inputs[name] = torch.full_like(inputs[name], UNCOUNTED)
                yield inputs

    def count_samples(self, iterator: Iterator[Any], number: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return a step's passes, and the step's `num_items_in_batch`, summed over all workers.

        The Trainer divides losses by this sum.
        """
        samples, items = self._count(iterator, number, device)
        if items is not None:
            items = torch.as_tensor(items, device=device)
            dist.all_reduce(items)
        return samples, items

    def make_pass(self, model: torch.nn.Module, inputs: Any, items: Any = None) -> torch.Tensor:
        """Run a forward and backward pass."""
        self._begin_pass(*self._ahead.popleft())
        self.trainer.current_gradient_accumulation_steps = 1  # row weights already account for the number of passes
        return self._pass(model, inputs, items)

    def weighted_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return a pass's contribution to the step's loss, multiplied by the number of workers.

        The number of workers cancels out, because gradients are averaged over the workers. If the Trainer divides
        losses by `num_items_in_batch`, its loss already has the right value. Otherwise, the pass's mean loss is
        multiplied by the weights of its rows.
        """
        if not self.in_step:  # the mean loss of held-out rows
            return self._loss(model, inputs, return_outputs=return_outputs)
        with self.forward():
            found = self._loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        loss, outputs = found if return_outputs else (found, None)
        self.refuse_detached(loss)
        if not self.weight:
            loss = loss.nan_to_num() * 0
        else:
            counts = self.pass_rows * self.weight
            loss = loss if self._is_divided(num_items_in_batch) else loss * counts
            self.log({"loss": loss / counts})
        return (loss, outputs) if return_outputs else loss

    def _is_divided(self, items: Any) -> bool:
        """Return True if the Trainer divides losses by `num_items_in_batch`.

        The condition is the same as in the Trainer's `training_step`.
        """
        scaled = getattr(self.trainer, "loss_is_scaled_for_ga", None)
        accepts = self.trainer.model_accepts_loss_kwargs or self.trainer.compute_loss_func is not None
        return items is not None and (accepts if scaled is None else scaled)


class StepCallback(TrainerCallback):
    """Starts the Trainer at the run's position, and makes the optimizer wait until the state has been copied.

    It also ends the last step of each epoch. Any other step ends when the Trainer requests the next batch.
    """

    def __init__(self, run: TrainerRun, task: TrainerTask) -> None:
        self._run = run
        self._task = task

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        state.global_step = self._run.position
        self._run.trainer._globalstep_last_logged = self._run.position  # for the means that the Trainer logs itself
        self._task.begin_schedule(objects["lr_scheduler"], self._run.position)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._run.before_change()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = state.global_step / self._run.steps_per_epoch

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._run.in_step:
            self._run.log({name: torch.tensor(value) for name, value in measured(logs).items()})

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._run.end_step()  # no batch is requested after the last step of an epoch
        control.should_training_stop |= self._run.stopped
