"""Finds the processes of a Ray session on this machine."""

import contextlib

import psutil


def ray_processes(name: str, driver: psutil.Process) -> list[psutil.Process]:
    """Return processes of the Ray session that `driver` has started, oldest first.

    `name` is the beginning of the processes' name after `ray::`.
    """
    raylets = {str(child.pid) for child in driver.children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(f"ray::{name}") and process.environ().get("RAY_RAYLET_PID") in raylets:
                found.append(process)  # a forked process (tests/harness/forking.py) is not a child of the driver
    return sorted(found, key=psutil.Process.create_time)
