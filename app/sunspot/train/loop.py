"""The training loop, as every worker of the group runs it."""

from sunspot.data.source import Batch
from sunspot.train.config import WorkerConfig
from sunspot.train.join import join_run
from sunspot.train.run import TrainingRun
from sunspot.train.worker import Worker


def train_loop(config: WorkerConfig) -> None:
    """What Ray Train runs on every worker."""
    with join_run(config) as worker:
        if worker:
            train(worker)
            with worker.watchdog.paused():
                worker.checkpoints.close(finished=True)


def train(worker: Worker) -> None:
    """Train to the end of the run, or until it is stopped: by the task's loop, Lightning's Trainer, or ours."""
    task = worker.learner.task
    if hasattr(task, "build_module"):
        from sunspot.train.lightning import train as train_by_lightning  # only its own tasks need Lightning

        train_by_lightning(worker)
    else:
        run = TrainingRun(worker)
        getattr(task, "train", take_steps)(run)
        run.refuse_early_end()


def take_steps(run: TrainingRun) -> None:
    """Take all steps, for a task that brings no loop."""
    for batch in run.batches():
        take_step(run, batch)


def take_step(run: TrainingRun, batch: Batch) -> None:
    """Take one optimizer step."""
    for part in run.parts(batch):
        losses, metrics = run.losses(part)
        (losses.sum() * run.weight).backward()
        run.log({"loss": losses, **metrics})
    run.clip()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step()
