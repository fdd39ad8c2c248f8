"""Describes the outcome of a run for the terminal."""

from collections.abc import Iterator

from sunspot.formatting import columns
from sunspot.report import Report
from sunspot.run import Run
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.history import format_metric, model_metrics


def describe_outcome(run: Run, report: Report) -> Iterator[str]:
    """Yield lines with the run's state, a comparison of the newest and the best checkpoint, and the weights' path.

    The lines do not include the error that ended the run, because the entry point prints it afterwards.
    """
    seen = report.seen
    newest, best = seen.checkpoint, report.best
    metric, order = report.best_by, seen.retention.order
    of = f" of {seen.total_steps}" if seen.total_steps else ""
    yield f"{seen.state} at step {seen.step}{of}"
    if newest is None:
        made = report.checkpoints or report.checkpoints_left_out or (seen.status and seen.status.checkpoint)
        yield "  no checkpoint is intact" if made else "  no checkpoint was made"
        return
    by = f"{'lowest' if order == 'min' else 'highest'} {metric}"
    rows = [["", "newest", f"best: {by}"], *_compare(newest, best)]
    if best is None:
        known = ", ".join(sorted(newest.metrics))
        yield f"  warning: SUNSPOT_CHECKPOINT_METRIC={metric} is not among {known}; the newest checkpoints were kept"
    if best is None or best.name == newest.name:
        rows = [row[:2] for row in rows]
        rows[0][1] += "" if best is None else f", and best: {by}"
    yield from columns(rows)
    # With PARALLEL=fsdp, the weights are sharded until the run is finished.
    forms = ("model.pt", "model.safetensors", "model.safetensors.index.json", "__*_0.distcp")
    file = next(form for form in forms if form in newest.files or "*" in form)
    yield f"  weights: {run.storage.locate(run.key('checkpoints', newest.name, file))}"


def _compare(newest: Checkpoint, best: Checkpoint | None) -> Iterator[list[str]]:
    shown = [newest, best or newest]
    yield ["checkpoint", *(checkpoint.name for checkpoint in shown)]
    yield ["epoch", *(str(checkpoint.epoch) for checkpoint in shown)]
    numbers = [model_metrics(checkpoint.metrics) for checkpoint in shown]
    for name in sorted({name for each in numbers for name in each}):
        yield [name, *(format_metric(each[name]) if name in each else "" for each in numbers)]
