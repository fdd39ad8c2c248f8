"""The training loop that every worker runs."""

from contextlib import closing

from sunspot.data.source import Batch
from sunspot.elastic.membership_channel import RegroupError
from sunspot.parallel.gradients import add_gradients
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.train.joining import Joining, WorkerConfig, record_end
from sunspot.train.replacement import end_replacement
from sunspot.train.run import TrainingRun
from sunspot.train.survivor import Survivor
from sunspot.train.worker import Worker


def train_loop(config: WorkerConfig) -> None:
    """Train on one worker. Continue in later groups if the worker's process outlives its group.

    Ray Train calls this on every worker.
    """
    if config.membership is None:
        train_in_group(config)
        return
    survivor = Survivor(config.membership, config.limit_s, config.replica_groups())
    try:
        with survivor:
            train_in_groups(config, survivor)
    except Exception as error:
        if survivor.replaces:
            end_replacement(error, config)
        raise


def train_in_groups(config: WorkerConfig, survivor: Survivor) -> None:
    """Train in one worker group after another until the run ends. Raises the error that ends this process."""
    while True:
        try:
            train_in_group(config, survivor)
            return
        except Exception as error:
            if not survivor.outlives(error):
                if not survivor.replaces:
                    survivor.end()
                raise
            survivor.abandon_group(error)


def train_in_group(config: WorkerConfig, survivor: Survivor | None = None) -> None:
    """Train in one worker group, until the run or the group ends.

    Raises `GroupRestartError` if Ray starts another group. An error while the group forms, or while it claims an
    attempt, is raised unchanged. A later error is raised as a `RegroupError` if this process can continue in the next
    group (`Survivor.outlives`). Otherwise, the later error is recorded in storage and raised.
    """
    with Joining(config, survivor) as joining:
        place = joining.form()
        setup = joining.claim(place) if place else None
        if setup:
            try:
                worker = joining.build(setup)
                train(worker)
                with worker.watchdog.paused():
                    worker.checkpoints.close(finished=True)
                if worker.reporter:
                    worker.reporter.saved_last_step()
            except GroupRestartError:
                raise
            except Exception as error:
                if survivor and survivor.outlives(error):
                    survivor.write_outputs(setup.outputs)
                    raise RegroupError from error
                record_end(error, setup)
                raise
        if survivor:
            survivor.end()


def train(worker: Worker) -> None:
    """Train until the run ends or is stopped, with the task's own loop, a library's Trainer, or `take_steps`."""
    task = worker.learner.task
    if task.library_loop:
        task.library_loop(worker)
        return
    run = TrainingRun(worker)
    with closing(run):
        (task.train or take_steps)(run)
        run.refuse_early_end()


def take_steps(run: TrainingRun) -> None:
    """Take all steps of the run, for a task without its own loop."""
    for batch in run.batches():
        take_step(run, batch)


def take_step(run: TrainingRun, batch: Batch) -> None:
    """Take one optimizer step."""
    for part in run.parts(batch):
        losses, metrics = run.losses(part)
        run.refuse_detached(losses)
        add_gradients(losses, run.weight)
        run.log({"loss": losses, **metrics})
    run.clip()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step()
