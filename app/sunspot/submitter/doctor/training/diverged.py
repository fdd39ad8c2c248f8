"""Finds runs with a loss or weights that are not finite, and the checkpoint to resume from."""

import math
from collections.abc import Iterator
from typing import Any

from sunspot.run.checkpoints import Checkpoint
from sunspot.submitter.doctor.training.case import Case
from sunspot.submitter.findings import Diagnosis, Finding, Severity

FIX = "lower SUNSPOT_LEARNING_RATE, set SUNSPOT_CLIP_NORM, or check the rows of the steps before"


def find_not_finite(case: Case) -> Iterator[Finding]:
    """Yield a finding if the loss or the weights are not finite."""
    seen = case.seen
    status = seen.status
    since = status.nan_since if status else 0
    loss = seen.loss
    broken = loss is not None and not math.isfinite(loss)
    if not since and not broken:
        return
    what = "the loss is" if broken else "the loss or the weights are"
    when = f"since step {since}; the newest step is {seen.step}" if since else f"at step {seen.step}"
    good = seen.checkpoint if seen.checkpoint and _is_good(seen.checkpoint) else None
    details: dict[str, Any] = {"since": since or None, "checkpoint": good.name if good else None}
    evidence = f"{what} NaN or infinite {when}"
    yield Finding(Diagnosis.NOT_FINITE, Severity.ERROR, evidence, _advise(case, good), details, cost=1.0)


def _advise(case: Case, good: Checkpoint | None) -> str:
    """Return advice on how to resume from a `good` checkpoint, or how to start a new run."""
    limit = case.number("max_nan_windows")
    name = case.seen.run.name
    if case.state.terminal:
        first = ""
    elif limit:
        first = f"it ends after {limit:.0f} windows of metrics (SUNSPOT_MAX_NAN_WINDOWS); then "
    else:
        first = "stop it, because it would otherwise train on forever (SUNSPOT_MAX_NAN_WINDOWS=0); then "
    if good and limit:
        then = f"start it again: it resumes from step {good.step}, {good.name}"
    else:
        finite = f"a checkpoint with a finite loss, if `sunspot checkpoints ls {name}` shows one"
        then = f"start a run under another name, with SUNSPOT_INIT_FROM set to model.pt of {finite}"
    return f"{first}{FIX}, and {then}"


def _is_good(checkpoint: Checkpoint) -> bool:
    """Return True if the weights and the loss of a checkpoint are finite."""
    return checkpoint.finite and math.isfinite(checkpoint.metrics.get("loss") or 0.0)
