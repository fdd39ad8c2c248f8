"""Memory and CPU throttling of this process and its container, as Linux reports them.

A container is a control group (version 1 or 2): a folder of small files. In a container that is /sys/fs/cgroup itself;
elsewhere /proc/self/cgroup names a folder below it, and the limits of the groups above hold too. Without control groups
(macOS), nothing is known and nothing fails.
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
    """Counters of a CPU quota since its group was created; all 0 without a quota."""

    periods: int = 0
    "Periods of the quota, usually of 100 ms, in which the group had something to run."
    throttled: int = 0
    "Those in which it used up the quota."
    seconds: float = 0.0
    "Seconds it was throttled, summed over processors."

    def since(self, before: Throttling) -> Throttling:
        """The difference to `before`."""
        return Throttling(
            self.periods - before.periods, self.throttled - before.throttled, self.seconds - before.seconds
        )

    @property
    def share(self) -> float:
        """Share of the periods in which it was throttled."""
        return self.throttled / self.periods if self.periods > 0 else 0.0


def read_throttling(groups: Path = GROUPS, process: Path = PROCESS) -> Throttling:
    """The counters of the nearest quota."""
    for folder in _folders("cpu", groups, process):
        with contextlib.suppress(OSError, ValueError, KeyError):
            counters = _read_table(folder / "cpu.stat")
            if counters["nr_periods"]:
                seconds = counters["throttled_usec"] / 1e6 if "throttled_usec" in counters else 0.0
                seconds += counters.get("throttled_time", 0) / 1e9  # version 1
                return Throttling(counters["nr_periods"], counters["nr_throttled"], seconds)
    return Throttling()


def memory_left(groups: Path = GROUPS, process: Path = PROCESS) -> int | None:
    """Bytes of memory left until the nearest limit, of a group or of the machine; None if unknown.

    The kernel's cache of files counts as free, as it is dropped when memory gets short.
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
            left.append(int(limit) - int(used) + files)  # "max" is no number: no limit here
    with contextlib.suppress(OSError, KeyError):
        left.append(_read_kilobytes(process.parent / "meminfo")["MemAvailable"])
    return max(0, min(left)) if left else None


def resident_memory(process: Path = PROCESS) -> int | None:
    """Bytes of this process's own memory, without files and shared memory; None if unknown."""
    try:
        return _read_kilobytes(process / "status")["RssAnon"]
    except (OSError, KeyError):
        return None


def _folders(controller: str, groups: Path, process: Path) -> Iterator[Path]:
    """The group of this process, and those above it."""
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
    """Read a file of the kernel, in which names of processes and groups may contain any bytes."""
    return os.fsdecode(file.read_bytes())


def _read_table(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {name: int(number) for name, number in (line.split() for line in _read(file).splitlines())}


def _read_kilobytes(file: Path) -> dict[str, int]:
    """Lines such as `RssAnon:    1234 kB`, in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", _read(file), re.MULTILINE)
    return {name: int(number) * 1024 for name, number in found}
