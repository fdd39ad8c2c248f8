"""What NCCL says of the network that it takes between nodes: it does so only in its log, as it forms a group."""

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
    """Have NCCL log what it begins with, from its first group on."""
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(log)}


def read_network(log: Path) -> str:
    """Read which network NCCL took, in its own words: Socket, IB, Libfabric; empty if it does not say."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return next(iter(re.findall(r"NCCL INFO Using network (.+)", text)), "").strip()
