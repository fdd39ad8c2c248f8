"""`python -m sunspot.tune`: train a run for each of several settings, and keep the best one's checkpoint.

A search is itself a run, with a status, logs, results and, at its end, one checkpoint. Its trials are separate runs,
called `<RUN_NAME>-01` and so on. The same command resumes an interrupted search.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

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
from sunspot.run.requests import StopRequest, refuse_if_deleted, resume_hint, stop_requested
from sunspot.run.search import SearchResults, Trial, read_trial, write_results
from sunspot.run.status import STATUS_EVERY_S, RunState, Status, find_own_status, new_driver, read_status, write_status
from sunspot.search_space import Search, in_words, load_search
from sunspot.storage.limits import retry_storage
from sunspot.storage.prove import prove
from sunspot.tracking.process import refuse_unusable

log = logging.getLogger(__name__)


def main() -> int:
    """Read the search, open its run, train the trials, and promote the best one's checkpoint."""
    search = load_search(os.environ)
    if not search.dimensions:
        raise SettingsError(
            "there is nothing to search: no setting is an expression, such as "
            "SUNSPOT_LEARNING_RATE=loguniform(1e-4,1e-2); `sunspot train` trains one run"
        )
    refuse_unusable(search.settings)

    # Imported late, because torch and Ray take seconds, and a wrong setting is reported at once.
    from sunspot.plan import with_absolute_paths
    from sunspot.run.logs import shipped_driver_output
    from sunspot.run.outcome import recorded_outcome
    from sunspot.run.owner import new_owner
    from sunspot.train.driver import on_exit

    trials = tuple(map(with_absolute_paths, search.trials))
    search = replace(search, settings=with_absolute_paths(search.settings), trials=trials)
    settings = search.settings
    run = open_run(settings.storage_path, settings.run_name)
    prove(run.storage, run.name)
    refuse_if_deleted(run)
    give_up_damaged(run, settings.environment())
    running = RunningSearch(search, Claimant(run, new_owner(settings.job_id), new_driver()))
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
        # A search has no checkpoint before its end, so its driver may start again for every trial.
        starts = settings.max_driver_starts * settings.trials
        with recorded_outcome(running.claimant, promoted, starts, running.stop_request) as outcome:
            outcome.expect(train_and_promote(running, promoted))
    return 0


@dataclass
class RunningSearch:
    """A search with the process that runs it, and its progress so far."""

    search: Search
    claimant: Claimant
    errors: dict[int, str] = field(default_factory=dict)
    "Error of each trial that has ended, by its number; empty for a trial without an error."
    promoted: str | None = None
    "Name of the run whose best checkpoint has become the search's."
    stop_request: StopRequest = field(default_factory=StopRequest)

    def end_trial(self, number: int, error: str) -> None:
        """Record and print how a trial has ended.

        Nothing is printed if storage fails; the results have the same line.
        """
        self.errors[number] = error
        with suppress(StorageError):
            trial = self.read_trial(number)
            reason = f": {trial.reason}" if trial.reason else ""
            best = f", {self.search.settings.checkpoint_metric} {trial.best:.4g}" if trial.best is not None else ""
            line = f"{trial.run}  step {trial.step}{best}  {in_words(trial.settings)}  {trial.state}{reason}"
            print(visible(line), flush=True)

    def update_status(self, attempt: Attempt) -> None:
        """Write the search's progress.

        Raises `StorageError`, or `SupersededError` if another process has taken it over.
        """
        run = self.claimant.run
        ensure_owner(run, attempt)
        status = read_status(run, self.claimant.driver)
        if status:
            reason = f"{len(self.errors)} of {len(self.search.trials)} trials have ended"
            write_status(run, replace(status, state=RunState.RUNNING, attempt=attempt.number, reason=reason))

    def read_trial(self, number: int) -> Trial:
        """Read a trial's results from its run. Raises `StorageError` if storage fails."""
        search = self.search
        settings = search.settings
        error = self.errors.get(number, "")
        run = open_run(settings.storage_path, search.trials[number - 1].run_name)
        return read_trial(run, search.samples[number - 1], settings.checkpoint_metric, settings.checkpoint_order, error)

    def read_results(self) -> SearchResults:
        """Read the results of all trials from their runs. Raises `StorageError` if storage fails."""
        settings = self.search.settings
        trials = map_parallel(self.read_trial, range(1, settings.trials + 1))
        space = {dimension.name: dimension.text for dimension in self.search.dimensions}
        return SearchResults(settings.checkpoint_metric, settings.checkpoint_order, space, tuple(trials), self.promoted)

    def publish_results(self) -> None:
        """Print the results as a table, and write the results and the report into the run.

        A failure is only a warning.
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


def train_and_promote(running: RunningSearch, promoted: Checkpoint | None) -> RunState:
    """Train the trials that have not ended, and promote the best trial's checkpoint."""
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
        print(f"  stopped by `sunspot stop`; {resume_hint(run.name, bool(running.search.settings.job_id))}")
        return RunState.STOPPED
    enter_code(running.search.settings.code)
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
                    running.update_status(attempt)
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
    stop_request.raise_signal(kept, search.settings.job_id)
    if stop_request.marked:
        print(f"  stopped by `sunspot stop`; {resume_hint(run.name, bool(running.search.settings.job_id))}")
        return RunState.STOPPED
    promote_best(running)
    return RunState.SUCCEEDED


def print_plan(search: Search, concurrency: str) -> None:
    """Print the dimensions, the metric, and the number of trials that train at once."""
    settings = search.settings
    metric = settings.checkpoint_metric
    goal = f"{'lowest' if settings.checkpoint_order == 'min' else 'highest'} {metric}"
    for dimension in search.dimensions:
        print(f"  {dimension.name}: {dimension.text}")
    print(f"  trials: {settings.trials}, for the {goal}; {concurrency}", flush=True)
    if not metric.startswith(HELD_OUT):
        log.warning(f"no rows are held out; ranking trials by the {metric} of training rows rewards overfitting")


def ranked_by_held_out(search: Search) -> Search:
    """Return the search with its trials ranked by the metric of held-out rows, if there are such rows."""
    from sunspot.plan import make_plan
    from sunspot.tasks import load_task

    first = search.trials[0]
    if not make_plan(first, load_task(first)).test:
        return search
    metric = {"checkpoint_metric": HELD_OUT + first.checkpoint_metric.removeprefix(HELD_OUT)}
    trials = tuple(trial.model_copy(update=metric) for trial in search.trials)
    return replace(search, settings=search.settings.model_copy(update=metric), trials=trials)


def promote_best(running: RunningSearch) -> None:
    """Copy the best checkpoint of all trials into the search. Raises `SunspotError` if no trial has a usable one."""
    from sunspot.tune.promotion import promote

    run, settings = running.claimant.run, running.search.settings
    metric = settings.checkpoint_metric
    limit_s = settings.storage_timeout_s
    ranking = retry_storage(limit_s, "reading the trials", running.read_results).ranking
    if not any(trial.state is RunState.SUCCEEDED for trial in ranking):
        lines = "\n".join(f"  {trial.run}: {trial.state}: {trial.reason}" for trial in ranking)
        raise SunspotError(f"no trial succeeded:\n{lines}")
    for trial in [trial for trial in ranking if trial.eligible and trial.checkpoint]:
        environment = next(s for s in running.search.trials if s.run_name == trial.run).environment()
        source = Run(run.storage, trial.run)
        try:
            checkpoint = retry_storage(
                limit_s,
                "promoting a checkpoint",
                promote,
                run,
                running.claimant.owner,
                environment,
                source,
                str(trial.checkpoint),
            )
        except (DamageError, NotFoundError) as error:
            log.warning(f"{trial.run} skipped: {error}")
            continue
        status = read_status(run, running.claimant.driver)
        if status:
            write_status(run, _promoted_status(status, checkpoint))
        running.promoted = trial.run
        print(f"  checkpoint: {run.storage.locate(run.key('checkpoints', checkpoint.name))}, the best of {trial.run}")
        return
    raise SunspotError(
        f"no trial has a checkpoint whose metric {metric} (SUNSPOT_CHECKPOINT_METRIC) is a number; set another metric, "
        "and the same command promotes the best checkpoint without training again"
    )


def _promoted_status(status: Status, checkpoint: Checkpoint) -> Status:
    return replace(
        status,
        attempt=checkpoint.attempt,
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        total_steps=checkpoint.total_steps,
        steps_per_epoch=checkpoint.steps_per_epoch,
        checkpoint=checkpoint.name,
        checkpoint_time=checkpoint.time,
        loss=checkpoint.metrics.get("loss"),
        test_loss=checkpoint.metrics.get("test_loss"),
    )
