"""Waits until another thread or process has done its work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], process: Any = None, seconds: float = 240) -> None:
    """Wait until the condition holds. Fails if it takes too long, or if the process or training ends first."""
    deadline, pause = time.monotonic() + seconds, 0.01
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        assert process is None or process.poll() is None, getattr(process, "stdout", None) and process.stdout.read()
        time.sleep(pause)
        pause = min(0.2, 1.2 * pause)
