"""`sunspot checkpoints`: which checkpoints a run has, and whether every byte of them is as it was written."""

from __future__ import annotations

from app.errors import DamageError, NotFoundError
from app.layout import Run
from app.layout.attempts import lineage, read_attempts
from app.layout.checkpoints import MANIFEST, Checkpoint, find_faults, in_lineage, list_checkpoints, list_incomplete
from submitter.output import print_json, print_table, warn


def list_all(run: Run, as_json: bool) -> None:
    """Print the checkpoints that lead to the newest attempt, by step, each verified."""
    listed, superseded = _find(run)
    verified = _verify(run, listed)
    rows = [
        {
            "name": checkpoint.name,
            "step": checkpoint.step,
            "epoch": checkpoint.epoch,
            "metrics": checkpoint.metrics,
            "bytes": checkpoint.bytes,
            "verified": not faults,
        }
        for checkpoint, faults in verified
    ]
    if as_json:
        print_json(rows)
    else:
        names = sorted({name for checkpoint, _ in verified for name in checkpoint.metrics if _is_result(name)})
        print_table(
            ["name", "step", "epoch", *names, "bytes", "verified"],
            [
                [c.name, c.step, c.epoch, *(c.metrics.get(name) for name in names), c.bytes, not faults]
                for c, faults in verified
            ],
        )
    for checkpoint, faults in verified:
        if faults:
            warn(f"{checkpoint.name}: damaged, {'; '.join(faults)}")
    incomplete = list_incomplete(run)
    if incomplete:
        warn(f"left out: {len(incomplete)} without {MANIFEST}, incomplete")
    if superseded:
        warn(f"left out: {len(superseded)} of superseded attempts, which do not lead to the newest one")


def verify(run: Run, name: str | None, as_json: bool) -> None:
    """Print for each checkpoint, or for the one called `name`, whether it is whole; raises `DamageError` if not."""
    listed, superseded = _find(run)
    if name is not None:
        listed = [checkpoint for checkpoint in listed if checkpoint.name == name]
        if not listed:
            raise NotFoundError(_explain_absence(run, name, superseded))
    verified = _verify(run, listed)
    if as_json:
        print_json([{"name": c.name, "verified": not faults, "faults": faults} for c, faults in verified])
    else:
        print_table(["name", "verified"], [[c.name, "; ".join(faults) or "ok"] for c, faults in verified])
    damaged = sum(bool(faults) for _, faults in verified)
    if damaged:
        raise DamageError(f"{damaged} of {len(verified)} checkpoints in {run.location} damaged")


def _find(run: Run) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """The checkpoints that count, and those that do not, although they are committed."""
    checkpoints = list_checkpoints(run)
    listed = in_lineage(checkpoints, lineage(read_attempts(run)))
    return listed, [checkpoint for checkpoint in checkpoints if checkpoint not in listed]


def _verify(run: Run, checkpoints: list[Checkpoint]) -> list[tuple[Checkpoint, list[str]]]:
    """Each checkpoint with its faults; without those that a live run deletes meanwhile, which only seem damaged."""
    verified = [(checkpoint, find_faults(run, checkpoint)) for checkpoint in checkpoints]
    return [
        (checkpoint, faults)
        for checkpoint, faults in verified
        if not faults or run.storage.exists(run.key("checkpoints", checkpoint.name, MANIFEST))
    ]


def _explain_absence(run: Run, name: str, superseded: list[Checkpoint]) -> str:
    location = run.storage.locate(run.key("checkpoints", name))
    if any(checkpoint.name == name for checkpoint in superseded):
        return f"{location}: written by a superseded attempt; it does not lead to the newest one, and is never used"
    if name in list_incomplete(run):
        return f"{location}: incomplete, it has no {MANIFEST}, and counts as not there"
    return f"{location}: no such checkpoint; `sunspot checkpoints ls {run.name}` lists them"


def _is_result(name: str) -> bool:
    """Whether a metric says how good the model is: a table has no room for the others."""
    return name.endswith(("loss", "accuracy"))
