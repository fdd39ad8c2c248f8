"""A run whose steps a library takes: its loop asks for the next batch when all hooks of a step are done."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sunspot.data.source import Batch
from sunspot.train.run import TrainingRun
from sunspot.train.worker import Worker


class LibraryRun(TrainingRun):
    """A run whose precision, schedulers and hooks are a library's."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.steps_per_epoch = worker.learner.plan.steps.per_epoch
        self._batches = self.batches()

    def prepare_model(self) -> torch.nn.Module:
        """Leave the model to what wraps it, and its optimizer to the library's own hook before a step."""
        return self._learner.model

    def set_learning_rates(self) -> None:
        """Nothing to do: the library's schedulers are objects that are stepped."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._worker.window.forward:
            yield

    def rest_of_epoch(self) -> Iterator[Batch]:
        """Yield this worker's rows of each step to the end of the epoch; a step ends when the next one's are asked for.

        After the last one call `end_step`.
        """
        end = min((self.position // self.steps_per_epoch + 1) * self.steps_per_epoch, self.total_steps)
        while self.position < end and not self.stopped:
            yield next(self._batches)
            self.end_step()

    def end_step(self) -> None:
        """End the step that is being taken, if there is one; its hooks have run, whose changes are part of it."""
        if self.in_step:
            self.step()
