"""The trials of a search: whole runs, each within a trial of Ray Tune, whose ASHA decides which of them go on.

Tune stores nothing. A trial's state is in its run, as with every run: one that has ended is not trained again, its
history is replayed to the scheduler, and the others resume from their checkpoints. A trial that ASHA gives up is not
killed by Tune, but stopped as a user would stop it: it saves, and stays stopped.
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
from sunspot.run.history import each_record, list_journal
from sunspot.run.identity import refuse_other_settings
from sunspot.run.requests import StopRequest, clear_stop, request_stop, stop_requested
from sunspot.run.status import RunState, read_status
from sunspot.run.streams import Segment
from sunspot.settings import PREFIX, Settings
from sunspot.train.driver import train_run

REDUCTION = 3
"""At each comparison, ASHA lets the best third of the trials go on."""

COMPARISONS = 2
"""After a ninth and a third of a run: early enough that a bad trial has cost little."""

WHOLE = REDUCTION**COMPARISONS
"""A whole run in ASHA's unit of time. Trials may differ in steps and epochs: they are compared at the same share of
their runs, where their learning rate schedules are equally far, too."""

MIN_PART = 0.01
"""Least share of a run between two reports to Tune: a history may be long, and Tune takes some 20 reports a second."""

TRIAL_POLL_EVERY_S = 2.0
"""How often a trial reads its run's history and the search's command."""

TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the history is in the run
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # an interrupt ends the search
    "RAY_AIR_NEW_OUTPUT": "0",  # so that verbose=0 prints nothing
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial's first and last reports have none
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}

PART, SCORE, ERROR = "part", "score", "error"
"""What a trial reports to Tune: how much of its run is done, of WHOLE; the metric of the search; and, at its end, its
error, empty if it had none."""

NODES_TIMEOUT_S = 60.0
"""How long to wait for the nodes of a job; a search that goes on without them trains fewer trials at a time."""

NODES_POLL_EVERY_S = 1.0

Allocation = tuple[int, tuple[Settings, ...], str]
"""How many trials train at once, the trials with the resources of their workers, and both in words."""


def await_nodes(trials: tuple[Settings, ...], observe: Callable[[], tuple[dict[str, float], int]]) -> Allocation:
    """Wait for nodes, and return what `allocate` does for the resources and number of nodes that `observe` returns.

    On Kubernetes, a restarted driver may be there before the nodes are back: wait for them.
    """
    settings = trials[0]
    wanted = min(settings.concurrent_trials, len(trials)) if settings.job_id else 0
    deadline = time.monotonic() + NODES_TIMEOUT_S
    allocation = allocate(trials, *observe())
    if allocation[0] < wanted:
        print(f"  waiting for room for {wanted} trials at a time, for at most {NODES_TIMEOUT_S:.0f} s", flush=True)
    while allocation[0] < wanted and time.monotonic() < deadline:
        time.sleep(NODES_POLL_EVERY_S)
        allocation = allocate(trials, *observe())
    return allocation


def allocate(trials: tuple[Settings, ...], cluster: dict[str, float], nodes: int) -> Allocation:
    """Divide the resources of the cluster, as Ray counts them over `nodes` nodes, among the trials."""
    settings = trials[0]
    workers, wanted = settings.num_workers.most, settings.concurrent_trials
    resources = choose_resources(settings, cluster, nodes)
    needs = dict(resources.per_worker)
    shared = nodes == 1 and not settings.resources_per_worker  # one machine, whose cores a single run would take
    if shared:
        needs["CPU"] = 0.0 if wanted else min(1.0, needs["CPU"])  # a core each, or less for CONCURRENT_TRIALS
    fits = [int(cluster.get(name, 0.0) / (workers * amount) + ROUNDING) for name, amount in needs.items() if amount]
    at_once = max(1, min(*fits, wanted or len(trials), len(trials)))
    if shared:
        resources = choose_resources(settings, {**cluster, "CPU": cluster.get("CPU", 0.0) / at_once}, nodes)
    given = {"resources_per_worker": resources.per_worker, "use_gpu": "true" if resources.use_gpu else "false"}
    each = ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.per_worker.items()))
    reason = f"{at_once} at a time, each with {plural(workers, 'worker')} of {each}"
    if at_once < min(wanted, len(trials)):
        reason += f" (no room for SUNSPOT_CONCURRENT_TRIALS={wanted})"
    return at_once, tuple(trial.model_copy(update=given) for trial in trials), reason


class Trials(NamedTuple):
    """The runs of a search, and what each trial's process needs to train one."""

    settings: tuple[Settings, ...]
    identity: tuple[str, ...]
    "Settings that may not change during a trial."
    owner: str
    control: ControlClient
    "Tells the trials to stop (elastic/control.py)."


def run_trials(trials: Trials, at_once: int, stopped: Callable[[], bool], on_end: Callable[[int, str], None]) -> None:
    """Train all trials, `at_once` at a time, until each has ended or the search is `stopped`.

    `on_end(number, error)` is called for each that has ended, with its number from 1. A trial's error is passed to it,
    never raised: one failure must not stop the search.
    """
    settings = trials.settings[0]
    scheduler = StoppingAsha(
        settings.checkpoint_order, lambda number, by: stop_trial(trials.settings[number - 1], by), on_end
    )
    os.environ.update(TUNE_ENVIRONMENT)
    trainable = tune.with_resources(
        tune.with_parameters(run_trial, trials=trials),
        # The trials' drivers run on the head, as workers' nodes may go; they are not counted as CPU.
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
                # For lost drivers only: `run_trial` raises no other error.
                failure_config=tune.FailureConfig(max_failures=settings.max_failures),
                stop=StopWhenIdle(scheduler, stopped),
            ),
        )
        tuner.fit()


def run_trial(config: dict[str, Any], trials: Trials) -> None:
    """Run a trial for Tune: train its run, and report its history, old and new."""
    print_logs()
    settings = trials.settings[config["trial"] - 1]
    run = open_run(settings.storage_path, settings.run_name)
    stop_request = StopRequest()
    history = HistoryReplay(run, settings.checkpoint_metric)
    tune.report({ERROR: ""})  # from now on the search waits for this trial
    with CommandPoller(trials.control) as commands, ThreadPoolExecutor(1, thread_name_prefix="train") as pool:
        training = pool.submit(_train, settings, trials, stop_request)
        ended = False
        while not ended:
            ended = training.done()  # checked first, so that its last records are reported
            if not stop_request.marked and commands.poll().stop:
                stop_request.note_marker()
            with suppress(StorageError):  # tried again the next time
                for result in history.new():
                    tune.report({ERROR: "", **result})
            wait([training], timeout=TRIAL_POLL_EVERY_S)
        tune.report({ERROR: training.result()})


def _train(settings: Settings, trials: Trials, stop_request: StopRequest) -> str:
    """Train the run; returns its error, or ''. The status has it too, unless another process owns the run."""
    run = open_run(settings.storage_path, settings.run_name)
    try:
        refuse_other_settings(run, settings.environment(), trials.identity)  # before anything else of it is believed
        if has_ended(run, settings):
            return ""
        state = train_run(settings, trials.owner, stop_request, trials.identity)
        if state is RunState.SUCCEEDED and stop_requested(run):
            clear_stop(run)  # ASHA gave it up just as it ended
    except SunspotError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {shorten(error)}"
    return ""


def has_ended(run: Run, settings: Settings) -> bool:
    """Tell whether nothing is left to train: a driver would only count another start without a new checkpoint."""
    status = read_status(run)
    if status and status.state is RunState.STOPPED:
        return stop_requested(run)
    if not status or status.state is not RunState.SUCCEEDED:
        return False
    trained, wanted = read_attempts(run)[-1].metadata.settings, settings.environment()
    return all(trained.get(name) == wanted[name] for name in (PREFIX + "EPOCHS", PREFIX + "MAX_STEPS"))


class HistoryReplay:
    """Turns a run's history into results for the scheduler, each part of the run once."""

    def __init__(self, run: Run, metric: str) -> None:
        self._run, self._metric = run, metric
        self._status_time = 0.0
        "When the status that was read last was written."
        self._part = self._read = 0.0
        "The parts up to which results were given, and records read."
        self._values: list[tuple[int, float]] = []
        "Rows and metric of the records since the last result."
        self._segments: set[Segment] = set()
        "Segments of the history that have been read: a long run has many."

    def new(self) -> list[dict[str, float]]:
        """Return the results since the last call; a small listing and a read if there are none."""
        status = read_status(self._run)
        if not status or not status.total_steps or status.time == self._status_time:
            return []
        segments = list_journal(self._run, "metrics")
        fresh = [segment for segment in segments if segment not in self._segments]
        records = list(each_record(self._run, "metrics", lineage(read_attempts(self._run)), fresh))
        # Nothing below raises: no result is lost.
        self._status_time, self._segments = status.time, set(segments)
        found = []
        for record in records:
            part = WHOLE * record["step"] / status.total_steps
            if self._metric not in record or part <= self._read:
                continue
            self._read = part
            self._values.append((record.get("rows", 0), float(record[self._metric])))
            if part >= self._part + MIN_PART * WHOLE or part >= WHOLE > self._part:
                self._part = part
                found.append({PART: part, SCORE: self._score()})
                self._values = []
        return found

    def _score(self) -> float:
        """Return the metric since the last result: a test's newest, or else the mean over the rows."""
        rows = sum(rows for rows, _ in self._values)
        if self._metric.startswith(HELD_OUT) or not rows:
            return self._values[-1][1]
        return sum(rows * value for rows, value in self._values) / rows


def stop_trial(settings: Settings, by: str) -> None:
    """Ask a trial's run to save and stop, unless somebody else has; raises `StorageError`."""
    run = open_run(settings.storage_path, settings.run_name)
    if not stop_requested(run):
        request_stop(run, by)


class DropOnPickle:
    """Tune saves a pickle of this that nobody reads: an empty one, as connections cannot be pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class StoppingAsha(DropOnPickle, ASHAScheduler):
    """ASHA that stops a trial through its run; Tune is told that every trial goes on."""

    def __init__(self, order: str, stop: Callable[[int, str], None], on_end: Callable[[int, str], None]) -> None:
        super().__init__(
            time_attr=PART,
            metric=SCORE,
            mode=order,
            max_t=WHOLE,
            grace_period=1,
            reduction_factor=REDUCTION,
            stop_last_trials=False,
        )
        self._stop, self._on_end = stop, on_end
        self.running: set[int] = set()
        "The numbers of trials that have begun and not ended: Tune may not end these."
        self._given_up: set[int] = set()
        self._to_stop: dict[int, str] = {}
        "Trials that were given up and whose runs have no stop marker yet, with the reason."

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Take a trial's result, and stop the run of a trial that ASHA would end."""
        number = trial.config["trial"]
        self.running.add(number)
        if number not in self._given_up and SCORE in result:
            if not math.isfinite(result[SCORE]):
                self._give_up(number, f"the search, as its metric was {result[SCORE]}")
            elif super().on_trial_result(tune_controller, trial, result) == TrialScheduler.STOP:
                done = f"{result[PART] / WHOLE:.0%}"
                self._give_up(number, f"ASHA after {done} of its steps, as others were better by then")
        for other, by in list(self._to_stop.items()):
            with suppress(StorageError):  # tried again with the next result
                self._stop(other, by)
                del self._to_stop[other]
        return str(TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Note that the trial has ended, with or without an error."""
        number = trial.config["trial"]
        self.running.discard(number)
        self._to_stop.pop(number, None)
        self._on_end(number, result.get(ERROR, ""))

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Tune has lost the trial's driver too often."""
        self.on_trial_complete(tune_controller, trial, {ERROR: "its driver was lost"})

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Nothing to clean up."""

    def _give_up(self, number: int, by: str) -> None:
        self._given_up.add(number)
        self._to_stop[number] = by


class StopWhenIdle(DropOnPickle, tune.Stopper):
    """Ends Tune when the search is stopped and every running trial has saved and ended, as Tune would kill it."""

    def __init__(self, scheduler: StoppingAsha, stopped: Callable[[], bool]) -> None:
        self._scheduler, self._stopped = scheduler, stopped

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Never ends a single trial."""
        return False

    def stop_all(self) -> bool:
        """Tell whether to end Tune."""
        return self._stopped() and not self._scheduler.running
