"""`sunspot checkpoints ls` and `verify`: which checkpoints a run has, and whether every byte is as it was written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from app.errors import DamageError, NotFoundError
from app.layout import Run
from app.layout.attempts import Attempt, Span, lineage, read_attempts
from app.layout.checkpoints import (
    MANIFEST,
    Checkpoint,
    by_step,
    find_faults,
    leads_to_newest,
    list_directories,
    read_manifest,
)
from app.layout.storage import Entry, in_parallel
from app.settings import PREFIX, Settings
from submitter.output import in_words, print_json, print_table, warn

Directories = Mapping[str, Mapping[str, Entry]]


def list_all(run: Run, limit: int | None, as_json: bool) -> None:
    """Print the newest `limit` (None: all) checkpoints that lead to the newest attempt, by step, each verified.

    Costs the pages of a listing, and one small read for each that is shown: bytes are read again only where the
    listing does not show that they are as they were committed.
    """
    directories = list_directories(run)
    counted, superseded, incomplete = sort_out(directories, read_spans(run))
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
    counted, _, _ = sort_out(directories, read_spans(run))
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


def read_spans(run: Run) -> list[Span]:
    """The steps that count. The first attempt begins at the beginning: while it is the only one, nothing is read."""
    numbers = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in run.storage.list(run.key("attempts"))]
    if [int(number) for number in numbers if number.isdigit()] == [1]:
        return [Span(1, 0, None)]
    return lineage(read_attempts(run))


def sort_out(directories: Directories, spans: list[Span]) -> tuple[list[str], list[str], list[str]]:
    """Names, by step, of the checkpoints that count, of those of superseded attempts, and of incomplete ones."""
    committed = by_step(name for name, files in directories.items() if MANIFEST in files)
    counted = [name for name in committed if leads_to_newest(name, spans)]
    superseded = [name for name in committed if not leads_to_newest(name, spans)]
    return counted, superseded, by_step(directories.keys() - set(committed))


def read_back(run: Run, names: list[str]) -> list[tuple[Checkpoint, list[str]]]:
    """Like `check_listed`, with every byte read."""
    listed = [checkpoint for name in names if (checkpoint := read_manifest(run, name))]
    checked = [(checkpoint, find_faults(run, checkpoint)) for checkpoint in listed]
    return [(checkpoint, faults) for checkpoint, faults in checked if not faults or _is_there(run, checkpoint)]


def check_listed(run: Run, names: list[str], directories: Directories) -> list[tuple[Checkpoint, list[str]]]:
    """Each checkpoint with its faults; without those that a live run deletes meanwhile, which only seem damaged."""

    def check(name: str) -> tuple[Checkpoint, list[str]] | None:
        checkpoint = read_manifest(run, name)
        if checkpoint is None:
            return None
        faults = find_faults(run, checkpoint, directories[name])
        return (checkpoint, faults) if not faults or _is_there(run, checkpoint) else None

    return [checked for checked in in_parallel(check, names) if checked]


def refuse_if_absent(run: Run, name: str, directories: Directories) -> None:
    """Raise `NotFoundError`, with the reason, when `name` is not a checkpoint that counts."""
    counted, superseded, incomplete = sort_out(directories, read_spans(run))
    location = run.storage.locate(run.key("checkpoints", name))
    if name in superseded:
        raise NotFoundError(
            f"{location}: written by a superseded attempt; it does not lead to the newest one, and is never used"
        )
    if name in incomplete:
        raise NotFoundError(f"{location}: incomplete, it has no {MANIFEST}, and counts as not there")
    if name not in counted:
        raise NotFoundError(f"{location}: no such checkpoint; `sunspot checkpoints ls {run.name}` lists them")


def policy(attempts: list[Attempt]) -> tuple[int, str, str]:
    """CHECKPOINTS_TO_KEEP, CHECKPOINT_METRIC and CHECKPOINT_ORDER as the newest attempt has them."""
    recorded = attempts[-1].about.get("settings", {}) if attempts else {}

    def setting(name: str) -> str:
        return str(recorded.get(PREFIX + name.upper(), Settings.model_fields[name].default))

    return int(setting("checkpoints_to_keep")), setting("checkpoint_metric"), setting("checkpoint_order")


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


def _is_there(run: Run, checkpoint: Checkpoint) -> bool:
    return run.storage.exists(run.key("checkpoints", checkpoint.name, MANIFEST))


def _is_result(name: str) -> bool:
    """Whether a metric says how good the model is: a table has no room for the others."""
    return name.endswith(("loss", "accuracy"))
