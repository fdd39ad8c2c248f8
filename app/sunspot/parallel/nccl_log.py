"""Reads from NCCL's log which network it uses between nodes. NCCL reports this only there, when it forms a group."""

import atexit
import functools
import os
import re
import shutil
import tempfile
from pathlib import Path


@functools.cache
def own_log() -> Path:
    """Return the path of NCCL's log in this process, in a folder of its own that is removed when the process exits."""
    folder = tempfile.mkdtemp(prefix="sunspot-nccl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder, "log")


def begin_log(log: Path) -> None:
    """Make NCCL log its initialization, beginning with its first group."""
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(log)}


def read_network(log: Path) -> str:
    """Return NCCL's name of the network that it uses (Socket, IB, Libfabric), or an empty string if unknown."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return next(iter(re.findall(r"NCCL INFO Using network (.+)", text)), "").strip()
