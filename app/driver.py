"""One start of a run: open it, plan, train, and record how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from app.background import Background
from app.errors import (
    ConflictError,
    NotFoundError,
    StorageError,
    SunspotError,
    SupersededError,
    shorten,
)
from app.report import FILE, gather, render
from app.report.summary import describe
from app.run import Run, open_run, to_json
from app.run.attempts import read_attempts, refuse_if_superseded
from app.run.checkpoints import Checkpoint, find_newest_good
from app.run.failures import describe_failure, record_failure
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
from app.settings import IDENTITY, PREFIX, Settings, differences
from app.tracking.process import tracked

if TYPE_CHECKING:
    from app.elastic.control import StopRequest


class Outcome:
    """A driver's part in the run."""

    def __init__(self, before: Status | None) -> None:
        self.before = before
        "The status that it found."
        self.state = RunState.SUCCEEDED
        "How it ended when no error ended it; the caller fills it in."


@contextmanager
def recorded_outcome(run: Run, owner: str, newest: Checkpoint | None, most_starts: int) -> Iterator[Outcome]:
    """Write the run's status when the driver begins and when it ends, whatever it ends in.

    Raises `SunspotError` when the same owner has begun `most_starts` times in a row without a new checkpoint: on a
    cluster, the operator starts the driver again for every head it loses, and counts none of them.
    """
    name = newest.name if newest else None
    before = read_status(run)
    again = before is not None and before.owner == owner and before.checkpoint == name
    starts = before.starts + 1 if before and again else 1
    begun = replace(
        before or Status(RunState.STARTING, owner),
        state=RunState.STARTING,
        owner=owner,
        reason="the driver has begun",
        began=time.time(),
        starts=starts,
        checkpoint=name,
        checkpoint_time=newest.time if newest else None,
        step=newest.step if newest else 0,
        epoch=newest.epoch if newest else 0,
        world_size=0,
    )
    write_status(run, begun)
    outcome = Outcome(before)
    try:
        if starts > most_starts:
            raise SunspotError(
                f"{owner} was started {most_starts} times without a new checkpoint; the logs of those starts say why. "
                "SUNSPOT_MAX_DRIVER_STARTS allows more"
            )
        with Background(STATUS_EVERY_S, lambda: _refresh(run, owner)):
            yield outcome
    except SupersededError:
        raise  # the run is another's, and so is its status
    except SunspotError as error:
        if isinstance(error, ConflictError) and before and (before.state.terminal or before.owner != owner):
            restore_status(run, before)  # a start with other settings changes nothing about where the run stands
        else:
            _write_end(run, owner, RunState.FAILED, str(error))
        raise
    except KeyboardInterrupt:
        _write_end(run, owner, RunState.LOST, "interrupted; the same command goes on from the last checkpoint")
        raise
    except Exception as error:
        _write_end(run, owner, RunState.FAILED, shorten(error))
        with suppress(StorageError):
            record_failure(run, describe_failure(error, 0, None, begun.step))
        raise
    _write_end(run, owner, outcome.state, reason="")


def _refresh(run: Run, owner: str) -> None:
    """Show that the driver is there while no worker does: reading data and waiting for machines may take long."""
    status = read_status(run)
    if status and status.owner == owner and time.time() - status.time > 2 * STATUS_EVERY_S:
        reason = "no worker trains: the driver waits for them, or sums up what they did"
        write_status(run, replace(status, state=RunState.STARTING, reason=reason))


def _write_end(run: Run, owner: str, state: RunState, reason: str) -> None:
    """Say how it ended, unless the run has been taken over; what storage refuses now only readers will miss."""
    with suppress(StorageError):
        status = read_status(run)
        if status and status.owner == owner:
            write_status(run, replace(status, state=state, reason=reason))


def report_result(run: Run) -> AbstractContextManager[None]:
    """Tell what came of the run when the context ends (`on_exit`)."""
    return on_exit(lambda error: _report(run, error))


@contextmanager
def on_exit(tell: Callable[[Exception | None], None]) -> Iterator[None]:
    """Call `tell` when the context ends, in success or with the error that ends the driver.

    A driver that has no business with the run (`ConflictError`), or is interrupted, tells nothing.
    """
    try:
        yield
    except ConflictError:
        raise
    except Exception as error:
        tell(error)
        raise
    tell(None)


def _report(run: Run, error: Exception | None) -> None:
    try:
        status = read_status(run)
        if status is None:
            return  # it never began, or was deleted meanwhile: a report would be all there is of it
        report = gather(run, status.state, status.reason)
        for line in describe(run, report, error):
            print(line)
        run.storage.write(run.key(FILE), render(report))
        print(f"  report: {run.storage.locate(run.key(FILE))}", flush=True)
    except Exception as trouble:  # the run ended as it did: a report never changes that
        print(f"warning: the report could not be written: {shorten(trouble)}", flush=True)


def train_run(
    settings: Settings, owner: str = "", stop_request: StopRequest | None = None, identity: Iterable[str] = IDENTITY
) -> RunState:
    """Open the run, and train it from wherever it stands; the run's storage learns what came of it.

    `owner` is who trains, if not the job or this process; `stop_request`, in which others may ask that the run stops;
    `identity`, the settings that the run keeps to its last step. Raises what ended the run.
    """
    # Only now, as torch and Ray take seconds to import: a wrong setting is told at once.
    from app.driver import recorded_outcome, report_result
    from app.observe.output import shipped_driver_output
    from app.plan import with_absolute_paths
    from app.run.attempts import new_owner

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
    """Plan, train from where the run stands, and say what came of it; `before` is the status that was found."""
    from app.plan import make_plan
    from app.predict.held_out import keep_predictions
    from app.ray_session import ray_session
    from app.run.attempts import fatal_error
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


def keep_identity(
    run: Run,
    environment: Mapping[str, str],
    names: Iterable[str],
    data: str = "",
    rows: int = 0,
    steps_per_epoch: int = 0,
) -> None:
    """Record what a run may never change, or refuse to go on under other values (`ConflictError`, with a diff).

    `environment` has all settings by variable, of which the run keeps those called `names`.
    """
    variables = [PREFIX + name.upper() for name in names]
    identity = {variable: environment[variable] for variable in variables}
    record = {"settings": identity, "data": data, "rows": rows, "steps_per_epoch": steps_per_epoch}
    if run.storage.create(run.key("run.json"), to_json(record)):
        return
    refuse_other_settings(run, environment, names)
    begun = run.read_json("run.json")
    if begun["data"] != data:
        _refuse(
            run,
            [f"the data behind {environment[PREFIX + 'DATASET']}: {begun['rows']} rows -> {rows} rows, or other files"],
        )


def refuse_other_settings(run: Run, environment: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise `ConflictError`, with a diff, when the run was begun with other values of these settings, or keeps more."""
    try:
        begun = run.read_json("run.json")["settings"]
    except NotFoundError:
        return
    kept = dict.fromkeys([*begun, *(PREFIX + name.upper() for name in names)])
    if changed := differences(begun, {name: environment[name] for name in kept if name in environment}):
        _refuse(run, changed)


def _refuse(run: Run, changed: list[str]) -> None:
    lines = "\n".join(f"  {line}" for line in changed)
    raise ConflictError(
        f"{run.location} was begun with other settings, and going on would mix two runs:\n{lines}\n"
        f"set them back, or choose another {PREFIX}RUN_NAME"
    )
