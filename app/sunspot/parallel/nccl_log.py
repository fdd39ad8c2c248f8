"""What NCCL says of the network that it takes between nodes: it does so only in its log, as it forms a group."""

import os
import re
import tempfile
from pathlib import Path


def own_log() -> Path:
    """Return where NCCL logs in this process, if it is to."""
    return Path(tempfile.gettempdir(), f"sunspot-nccl-{os.getpid()}")


def begin_log(log: Path) -> None:
    """Have NCCL log what it begins with, from its first group on."""
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(log)}


def read_network(log: Path) -> str:
    """Read which network NCCL took, in its own words: Socket, IB, Libfabric; empty if it does not say."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return next(iter(re.findall(r"NCCL INFO Using network (.+)", text)), "").strip()
