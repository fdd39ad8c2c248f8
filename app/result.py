"""What came of a run, at the end of its driver: a table on the terminal, and the report in storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from app.errors import ConflictError, shorten
from app.layout import Run
from app.layout.checkpoints import Checkpoint
from app.layout.status import read_status
from app.report import FILE, Report, gather, render

RESULTS = ("loss", "accuracy")
"""What the names of metrics end in that say how good the model is."""


def told_result(run: Run) -> AbstractContextManager[None]:
    """Tell what came of the run when the context ends (`told_at_end`)."""
    return told_at_end(lambda error: _tell(run, error))


@contextmanager
def told_at_end(tell: Callable[[Exception | None], None]) -> Iterator[None]:
    """Call `tell` when the context ends, in success or with the error that ends the driver.

    A driver that has no business with the run (`ConflictError`), or is interrupted, tells nothing.
    """
    try:
        yield
    except ConflictError:
        raise
    except Exception as error:
        tell(error)
        raise
    tell(None)


def _tell(run: Run, error: Exception | None) -> None:
    try:
        status = read_status(run)
        if status is None:
            return  # it never began, or was deleted meanwhile: a report would be all there is of it
        report = gather(run, status.state, status.reason)
        for line in describe(run, report, error):
            print(line)
        run.storage.write(run.key(FILE), render(report))
        print(f"  report: {run.storage.locate(run.key(FILE))}", flush=True)
    except Exception as trouble:  # the run ended as it did: a report never changes that
        print(f"warning: the report could not be written: {shorten(trouble)}", flush=True)


def describe(run: Run, report: Report, error: Exception | None) -> Iterator[str]:
    """The newest and the best checkpoint beside each other, the error that ended the run, and where the weights are."""
    newest, best = report.newest, report.best
    _, metric, order = report.policy
    of = f" of {report.total_steps}" if report.total_steps else ""
    yield f"{report.state} at step {report.step}{of}"
    if error:
        yield f"  error: {type(error).__name__}: {shorten(error)}"
    if newest is None:
        yield "  no checkpoint is whole"
        return
    by = f"{'lowest' if order == 'min' else 'highest'} {metric}"
    rows = [["", "newest", f"best: {by}"], *_compare(newest, best)]
    if best is None:
        known = ", ".join(sorted(newest.metrics))
        yield f"  warning: CHECKPOINT_METRIC={metric} is not among {known}; the newest were kept"
    if best is None or best.name == newest.name:
        rows = [row[:2] for row in rows]
        rows[0][1] += "" if best is None else f", and best: {by}"
    yield from columns(rows)
    # In parts (PARALLEL=fsdp), unless the run is finished.
    file = "model.pt" if "model.pt" in newest.files else "__*_0.distcp"
    yield f"  weights: {run.storage.locate(run.key('checkpoints', newest.name, file))}"


def _compare(newest: Checkpoint, best: Checkpoint | None) -> Iterator[list[str]]:
    shown = [newest, best or newest]
    yield ["checkpoint", *(checkpoint.name for checkpoint in shown)]
    yield ["epoch", *(str(checkpoint.epoch) for checkpoint in shown)]
    for name in sorted(name for name in {**newest.metrics, **shown[1].metrics} if name.endswith(RESULTS)):
        values = [checkpoint.metrics.get(name) for checkpoint in shown]
        yield [name, *("" if value is None else f"{value:.4f}" for value in values)]


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells as lines, the cells of a column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
