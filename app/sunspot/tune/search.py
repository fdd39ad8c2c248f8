"""The driver of a search.

A search is itself a run, with a status, logs, results and finally one checkpoint. Its trials are separate runs, called
`<RUN_NAME>-01` and so on. The same command resumes an interrupted search.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sunspot.background import Background, map_parallel
from sunspot.code_archive import enter_code
from sunspot.errors import (
    DamageError,
    NotFoundError,
    SettingsError,
    StorageError,
    SunspotError,
    SupersededError,
    shorten,
)
from sunspot.formatting import columns, visible
from sunspot.metric_names import HELD_OUT
from sunspot.report import FILE
from sunspot.report.search import read_search, render_search
from sunspot.run import Claimant, Run, open_run
from sunspot.run.attempts import Attempt, ensure_owner, give_up_damaged, read_attempts, refuse_if_superseded
from sunspot.run.checkpoints import Checkpoint, find_newest_good
from sunspot.run.identity import record_identity
from sunspot.run.outcome import DriverStatusWriter, recorded_outcome
from sunspot.run.requests import StopRequest, refuse_if_deleted, resume_hint, stop_requested
from sunspot.run.search import SearchResults, Trial, read_trial, write_results
from sunspot.run.status import STATUS_EVERY_S, RunState, find_own_status, new_driver
from sunspot.settings.search_space import Search, in_words, load_search
from sunspot.storage.limits import retry_storage
from sunspot.storage.prove import prove
from sunspot.tracking.process import refuse_unusable

log = logging.getLogger(__name__)


def main() -> int:
    """Train the trials of a search, and promote the best trial's checkpoint."""
    search = load_search(os.environ)
    if not search.dimensions:
        raise SettingsError(
            "there is nothing to search: no setting is an expression, such as "
            "SUNSPOT_LEARNING_RATE=loguniform(1e-4,1e-2); use `sunspot train` for a single run"
        )
    refuse_unusable(search.settings)

    # Imported late, because torch and Ray take seconds to import, and invalid settings should be reported at once.
    from sunspot.plan import with_absolute_paths
    from sunspot.run.logs import shipped_driver_output
    from sunspot.run.owner import new_owner
    from sunspot.train.driver import on_exit

    trials = tuple(map(with_absolute_paths, search.trials))
    search = replace(search, settings=with_absolute_paths(search.settings), trials=trials)
    settings = search.settings
    run = open_run(settings.storage_path, settings.run_name)
    prove(run.storage, run.name)
    refuse_if_deleted(run)
    give_up_damaged(run, settings.environment())
    running = RunningSearch(search, Claimant(run, new_owner(settings.job.job_id), new_driver()))
    with (
        shipped_driver_output(run),
        on_exit(lambda _: running.publish_results()),
    ):
        attempts = read_attempts(run)
        refuse_if_superseded(attempts, running.claimant.owner)
        promoted, skipped = find_newest_good(run, attempts)
        print(f"search {run.name} in {run.location}")
        for each in skipped:
            log.warning(f"skipped {each}")
        # A search has no checkpoint before its end, so each trial raises the allowed number of driver starts.
        starts = settings.max_driver_starts * settings.trials
        with recorded_outcome(running.claimant, promoted, starts, running.stop_request) as outcome:
            train_and_promote(running, promoted, outcome)
    return 0


@dataclass
class RunningSearch:
    """A search that this process runs, and its progress."""

    search: Search
    claimant: Claimant
    errors: dict[int, str] = field(default_factory=dict)
    "The error of each trial that has ended, keyed by the trial's number. It is empty if the trial had no error."
    promoted: str | None = None
    "The name of the run with the promoted checkpoint."
    stop_request: StopRequest = field(default_factory=StopRequest)

    def end_trial(self, number: int, error: str) -> None:
        """Record and print how a trial ended.

        If the trial cannot be read from storage now, it appears only in the table at the end of the search.
        """
        self.errors[number] = error
        with suppress(StorageError):
            trial = self.read_trial(number)
            reason = f": {trial.reason}" if trial.reason else ""
            best = f", {self.search.settings.checkpoint_metric} {trial.best:.4g}" if trial.best is not None else ""
            line = f"{trial.run}  step {trial.step}{best}  {in_words(trial.settings)}  {trial.state}{reason}"
            print(visible(line), flush=True)

    def show_progress(self, attempt: Attempt, outcome: DriverStatusWriter) -> None:
        """Write to the status how many trials have ended.

        Raises `SupersededError` if another process has taken over the search, and `StorageError` if storage fails.
        """
        ensure_owner(self.claimant.run, attempt)
        reason = f"{len(self.errors)} of {len(self.search.trials)} trials have ended"
        outcome.replace(state=RunState.RUNNING, attempt=attempt.number, reason=reason)

    def read_trial(self, number: int) -> Trial:
        """Return a trial's results from its run. Raises `StorageError` if storage fails."""
        search = self.search
        settings = search.settings
        error = self.errors.get(number, "")
        run = open_run(settings.storage_path, search.trials[number - 1].run_name)
        return read_trial(run, search.samples[number - 1], settings.checkpoint_metric, settings.checkpoint_order, error)

    def read_results(self) -> SearchResults:
        """Return the results of all trials from their runs. Raises `StorageError` if storage fails."""
        settings = self.search.settings
        trials = map_parallel(self.read_trial, range(1, settings.trials + 1))
        space = {dimension.name: dimension.text for dimension in self.search.dimensions}
        return SearchResults(settings.checkpoint_metric, settings.checkpoint_order, space, tuple(trials), self.promoted)

    def promote_best(self) -> Checkpoint:
        """Copy the best checkpoint of all trials into the search, and return the copy.

        Raises `SunspotError` if no trial has a usable checkpoint.
        """
        from sunspot.tune.promotion import promote

        run, settings = self.claimant.run, self.search.settings
        limit_s = settings.storage_timeout_s
        ranking = retry_storage(limit_s, "reading the trials", self.read_results).ranking
        if not any(trial.state is RunState.SUCCEEDED for trial in ranking):
            lines = "\n".join(f"  {trial.run}: {trial.state}: {trial.reason}" for trial in ranking)
            raise SunspotError(f"no trial succeeded:\n{lines}")
        for trial in [trial for trial in ranking if trial.eligible and trial.checkpoint]:
            environment = next(s for s in self.search.trials if s.run_name == trial.run).environment()
            source = (Run(run.storage, trial.run), str(trial.checkpoint))
            try:
                checkpoint = retry_storage(
                    limit_s, "promoting a checkpoint", promote, run, self.claimant.owner, environment, *source
                )
            except (DamageError, NotFoundError) as error:
                log.warning(f"{trial.run} skipped: {error}")
                continue
            self.promoted = trial.run
            where = run.storage.locate(run.key("checkpoints", checkpoint.name))
            print(f"  checkpoint: {where}, the best of {trial.run}")
            return checkpoint
        raise SunspotError(
            f"no trial has a checkpoint with a numeric value of {settings.checkpoint_metric} "
            "(SUNSPOT_CHECKPOINT_METRIC); set another metric and run the same command again to promote the best "
            "checkpoint without further training"
        )

    def publish_results(self) -> None:
        """Print the results as a table, and write the results and the report to the run.

        Any error is only logged as a warning.
        """
        run = self.claimant.run
        try:
            results = self.read_results()
            for line in columns(list(_table(results))):
                print(visible(line))
            if not find_own_status(run, self.claimant.driver):
                return  # another process took over the search while this one was frozen
            write_results(run, results)
            run.storage.write(run.key(FILE), render_search(*read_search(run), link=f"../{{}}/{FILE}"))
            print(f"  report: {run.storage.locate(run.key(FILE))}", flush=True)
        except Exception as error:
            log.warning(f"the results could not be written: {shorten(error)}")


def _table(results: SearchResults) -> Iterator[list[str]]:
    yield ["trial", "state", "steps", results.metric, *results.space]
    for trial in results.ranking:
        steps = f"{trial.step} of {trial.total_steps}" if trial.total_steps else str(trial.step)
        best = "" if trial.best is None else f"{trial.best:.4g}"
        mark = "  <- best" if trial.run == results.promoted else ""
        values = [str(trial.settings[name]) for name in results.space]
        yield [trial.run, str(trial.state), steps, best, *values[:-1], values[-1] + mark]


def train_and_promote(running: RunningSearch, promoted: Checkpoint | None, outcome: DriverStatusWriter) -> None:
    """Train the trials that have not ended. Then promote the best trial's checkpoint, unless the search was stopped."""
    import ray

    from sunspot.elastic.control import ControlChannel, open_control
    from sunspot.elastic.supervisor import supervised
    from sunspot.ray_internals.nodes import reachable_nodes
    from sunspot.ray_session import ray_session, starts_own_session
    from sunspot.run.attempts import fatal_error
    from sunspot.train.this_machine import refuse_impossible
    from sunspot.tune.promotion import begin_attempt
    from sunspot.tune.trials import Trials, await_nodes, run_trials

    run, owner = running.claimant.run, running.claimant.owner
    fatal = fatal_error(running.claimant)
    if fatal:
        raise fatal
    if stop_requested(run):
        print(f"  stopped by `sunspot stop`; {resume_hint(run.name, bool(running.search.settings.job.job_id))}")
        outcome.expect(RunState.STOPPED)
        return
    enter_code(running.search.settings.job.code)
    if starts_own_session():
        refuse_impossible(running.search.trials[0])
    search = running.search = ranked_by_held_out(running.search)
    environment = {**search.settings.environment(), **search.given}
    record_identity(run, environment, search.identity)
    attempt = begin_attempt(run, owner, environment, promoted)
    stop_request = running.stop_request
    superseded: list[SupersededError] = []
    with ray_session():
        allocation = await_nodes(search.trials, lambda: (ray.cluster_resources(), len(reachable_nodes(ray.nodes()))))
        print_plan(search, allocation.reason)
        with open_control() as control, supervised(control, stop_request):

            def update() -> None:
                try:
                    running.show_progress(attempt, outcome)
                except SupersededError as error:
                    superseded.append(error)
                    control.send(ControlChannel.request_stop)

            with Background(STATUS_EVERY_S, update):
                run_trials(
                    Trials(allocation.trials, search.identity, owner, control),
                    allocation.at_once,
                    stopped=lambda: stop_request.asked or bool(superseded),
                    on_end=running.end_trial,
                )
    fatal = superseded[0] if superseded else fatal_error(running.claimant)
    if fatal:
        raise fatal
    kept = f"its trials are kept, and the same command resumes it: {run.location}"
    stop_request.raise_signal(kept, search.settings.job.job_id)
    if stop_request.marked:
        print(f"  stopped by `sunspot stop`; {resume_hint(run.name, bool(running.search.settings.job.job_id))}")
        outcome.expect(RunState.STOPPED)
        return
    best = running.promote_best()
    number = max(attempt.number, best.attempt)  # a checkpoint that was promoted before has an older attempt
    outcome.expect(RunState.SUCCEEDED, attempt=number, **status_after_promotion(best))


def print_plan(search: Search, concurrency: str) -> None:
    """Print the dimensions, the metric, and the number of trials that train at once."""
    settings = search.settings
    metric = settings.checkpoint_metric
    goal = f"{'minimizing' if settings.checkpoint_order == 'min' else 'maximizing'} {metric}"
    for dimension in search.dimensions:
        print(f"  {dimension.name}: {dimension.text}")
    print(f"  trials: {settings.trials} ({goal}); {concurrency}", flush=True)
    if not metric.startswith(HELD_OUT):
        log.warning(f"no rows are held out; ranking trials by the {metric} of training rows rewards overfitting")


def ranked_by_held_out(search: Search) -> Search:
    """Return the search, with trials ranked by the metric of held-out rows if any rows are held out."""
    from sunspot.plan import make_plan
    from sunspot.tasks import load_task

    first = search.trials[0]
    if not make_plan(first, load_task(first)).test:
        return search
    metric = {"checkpoint_metric": HELD_OUT + first.checkpoint_metric.removeprefix(HELD_OUT)}
    trials = tuple(trial.model_copy(update=metric) for trial in search.trials)
    return replace(search, settings=search.settings.model_copy(update=metric), trials=trials)


def status_after_promotion(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the status fields that describe a promoted checkpoint."""
    return {
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "total_steps": checkpoint.total_steps,
        "steps_per_epoch": checkpoint.steps_per_epoch,
        "checkpoint": checkpoint.name,
        "checkpoint_time": checkpoint.time,
        "loss": checkpoint.metrics.get("loss"),
        "test_loss": checkpoint.metrics.get("test_loss"),
    }
