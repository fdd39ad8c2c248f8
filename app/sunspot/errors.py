"""Defines the errors that users can see, their exit codes, and `run_and_exit`, which exits with an error's code."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from sunspot.formatting import visible
from sunspot.standard_streams import flush_output, prepare_streams

MAX_FOREIGN_TEXT = 400

MAX_MESSAGE = 10_000
"""Maximum number of characters in an error's message. The values that it quotes can have any length."""

FAILED_FOR_GOOD = "failed for good"
"""Beginning of a Ray job's message if its error is final (`SunspotError.final`)."""

HIDDEN = "***"

MIN_SECRET = 8
"""Minimum length of a secret to hide. Shorter texts occur in ordinary words."""

SIGNED = r"""(?ix)
        (//)[^\s/]+(?=@)                                                  # user:password@ in a URL
      | (\b(?:sig|signature|credential|security-token)\s*[=:]\s*)[^\s&,'"]+   # a signed request or URL
      | (\bauthorization['"]?\s*[=:]\s*b?['"]?)[^\n'"]+
      | (\bbearer\s+)[^\s'"]+"""
"""Pattern of texts that are secret regardless of their value. The matching group before the secret is kept. Every
command imports this module, so the pattern is compiled on first use. Imports that `--help` does not need are in
functions."""


class SunspotError(Exception):
    """An error whose message tells users what happened, the value seen, and the fix.

    Secrets in the message are hidden.
    """

    exit_code = 1

    final = False
    "True if a retry cannot help, because the same job would fail on any cluster."

    def __init__(self, message: str = "") -> None:
        text = visible(without_secrets(message))
        super().__init__(text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}... ({len(text)} characters)")


class DataError(SunspotError):
    """A dataset cannot be used. The message names the file and, if possible, the row."""

    final = True


class SettingsError(SunspotError):
    """Settings or arguments are invalid. The message lists all problems."""

    exit_code = 2
    final = True


class NotFoundError(SunspotError):
    """The requested run, checkpoint or record does not exist."""

    exit_code = 3
    final = True


class StorageError(SunspotError):
    """Storage cannot be reached, or rejects a request. The message names the object."""

    exit_code = 4


class RefusedStorageError(StorageError):
    """Storage rejects a request because of credentials, permissions, the bucket's name or an unsupported feature."""

    final = True


class OutsideStorageError(StorageError):
    """A link in a directory points outside the storage path, so it is not followed."""


class ClusterError(SunspotError):
    """The Kubernetes API cannot be reached, or rejects a request. The message names the server."""

    exit_code = 4


class TrackingError(SunspotError):
    """The tracking service cannot be reached, or rejects a request. This error never ends a run."""

    exit_code = 4


class GaveUpError(SunspotError):
    """Waiting for an operation took longer than the time limit. The operation itself continues."""

    exit_code = 5


class ConflictError(SunspotError):
    """Stored data conflicts with this run, for example because the run was started with other settings."""

    exit_code = 6
    final = True


class SupersededError(ConflictError):
    """Another process took over the run, so this process must neither commit nor delete checkpoints."""


class DivergedError(SunspotError):
    """The loss or the weights have been NaN or infinite for too long, so further training is useless."""

    final = True


class DamageError(SunspotError):
    """Stored data is damaged or missing."""

    exit_code = 7


class TooLargeError(SunspotError):
    """Reading would take more bytes than the reader's budget allows. The data is not necessarily damaged."""

    exit_code = 7


class TerminatedError(KeyboardInterrupt):
    """SIGTERM or SIGHUP ended the program, as Ctrl-C does. The run can continue from its newest state."""

    def __init__(self, message: str = "", number: int = signal.SIGTERM) -> None:
        """Store the signal's `number`, which determines the exit code."""
        super().__init__(message)
        self.number = number


class EndAtOnceError(KeyboardInterrupt):
    """A second Ctrl-C ended the program. The process exits without waiting for its threads or for Ray."""


def find_in(error: BaseException) -> SunspotError | None:
    """Return the `SunspotError` that an error's text quotes. Ray keeps only the text of a task's error.

    If the text quotes no such error, return `error` itself if it is a `SunspotError`, otherwise None.
    """
    carried = re.findall(rf"^{re.escape(__name__)}\.(\w+): (.*)$", str(error), re.MULTILINE)
    if carried:
        name, message = carried[-1]
        return by_name(name)(message)
    return error if isinstance(error, SunspotError) else None


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the error that caused it, and so on."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def by_name(name: str) -> type[SunspotError]:
    """Return the error class that another process has named, or `SunspotError` if there is no such class."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, SunspotError) else SunspotError


def shorten(error: BaseException) -> str:
    """Return the text of another library's error on one line, shortened and without secrets."""
    text = " ".join(visible(without_secrets(str(error))).split()) or type(error).__name__
    return text if len(text) <= MAX_FOREIGN_TEXT else text[: MAX_FOREIGN_TEXT - 3] + "..."


def without_secrets(text: str) -> str:
    """Return the text with this process's credentials, passwords in URLs, and signatures replaced by HIDDEN."""
    for secret in _secrets():
        text = text.replace(secret, HIDDEN)
    return re.sub(SIGNED, lambda found: next(filter(None, found.groups())) + HIDDEN, text)


def _secrets() -> list[str]:
    """Return all credentials in the environment, longest first, in every form in which an error may quote them."""
    from urllib.parse import quote

    from sunspot.credentials import CREDENTIAL

    found = set()
    for name, value in os.environ.items():
        if CREDENTIAL.search(name.upper()):
            secret = value.strip()
        else:
            within = re.search(r"//(.+)@(?!sha256:)", value)  # a password in a URL can contain a '/'
            secret = within[1] if within else ""
        if len(secret) >= MIN_SECRET:
            found |= {secret, repr(secret)[1:-1], quote(secret, safe="")}
    return sorted(found, key=len, reverse=True)


def format_trace(error: BaseException) -> str:
    """Return an error's traceback, without secrets."""
    import traceback

    return without_secrets("".join(traceback.format_exception(error)))


def run_and_exit(program: Callable[[], int], when_interrupted: str = "interrupted") -> NoReturn:
    """Run `program` and exit with its code. Only this function turns an error into an exit code.

    For a `SunspotError`, only the message is printed. Any other error is a bug, so its traceback is printed.
    """
    prepare_streams()
    code = _run(program, when_interrupted)
    failure = flush_output()
    if failure and not isinstance(failure, BrokenPipeError):
        code = code or _refuse_output(failure)
    sys.exit(code)


def _run(program: Callable[[], int], when_interrupted: str) -> int:
    try:
        return program()
    except SunspotError as error:
        _complain(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt as error:
        _complain(f"{str(error) or when_interrupted}\n")
        if isinstance(error, EndAtOnceError):
            os._exit(128 + signal.SIGINT)
        return 128 + (error.number if isinstance(error, TerminatedError) else signal.SIGINT)
    except Exception as error:
        if isinstance(error, FileNotFoundError) and _was_folder_deleted():
            _complain("error: the working directory was deleted; change to another one\n")
            return SettingsError.exit_code
        # Python drops output that does not fit on a full disk, so only another write shows whether that was the error.
        failure = flush_output("\n") if isinstance(error, OSError) else None
        if isinstance(failure, BrokenPipeError):  # the code is not 0, because with `| head` the program did not finish
            return 128 + signal.SIGPIPE
        if failure:
            return _refuse_output(failure)
        _complain(visible(format_trace(error)))
        return 1


def _was_folder_deleted() -> bool:
    """Return True if this process's working directory no longer exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _refuse_output(failure: OSError) -> int:
    _complain(f"error: standard output cannot be written: {failure.strerror}; free some space, or redirect it\n")
    return StorageError.exit_code


def _complain(text: str) -> None:
    """Print text on stderr, unless writing to stderr fails."""
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)
