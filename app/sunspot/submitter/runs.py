"""Finds runs, their storage and the output of their processes, for the subcommands."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sunspot.errors import NotFoundError, StorageError
from sunspot.run import Run
from sunspot.run.logs import list_streams
from sunspot.run.overview import describe_absence
from sunspot.storage import Storage, open_storage
from sunspot.storage.base import UnfinishedWrite
from sunspot.submitter.printing import warn


@dataclass(frozen=True)
class Target:
    """A run's name, and the storage and cluster in which to look for it."""

    run: str
    storage: str | None = None
    "Path or URL of the runs. None means SUNSPOT_STORAGE_PATH or, if the subcommand only reads, the RayJob's bucket."
    context: str | None = None
    "Context of the kubeconfig, or None for the current one."
    namespace: str | None = None
    "Namespace, or None for the context's own namespace or sunspot."


def find_run(name: str, storage_path: str | None = None) -> Run:
    """Find a run in `storage_path` or, by default, in SUNSPOT_STORAGE_PATH.

    Raises `NotFoundError` if the run does not exist.
    """
    run = named_run(name, storage_path)
    absence = describe_absence(run)
    if absence:
        raise NotFoundError(absence)
    return run


def named_run(name: str, storage_path: str | None = None) -> Run:
    """Return the same run as `find_run`, without checking that it exists."""
    path, checked = _settle(name, storage_path)
    return Run(open_storage(path), checked)


def find_storage(storage_path: str | None = None) -> Storage:
    """Open the storage at `storage_path` or, by default, at SUNSPOT_STORAGE_PATH."""
    return open_storage(_settle(None, storage_path)[0])


def find_stream(run: Run, rank: int | None, previous: bool) -> str:
    """Return the name of the newest output stream of the driver or one rank.

    If `previous` is True, returns the second newest. Raises `NotFoundError` if there is no such stream.
    """
    streams = streams_of(run, rank)
    if len(streams) >= 1 + previous:
        return streams[-2 if previous else -1]
    who = "the driver" if rank is None else f"rank {rank}"
    what = f"{who} started only once, so --previous has no output" if streams else f"no output of {who}"
    every = list(list_streams(run))
    there = f"; there are {', '.join(every[-10:])}" if every else ", because no process has written any output yet"
    raise NotFoundError(f"{run.storage.locate(run.key('logs'))}: {what}{there}")


def streams_of(run: Run, rank: int | None) -> list[str]:
    """Return the names of the output streams of the driver or one rank, from oldest to newest."""
    wanted = "driver-.*" if rank is None else f"attempt-.*-rank-0*{rank}"
    return [stream for stream in list_streams(run) if re.fullmatch(wanted, stream)]


def list_unfinished(run: Run) -> Sequence[UnfinishedWrite]:
    """Return the run's unfinished uploads. If they cannot be listed, prints a warning and returns an empty sequence."""
    try:
        return run.storage.list_unfinished(run.name)
    except StorageError as error:  # some servers do not support this listing, and some users lack the permission
        warn(f"unfinished uploads cannot be listed: {error}")
        return ()


def _settle(name: str | None, storage_path: str | None) -> tuple[str, str]:
    """Return the storage path and the run name from the arguments or settings.

    Raises `SettingsError` if either is invalid.
    """
    from sunspot.settings import PREFIX, with_place
    from sunspot.settings.search_space import (
        load_common,
    )  # pydantic is slow to import, and `sunspot VERB --help` does not need it

    given = {PREFIX + setting: value for setting, value in with_place({}, name, storage_path).items()}
    settings, _, _ = load_common({**os.environ, **given})  # the environment can describe a search
    return settings.storage_path, settings.run_name
