"""Every error that a user may see, and its exit code.

SunspotError               1  the run failed
|-- DataError              1  a dataset cannot be used: names the file and the row
|-- SettingsError          2  bad settings or usage: lists every problem at once
|-- NotFoundError          3  no such run or checkpoint, or nothing recorded
|-- StorageError           4  storage cannot be reached, or refuses: names the object
|-- ClusterError           4  the cluster cannot be reached, or refuses: names the server
|-- TrackingError          4  the tracking server cannot be reached, or refuses
|-- GaveUpError            5  gave up waiting; the run goes on
|-- ConflictError          6  the run was begun with other settings
|   `-- SupersededError    6  another process took the run over
`-- DamageError            7  a checkpoint fails verification, an audit finds faults
"""

import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

MAX_FOREIGN_TEXT = 400


class SunspotError(Exception):
    """A failure with a message for the user: what happened, the value seen, and the fix."""

    exit_code = 1


class DataError(SunspotError):
    """A dataset cannot be used; the message names the file and, where there is one, the row."""


class SettingsError(SunspotError):
    """Settings or arguments are wrong; the message lists every problem found."""

    exit_code = 2


class NotFoundError(SunspotError):
    """The run, the checkpoint or the record asked for does not exist."""

    exit_code = 3


class StorageError(SunspotError):
    """Storage cannot be reached or refuses; the message names the object."""

    exit_code = 4


class ClusterError(SunspotError):
    """The Kubernetes API cannot be reached or refuses; the message names the server."""

    exit_code = 4


class TrackingError(SunspotError):
    """The tracking service cannot be reached or refuses; it never ends a run."""

    exit_code = 4


class GaveUpError(SunspotError):
    """The time to wait is over; what was waited for goes on."""

    exit_code = 5


class ConflictError(SunspotError):
    """The run in storage was begun with other settings."""

    exit_code = 6


class SupersededError(ConflictError):
    """Another process took the run over: this one may neither commit nor delete."""


class DamageError(SunspotError):
    """Stored data does not match what was recorded of it."""

    exit_code = 7


def find_in(error: BaseException) -> SunspotError | None:
    """The `SunspotError` that `error` is or names in its text, all that Ray is sure to keep of an error in a task."""
    carried = re.findall(rf"^{re.escape(__name__)}\.(\w+): (.*)$", str(error), re.MULTILINE)
    if carried:
        name, message = carried[-1]
        return by_name(name)(message)
    return error if isinstance(error, SunspotError) else None


def by_name(name: str) -> type[SunspotError]:
    """The error class with that name, for an error of another process; `SunspotError` if there is none."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, SunspotError) else SunspotError


def shorten(error: BaseException) -> str:
    """The text of a foreign error on one line, capped."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_FOREIGN_TEXT else text[: MAX_FOREIGN_TEXT - 3] + "..."


def run_and_exit(program: Callable[[], int], when_interrupted: str = "interrupted") -> NoReturn:
    """Run `program` and exit with its code: the one place where an error becomes an exit code.

    A `SunspotError` prints its message alone; any other error is a defect and prints its traceback.
    """
    code = _run(program, when_interrupted)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _mute()
    sys.exit(code)


def _run(program: Callable[[], int], when_interrupted: str) -> int:
    try:
        return program()
    except SunspotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(when_interrupted, file=sys.stderr)
        return 130
    except BrokenPipeError:
        _mute()
        return 0
    except Exception:
        traceback.print_exc()
        return 1


def _mute() -> None:
    """Send stdout nowhere, as its reader is gone (`| head`) and Python would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
