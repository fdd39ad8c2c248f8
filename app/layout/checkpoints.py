"""Which checkpoints a run has, and whether they are whole.

A checkpoint directory counts when it holds `manifest.json`, which is written last and removed first, and is whole
when every file has the size and the SHA-256 that the manifest lists.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from app.errors import NotFoundError
from app.layout import Run, to_json
from app.layout.attempts import Attempt, Span, attempt_of, lineage, step_of

MANIFEST = "manifest.json"
NAME = re.compile(r"step-\d{8,}-attempt-\d{4,}")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: the content of its manifest."""

    name: str
    step: int
    "Optimizer steps taken."
    epoch: int
    "The epoch, from 1, that its last step belongs to."
    steps_per_epoch: int
    total_steps: int
    "Steps of the whole run by the settings it was written under."
    attempt: int
    metrics: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    "For each file: `size` in bytes and `sha256`."
    time: float = field(default_factory=time.time)
    damage: str = ""
    "Why the manifest itself cannot be used; empty when it can."

    @property
    def bytes(self) -> int:
        return sum(file["size"] for file in self.files.values())

    @property
    def finished(self) -> bool:
        """Whether nothing was left to train when it was written."""
        return self.step >= self.total_steps


def write_manifest(run: Run, checkpoint: Checkpoint) -> None:
    """The commit: after this the checkpoint exists."""
    record = {name: value for name, value in asdict(checkpoint).items() if name != "damage"}
    run.storage.write(_key(run, checkpoint.name, MANIFEST), to_json(record))


def list_checkpoints(run: Run) -> list[Checkpoint]:
    """Every directory with a manifest, by step; one whose manifest cannot be read has `damage`."""
    names = [name for name, complete in _directories(run).items() if complete]
    found = [checkpoint for name in names if (checkpoint := _read_manifest(run, name))]
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt))


def list_incomplete(run: Run) -> list[str]:
    """Names of the checkpoint directories without a manifest: uploads that never ended, or deletions that did not."""
    return [name for name, complete in _directories(run).items() if not complete]


def in_lineage(checkpoints: list[Checkpoint], spans: list[Span]) -> list[Checkpoint]:
    """Those that lead to the newest attempt; a stale writer's late manifest is not among them."""
    return [c for c in checkpoints if any(span.holds(c.attempt, c.step) for span in spans)]


def find_faults(run: Run, checkpoint: Checkpoint) -> list[str]:
    """What is wrong with a checkpoint, a line for each fault; empty when every byte is as the manifest says."""
    if checkpoint.damage:
        return [checkpoint.damage]
    faults = []
    for file, expected in checkpoint.files.items():
        try:
            size, sha256 = run.storage.digest(_key(run, checkpoint.name, file))
        except NotFoundError:
            faults.append(f"{file} is missing")
            continue
        if size != expected["size"]:
            faults.append(f"{file} has {size} bytes instead of {expected['size']}")
        elif sha256 != expected["sha256"]:
            faults.append(f"{file} has SHA-256 {sha256[:12]}... instead of {expected['sha256'][:12]}...")
    return faults


def find_newest_good(run: Run, attempts: list[Attempt]) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest whole checkpoint of the run's lineage, and what was passed over to reach it, newest first."""
    spans = lineage(attempts)
    skipped = [
        (step_of(name), f"{name}: incomplete, it has no manifest")
        for name in list_incomplete(run)
        if any(span.holds(attempt_of(name), step_of(name)) for span in spans)
    ]
    for checkpoint in reversed(in_lineage(list_checkpoints(run), spans)):
        faults = find_faults(run, checkpoint)
        if not faults:
            newer = sorted((step, text) for step, text in skipped if step > checkpoint.step)
            return checkpoint, tuple(text for _, text in reversed(newer))
        skipped.append((checkpoint.step, f"{checkpoint.name}: damaged, {'; '.join(faults)}"))
    return None, tuple(text for _, text in sorted(skipped, reverse=True))


def delete_checkpoint(run: Run, name: str) -> None:
    """Remove a checkpoint, its manifest first: killed in between, it is incomplete and ignored."""
    run.storage.delete(_key(run, name, MANIFEST))
    for entry in run.storage.list(run.key("checkpoints", name)):
        run.storage.delete(entry.key)


def _directories(run: Run) -> dict[str, bool]:
    """The checkpoint directories, and whether each has a manifest; what others put beside them is not ours to judge."""
    names: dict[str, bool] = {}
    for entry in run.storage.list(run.key("checkpoints")):
        name, _, file = entry.key.removeprefix(run.key("checkpoints") + "/").partition("/")
        if NAME.fullmatch(name):
            names[name] = names.get(name, False) or file == MANIFEST
    return names


def _read_manifest(run: Run, name: str) -> Checkpoint | None:
    try:
        checkpoint = Checkpoint(**run.read_json("checkpoints", name, MANIFEST))
        if (checkpoint.name, checkpoint.step, checkpoint.attempt) != (name, step_of(name), attempt_of(name)):
            raise ValueError("it describes another checkpoint")
        sized = [
            isinstance(file["size"], int) and isinstance(file["sha256"], str) for file in checkpoint.files.values()
        ]
        if not sized or not all(sized) or not isinstance(checkpoint.metrics, dict):
            raise ValueError("it lists no file, or not its size and SHA-256")
        return checkpoint
    except NotFoundError:  # deleted since it was listed
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Checkpoint(name, step_of(name), 0, 0, 0, attempt_of(name), damage=f"{MANIFEST} cannot be used: {error}")


def _key(run: Run, name: str, file: str) -> str:
    return run.key("checkpoints", name, file)
