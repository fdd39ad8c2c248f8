"""`python -m app.tune`: train a run for each of several settings, and keep the best one's checkpoint.

A search is a run itself, with a status, logs, results and, at its end, one checkpoint; its trials are runs beside it,
called `<RUN_NAME>-01` and so on. The same command goes on with a search that was interrupted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from app.errors import (
    DamageError,
    NotFoundError,
    SettingsError,
    StorageError,
    SunspotError,
    SupersededError,
    shorten,
)
from app.formatting import plural
from app.report import FILE
from app.report.search import gather_search, render_search
from app.run import Run, open_run
from app.run.attempts import Attempt, ensure_owner, read_attempts, refuse_if_superseded
from app.run.checkpoints import Checkpoint, find_newest_good
from app.run.search import Results, Trial, read_trial, write_results
from app.run.status import (
    STATUS_EVERY_S,
    RunState,
    Status,
    read_status,
    refuse_if_deleted,
    stop_requested,
    write_status,
)
from app.search_space import Search, in_words, load_search
from app.settings import Settings
from app.storage.base import map_parallel
from app.tracking.process import refuse_unusable

TRAINING_METRICS = ("loss", "accuracy")
"""What is measured on the very rows that a trial learns from: by these, whatever learns them by heart is the best."""

ROOM_WITHIN_S = 60.0
"""How long the nodes of a job may take to come back: a search that goes on without them trains fewer at a time."""

LOOK_EVERY_S = 1.0


@dataclass
class Progress:
    """What a search has come to since its driver began."""

    errors: dict[int, str] = field(default_factory=dict)
    "Of each trial that has ended, by its number: what its driver ended in, empty when in nothing."
    promoted: str | None = None
    "The run whose best checkpoint has become the search's."


def main() -> int:
    """Read the search, open its run, train the trials, and promote the best; its storage learns what came of it."""
    search = load_search(os.environ)
    if not search.dimensions:
        raise SettingsError(
            "nothing is to be searched: no setting holds an expression, such as "
            "SUNSPOT_LEARNING_RATE=loguniform(1e-4,1e-2); `python -m app` trains one run"
        )
    refuse_unusable(search.settings)

    # Only now, as torch and Ray take seconds to import: a wrong setting is told at once.
    from app.driver import on_exit, recorded_outcome
    from app.observe.output import shipped_driver_output
    from app.plan import with_absolute_paths
    from app.run.attempts import new_owner

    trials = tuple(map(with_absolute_paths, search.trials))
    search = replace(search, settings=with_absolute_paths(search.settings), trials=trials)
    settings = search.settings
    run = open_run(settings.storage_path, settings.run_name)
    run.storage.prove(run.name)
    refuse_if_deleted(run)
    progress = Progress()
    with shipped_driver_output(run), on_exit(lambda _: tell_results(search, run, progress)):
        attempts = read_attempts(run)
        owner = new_owner(run, settings.job_id)
        refuse_if_superseded(attempts, owner)
        promoted, _ = find_newest_good(run, attempts)
        print(f"search {run.name} in {run.location}")
        # A search has no checkpoint before its end: that a driver starts again and again is for its trials to judge.
        starts = settings.max_driver_starts * settings.trials
        with recorded_outcome(run, owner, promoted, starts) as outcome:
            outcome.state = train_and_promote(search, run, owner, promoted, progress)
    return 0


def train_and_promote(
    search: Search, run: Run, owner: str, promoted: Checkpoint | None, progress: Progress
) -> RunState:
    """Train the trials from where they stand, and promote the best one's checkpoint; `progress` is filled in."""
    import ray

    from app.background import Background
    from app.driver import keep_identity
    from app.elastic.control import StopRequest, open_control, watch_stop
    from app.ray_internals import answering
    from app.ray_session import ray_session
    from app.run.attempts import fatal_error
    from app.tune.promotion import begin_attempt
    from app.tune.trials import run_trials

    if fatal := fatal_error(run, owner):
        raise fatal
    if stop_requested(run):
        print(f"  stopped; `sunspot resume {run.name}` lets it go on")
        return RunState.STOPPED
    environment = {**search.settings.environment(), **search.given}
    keep_identity(run, environment, search.identity)
    attempt = begin_attempt(run, owner, environment, promoted)
    stop_request = StopRequest()
    with ray_session():
        at_once, trials, reason = find_room(
            search.trials, lambda: (ray.cluster_resources(), len(answering(ray.nodes())))
        )
        tell_plan(search, reason)
        with open_control() as control, watch_stop(run, control, stop_request):
            watch = Watch(run, attempt, control, progress, len(trials))

            def told(number: int, error: str) -> None:
                progress.errors[number] = error
                tell_trial(search, number, error)

            with Background(STATUS_EVERY_S, watch.look):
                run_trials(
                    trials,
                    search.identity,
                    owner,
                    at_once,
                    control,
                    lambda: bool(stop_request or watch.superseded),
                    told,
                )
    if fatal := watch.superseded or fatal_error(run, owner):
        raise fatal
    if stop_request.terminated:
        raise SunspotError(f"told to end by SIGTERM; its trials are kept, and the same command goes on: {run.location}")
    if stop_request.marked:
        print(f"  stopped; `sunspot resume {run.name}` lets it go on")
        return RunState.STOPPED
    promote_best(search, run, owner, progress)
    return RunState.SUCCEEDED


def promote_best(search: Search, run: Run, owner: str, progress: Progress) -> None:
    """Copy the best checkpoint of all trials into the search; raises `SunspotError` when there is none."""
    from app.storage.base import retry_storage
    from app.tune.promotion import promote

    settings = search.settings
    metric, limit_s = settings.checkpoint_metric, settings.storage_timeout_s
    ranking = retry_storage(lambda: read_all(search, progress), limit_s, "reading the trials", print).ranking
    if not any(trial.state is RunState.SUCCEEDED for trial in ranking):
        lines = "\n".join(f"  {trial.run}: {trial.state}: {trial.reason}" for trial in ranking)
        raise SunspotError(f"no trial succeeded:\n{lines}")
    for trial in [trial for trial in ranking if trial.eligible and trial.checkpoint]:
        origin, name = Run(run.storage, trial.run), str(trial.checkpoint)
        of_trial = next(s for s in search.trials if s.run_name == trial.run).environment()
        try:
            checkpoint = retry_storage(
                lambda origin=origin, name=name, of_trial=of_trial: promote(run, owner, of_trial, origin, name),  # type: ignore[misc]
                limit_s,
                "promoting a checkpoint",
                print,
            )
        except (DamageError, NotFoundError) as error:
            print(f"warning: {trial.run} passed over: {error}", flush=True)
            continue
        status = read_status(run)
        if status and status.owner == owner:
            write_status(run, describe(status, checkpoint))
        progress.promoted = trial.run
        print(f"  checkpoint: {run.storage.locate(run.key('checkpoints', checkpoint.name))}, the best of {trial.run}")
        return
    raise SunspotError(
        f"no checkpoint of a trial has the metric {metric} (SUNSPOT_CHECKPOINT_METRIC) as a number; with another one "
        "the same command promotes the best, and trains no trial again"
    )


def describe(status: Status, checkpoint: Checkpoint) -> Status:
    """The status of a search that has its checkpoint."""
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
    )


def find_room(
    trials: tuple[Settings, ...], look: Callable[[], tuple[dict[str, float], int]]
) -> tuple[int, tuple[Settings, ...], str]:
    """What `share_out` makes of the cluster that `look` sees, its resources and the number of its nodes.

    On Kubernetes, a driver that was started again may be there before the nodes are back: it waits for them.
    """
    settings = trials[0]
    wanted = min(settings.concurrent_trials, len(trials)) if settings.job_id else 0
    deadline = time.monotonic() + ROOM_WITHIN_S
    found = share_out(trials, *look())
    if found[0] < wanted:
        print(f"  waiting for room for {wanted} trials at a time, for at most {ROOM_WITHIN_S:.0f} s", flush=True)
    while found[0] < wanted and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
        found = share_out(trials, *look())
    return found


def share_out(
    trials: tuple[Settings, ...], there: dict[str, float], nodes: int
) -> tuple[int, tuple[Settings, ...], str]:
    """How many trials train at once, the trials with what a worker of each gets, and both in words.

    `there` is what the cluster of so many nodes has, as Ray counts it.
    """
    from app.plan import choose_resources
    from app.ray_internals import ROUNDING

    settings = trials[0]
    workers, wanted = settings.num_workers.most, settings.concurrent_trials
    resources = choose_resources(settings, there, nodes)
    needs = dict(resources.per_worker)
    shared = nodes == 1 and not settings.resources_per_worker  # one machine's cores, of which one run would take all
    if shared:
        needs["CPU"] = 0.0 if wanted else min(1.0, needs["CPU"])  # a core each, or less where that is asked for
    fits = [int(there.get(name, 0.0) / (workers * amount) + ROUNDING) for name, amount in needs.items() if amount]
    at_once = max(1, min(*fits, wanted or len(trials), len(trials)))
    if shared:
        resources = choose_resources(settings, {**there, "CPU": there.get("CPU", 0.0) / at_once}, nodes)
    given = {"resources_per_worker": resources.per_worker, "use_gpu": "true" if resources.use_gpu else "false"}
    each = ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.per_worker.items()))
    reason = f"{at_once} at a time, each with {plural(workers, 'worker')} of {each}"
    if at_once < min(wanted, len(trials)):
        reason += f" (no room for CONCURRENT_TRIALS={wanted})"
    return at_once, tuple(trial.model_copy(update=given) for trial in trials), reason


class Watch:
    """Keeps the status of a search that goes on, and finds out when it has been taken over."""

    def __init__(self, run: Run, attempt: Attempt, control: Any, progress: Progress, trials: int) -> None:
        self._run, self._attempt, self._control, self._progress, self._trials = run, attempt, control, progress, trials
        self.superseded: SupersededError | None = None

    def look(self) -> None:
        """A chore for the background; storage that refuses is asked again the next time."""
        try:
            ensure_owner(self._run, self._attempt)
        except SupersededError as error:
            self.superseded = error
            self._control.stop.remote()
            return
        status = read_status(self._run)
        if status and status.owner == self._attempt.owner:
            reason = f"{len(self._progress.errors)} of {self._trials} trials have ended"
            write_status(self._run, replace(status, state=RunState.RUNNING, reason=reason))


# -------------------------------------------------------------------------------------------------------------- telling


def tell_plan(search: Search, reason: str) -> None:
    """Print what will be searched, and how."""
    settings = search.settings
    metric = settings.checkpoint_metric
    goal = f"{'lowest' if settings.checkpoint_order == 'min' else 'highest'} {metric}"
    for dimension in search.dimensions:
        print(f"  {dimension.name}: {dimension.text}")
    print(f"  trials: {settings.trials}, for the {goal}; {reason}", flush=True)
    if metric in TRAINING_METRICS:
        print(
            f"warning: CHECKPOINT_METRIC={metric} is measured on the rows that a trial learns from; test_{metric} says "
            "what it makes of others, where there are held-out rows",
            flush=True,
        )


def tell_trial(search: Search, number: int, error: str) -> None:
    """Print how a trial has ended; what storage refuses, the results at the end tell."""
    settings = search.settings
    sample = search.samples[number - 1]
    run = open_run(settings.storage_path, search.trials[number - 1].run_name)
    with suppress(StorageError):
        trial = read_trial(run, sample, settings.checkpoint_metric, settings.checkpoint_order, error)
        why = f": {trial.reason}" if trial.reason else ""
        best = f", {settings.checkpoint_metric} {trial.best:.4g}" if trial.best is not None else ""
        print(f"{trial.run}  step {trial.step}{best}  {in_words(sample)}  {trial.state}{why}", flush=True)


def read_all(search: Search, progress: Progress) -> Results:
    """Where all trials stand, by their runs; raises `StorageError`."""
    settings = search.settings
    metric, order = settings.checkpoint_metric, settings.checkpoint_order

    def read(number: int) -> Trial:
        run = open_run(settings.storage_path, search.trials[number - 1].run_name)
        return read_trial(run, search.samples[number - 1], metric, order, progress.errors.get(number, ""))

    found = tuple(map_parallel(read, range(1, settings.trials + 1)))
    space = {dimension.name: dimension.text for dimension in search.dimensions}
    return Results(metric, order, space, found, progress.promoted)


def tell_results(search: Search, run: Run, progress: Progress) -> None:
    """Tell what came of the trials: a table, and the report."""
    from app.report.summary import columns

    try:
        results = read_all(search, progress)
        for line in columns(list(_table(results))):
            print(line)
        write_results(run, results)
        run.storage.write(run.key(FILE), render_search(*gather_search(run)))
        print(f"  report: {run.storage.locate(run.key(FILE))}", flush=True)
    except Exception as trouble:  # the search ended as it did: a report never changes that
        print(f"warning: the results could not be written: {shorten(trouble)}", flush=True)


def _table(results: Results) -> Iterator[list[str]]:
    yield ["trial", "state", "steps", results.metric, *results.space]
    for trial in results.ranking:
        steps = f"{trial.step} of {trial.total_steps}" if trial.total_steps else str(trial.step)
        best = "" if trial.best is None else f"{trial.best:.4g}"
        mark = "  <- best" if trial.run == results.promoted else ""
        values = [str(trial.settings[name]) for name in results.space]
        yield [trial.run, str(trial.state), steps, best, *values[:-1], values[-1] + mark]
