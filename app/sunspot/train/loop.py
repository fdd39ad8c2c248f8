"""The training loop, as every worker of the group runs it."""

from typing import Any

from sunspot.data.source import Batch
from sunspot.train.run import TrainingRun
from sunspot.train.setup import join_run
from sunspot.train.worker import Worker


def train_loop(config: dict[str, Any]) -> None:
    """What Ray Train runs on every worker; `config` is that of sunspot/train/trainer.py."""
    with join_run(config) as worker:
        if not worker:
            return
        if hasattr(worker.task, "build_module"):
            from sunspot.train.lightning import train as train_with_lightning  # only its own tasks need Lightning

            train_with_lightning(worker)
        elif hasattr(worker.task, "takes_all_rows"):
            from sunspot.train.trees import train as boost  # likewise

            boost(worker)
        else:
            train(worker)
        worker.checkpoints.close(finished=True)


def train(worker: Worker) -> None:
    """Train from the worker's first step to the end of the run, or until it is stopped: by the task's loop, or ours."""
    run = TrainingRun(worker)
    own = getattr(worker.task, "train", take_steps)
    own(run)
    run.refuse_early_end()


def take_steps(run: TrainingRun) -> None:
    """The loop of tasks that bring none."""
    for batch in run.batches():
        take_step(run, batch)


def take_step(run: TrainingRun, batch: Batch) -> None:
    """One optimizer step."""
    for part in run.parts(batch):
        losses, metrics = run.losses(part)
        (losses.sum() * run.weight).backward()
        run.log({"loss": losses, **metrics})
    run.clip()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step()
