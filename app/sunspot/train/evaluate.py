"""Evaluates the held-out rows, on all workers together, and tells when a run ends as it improves no more."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from sunspot.data.order import largest_pass
from sunspot.elastic.messages import Command
from sunspot.errors import SettingsError
from sunspot.metric_names import HELD_OUT
from sunspot.observe.metrics import Sums, reduce
from sunspot.parallel.collectives import sync_buffers
from sunspot.parallel.decisions import EvaluationEnd
from sunspot.run.checkpoints import SINCE_BEST, is_out_of_patience
from sunspot.settings import PREFIX, Settings
from sunspot.train.held_out_scores import HeldOutScores
from sunspot.train.learner import Learner, row_losses

BEST = "best_evaluation"
"""In the metrics of a checkpoint: the best result so far, beside SINCE_BEST."""


class Evaluation(NamedTuple):
    """How an evaluation ended: with results, or cut short to stop or restart, as a notice may be shorter."""

    results: dict[str, float] | None = None
    """Mean loss and metrics over the held-out rows, as `test_loss`, `test_accuracy`, ..., and those that the task
    computes of all these rows at once; empty without such rows."""
    stop: bool = False
    restart: bool = False


def evaluate(learner: Learner, poll: Callable[[], Command], heartbeat: Callable[[bool], None]) -> Evaluation:
    """Evaluate the held-out rows; all workers call this together.

    `poll` returns the driver's newest command. `heartbeat` is called again and again, with whether a batch was
    evaluated since, or this worker waits for others.
    """
    if not learner.plan.test:
        return Evaluation({})
    model, group, sums = learner.model, learner.place.group, Sums()
    scores = HeldOutScores(learner) if hasattr(learner.task, "compute_metrics") else None
    assert group
    settings = learner.plan.settings
    together = settings.parallel == "fsdp"
    end = EvaluationEnd(group, together=together)
    # No more rows at once than it trains on.
    world_size, plan = learner.place.world_size, learner.plan
    rows = plan.pass_rows or largest_pass(settings.global_batch_size, world_size, plan.pass_limit)
    batches = learner.loader.test(rows)
    sync_buffers(model)  # a checkpoint has rank 0's
    # Not inference_mode: training cannot use what a model keeps of it, such as a table that it made there.
    with learner.average.in_place(model), evaluation_mode(model), torch.no_grad():
        while True:
            batch, command = next(batches, {}), poll()
            if end.reached(command.stop, command.restart, bool(batch)):
                break
            if batch or together:  # under FSDP, workers make each forward pass together, with rows or without
                losses, metrics = row_losses(learner, model, batch or learner.padding_batch)
                if scores:
                    scores.predict(batch or learner.padding_batch, counts=bool(batch))
                if batch:
                    sums.add({"loss": losses, **metrics})
            heartbeat(bool(batch) or together)
    if end.stop or end.restart:
        return Evaluation(None, end.stop, end.restart)
    means, _ = reduce(sums, [], group)
    computed = scores.compute_metrics(means.keys()) if scores else {}
    return Evaluation({f"{HELD_OUT}{name}": value for name, value in {**means, **computed}.items()})


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and then each of its modules back in the mode that it had before."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


class Patience:
    """Ends a run after evaluations in a row that were no better than the best before them.

    All workers know the same results, and so count alike.
    """

    def __init__(self, settings: Settings, before: Mapping[str, Any]) -> None:
        """`before` are the metrics of the state that training goes on from."""
        self._limit, self._order = settings.early_stop_evaluations, settings.checkpoint_order
        self._metric = HELD_OUT + settings.checkpoint_metric.removeprefix(HELD_OUT)
        self.state = {name: before[name] for name in (BEST, SINCE_BEST) if self._limit and name in before}
        "For the metrics of each checkpoint, so that a restart goes on counting."

    @property
    def over(self) -> bool:
        """Whether this result ends the run."""
        return is_out_of_patience(self.state, self._limit)

    def ends(self, results: Mapping[str, float]) -> bool:
        """Count the results of an evaluation, and return whether the run ends by them."""
        if not self._limit:
            return False
        if self._metric not in results:
            raise SettingsError(
                f"{PREFIX}EARLY_STOP_EVALUATIONS={self._limit}: no {self._metric} among {', '.join(sorted(results))}; "
                f"set {PREFIX}CHECKPOINT_METRIC to one of them, or this to 0"
            )
        sign, result = 1 if self._order == "min" else -1, results[self._metric]
        best = self.state.get(BEST, sign * math.inf)
        if math.isfinite(result) and sign * result < sign * best:
            self.state = {BEST: result, SINCE_BEST: 0}
        else:
            self.state = {BEST: best, SINCE_BEST: self.state.get(SINCE_BEST, 0) + 1}
        return self.over
