"""Finds out which network NCCL uses between nodes. NCCL reports this only in its log."""

import atexit
import functools
import os
import re
import shutil
import tempfile
from pathlib import Path


@functools.cache
def own_log() -> Path:
    """Return the path of this process's NCCL log, in a temporary folder that is removed at exit."""
    folder = tempfile.mkdtemp(prefix="sunspot-nccl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder, "log")


def begin_log(log: Path) -> None:
    """Make NCCL log the initialization of each group."""
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(log)}


def read_network(log: Path) -> str:
    """Return NCCL's name for the network (Socket, IB or Libfabric), or an empty string if it is unknown."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return next(iter(re.findall(r"NCCL INFO Using network (.+)", text)), "").strip()
