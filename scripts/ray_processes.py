"""Finds the processes of a Ray instance on this machine."""

import contextlib

import psutil


def ray_processes(name: str, driver: psutil.Process) -> list[psutil.Process]:
    """Return the processes of the instance that `driver` has started, by the beginning of their name; eldest first."""
    raylets = {str(child.pid) for child in driver.children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(f"ray::{name}") and process.environ().get("RAY_RAYLET_PID") in raylets:
                found.append(process)  # one that was forked (tests/harness/forking.py) is no child of the driver
    return sorted(found, key=psutil.Process.create_time)
