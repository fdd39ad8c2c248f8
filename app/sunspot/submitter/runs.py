"""Finds the run that a command names, the storage of all runs, and the output of a run's processes."""

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
    """Name of a run, with the storage and the cluster in which to look for it."""

    run: str
    storage: str | None = None
    "Path or URL of the runs. None means SUNSPOT_STORAGE_PATH or, for verbs that only read, the RayJob's bucket."
    context: str | None = None
    "Context of the kubeconfig, or None for the current one."
    namespace: str | None = None
    "Namespace, or None for that of the context, or else sunspot."


def find_run(name: str, storage_path: str | None = None) -> Run:
    """Find a run in `storage_path`, by default that of the settings. Raises `NotFoundError` if it does not exist."""
    run = named_run(name, storage_path)
    absence = describe_absence(run)
    if absence:
        raise NotFoundError(absence)
    return run


def named_run(name: str, storage_path: str | None = None) -> Run:
    """Return the run, like `find_run`, even if it does not exist."""
    path, checked = _settle(name, storage_path)
    return Run(open_storage(path), checked)


def find_storage(storage_path: str | None = None) -> Storage:
    """Open the storage of all runs: `storage_path`, by default that of the settings."""
    return open_storage(_settle(None, storage_path)[0])


def find_stream(run: Run, rank: int | None, previous: bool) -> str:
    """Return the newest stream of the driver or of one rank, or with `previous` the one before.

    Raises `NotFoundError` if there is no such stream.
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
    """Return the streams of the driver or of one rank, the newest last."""
    wanted = "driver-.*" if rank is None else f"attempt-.*-rank-0*{rank}"
    return [stream for stream in list_streams(run) if re.fullmatch(wanted, stream)]


def list_unfinished(run: Run) -> Sequence[UnfinishedWrite]:
    """Return the run's unfinished uploads. If storage cannot list them, print a warning and return none."""
    try:
        return run.storage.list_unfinished(run.name)
    except StorageError as error:  # some servers do not offer this listing, and some users may not see it
        warn(f"unfinished uploads cannot be listed: {error}")
        return ()


def _settle(name: str | None, storage_path: str | None) -> tuple[str, str]:
    """Return the storage path and the run name, by the rules of the settings. Raises `SettingsError`."""
    from sunspot.search_space import (
        load_common,
    )  # pydantic is slow to import, and `sunspot VERB --help` does not need it
    from sunspot.settings import PREFIX, with_place

    given = {PREFIX + setting: value for setting, value in with_place({}, name, storage_path).items()}
    settings, _, _ = load_common({**os.environ, **given})  # the environment may describe a search
    return settings.storage_path, settings.run_name
