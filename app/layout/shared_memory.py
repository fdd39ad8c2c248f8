"""Where the processes of a run keep copies of its state on one machine: `app.memory` fills it, deleting empties it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def copies_of(location: str, shared_memory: Path = SHARED_MEMORY) -> Path:
    """The directory of the run at `location` (`Run.location`); there or not."""
    name = hashlib.sha256(location.encode()).hexdigest()[:16]
    return shared_memory / f"sunspot-{os.getuid()}" / name
