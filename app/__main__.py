"""`python -m app`: train the run that the SUNSPOT_ settings describe, from wherever it stands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from app.errors import ConflictError, NotFoundError, SettingsError, run_and_exit
from app.layout import Run, open_run, to_json
from app.layout.attempts import read_attempts, refuse_if_superseded
from app.layout.checkpoints import Checkpoint, find_newest_good
from app.layout.deletion import refuse_if_deleted
from app.layout.status import RunState, Status, stop_requested
from app.search_space import find_dimensions
from app.settings import IDENTITY, PREFIX, Settings, differences, load_settings
from app.tracking.process import refuse_unusable, tracked

if TYPE_CHECKING:
    from app.stop import StopWish


def main() -> int:
    """Read the settings, and train the run that they describe."""
    if space := find_dimensions(os.environ):
        given = ", ".join(f"{PREFIX}{dimension.name}={dimension.text}" for dimension in space)
        raise SettingsError(f"{given}: one run takes one value; `python -m app.tune` trains a run for each of several")
    settings = load_settings()
    refuse_unusable(settings)
    train_run(settings)
    return 0


def train_run(
    settings: Settings, owner: str = "", wish: StopWish | None = None, identity: Iterable[str] = IDENTITY
) -> RunState:
    """Open the run, and train it from wherever it stands; the run's storage learns what came of it.

    `owner` is who trains, if not the job or this process; `wish`, in which others may wish that the run stops;
    `identity`, the settings that the run keeps to its last step. Raises what ended the run.
    """
    # Only now, as torch and Ray take seconds to import: a wrong setting is told at once.
    from app.outcome import recorded_outcome
    from app.output import shipped_driver_output
    from app.plan import with_absolute_paths
    from app.result import told_result
    from app.trainer import new_owner

    settings = with_absolute_paths(settings)
    run = open_run(settings.storage_path, settings.run_name)
    run.storage.prove(run.name)
    refuse_if_deleted(run)
    with shipped_driver_output(run), tracked(run, settings), told_result(run):
        attempts = read_attempts(run)
        owner = owner or new_owner(run, settings.job_id)
        refuse_if_superseded(attempts, owner)
        checkpoint, skipped = find_newest_good(run, attempts)
        print(f"run {run.name} in {run.location}")
        for text in skipped:
            print(f"warning: skipped {text}")
        with recorded_outcome(run, owner, checkpoint, settings.max_driver_starts) as outcome:
            outcome.state = train(settings, run, owner, checkpoint, outcome.before, wish, identity)
    return outcome.state


def train(
    settings: Settings,
    run: Run,
    owner: str,
    checkpoint: Checkpoint | None,
    before: Status | None,
    wish: StopWish | None,
    identity: Iterable[str],
) -> RunState:
    """Plan, train from where the run stands, and say what came of it; `before` is the status that was found."""
    from app.plan import make_plan
    from app.predictions import keep_predictions
    from app.tasks import load_task
    from app.trainer import find_verdict, fit, ray_session

    if verdict := find_verdict(run, owner):
        raise verdict  # this job has failed for good: a retry of it does not train either
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
            checkpoint = fit(plan, run, owner, before, wish)
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


if __name__ == "__main__":
    run_and_exit(main, "interrupted: what was committed is safe; the same command goes on from there")
