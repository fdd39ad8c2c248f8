"""The trials of a search: whole runs, each within a trial of Ray Tune, whose ASHA says which of them go on.

Tune is given nothing to keep. Where a trial stands is in its run, as with every run: one that has ended is not trained
again, its history tells the scheduler what it has to know, and the others go on from their checkpoints. What ASHA has
given up is not killed by Tune, but stopped as a user would stop it: it saves, and stays stopped.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from app.driver import refuse_other_settings, train_run
from app.elastic.control import CommandPoller, StopRequest
from app.elastic.nodes import HEAD
from app.errors import StorageError, SunspotError, shorten
from app.run import Run, open_run
from app.run.attempts import lineage, read_attempts
from app.run.history import each_record, list_journal
from app.run.status import RunState, clear_stop, read_status, request_stop, stop_requested
from app.settings import PREFIX, Settings

REDUCTION = 3
"""Of the trials that come to a comparison, ASHA lets the best third go on."""

COMPARISONS = 2
"""After a ninth and after a third of a run: by then a bad trial is known, and it has cost little."""

WHOLE = REDUCTION**COMPARISONS
"""What a whole run counts in ASHA's time. Trials may differ in steps and epochs: they are compared at the same part of
their runs, where a schedule of the learning rate has come equally far, too."""

LEAST_PART = 0.01
"""Of a run between two reports to Tune: its history may be long, and Tune takes some 20 reports a second."""

LOOK_EVERY_S = 2.0
"""Seconds between two looks of a trial at its run's history, and at what the search wants."""

TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the history is in the run
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # an interrupted search ends, as an interrupted run does
    "RAY_AIR_NEW_OUTPUT": "0",  # with which verbose=0 says nothing
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial's first and last reports have none
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}

PART, SCORE, ERROR = "part", "score", "error"
"""What a trial reports to Tune: the part of its run that is done, in WHOLE; the metric that is searched for; and at its
end the error that it ended in, empty when there was none."""


def run_trials(
    trials: Sequence[Settings],
    identity: Sequence[str],
    owner: str,
    at_once: int,
    control: Any,
    stopped: Callable[[], bool],
    told: Callable[[int, str], None],
) -> None:
    """Train all trials, `at_once` at the same time, until each has ended or the search is `stopped`.

    Over `control` (app.elastic.control) the trials hear that they are to stop. `told(number, error)` is called for each
    that has ended, with its number from 1. A trial's error is passed to `told`, never raised: one failure must not stop
    the search.
    """
    settings = trials[0]
    scheduler = StoppingAsha(settings.checkpoint_order, lambda number, by: stop_trial(trials[number - 1], by), told)
    os.environ.update(TUNE_ENVIRONMENT)
    trainable = tune.with_resources(
        tune.with_parameters(run_trial, trials=list(trials), identity=tuple(identity), owner=owner, control=control),
        # The drivers are where this one is: their workers' nodes may go. What they need is not counted.
        tune.PlacementGroupFactory([{"CPU": 0, HEAD: 0.001}]),
    )
    with tempfile.TemporaryDirectory() as scratch:
        tuner = tune.Tuner(
            trainable,
            param_space={"trial": tune.grid_search(list(range(1, len(trials) + 1)))},
            tune_config=tune.TuneConfig(scheduler=scheduler, max_concurrent_trials=at_once),
            run_config=tune.RunConfig(
                name="search",
                storage_path=scratch,
                verbose=0,
                # Only of drivers that are lost: no other error leaves `run_trial`.
                failure_config=tune.FailureConfig(max_failures=settings.max_failures),
                stop=WhenNoneRuns(scheduler, stopped),
            ),
        )
        tuner.fit()


def run_trial(
    config: dict[str, Any], trials: Sequence[Settings], identity: Sequence[str], owner: str, control: Any
) -> None:
    """What Tune runs for each trial: train its run, and report what its history says, old and new."""
    settings = trials[config["trial"] - 1]
    run = open_run(settings.storage_path, settings.run_name)
    stop_request, commands, history = StopRequest(), CommandPoller(control), Reported(run, settings.checkpoint_metric)
    tune.report({ERROR: ""})  # from now on the search waits for this trial
    with ThreadPoolExecutor(1, thread_name_prefix="train") as pool:
        training = pool.submit(_train, settings, identity, owner, stop_request)
        ended = False
        while not ended:
            ended = training.done()  # before the look: what it wrote last is seen
            stop_request.marked = stop_request.marked or commands.look().stop
            with suppress(StorageError):  # the next look may do better
                for result in history.new():
                    tune.report({ERROR: "", **result})
            wait([training], timeout=LOOK_EVERY_S)
        tune.report({ERROR: training.result()})


def _train(settings: Settings, identity: Sequence[str], owner: str, stop_request: StopRequest) -> str:
    """Train the run; returns what went wrong, which is in its status, too, unless it is another one's."""
    run = open_run(settings.storage_path, settings.run_name)
    try:
        refuse_other_settings(run, settings.environment(), identity)  # how another run ended is not believed
        if has_ended(run, settings):
            return ""
        state = train_run(settings, owner, stop_request, identity)
        if state is RunState.SUCCEEDED and stop_requested(run):
            clear_stop(run)  # ASHA gave it up as it ended
    except SunspotError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {shorten(error)}"
    return ""


def has_ended(run: Run, settings: Settings) -> bool:
    """Whether nothing is left to train: its driver would only count one more start of it without a new checkpoint."""
    status = read_status(run)
    if status and status.state is RunState.STOPPED:
        return stop_requested(run)
    if not status or status.state is not RunState.SUCCEEDED:
        return False
    trained, wanted = read_attempts(run)[-1].metadata.get("settings", {}), settings.environment()
    return all(trained.get(name) == wanted[name] for name in (PREFIX + "EPOCHS", PREFIX + "MAX_STEPS"))


class Reported:
    """What a run's history has to say to the scheduler, each part of the run once."""

    def __init__(self, run: Run, metric: str) -> None:
        self._run, self._metric = run, metric
        self._seen = 0.0
        "When the status was written that has been looked at."
        self._part = 0.0
        self._read: dict[str, str] = {}
        "The version of each file of the history that has been read: a long run's are not read again at every look."

    def new(self) -> list[dict[str, float]]:
        """The results since the last call; one small request while the run has nothing new to say."""
        status = read_status(self._run)
        if not status or not status.total_steps or status.time == self._seen:
            return []
        files = list_journal(self._run, "metrics")
        fresh = [file for file in files if self._read.get(file.key) != file.version]
        records = list(each_record(self._run, "metrics", lineage(read_attempts(self._run)), fresh))
        self._seen, self._read = status.time, {file.key: file.version for file in files}  # nothing can fail now
        found = []
        for record in records:
            part = WHOLE * record["step"] / status.total_steps
            if self._metric in record and (part >= self._part + LEAST_PART * WHOLE or part >= WHOLE > self._part):
                self._part = part
                found.append({PART: part, SCORE: float(record[self._metric])})
        return found


def stop_trial(settings: Settings, by: str) -> None:
    """Have a trial's run save and stand still, unless somebody else has; raises `StorageError`."""
    run = open_run(settings.storage_path, settings.run_name)
    if not stop_requested(run):
        request_stop(run, by)


class NotKept:
    """Something of which Tune writes a copy that nobody reads: an empty one, as connections cannot be pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class StoppingAsha(NotKept, ASHAScheduler):
    """ASHA, whose verdict goes to the trial's run; Tune hears that every trial goes on."""

    def __init__(self, order: str, stop: Callable[[int, str], None], told: Callable[[int, str], None]) -> None:
        super().__init__(
            time_attr=PART,
            metric=SCORE,
            mode=order,
            max_t=WHOLE,
            grace_period=1,
            reduction_factor=REDUCTION,
            stop_last_trials=False,
        )
        self._stop, self._told = stop, told
        self.running: set[int] = set()
        "Trials that Tune may not end, by their numbers."
        self._given_up: dict[int, str] = {}
        self._untold: dict[int, str] = {}
        "Given up, and their runs do not know it yet."

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Take a trial's result; what ASHA would end is told to stop."""
        number = trial.config["trial"]
        self.running.add(number)
        if number not in self._given_up and SCORE in result:
            if not math.isfinite(result[SCORE]):
                self._give_up(number, f"the search, as its metric was {result[SCORE]}")
            elif super().on_trial_result(tune_controller, trial, result) == TrialScheduler.STOP:
                done = f"{result[PART] / WHOLE:.0%}"
                self._give_up(number, f"ASHA after {done} of its steps, as others were better by then")
        for untold, by in list(self._untold.items()):
            with suppress(StorageError):  # the next result is another chance
                self._stop(untold, by)
                del self._untold[untold]
        return str(TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """The trial has ended, in whatever."""
        self._ended(trial, result.get(ERROR, ""))

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Tune has lost the trial's driver too often."""
        self._ended(trial, "its driver was lost")

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Nothing is kept of it."""

    def _give_up(self, number: int, by: str) -> None:
        self._given_up[number] = self._untold[number] = by

    def _ended(self, trial: Any, error: str) -> None:
        number = trial.config["trial"]
        self.running.discard(number)
        self._untold.pop(number, None)
        self._told(number, error)


class WhenNoneRuns(NotKept, tune.Stopper):
    """Ends Tune when the search is to stop and every trial that runs has saved: Tune would kill it."""

    def __init__(self, scheduler: StoppingAsha, stopped: Callable[[], bool]) -> None:
        self._scheduler, self._stopped = scheduler, stopped

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No trial by itself."""
        return False

    def stop_all(self) -> bool:
        """Whether Tune is to end."""
        return self._stopped() and not self._scheduler.running
