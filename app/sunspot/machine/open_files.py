"""Raises the limit on the number of files, including sockets, that this process can have open."""

import resource

from sunspot.errors import SettingsError

OWN_FILES = 256
"""Number of files that Python, torch and Ray may have open, besides those for each worker."""


def allow_open_files(process: str, per_worker: int, workers: int) -> None:
    """Raise this process's limit, if necessary, so that it can have `per_worker` files open for each of the `workers`.

    The soft limit can be raised up to the hard limit, which only an administrator can raise. Raises `SettingsError` if
    the hard limit is too low. `process` is the name of this process in the error's message.
    """
    needed = OWN_FILES + per_worker * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return
    if hard != unlimited and hard < needed:
        raise SettingsError(
            f"SUNSPOT_NUM_WORKERS: with {workers:,} workers, {process} needs {needed:,} open files, but the hard limit "
            f"of its container or user is {hard:,} (`ulimit -Hn`); raise this limit, for example with LimitNOFILE in "
            "the systemd unit of the container runtime, or use at most "
            f"{max(0, hard - OWN_FILES) // per_worker:,} workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == unlimited else hard, hard))
