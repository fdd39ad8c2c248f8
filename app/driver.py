"""One start of a run: claim it, plan, train, record how it ended, and print the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from app.background import Background
from app.errors import ConflictError, StorageError, SunspotError, SupersededError, shorten
from app.observe.output import shipped_driver_output
from app.report import FILE, gather, render
from app.report.summary import describe
from app.run import Run, open_run
from app.run.attempts import fatal_error, new_owner, read_attempts, refuse_if_superseded
from app.run.checkpoints import Checkpoint, find_newest_good
from app.run.failures import describe_failure, record_failure
from app.run.identity import keep_identity
from app.run.status import (
    STATUS_EVERY_S,
    RunState,
    Status,
    read_status,
    refuse_if_deleted,
    restore_status,
    stop_requested,
    write_status,
)
from app.settings import IDENTITY, Settings
from app.tracking.process import tracked

if TYPE_CHECKING:
    from app.elastic.control import StopRequest


def train_run(
    settings: Settings, owner: str = "", stop_request: StopRequest | None = None, identity: Iterable[str] = IDENTITY
) -> RunState:
    """Train a run from where it stands, and record in its storage how that ended.

    `owner` trains it (default: the job, or this process), a `stop_request` of the caller's stops it, and `identity`
    names the settings that it may never change. Raises what ended the run.
    """
    from app.plan import with_absolute_paths  # here, so that a wrong setting is reported before numpy is imported

    settings = with_absolute_paths(settings)
    run = open_run(settings.storage_path, settings.run_name)
    run.storage.prove(run.name)
    refuse_if_deleted(run)
    with shipped_driver_output(run), tracked(run, settings), report_result(run):
        attempts = read_attempts(run)
        owner = owner or new_owner(run, settings.job_id)
        refuse_if_superseded(attempts, owner)
        checkpoint, skipped = find_newest_good(run, attempts)
        print(f"run {run.name} in {run.location}")
        for text in skipped:
            print(f"warning: skipped {text}")
        with recorded_outcome(run, owner, checkpoint, settings.max_driver_starts) as outcome:
            outcome.state = train(settings, run, owner, checkpoint, outcome.before, stop_request, identity)
    return outcome.state


def train(
    settings: Settings,
    run: Run,
    owner: str,
    checkpoint: Checkpoint | None,
    before: Status | None,
    stop_request: StopRequest | None,
    identity: Iterable[str],
) -> RunState:
    """Plan, and train from the newest `checkpoint`; `before` is the status that this start found."""
    # Here, as torch and Ray take seconds to import.
    from app.plan import make_plan
    from app.predict.held_out import keep_predictions
    from app.ray_session import ray_session
    from app.tasks import load_task
    from app.train.trainer import fit

    if fatal := fatal_error(run, owner):
        raise fatal  # this job has failed for good: a retry of it does not train either
    if stop_requested(run):
        print(f"  stopped; `sunspot resume {run.name}` lets it train again")
        return RunState.STOPPED
    plan = make_plan(settings, load_task(settings))
    keep_identity(run, settings.environment(), identity, plan.source.fingerprint, plan.steps.rows, plan.steps.per_epoch)
    if checkpoint and checkpoint.step >= plan.total_steps and checkpoint.evaluated:
        print(f"  already finished at step {checkpoint.step}; more EPOCHS would train it further")
        keep_predictions(plan, run, checkpoint)
    else:
        for reason in plan.reasons:
            print(f"  {reason}")
        print(f"  from: {checkpoint.name if checkpoint else settings.init_from or 'the beginning'}", flush=True)
        with ray_session():  # one for both
            checkpoint = fit(plan, run, owner, before, stop_request)
            keep_predictions(plan, run, checkpoint)
    if checkpoint.step < plan.total_steps or not checkpoint.evaluated:
        print(f"  stopped at step {checkpoint.step}; `sunspot resume {run.name}` lets it train again")
        return RunState.STOPPED
    return RunState.SUCCEEDED


class Outcome:
    """How one start of a driver goes."""

    def __init__(self, before: Status | None) -> None:
        self.before = before
        "The status that it found."
        self.state = RunState.SUCCEEDED
        "How it ended, unless with an error; set by the caller."


@contextmanager
def recorded_outcome(run: Run, owner: str, newest: Checkpoint | None, max_starts: int) -> Iterator[Outcome]:
    """Write the run's status when the driver begins, and again when the context ends, in success or with an error.

    Raises `SunspotError` once the same owner has begun more than `max_starts` times in a row without a new checkpoint:
    on a cluster the operator restarts the driver for every head that is lost, without a limit.
    """
    before = read_status(run)
    begun = _status_at_start(before, owner, newest)
    write_status(run, begun)
    outcome = Outcome(before)
    try:
        if begun.starts > max_starts:
            raise SunspotError(
                f"{owner} was started {max_starts} times without a new checkpoint; the logs of those starts say why. "
                "SUNSPOT_MAX_DRIVER_STARTS allows more"
            )
        with Background(STATUS_EVERY_S, lambda: _refresh_status(run, owner)):
            yield outcome
    except SupersededError:
        raise  # the run is another's, and so is its status
    except SunspotError as error:
        if isinstance(error, ConflictError) and before and (before.state.terminal or before.owner != owner):
            restore_status(run, before)  # a start with other settings does not change where the run stands
        else:
            _end_status(run, owner, RunState.FAILED, str(error))
        raise
    except KeyboardInterrupt:
        _end_status(run, owner, RunState.LOST, "interrupted; the same command goes on from the last checkpoint")
        raise
    except Exception as error:
        _end_status(run, owner, RunState.FAILED, shorten(error))
        with suppress(StorageError):
            record_failure(run, describe_failure(error, 0, None, begun.step))
        raise
    _end_status(run, owner, outcome.state, reason="")


def _status_at_start(before: Status | None, owner: str, newest: Checkpoint | None) -> Status:
    name = newest.name if newest else None
    again = before is not None and before.owner == owner and before.checkpoint == name
    return replace(
        before or Status(RunState.STARTING, owner),
        state=RunState.STARTING,
        owner=owner,
        reason="the driver has begun",
        began=time.time(),
        starts=before.starts + 1 if before and again else 1,
        checkpoint=name,
        checkpoint_time=newest.time if newest else None,
        step=newest.step if newest else 0,
        epoch=newest.epoch if newest else 0,
        world_size=0,
    )


def _refresh_status(run: Run, owner: str) -> None:
    """Show that the driver lives while no worker does: reading data and waiting for machines may take long."""
    status = read_status(run)
    if status and status.owner == owner and time.time() - status.time > 2 * STATUS_EVERY_S:
        reason = "no worker trains: the driver waits for them, or sums up what they did"
        write_status(run, replace(status, state=RunState.STARTING, reason=reason))


def _end_status(run: Run, owner: str, state: RunState, reason: str) -> None:
    """Write the final status unless another process owns the run; storage errors are ignored here."""
    with suppress(StorageError):
        status = read_status(run)
        if status and status.owner == owner:
            write_status(run, replace(status, state=state, reason=reason))


def report_result(run: Run) -> AbstractContextManager[None]:
    """Print the result of the run, and write its report, when the context ends (`on_exit`)."""
    return on_exit(lambda error: _report(run, error))


@contextmanager
def on_exit(report: Callable[[Exception | None], None]) -> Iterator[None]:
    """Call `report` when the context ends, with the error that ended it, if any.

    Not after a `ConflictError`, as the run is not this driver's, and not when interrupted.
    """
    try:
        yield
    except ConflictError:
        raise
    except Exception as error:
        report(error)
        raise
    report(None)


def _report(run: Run, error: Exception | None) -> None:
    try:
        status = read_status(run)
        if status is None:
            return  # it never began, or was deleted meanwhile
        report = gather(run, status.state, status.reason)
        for line in describe(run, report, error):
            print(line)
        run.storage.write(run.key(FILE), render(report))
        print(f"  report: {run.storage.locate(run.key(FILE))}", flush=True)
    except Exception as trouble:  # how the run ended does not depend on its report
        print(f"warning: the report could not be written: {shorten(trouble)}", flush=True)
