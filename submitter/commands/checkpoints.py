"""`sunspot checkpoints ls` and `verify`: which checkpoints a run has, and whether every byte is as it was written."""

from __future__ import annotations

import time
from typing import Any

from app.errors import DamageError
from app.formatting import in_words
from app.run import Run
from app.run.checkpoints import (
    MANIFEST,
    Checkpoint,
    check_listed,
    classify,
    list_directories,
    read_back,
    read_spans,
    refuse_if_absent,
)
from submitter.output import print_json, print_table, warn


def list_all(run: Run, limit: int | None, as_json: bool) -> None:
    """Print the newest `limit` (None: all) checkpoints that lead to the newest attempt, by step, each verified.

    Costs the pages of a listing, and one small read for each that is shown: bytes are read again only where the
    listing does not show that they are as they were committed.
    """
    directories = list_directories(run)
    counted, superseded, incomplete = classify(directories, read_spans(run))
    shown = counted[-limit:] if limit else counted
    checked = check_listed(run, shown, directories)
    now = time.time()
    if as_json:
        print_json([_as_record(checkpoint, faults, now) for checkpoint, faults in checked])
        for checkpoint, faults in checked:
            if faults:
                warn(f"{checkpoint.name}: damaged, {'; '.join(faults)}")
    else:
        names = sorted({name for checkpoint, _ in checked for name in checkpoint.metrics if _is_result(name)})
        print_table(
            ["name", "step", "epoch", *names, "bytes", "age", "verified"],
            [
                [
                    *(c.name, c.step, c.epoch, *(c.metrics.get(name) for name in names), c.bytes),
                    *("" if c.damage else in_words(now - c.time), f"no: {'; '.join(faults)}" if faults else "yes"),
                ]
                for c, faults in checked
            ],
        )
    if len(counted) > len(shown):
        warn(f"left out: {len(counted) - len(shown)} older; --all lists them")
    if incomplete:
        warn(f"left out: {len(incomplete)} without {MANIFEST}, incomplete")
    if superseded:
        warn(f"left out: {len(superseded)} of superseded attempts, which do not lead to the newest one")


def verify(run: Run, name: str | None, as_json: bool) -> None:
    """Print for each checkpoint, or for the one called `name`, whether it is whole; raises `DamageError` if not."""
    directories = list_directories(run)
    counted, _, _ = classify(directories, read_spans(run))
    chosen = [name] if name is not None else counted
    if name is not None:
        refuse_if_absent(run, name, directories)
    verified = read_back(run, chosen)
    if as_json:
        print_json([{"name": c.name, "verified": not faults, "faults": faults} for c, faults in verified])
    else:
        print_table(["name", "verified"], [[c.name, "; ".join(faults) or "ok"] for c, faults in verified])
    damaged = sum(bool(faults) for _, faults in verified)
    if damaged:
        raise DamageError(f"{damaged} of {len(verified)} checkpoints in {run.location} damaged")


def _as_record(checkpoint: Checkpoint, faults: list[str], now: float) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "metrics": checkpoint.metrics,
        "bytes": checkpoint.bytes,
        "age_s": None if checkpoint.damage else now - checkpoint.time,
        "verified": not faults,
        "faults": faults,
    }


def _is_result(name: str) -> bool:
    """Whether a metric says how good the model is: a table has no room for the others."""
    return name.endswith(("loss", "accuracy"))
