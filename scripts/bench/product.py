"""The product itself, as the benchmarks measure it."""

import io
from contextlib import redirect_stdout

from sunspot.plan import make_plan
from sunspot.run import Run, open_run
from sunspot.run.attempts import new_owner
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.claimant import Claimant
from sunspot.run.identity import keep_identity
from sunspot.settings import IDENTITY, Settings
from sunspot.tasks import load_task
from sunspot.train.driver import identify_rows
from sunspot.train.trainer import fit


def train(settings: Settings) -> tuple[Run, Checkpoint]:
    """Train a run to its end, without a word; returns it with its newest checkpoint."""
    plan = make_plan(settings, load_task(settings))
    run = open_run(settings.storage_path, settings.run_name)
    keep_identity(run, settings.environment(), IDENTITY, identify_rows(plan))  # for the audit
    with redirect_stdout(io.StringIO()):
        return run, fit(plan, Claimant(run, new_owner(run, "")))
