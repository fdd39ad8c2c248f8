"""Renders the section on checkpoints and their states."""

from collections.abc import Sequence
from typing import Any

from sunspot.report.html import Html, element, join, paragraph, result, size, table, utc_time
from sunspot.report.learning import results_first
from sunspot.report.model import ListedCheckpoint, Report
from sunspot.run.attempts import step_of

MAX_RESULTS = 6
"""Largest number of metric columns."""


def show(report: Report) -> Html:
    """Return a table of the checkpoints, with notes about omitted checkpoints and retention."""
    keep, _, order = report.seen.retention
    metric = report.best_by
    parts = []
    if not report.checkpoints:
        parts.append(paragraph("There is no checkpoint."))
    else:
        found = {name for kept in report.checkpoints if kept.checkpoint for name in kept.checkpoint.metrics}
        results = [name for name in found if name.endswith(("loss", "accuracy")) or name == metric]
        names = sorted(results, key=results_first)[:MAX_RESULTS]
        rows = [_row(report, kept, names) for kept in reversed(report.checkpoints)]
        columns = ["step", "state", "which", "epoch", *names, "size", "committed (UTC)", "name"]
        parts.append(table("Checkpoints, the newest first", columns, rows))
    for why, number in report.checkpoints_left_out.items():
        parts.append(paragraph(f"Left out: {number:,} {why}.", kind="note"))
    best = "lowest" if order == "min" else "highest"
    note = (
        f"The newest checkpoint and the {keep} with the {best} {metric} are kept. A checkpoint is verified if every "
        "file has the size and the SHA-256 that its manifest lists. A file is not read again if, according to storage, "
        "it has not changed since the commit."
    )
    return join([*parts, paragraph(note, kind="note")])


def _row(report: Report, kept: ListedCheckpoint, names: Sequence[str]) -> list[Any]:
    chosen = (("newest", report.seen.checkpoint), ("best", report.best))
    which = " and ".join(role for role, checkpoint in chosen if checkpoint and checkpoint.name == kept.name)
    words, kind = {
        "verified": ("✓ verified", "good"),
        "unread": ("… copied, or written since its commit; its bytes are not checked here", "wide"),
        "damaged": (f"✗ damaged: {'; '.join(kept.faults)}", "bad wide"),
        "incomplete": ("… incomplete: it has no manifest", "bad wide"),
    }[kept.state]
    if kept.usable and kept.checkpoint and not kept.checkpoint.finite:
        words, kind = "✗ some of its weights are NaN or infinite", "bad wide"
    state = element("span", words, class_=kind)
    details: list[Any] = [None] * (len(names) + 3)
    if kept.checkpoint and not kept.checkpoint.damage:
        found = kept.checkpoint
        results = [result(name, found.metrics.get(name)) for name in names]
        details = [found.epoch, *results, size(found.bytes), utc_time(found.time)]
    return [str(step_of(kept.name)), state, which, *details, element("code", kept.name, class_="wide")]
