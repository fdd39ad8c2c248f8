"""The mark of a run that is being deleted: put down before anything goes, and the last object to go.

While it is there the run is not to be trained, submitted or taken for whole. What still trains the run finds its own
attempt gone (`attempts.ensure_owner`) and commits nothing any more, even when the mark has gone too.
"""

from __future__ import annotations

import time

from app.errors import SupersededError
from app.layout import Run, to_json

MARK = "delete.json"


def mark_deletion(run: Run, by: str) -> None:
    """Say that the run is being deleted; raises `StorageError`."""
    run.storage.write(run.key(MARK), to_json({"by": by, "time": time.time()}))


def deletion_begun(run: Run) -> bool:
    """Whether the run is being deleted, or was and not all of it is gone."""
    return run.storage.exists(run.key(MARK))


def refuse_if_deleted(run: Run) -> None:
    """Raise `SupersededError` when the run is being deleted."""
    if deletion_begun(run):
        raise SupersededError(
            f"{run.location} is being deleted, so nothing may train it; `sunspot delete {run.name}` completes that"
        )


def clear_deletion(run: Run) -> None:
    """Take the mark away: nothing else of the run is left."""
    run.storage.delete(run.key(MARK))
