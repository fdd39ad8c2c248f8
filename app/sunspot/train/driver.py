"""The driver of a run. It claims and plans the run, trains, records the outcome, and prints the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sunspot.code_archive import enter_code
from sunspot.errors import ConflictError, DamageError, StorageError, SunspotError, shorten
from sunspot.formatting import plural, visible
from sunspot.report import FILE, read_report, render
from sunspot.report.summary import describe_outcome
from sunspot.run import Claimant, Run, open_run
from sunspot.run.attempts import fatal_error, give_up_damaged, read_attempts, refuse_if_left, refuse_if_superseded
from sunspot.run.checkpoints import Checkpoint, SkippedCheckpoint, Unusable, find_newest_good
from sunspot.run.handover import MOVE, read_handover
from sunspot.run.identity import Rows, record_identity
from sunspot.run.logs import shipped_driver_output
from sunspot.run.outcome import RECORD_S, DriverStatusWriter, RecordLimit, recorded_outcome
from sunspot.run.owner import Owner, new_owner
from sunspot.run.requests import (
    SPENT_BUDGET,
    StopRequest,
    describe_stop,
    refuse_if_deleted,
    resume_hint,
    stop_requested,
)
from sunspot.run.seen import RunSeen, look
from sunspot.run.status import RunState, find_own_status, new_driver, read_status
from sunspot.settings import IDENTITY, Settings
from sunspot.storage.limits import with_deadline
from sunspot.storage.prove import prove
from sunspot.tracking.process import tracked
from sunspot.train.budget import refuse_unpriced_budget, within_budget

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from sunspot.plan import Plan


def train_run(
    settings: Settings, owner: str = "", stop_request: StopRequest | None = None, identity: Iterable[str] = IDENTITY
) -> RunState:
    """Train a run from its newest state, record its outcome in storage, and return its final state.

    The run belongs to `owner`. The default is the job, or this process if there is no job. The caller can stop the run
    with `stop_request`. Settings named in `identity` must be the same as when the run was first started. Raises the
    error that ended the run.
    """
    # Imported here, so that a wrong setting is reported before numpy is imported.
    from sunspot.data.disk_cache import export_cache
    from sunspot.plan import with_absolute_paths

    refuse_unpriced_budget(settings)
    settings = with_absolute_paths(settings)
    export_cache(settings)
    run = open_run(settings.storage_path, settings.run_name)
    limit_s = settings.storage_timeout_s
    with_deadline(limit_s, "proving the storage", prove, run.storage, run.name)
    with_deadline(limit_s, "reading the run", refuse_if_deleted, run)
    with_deadline(limit_s, "reading the run", give_up_damaged, run, settings.environment())
    driver = new_driver()
    stop_request = stop_request or StopRequest()

    def find_origin() -> tuple[str, Origin]:
        attempts = read_attempts(run)
        claimed_for = owner or new_owner(settings.job.job_id)
        refuse_if_superseded(attempts, claimed_for)
        refuse_if_left(run, attempts, claimed_for)
        origin = Origin(*find_newest_good(run, attempts, trust_listing=True))  # its loader verifies it
        if origin.checkpoint and origin.checkpoint.finished:  # perhaps nothing loads it, so it is verified here
            origin = Origin(*find_newest_good(run, attempts))
        return claimed_for, origin

    if settings.job.moves_from:
        old = Owner.parse(settings.job.moves_from).describe()
        print(f"moving from {old}, which keeps training until the workers here are ready to take over", flush=True)
    limit = RecordLimit()
    with shipped_driver_output(run), tracked(run, settings, driver), report_result(run, driver, limit):
        owner, origin = with_deadline(limit_s, "reading the newest checkpoint", find_origin)
        claimant = Claimant(run, owner, driver)
        print(f"run {run.name} in {run.location}")
        for each in origin.skipped:
            log.warning(f"skipped {each}")
        with (
            within_budget(run, settings),
            recorded_outcome(claimant, origin.checkpoint, settings.max_driver_starts, stop_request, limit) as outcome,
        ):
            try:
                if may_train(claimant, stop_request, limit_s, settings.job.job_id):
                    plan = plan_run(run, settings, identity)
                    state, reason = train(plan, claimant, origin, outcome, stop_request)
                else:
                    state, reason = RunState.STOPPED, _stop_reason(claimant, stop_request)
                outcome.expect(state, reason)
            except SunspotError as error:
                error.final = error.final or has_failed_for_good(claimant, limit)
                raise
    return state


class Origin(NamedTuple):
    """The checkpoint in storage from which training continues. Nodes may have newer copies in memory."""

    checkpoint: Checkpoint | None
    "The newest checkpoint that can be used, or None."
    skipped: tuple[SkippedCheckpoint, ...]
    "Newer checkpoints that cannot be used."

    def describe(self, settings: Settings) -> str:
        """Describe the origin for the terminal."""
        if self.checkpoint:
            return self.checkpoint.name + (", or a newer copy in memory" if settings.snapshot_cost else "")
        if any(each.kind is Unusable.DAMAGED for each in self.skipped):
            return "a copy in memory, if there is one, because no checkpoint is intact"
        return settings.init_from or "the beginning"


def may_train(claimant: Claimant, stop_request: StopRequest, limit_s: float, job: str = "") -> bool:
    """Return False if the run was stopped. Raise the error that permanently ended this owner's job, if there is one.

    Reading the run from storage may take up to `limit_s` seconds.
    """
    run = claimant.run
    fatal, stopped = with_deadline(limit_s, "reading the run", lambda: (fatal_error(claimant), stop_requested(run)))
    if fatal:
        raise fatal  # this job has failed for good, so a retry of it does not train either
    if stopped:
        print(f"  stopped by {_describe_stop(claimant, stop_request)}; {resume_hint(run.name, bool(job))}")
    return not stopped


def _describe_stop(claimant: Claimant, stop_request: StopRequest) -> str:
    """Return what stopped the run: a move, its budget or `sunspot stop`."""
    if stop_request.moves_to:
        return f"{MOVE} to {Owner.parse(stop_request.moves_to).describe()}"
    return with_deadline(RECORD_S, "reading the stop marker", describe_stop, claimant.run)


def _stop_reason(claimant: Claimant, stop_request: StopRequest) -> str:
    """Return the reason if a move or the budget stopped the run, or an empty string if a user did."""
    by = _describe_stop(claimant, stop_request)
    return f"stopped by {by}" if by.startswith((SPENT_BUDGET, MOVE)) else ""


def has_failed_for_good(claimant: Claimant, limit: RecordLimit) -> bool:
    """Return True if storage contains an error that permanently ended this job. A retry of the job would not train."""
    with suppress(StorageError, DamageError):
        return limit.run("reading the run", lambda: fatal_error(claimant)) is not None
    return False


def plan_run(run: Run, settings: Settings, identity: Iterable[str]) -> Plan:
    """Plan the training. Raises `ConflictError` if settings or data differ from those at the beginning of the run."""
    # Imported here, because torch takes seconds to import.
    from sunspot.plan import make_plan
    from sunspot.ray_session import starts_own_session
    from sunspot.tasks import describe_misspelled, load_task
    from sunspot.train.this_machine import refuse_impossible

    enter_code(settings.job.code)
    task = load_task(settings)
    for text in describe_misspelled(task):
        log.warning(text)
    plan = replace(make_plan(settings, task), one_machine=starts_own_session())
    if plan.one_machine:
        refuse_impossible(plan.settings)
    if task.find_ray_trainer:
        task.find_ray_trainer(plan.settings, plan.source)  # fails before the run exists if it is not installed
    rows = identify_rows(plan)
    limit_s = settings.storage_timeout_s
    with_deadline(limit_s, "writing its identity", record_identity, run, settings.environment(), identity, rows)
    return plan


def train(
    plan: Plan, claimant: Claimant, origin: Origin, outcome: DriverStatusWriter, stop_request: StopRequest
) -> tuple[RunState, str]:
    """Train until the plan is complete, and predict with the last checkpoint.

    `outcome` writes the driver's part of the run's status. Returns the run's final state, and the reason if the run
    ended because of its budget, a move or early stopping.
    """
    # Imported here, because torch and Ray take seconds to import.
    from sunspot.predict.for_report import save_exhibit, save_predictions
    from sunspot.ray_session import ray_session
    from sunspot.train.trainer import fit

    run = claimant.run
    patience = plan.settings.early_stop_evaluations

    def finish(checkpoint: Checkpoint | None) -> tuple[RunState, str]:
        if not checkpoint or not checkpoint.completes(plan.total_steps, patience):
            how = resume_hint(run.name, bool(plan.settings.job.job_id))
            step = checkpoint.step if checkpoint else 0
            by = _describe_stop(claimant, stop_request)
            print(f"  stopped by {by} at step {step} of {plan.total_steps}; {how}")
            return RunState.STOPPED, _stop_reason(claimant, stop_request)
        reason = ""
        if checkpoint.step < plan.total_steps:
            reason = f"no improvement in {plural(patience, 'evaluation')}"
            print(f"  stopped early at step {checkpoint.step} of {plan.total_steps}: {reason}")
        outcome.finishing()
        save_predictions(plan, run, checkpoint, claimant.driver)
        save_exhibit(plan, run, checkpoint, claimant.driver)
        return RunState.SUCCEEDED, reason

    checkpoint = origin.checkpoint
    if checkpoint and checkpoint.completes(plan.total_steps, patience):
        if checkpoint.step >= plan.total_steps:
            print(f"  already finished at step {checkpoint.step}; raise SUNSPOT_EPOCHS to train further")
        return finish(checkpoint)
    for reason in plan.reasons:
        print(f"  {reason}")
    print(f"  from: {origin.describe(plan.settings)}", flush=True)
    with ray_session():  # one session for training and prediction
        while True:
            checkpoint = fit(plan, claimant, stop_request, outcome.note_end)
            done = checkpoint and checkpoint.completes(plan.total_steps, patience)
            if done or not continues_after_move(claimant, stop_request):
                return finish(checkpoint)


def continues_after_move(claimant: Claimant, stop_request: StopRequest) -> bool:
    """Return True if the workers stopped for a move that was cancelled while they were saving.

    The driver must then resume training, because no other driver trains the run. If the driver in the new place has
    claimed the run anyway, this driver's next claim is refused.
    """
    if not stop_request.moves_to or stop_request.signal:
        return False
    handover = with_deadline(RECORD_S, "reading the request to move", read_handover, claimant.run)
    if handover and handover.old == claimant.owner:
        return False
    with_deadline(RECORD_S, "reading the stop marker", stop_request.cancel_move, claimant.run)
    if not stop_request.asked:
        print("  the move was cancelled, so training continues here", flush=True)
    return not stop_request.asked


def identify_rows(plan: Plan) -> Rows:
    """Return a value that identifies the plan's training rows and their order.

    Raises `StorageError` if the data cannot be read.
    """
    import numpy

    from sunspot.plan import lay_out

    return Rows(
        data=plan.source.fingerprint,
        rows=plan.steps.rows,
        steps_per_epoch=plan.steps.per_epoch,
        order=plan.order,
        shuffled_by=f"NumPy {numpy.__version__}",
        sources=lay_out(plan.source, plan.steps).sources,
    )


def report_result(run: Run, driver: str, limit: RecordLimit) -> AbstractContextManager[None]:
    """Context manager that prints the run's result and writes its report on exit (see `on_exit`)."""

    def report(_: Exception | None) -> None:
        try:
            limit.run("writing the report", lambda: _write_report(run, driver))
        except Exception as trouble:  # the outcome of the run does not depend on its report
            log.warning(f"the report could not be written: {shorten(trouble)}")

    return on_exit(report)


@contextmanager
def on_exit(report: Callable[[Exception | None], None]) -> Iterator[None]:
    """Context manager that calls `report` on exit, with the error that ended the context, or None.

    `report` is not called after an interrupt. It is not called after a `ConflictError` either, because another driver
    may own the run.
    """
    try:
        yield
    except ConflictError:
        raise
    except Exception as error:
        report(error)
        raise
    report(None)


def _write_report(run: Run, driver: str) -> None:
    status = read_status(run)
    if status is None or status.driver != driver:
        return  # the run never began, was deleted, or belongs to another process now
    report = read_report(RunSeen(run, status=status))
    for line in describe_outcome(run, report):
        print(visible(line))
    page = render(report)
    if not find_own_status(run, driver):
        return
    run.storage.write(run.key(FILE), page)
    if not find_own_status(run, driver):  # a frozen driver may have overwritten the report of the new owner
        run.storage.write(run.key(FILE), render(read_report(look(run))))
    print(f"  report: {run.storage.locate(run.key(FILE))}", flush=True)
