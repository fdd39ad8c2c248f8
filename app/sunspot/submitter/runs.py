"""Finds the run that a command names, the storage of all runs, or what a process of a run has printed."""

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
    """A run as a user names it, and where to look for it."""

    run: str
    storage: str | None = None
    "The path or URL of the runs. None stands for SUNSPOT_STORAGE_PATH or, only to read, the RayJob's bucket."
    context: str | None = None
    "A context of the kubeconfig; None: its current one."
    namespace: str | None = None
    "None: the context's own, or sunspot."


def find_run(name: str, storage_path: str | None = None) -> Run:
    """Find the run in `storage_path`, or else where the settings say. Raises `NotFoundError` if it does not exist."""
    run = named_run(name, storage_path)
    absence = describe_absence(run)
    if absence:
        raise NotFoundError(absence)
    return run


def named_run(name: str, storage_path: str | None = None) -> Run:
    """Do the same as `find_run`, whether or not the run exists."""
    path, checked = _settle(name, storage_path)
    return Run(open_storage(path), checked)


def find_storage(storage_path: str | None = None) -> Storage:
    """Open the storage of all runs: `storage_path`, or else what the settings say."""
    return open_storage(_settle(None, storage_path)[0])


def find_stream(run: Run, rank: int | None, previous: bool) -> str:
    """Find the newest stream of the driver or one rank; with `previous`, the one before. Raises `NotFoundError`."""
    streams = streams_of(run, rank)
    if len(streams) >= 1 + previous:
        return streams[-2 if previous else -1]
    who = "the driver" if rank is None else f"rank {rank}"
    what = f"one start of {who} only, so --previous has nothing" if streams else f"no output of {who}"
    every = list(list_streams(run))
    there = f"; there are {', '.join(every[-10:])}" if every else ", because none of its processes has written any yet"
    raise NotFoundError(f"{run.storage.locate(run.key('logs'))}: {what}{there}")


def streams_of(run: Run, rank: int | None) -> list[str]:
    """List the streams of the driver, or of one rank, the newest last."""
    wanted = "driver-.*" if rank is None else f"attempt-.*-rank-0*{rank}"
    return [stream for stream in list_streams(run) if re.fullmatch(wanted, stream)]


def list_unfinished(run: Run) -> Sequence[UnfinishedWrite]:
    """List the run's unfinished uploads; none, with a warning, where storage does not list them."""
    try:
        return run.storage.list_unfinished(run.name)
    except StorageError as error:  # some servers know no such listing, some users may not see it
        warn(f"unfinished uploads are not looked for: {error}")
        return ()


def _settle(name: str | None, storage_path: str | None) -> tuple[str, str]:
    """Settle storage path and run name by the rules of the settings; raises `SettingsError`."""
    from sunspot.search_space import load_common  # pydantic: slow to import, and `sunspot VERB --help` does without
    from sunspot.settings import PREFIX, with_place

    given = {PREFIX + setting: value for setting, value in with_place({}, name, storage_path).items()}
    settings, _, _ = load_common({**os.environ, **given})  # the environment may be that of a search
    return settings.storage_path, settings.run_name
