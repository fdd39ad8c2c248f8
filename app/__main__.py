"""`python -m app`: train the run that the SUNSPOT_ settings describe, from wherever it stands."""

from __future__ import annotations

from app.errors import ConflictError, run_and_exit
from app.layout import Run, open_run, to_json
from app.layout.attempts import read_attempts, refuse_if_superseded
from app.layout.checkpoints import Checkpoint, find_newest_good
from app.layout.deletion import refuse_if_deleted
from app.layout.status import RunState, Status, stop_requested
from app.settings import IDENTITY, PREFIX, Settings, differences, load_settings


def main() -> int:
    """Read the settings, open the run, and train it; the run's storage learns what came of it."""
    settings = load_settings()

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
    with shipped_driver_output(run), told_result(run):
        attempts = read_attempts(run)
        owner = new_owner(run, settings.job_id)
        refuse_if_superseded(attempts, owner)
        checkpoint, skipped = find_newest_good(run, attempts)
        print(f"run {run.name} in {run.location}")
        for text in skipped:
            print(f"warning: skipped {text}")
        with recorded_outcome(run, owner, checkpoint, settings.max_driver_starts) as outcome:
            outcome.state = train(settings, run, owner, checkpoint, outcome.before)
    return 0


def train(settings: Settings, run: Run, owner: str, checkpoint: Checkpoint | None, before: Status | None) -> RunState:
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
    keep_identity(run, settings, plan.source.fingerprint, plan.steps.rows, plan.steps.per_epoch)
    if checkpoint and checkpoint.step >= plan.total_steps and checkpoint.evaluated:
        print(f"  already finished at step {checkpoint.step}; more EPOCHS would train it further")
        keep_predictions(plan, run, checkpoint)
    else:
        for reason in plan.reasons:
            print(f"  {reason}")
        print(f"  from: {checkpoint.name if checkpoint else settings.init_from or 'the beginning'}", flush=True)
        with ray_session():  # one for both
            checkpoint = fit(plan, run, owner, before)
            keep_predictions(plan, run, checkpoint)
    if checkpoint.step < plan.total_steps or not checkpoint.evaluated:
        print(f"  stopped at step {checkpoint.step}; `sunspot resume {run.name}` lets it train again")
        return RunState.STOPPED
    return RunState.SUCCEEDED


def keep_identity(run: Run, settings: Settings, data: str, rows: int, steps_per_epoch: int) -> None:
    """Record what a run may never change, or refuse to go on under other values (`ConflictError`, with a diff)."""
    environment = settings.environment()
    identity = {PREFIX + name.upper(): environment[PREFIX + name.upper()] for name in IDENTITY}
    record = {"settings": identity, "data": data, "rows": rows, "steps_per_epoch": steps_per_epoch}
    if run.storage.create(run.key("run.json"), to_json(record)):
        return
    begun = run.read_json("run.json")
    changed = differences(begun["settings"], identity)
    if not changed and begun["data"] != data:
        changed = [
            f"the data behind {environment[PREFIX + 'DATASET']}: {begun['rows']} rows -> {rows} rows, or other files"
        ]
    if changed:
        lines = "\n".join(f"  {line}" for line in changed)
        raise ConflictError(
            f"{run.location} was begun with other settings, and going on would mix two runs:\n{lines}\n"
            f"set them back, or choose another {PREFIX}RUN_NAME"
        )


if __name__ == "__main__":
    run_and_exit(main, "interrupted: what was committed is safe; the same command goes on from there")
