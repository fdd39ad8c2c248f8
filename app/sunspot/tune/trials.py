"""The trials of a search, each of which is a run inside a Ray Tune trial.

Tune's ASHA scheduler decides which trials continue. Tune's own files are discarded, because a trial's state is in its
run. When a search resumes, trials that have ended only replay their history to the scheduler, and the other trials
resume from their checkpoints. A trial that ASHA rejects is not killed. Its run is stopped as if by a user:
it saves, and stays stopped.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, NamedTuple

from ray import tune
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from sunspot.elastic.control import CommandPoller, ControlClient
from sunspot.elastic.nodes import HEAD
from sunspot.errors import StorageError, SunspotError, shorten
from sunspot.formatting import plural
from sunspot.log import print_logs
from sunspot.metric_names import HELD_OUT
from sunspot.plan import choose_resources
from sunspot.ray_internals.coordinator import ROUNDING
from sunspot.run import Run, open_run
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.history import iter_records, list_journal
from sunspot.run.identity import refuse_other_settings
from sunspot.run.requests import StopRequest, clear_stop, request_stop, stop_requested
from sunspot.run.status import RunState, read_status
from sunspot.run.streams import Segment
from sunspot.settings import PREFIX, Settings
from sunspot.train.driver import train_run

REDUCTION = 3
"""Factor by which each of ASHA's comparisons reduces the number of trials. The best third continues."""

COMPARISONS = 2
"""Number of comparisons. They happen after a ninth and a third of a run, so a bad trial costs little."""

FULL_RUN = REDUCTION**COMPARISONS
"""Length of a complete run in ASHA's unit of time. Trials are compared at equal fractions of their runs, because they
can differ in steps and epochs. At equal fractions, their learning rate schedules have progressed equally."""

MIN_PROGRESS = 0.01
"""Smallest fraction of a run between two reports to Tune, which handles only about 20 reports per second."""

TRIAL_POLL_EVERY_S = 2.0
"""Seconds between a trial's checks of its run's history and of the search's commands."""

TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the history is in the run
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # an interrupt ends the search
    "RAY_AIR_NEW_OUTPUT": "0",  # so that verbose=0 prints nothing
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial's first and last reports have no metric
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}

PROGRESS = "progress"
"""The key in a trial's report for the completed part of its run, from 0 to FULL_RUN."""

SCORE = "score"
"""The key in a trial's report for the metric of the search."""

ERROR = "error"
"""The key in a trial's report for its error, which is empty before the trial ends or if it ended without an error."""

NODES_TIMEOUT_S = 60.0
"""Seconds to wait for a job's nodes. After that, the search trains fewer trials at a time."""

NODES_POLL_EVERY_S = 1.0


class Allocation(NamedTuple):
    """A division of the cluster's resources among the trials."""

    at_once: int
    "The number of trials that train at once."
    trials: tuple[Settings, ...]
    "The settings of the trials, including the resources of their workers."
    reason: str
    "A description of the allocation for the user."


def await_nodes(trials: tuple[Settings, ...], observe: Callable[[], tuple[dict[str, float], int]]) -> Allocation:
    """Wait for nodes, and return the allocation of their resources.

    `observe` returns the cluster's resources and its number of nodes. On Kubernetes, a restarted driver can be running
    before its nodes are back. This function waits up to NODES_TIMEOUT_S seconds for the nodes.
    """
    settings = trials[0]
    wanted = min(settings.concurrent_trials, len(trials)) if settings.job.job_id else 0
    deadline = time.monotonic() + NODES_TIMEOUT_S
    allocation = allocate(trials, *observe())
    if allocation.at_once < wanted:
        print(f"  waiting up to {NODES_TIMEOUT_S:.0f} s for enough nodes for {wanted} trials at a time", flush=True)
    while allocation.at_once < wanted and time.monotonic() < deadline:
        time.sleep(NODES_POLL_EVERY_S)
        allocation = allocate(trials, *observe())
    return allocation


def allocate(trials: tuple[Settings, ...], cluster: dict[str, float], nodes: int) -> Allocation:
    """Divide the cluster's resources among the trials.

    `cluster` contains the total resources, and `nodes` is the number of nodes.
    """
    settings = trials[0]
    workers = settings.num_workers.most
    wanted = settings.concurrent_trials
    resources = choose_resources(settings, cluster, nodes)
    needs = dict(resources.per_worker)
    shared = nodes == 1 and not settings.resources_per_worker  # on one machine, a single run would take all cores
    if shared:
        needs["CPU"] = 0.0 if wanted else min(1.0, needs["CPU"])  # one core per worker, or less for CONCURRENT_TRIALS
    fits = [int(cluster.get(name, 0.0) / (workers * amount) + ROUNDING) for name, amount in needs.items() if amount]
    at_once = max(1, min(*fits, wanted or len(trials), len(trials)))
    if shared:
        resources = choose_resources(settings, {**cluster, "CPU": cluster.get("CPU", 0.0) / at_once}, nodes)
    given = {"resources_per_worker": resources.per_worker, "use_gpu": "true" if resources.use_gpu else "false"}
    each = ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.per_worker.items()))
    reason = f"{at_once} at a time, each with {plural(workers, 'worker')} of {each}"
    if at_once < min(wanted, len(trials)):
        reason += f" (no room for SUNSPOT_CONCURRENT_TRIALS={wanted})"
    return Allocation(at_once, tuple(trial.model_copy(update=given) for trial in trials), reason)


class Trials(NamedTuple):
    """The trials of a search, with everything that a trial's process needs to train its run."""

    settings: tuple[Settings, ...]
    identity: tuple[str, ...]
    "The names of the settings that must not change during a trial."
    owner: str
    control: ControlClient
    "The channel through which the search stops the trials (elastic/control.py)."


def run_trials(trials: Trials, at_once: int, stopped: Callable[[], bool], on_end: Callable[[int, str], None]) -> None:
    """Train all trials, `at_once` at a time, until each has ended or the search is `stopped`.

    `on_end(number, error)` is called when a trial ends. Numbers start at 1. A trial's error is passed to `on_end` and
    not raised, because a failed trial must not stop the search.
    """
    settings = trials.settings[0]
    scheduler = StoppingAsha(
        settings.checkpoint_order, lambda number, by: stop_trial(trials.settings[number - 1], by), on_end
    )
    os.environ.update(TUNE_ENVIRONMENT)
    trainable = tune.with_resources(
        tune.with_parameters(run_trial, trials=trials),
        # The trials' drivers run on the head, because the workers' nodes can be lost. The drivers take no CPU from the
        # workers.
        tune.PlacementGroupFactory([{"CPU": 0, HEAD: 0.001}]),
    )
    with tempfile.TemporaryDirectory() as scratch:
        tuner = tune.Tuner(
            trainable,
            param_space={"trial": tune.grid_search(list(range(1, len(trials.settings) + 1)))},
            tune_config=tune.TuneConfig(scheduler=scheduler, max_concurrent_trials=at_once),
            run_config=tune.RunConfig(
                name="search",
                storage_path=scratch,
                verbose=0,
                # Only a lost driver counts as a failure: `run_trial` itself raises no error.
                failure_config=tune.FailureConfig(max_failures=settings.max_failures),
                stop=StopWhenIdle(scheduler, stopped),
            ),
        )
        tuner.fit()


def run_trial(config: dict[str, Any], trials: Trials) -> None:
    """Train a trial's run, and report the run's whole history to Tune."""
    print_logs()
    settings = trials.settings[config["trial"] - 1]
    run = open_run(settings.storage_path, settings.run_name)
    stop_request = StopRequest()
    history = HistoryReplay(run, settings.checkpoint_metric)
    tune.report({ERROR: ""})  # from now on, the search waits for this trial
    with CommandPoller(trials.control) as commands, ThreadPoolExecutor(1, thread_name_prefix="train") as pool:
        training = pool.submit(_train, settings, trials, stop_request)
        ended = False
        while not ended:
            ended = training.done()  # read before the history, so that its last records are reported
            if not stop_request.marked and commands.poll().stop:
                stop_request.note_marker()
            with suppress(StorageError):  # read again the next time
                for result in history.new():
                    tune.report({ERROR: "", **result})
            wait([training], timeout=TRIAL_POLL_EVERY_S)
        tune.report({ERROR: training.result()})


def _train(settings: Settings, trials: Trials, stop_request: StopRequest) -> str:
    """Train the run and return its error, or an empty string.

    The error is also in the run's status unless another process owns the run.
    """
    run = open_run(settings.storage_path, settings.run_name)
    try:
        refuse_other_settings(
            run, settings.environment(), trials.identity
        )  # before any other file of the run is trusted
        if has_ended(run, settings):
            return ""
        state = train_run(settings, trials.owner, stop_request, trials.identity)
        if state is RunState.SUCCEEDED and stop_requested(run):
            clear_stop(run)  # ASHA rejected the trial just as it ended
    except SunspotError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {shorten(error)}"
    return ""


def has_ended(run: Run, settings: Settings) -> bool:
    """Return True if the run has nothing left to train and needs no driver."""
    status = read_status(run)
    if status and status.state is RunState.STOPPED:
        return stop_requested(run)
    if not status or status.state is not RunState.SUCCEEDED:
        return False
    trained = read_attempts(run)[-1].metadata.settings
    wanted = settings.environment()
    return all(trained.get(name) == wanted[name] for name in (PREFIX + "EPOCHS", PREFIX + "MAX_STEPS"))


class HistoryReplay:
    """Converts a run's history into results for the scheduler, and returns each result once."""

    def __init__(self, run: Run, metric: str) -> None:
        self._run, self._metric = run, metric
        self._status_time = 0.0
        "The time of the status that was read last."
        self._reported = 0.0
        "The progress up to which results were returned."
        self._read = 0.0
        "The progress up to which records were read."
        self._values: list[tuple[int, float]] = []
        "The number of rows and the metric of each record since the last result."
        self._segments: set[Segment] = set()
        "The segments of the history that have been read."

    def new(self) -> list[dict[str, float]]:
        """Return the results since the last call. If there are none, this costs at most a small listing and a read."""
        status = read_status(self._run)
        if not status or not status.total_steps or status.time == self._status_time:
            return []
        segments = list_journal(self._run, "metrics")
        fresh = [segment for segment in segments if segment not in self._segments]
        records = list(iter_records(self._run, "metrics", lineage(read_attempts(self._run)), fresh))
        # Nothing below raises an error, so no result is lost.
        self._status_time = status.time
        self._segments = set(segments)
        found = []
        for record in records:
            progress = FULL_RUN * record["step"] / status.total_steps
            if self._metric not in record or progress <= self._read:
                continue
            self._read = progress
            self._values.append((record.get("rows", 0), float(record[self._metric])))
            if progress >= self._reported + MIN_PROGRESS * FULL_RUN or progress >= FULL_RUN > self._reported:
                self._reported = progress
                found.append({PROGRESS: progress, SCORE: self._score()})
                self._values = []
        return found

    def _score(self) -> float:
        """Return the metric's newest value for held-out rows, or its mean over training rows since the last result."""
        rows = sum(rows for rows, _ in self._values)
        if self._metric.startswith(HELD_OUT) or not rows:
            return self._values[-1][1]
        return sum(rows * value for rows, value in self._values) / rows


def stop_trial(settings: Settings, by: str) -> None:
    """Ask a trial's run to save and stop, unless this was done before. Raises `StorageError` if storage fails."""
    run = open_run(settings.storage_path, settings.run_name)
    if not stop_requested(run):
        request_stop(run, by)


class DropOnPickle:
    """A base class for objects that are pickled without their state. Tune saves the pickles, but nothing reads them."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # connections cannot be pickled


class StoppingAsha(DropOnPickle, ASHAScheduler):
    """An ASHA scheduler that stops a trial by asking its run to stop. It tells Tune to continue every trial."""

    def __init__(self, order: str, stop: Callable[[int, str], None], on_end: Callable[[int, str], None]) -> None:
        super().__init__(
            time_attr=PROGRESS,
            metric=SCORE,
            mode=order,
            max_t=FULL_RUN,
            grace_period=1,
            reduction_factor=REDUCTION,
            stop_last_trials=False,
        )
        self._stop, self._on_end = stop, on_end
        self.running: set[int] = set()
        "The numbers of the running trials, which Tune must not end."
        self._given_up: set[int] = set()
        self._to_stop: dict[int, str] = {}
        "The reason for rejecting each trial that could not be asked to stop yet, keyed by the number of the trial."

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Process a trial's result, and stop the trial's run if ASHA would end the trial."""
        number = trial.config["trial"]
        self.running.add(number)
        if number not in self._given_up and SCORE in result:
            if not math.isfinite(result[SCORE]):
                self._give_up(number, f"the search, because its metric was {result[SCORE]}")
            elif super().on_trial_result(tune_controller, trial, result) == TrialScheduler.STOP:
                done = f"{result[PROGRESS] / FULL_RUN:.0%}"
                self._give_up(number, f"ASHA after {done} of its steps, because other trials were better by then")
        for other, by in list(self._to_stop.items()):
            with suppress(StorageError):  # asked again with the next result
                self._stop(other, by)
                del self._to_stop[other]
        return str(TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Record that a trial has ended, with or without an error."""
        number = trial.config["trial"]
        self.running.discard(number)
        self._to_stop.pop(number, None)
        self._on_end(number, result.get(ERROR, ""))

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Record that Tune has abandoned a trial because its driver was lost too often."""
        self.on_trial_complete(tune_controller, trial, {ERROR: "its driver was lost"})

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Do nothing, because there is nothing to clean up."""

    def _give_up(self, number: int, by: str) -> None:
        self._given_up.add(number)
        self._to_stop[number] = by


class StopWhenIdle(DropOnPickle, tune.Stopper):
    """A stopper that ends Tune only when no trial is running, because Tune would kill running trials."""

    def __init__(self, scheduler: StoppingAsha, stopped: Callable[[], bool]) -> None:
        self._scheduler, self._stopped = scheduler, stopped

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False, because this stopper never ends a single trial."""
        return False

    def stop_all(self) -> bool:
        """Return True if the search is stopped and no trial is running."""
        return self._stopped() and not self._scheduler.running
