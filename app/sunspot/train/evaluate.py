"""Evaluates held-out rows on all workers, and ends runs that no longer improve."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import torch

from sunspot.data.order import largest_pass
from sunspot.elastic.claim import StartPoint
from sunspot.elastic.messages import Command
from sunspot.elastic.restore import TrainingState
from sunspot.errors import SettingsError
from sunspot.metric_names import HELD_OUT, LOSS
from sunspot.observe.metrics import Sums, reduce
from sunspot.parallel.collectives import sync_buffers
from sunspot.parallel.decisions import EvaluationEnd
from sunspot.plan import Plan
from sunspot.run.attempts import IN_PLACE, Attempt
from sunspot.run.checkpoints import SINCE_BEST, is_out_of_patience
from sunspot.settings import PREFIX, Settings
from sunspot.train.held_out_scores import HeldOutScores
from sunspot.train.learner import Learner, row_losses

BEST = "best_evaluation"
"""Key of the best result so far in a checkpoint's metrics."""


EVALUATION_TRIES = 3
"""Number of attempts at an evaluation before it is skipped, because notices can come too fast to complete it."""


class Evaluation(NamedTuple):
    """The outcome of an evaluation. It has no results if a stop or a restart interrupted the evaluation."""

    results: dict[str, float] | None = None
    """Mean loss and metrics over the held-out rows (`test_loss`, `test_accuracy`, ...), and the metrics that the task
    computes from all these rows at once. Empty if no rows are held out, and None if the evaluation was interrupted."""
    stop: bool = False
    "True if the run stops."
    restart: bool = False
    "True if the worker group restarts."


def evaluate(learner: Learner, poll: Callable[[], Command], heartbeat: Callable[[bool], None]) -> Evaluation:
    """Evaluate the held-out rows and return the outcome. All workers call this together.

    `poll` returns the driver's newest command. `heartbeat` is called after each batch. Its argument is True if this
    worker evaluated a batch, and False if the worker only waited for the others.
    """
    if not learner.plan.test:
        return Evaluation({})
    model = learner.model
    group = learner.place.group
    sums = Sums()
    scores = HeldOutScores(learner) if learner.task.compute_metrics else None
    assert group
    settings = learner.plan.settings
    together = settings.sharded
    end = EvaluationEnd(group, together=together)
    # Use no more rows at once than a training pass.
    plan = learner.plan
    world_size = learner.place.world_size
    rows = plan.pass_rows or largest_pass(settings.global_batch_size, world_size, plan.pass_limit)
    batches = learner.loader.test(rows)
    sync_buffers(model, learner.place.sums)  # checkpoints contain the buffers of rank 0
    # With inference_mode, training could not use a tensor that the model keeps, such as a table that it made here.
    with learner.average.in_place(model), evaluation_mode(model), torch.no_grad():
        while True:
            batch = next(batches, {})
            command = poll()
            if end.reached(command.stop, command.restart, bool(batch)):
                break
            if batch or together:  # under FSDP, all workers make each forward pass, even without rows
                losses, metrics = row_losses(learner, model, batch or learner.padding_batch)
                if scores:
                    scores.predict(batch or learner.padding_batch, counts=bool(batch))
                if batch:
                    sums.add({"loss": losses, **metrics})
            heartbeat(bool(batch) or together)
    if end.stop or end.restart:
        return Evaluation(None, end.stop, end.restart)
    means = reduce(sums, {}, group)[0].means
    computed = scores.compute_metrics(means.keys()) if scores else {}
    return Evaluation({f"{HELD_OUT}{name}": value for name, value in {**means, **computed}.items()})


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Context manager that puts the model in evaluation mode and restores each module's previous mode."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def describe_absent(metric: str, names: Collection[str]) -> str:
    """Return a message if the task has no metric called `metric` (CHECKPOINT_METRIC), otherwise an empty string.

    `names` are the names of the task's metrics. Metrics of held-out rows have the prefix HELD_OUT.
    """
    if metric == LOSS or metric in names or HELD_OUT + metric in names:
        return ""
    found = ", ".join(sorted(names))
    return f"{PREFIX}CHECKPOINT_METRIC={metric}: the task has no such metric; set it to one of {found}"


class Patience:
    """Ends a run after several consecutive evaluations without an improvement.

    All workers get the same results, so they make the same decision.
    """

    def __init__(self, settings: Settings, before: Mapping[str, Any]) -> None:
        """Continue counting from `before`, the metrics of the state from which training continues."""
        self._limit = settings.early_stop_evaluations
        self._order = settings.checkpoint_order
        self._metric = HELD_OUT + settings.checkpoint_metric.removeprefix(HELD_OUT)
        self.state = {name: before[name] for name in (BEST, SINCE_BEST) if self._limit and name in before}
        "Entries for the metrics of each checkpoint, so that a restart continues counting."

    @property
    def over(self) -> bool:
        """True if there were too many consecutive evaluations without an improvement."""
        return is_out_of_patience(self.state, self._limit)

    def ends(self, results: Mapping[str, float]) -> bool:
        """Add the results of an evaluation, and return True if the run should end."""
        if not self._limit:
            return False
        if self._metric not in results:
            raise SettingsError(
                f"{PREFIX}EARLY_STOP_EVALUATIONS={self._limit} needs the metric {self._metric}, but the evaluation "
                f"returned only {', '.join(sorted(results))}; set {PREFIX}CHECKPOINT_METRIC to one of these, or set "
                f"{PREFIX}EARLY_STOP_EVALUATIONS to 0"
            )
        sign = 1 if self._order == "min" else -1
        result = results[self._metric]
        best = self.state.get(BEST, sign * math.inf)
        if math.isfinite(result) and sign * result < sign * best:
            self.state = {BEST: result, SINCE_BEST: 0}
        else:
            self.state = {BEST: best, SINCE_BEST: self.state.get(SINCE_BEST, 0) + 1}
        return self.over


def ends_in_memory(plan: Plan, step: int, state: TrainingState) -> bool:
    """Return True if the run ends at `step`, but its last state may exist only in memory.

    No further step would save this state, so the worker must evaluate and save the state before the run ends.
    """
    ended_early = is_out_of_patience(state.metrics, plan.settings.early_stop_evaluations)
    return state.tier in ("memory", IN_PLACE) and (step >= plan.total_steps or ended_early)


def leaves_out_evaluation(start: StartPoint, total_steps: int) -> bool:
    """Return True if the evaluation that the group would start with must be skipped.

    This is the case if EVALUATION_TRIES groups in a row failed to complete the evaluation. A group does not count as
    failed if all of its processes continue in the next group, because such a group ended only to admit more workers.
    The evaluation at the end of the run is never skipped, because no step has to wait for it.
    """
    step = start.attempt.step
    here = [start.attempt, *takewhile(lambda attempt: attempt.step == step, reversed(start.before))]
    failed = [before for after, before in pairwise(here) if not all_continue(before, after)]
    return step < total_steps and 1 + len(failed) >= EVALUATION_TRIES


def all_continue(before: Attempt, after: Attempt) -> bool:
    """Return True if all processes of the attempt `before` are known to continue in the attempt `after`."""
    processes = set(before.metadata.processes)
    return bool(processes) and processes <= set(after.metadata.processes)
