"""Evaluates the held-out rows, on all workers together, and ends early for a notice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from sunspot.data.order import largest_pass
from sunspot.data.source import Batch
from sunspot.elastic.messages import Command
from sunspot.observe.metrics import Sums, reduce
from sunspot.parallel.collectives import sync_buffers
from sunspot.parallel.decisions import EvaluationEnd
from sunspot.train.forward import row_losses
from sunspot.train.learner import Learner


class Evaluation(NamedTuple):
    """How an evaluation ended: with results, or cut short to stop or restart, as a notice may be shorter."""

    results: dict[str, float] | None = None
    "Mean loss and metrics over the held-out rows, as `test_loss`, `test_accuracy`, ...; empty without such rows."
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
    assert group
    end = EvaluationEnd(group, together=learner.plan.settings.parallel == "fsdp")
    sync_buffers(model)  # a checkpoint has rank 0's
    # Not inference_mode: training cannot use what a model keeps of it, such as a table that it made there.
    with learner.average.in_place(model), evaluation_mode(model), torch.no_grad():
        for batch in _batches(learner, end, poll, heartbeat):
            losses, metrics = row_losses(learner, model, batch or learner.padding_batch)
            if batch:
                sums.add({"loss": losses, **metrics})
            heartbeat(True)
    if end.stop or end.restart:
        return Evaluation(None, end.stop, end.restart)
    means, _ = reduce(sums, [], group)
    return Evaluation({f"test_{name}": mean for name, mean in means.items()})


def _batches(
    learner: Learner, end: EvaluationEnd, poll: Callable[[], Command], heartbeat: Callable[[bool], None]
) -> Iterator[Batch]:
    """Yield this worker's held-out rows, no more at once than it trains on, until all had theirs or are to leave.

    Under FSDP workers make each forward pass together: all get the same number of batches, {} when they have no rows.
    """
    settings, limit = learner.plan.settings, learner.plan.pass_limit
    batches = learner.loader.test(largest_pass(settings.global_batch_size, learner.place.world_size, limit))
    while True:
        batch, command = next(batches, {}), poll()
        if end.reached(command.stop, command.restart, bool(batch)):
            return
        if batch or settings.parallel == "fsdp":
            yield batch
        else:
            heartbeat(False)


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
