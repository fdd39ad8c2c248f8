"""Reads the memory use and CPU throttling of this process and its container from Linux.

A container is a control group (version 1 or 2), which is a folder of small files. Inside a container, this folder is
/sys/fs/cgroup. Outside a container, /proc/self/cgroup names a folder below /sys/fs/cgroup, and the parent groups'
limits apply, too. On systems without control groups, such as macOS, the functions return zeros or None.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUPS, PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self")


class Throttling(NamedTuple):
    """The counters of a CPU quota since its group was created. All are 0 if there is no quota."""

    periods: int = 0
    "Number of periods (usually 100 ms) in which the group had something to run."
    throttled: int = 0
    "Number of periods in which the group used up its quota."
    seconds: float = 0.0
    "Seconds for which the group was throttled, summed over all CPUs."

    def since(self, before: Throttling) -> Throttling:
        """Return the increase since the earlier counters `before`."""
        return Throttling(
            self.periods - before.periods, self.throttled - before.throttled, self.seconds - before.seconds
        )

    @property
    def share(self) -> float:
        """Fraction of the `periods` that were throttled."""
        return self.throttled / self.periods if self.periods > 0 else 0.0


def read_throttling(groups: Path = GROUPS, process: Path = PROCESS) -> Throttling:
    """Return the throttling counters of the innermost control group with a CPU quota."""
    for folder in _folders("cpu", groups, process):
        with contextlib.suppress(OSError, ValueError, KeyError):
            counters = _read_table(folder / "cpu.stat")
            if counters["nr_periods"]:
                seconds = counters["throttled_usec"] / 1e6 if "throttled_usec" in counters else 0.0
                seconds += counters.get("throttled_time", 0) / 1e9  # version 1
                return Throttling(counters["nr_periods"], counters["nr_throttled"], seconds)
    return Throttling()


def memory_left(groups: Path = GROUPS, process: Path = PROCESS) -> int | None:
    """Return how many bytes of memory the control groups and the machine still allow, or None if unknown.

    The kernel's page cache counts as free memory, because the kernel drops it when memory is short.
    """
    left = []
    for folder in _folders("memory", groups, process):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if (folder / "memory.max").exists():
                limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
                files = _read_table(folder / "memory.stat")["inactive_file"]
            else:
                limit = _read(folder / "memory.limit_in_bytes")
                used = _read(folder / "memory.usage_in_bytes")
                files = _read_table(folder / "memory.stat")["total_inactive_file"]
            left.append(int(limit) - int(used) + files)  # int("max") raises, because this group has no limit
    with contextlib.suppress(OSError, KeyError):
        left.append(_read_kilobytes(process.parent / "meminfo")["MemAvailable"])
    return max(0, min(left)) if left else None


def resident_memory(process: Path = PROCESS) -> int | None:
    """Return this process's resident anonymous memory (RssAnon) in bytes, or None if unknown.

    File-backed memory and shared memory are not included.
    """
    try:
        return _read_kilobytes(process / "status")["RssAnon"]
    except (OSError, KeyError):
        return None


def _folders(controller: str, groups: Path, process: Path) -> Iterator[Path]:
    """Yield the folder of this process's group, then those of its parent groups."""
    try:
        lines = _read(process / "cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = groups / "unified" if (groups / "unified").is_dir() else groups
        elif controller in controllers.split(","):
            root = groups / controllers if (groups / controllers).is_dir() else groups / controller
        else:
            continue
        folder = root / path.lstrip("/")
        yield from (above for above in (folder, *folder.parents) if above.is_relative_to(root) and above.is_dir())


def _read(file: Path) -> str:
    """Return the text of a kernel file, even if names of processes or groups in it are not valid UTF-8."""
    return os.fsdecode(file.read_bytes())


def _read_table(file: Path) -> dict[str, int]:
    """Return the numbers in a file with lines such as `anon 1234`, keyed by name."""
    return {name: int(number) for name, number in (line.split() for line in _read(file).splitlines())}


def _read_kilobytes(file: Path) -> dict[str, int]:
    """Return the sizes in bytes from a file with lines such as `RssAnon:    1234 kB`."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", _read(file), re.MULTILINE)
    return {name: int(number) * 1024 for name, number in found}
