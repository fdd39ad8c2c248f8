"""What a search prints while it runs, and the results that it leaves in its run."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from sunspot.background import map_parallel
from sunspot.errors import StorageError, shorten
from sunspot.formatting import columns, visible
from sunspot.report import FILE
from sunspot.report.search import gather_search, render_search
from sunspot.run import Run, open_run
from sunspot.run.history import HELD_OUT
from sunspot.run.search import Results, Trial, read_trial, write_results
from sunspot.run.status import own_status
from sunspot.search_space import Search, in_words

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """What has happened in a search since its driver began."""

    errors: dict[int, str] = field(default_factory=dict)
    "The error of each trial that has ended, by its number; empty if it had none."
    promoted: str | None = None
    "The run whose best checkpoint has become the search's."


def print_plan(search: Search, concurrency: str) -> None:
    """Print the dimensions, the metric, and how many trials train at once."""
    settings = search.settings
    metric = settings.checkpoint_metric
    goal = f"{'lowest' if settings.checkpoint_order == 'min' else 'highest'} {metric}"
    for dimension in search.dimensions:
        print(f"  {dimension.name}: {dimension.text}")
    print(f"  trials: {settings.trials}, for the {goal}; {concurrency}", flush=True)
    if not metric.startswith(HELD_OUT):
        log.warning(f"no rows are held out, and to rank trials by the {metric} of training rows rewards overfitting")


def print_trial(search: Search, number: int, error: str) -> None:
    """Print how a trial has ended, unless storage fails: the results at the end have it too."""
    with suppress(StorageError):
        trial = _read_trial(search, number, error)
        reason = f": {trial.reason}" if trial.reason else ""
        best = f", {search.settings.checkpoint_metric} {trial.best:.4g}" if trial.best is not None else ""
        line = f"{trial.run}  step {trial.step}{best}  {in_words(trial.settings)}  {trial.state}{reason}"
        print(visible(line), flush=True)


def collect_results(search: Search, progress: Progress) -> Results:
    """Read the results of all trials from their runs; raises `StorageError`."""
    settings = search.settings
    trials = map_parallel(
        lambda number: _read_trial(search, number, progress.errors.get(number, "")), range(1, settings.trials + 1)
    )
    space = {dimension.name: dimension.text for dimension in search.dimensions}
    return Results(settings.checkpoint_metric, settings.checkpoint_order, space, tuple(trials), progress.promoted)


def publish_results(search: Search, run: Run, driver: str, progress: Progress) -> None:
    """Print the results as a table, and write them and the report into the run; a failure is only a warning."""
    try:
        results = collect_results(search, progress)
        for line in columns(list(_table(results))):
            print(visible(line))
        if not own_status(run, driver):
            return  # another process has taken the search over while this one was frozen
        write_results(run, results)
        run.storage.write(run.key(FILE), render_search(*gather_search(run), link=f"../{{}}/{FILE}"))
        print(f"  report: {run.storage.locate(run.key(FILE))}", flush=True)
    except Exception as error:
        log.warning(f"the results could not be written: {shorten(error)}")


def _read_trial(search: Search, number: int, error: str) -> Trial:
    settings = search.settings
    run = open_run(settings.storage_path, search.trials[number - 1].run_name)
    return read_trial(run, search.samples[number - 1], settings.checkpoint_metric, settings.checkpoint_order, error)


def _table(results: Results) -> Iterator[list[str]]:
    yield ["trial", "state", "steps", results.metric, *results.space]
    for trial in results.ranking:
        steps = f"{trial.step} of {trial.total_steps}" if trial.total_steps else str(trial.step)
        best = "" if trial.best is None else f"{trial.best:.4g}"
        mark = "  <- best" if trial.run == results.promoted else ""
        values = [str(trial.settings[name]) for name in results.space]
        yield [trial.run, str(trial.state), steps, best, *values[:-1], values[-1] + mark]
