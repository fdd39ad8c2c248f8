"""Lists and verifies the checkpoints in the lineage of a run's newest attempt."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sunspot.run import Run
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.checkpoints import Checkpoint, classify, list_directories, verify
from sunspot.submitter.printing import progress_note


@dataclass(frozen=True)
class CheckpointList:
    """Checkpoints with their faults, sorted by step.

    Superseded and incomplete checkpoints are only counted, and so are checkpoints that are older than those listed.
    """

    checked: Sequence[tuple[Checkpoint, Sequence[str]]]
    older: int
    superseded: int
    incomplete: int

    def records(self) -> list[dict[str, Any]]:
        """Return one JSON record per checkpoint."""
        now = time.time()
        return [
            {
                "name": checkpoint.name,
                "step": checkpoint.step,
                "epoch": checkpoint.epoch,
                "metrics": checkpoint.metrics,
                "finite": checkpoint.finite,
                "bytes": checkpoint.bytes,
                "age_s": None if checkpoint.damage else now - checkpoint.time,
                "verified": not faults,
                "faults": list(faults),
            }
            for checkpoint, faults in self.checked
        ]


def list_checkpoints(run: Run, limit: int | None = None) -> CheckpointList:
    """Verify the newest `limit` checkpoints, or all of them if `limit` is None.

    Reads one small file per checkpoint. The other files are not read if the storage listing proves that they are
    unchanged.
    """
    with progress_note("listing the checkpoints"):
        directories = list_directories(run)
        counted, superseded, incomplete = classify(directories, lineage(read_attempts(run)))
        shown = counted[-limit:] if limit else counted
        checked = verify(run, shown, directories)
    return CheckpointList(tuple(checked), len(counted) - len(shown), len(superseded), len(incomplete))
