"""Explains why a Ray session cannot be started or reached, and how to fix it."""

import errno
import logging
import os
import re
import socket
import tempfile
import time
from pathlib import Path

from sunspot.errors import SunspotError, error_chain, shorten

log = logging.getLogger(__name__)

REACH_WITHIN_S = 60.0
"""Seconds to wait until something listens at RAY_ADDRESS.

Ray 2.60 itself tries 20 times, which takes 14 minutes, and gives the reason only in its logs.
"""

CONNECT_WITHIN_S = 5.0

TRY_EVERY_S = 1.0

SHARED_MEMORY = Path("/dev/shm")
"""Folder of Ray's object store on Linux."""

TIMED_OUT = re.compile(r"timed out|deadline.exceeded", re.IGNORECASE)
"""Matches Ray's errors if its own processes start too slowly or not at all."""

FULL = (errno.ENOSPC, errno.EDQUOT)

NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)

NO_FILES_LEFT = (errno.EMFILE, errno.ENFILE)


def explain_start(error: Exception, folder: Path) -> str:
    """Return a line that explains why no session could be started in `folder`, and how to fix it.

    If Ray's own processes did not start in time, Ray's error gives no reason. This function then checks whether these
    processes can write to the folders that they need.
    """
    failed = f"Ray cannot be started on this machine: {shorten(error).rstrip('.')}"
    if "AF_UNIX" in str(error):
        return f"{failed}; set RAY_TMPDIR to a folder with a shorter path, or unset it"
    fixes = [_find_fix(cause) for cause in error_chain(error) if isinstance(cause, OSError)]
    if any(fixes):
        return f"{failed}; {next(filter(None, fixes))}"
    if TIMED_OUT.search(str(error)):
        for needed in (SHARED_MEMORY, folder):
            trouble = _try_to_write(needed) if needed.is_dir() else ""
            if trouble:
                return f"Ray cannot be started on this machine: {needed} {trouble}"
        return f"{failed}; try again when the machine is less busy; Ray's logs are in {folder}/session_latest/logs"
    return failed


def refuse_unreachable(address: str) -> None:
    """Wait until something listens at `address`, which has the format of RAY_ADDRESS.

    Raises `SunspotError` if nothing listens within REACH_WITHIN_S. Returns at once if the address has no port, because
    Ray handles such addresses itself.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():
        return
    deadline = time.monotonic() + REACH_WITHIN_S
    waiting = False
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_WITHIN_S).close()
            return
        except (OSError, OverflowError, UnicodeError) as error:  # a port above 65535, or an invalid name
            if time.monotonic() > deadline:
                seen = f"RAY_ADDRESS={address}: {shorten(error)} (for {REACH_WITHIN_S:.0f} s)"
                fix = "correct the address, start Ray there, or unset RAY_ADDRESS to start Ray on this machine"
                raise SunspotError(f"Ray cannot be reached at {seen}; {fix}") from error
            if not waiting:
                log.info(f"waiting up to {REACH_WITHIN_S:.0f} s for Ray at RAY_ADDRESS={address}: {shorten(error)}")
                waiting = True
            time.sleep(TRY_EVERY_S)


def _find_fix(error: OSError) -> str:
    """Return how to fix an operating system error, or an empty string if no fix is known."""
    if error.errno in NO_FILES_LEFT:
        return "raise the limit of open files, for example with `ulimit -n 65536`"
    folders = {"TMPDIR": tempfile.gettempdir(), "HOME": os.path.expanduser("~")}
    file = Path(os.fsdecode(error.filename or ""))
    variable = next((name for name, folder in folders.items() if file.is_relative_to(folder)), "")
    elsewhere = f", or set {variable} to another folder" if variable else ""
    if error.errno in FULL:
        return f"free some space{elsewhere}"
    return f"let this user write there{elsewhere}" if error.errno in NOT_WRITABLE else ""


def _try_to_write(folder: Path) -> str:
    """Try to write one page to a file in a folder. Return the problem and its fix, or an empty string if it works."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        fix = "free some space there" if error.errno in FULL else "let this user write there"
        if folder == SHARED_MEMORY:
            fix += " (in a container, use --shm-size or a memory-backed volume)"
        return f"cannot be written ({error.strerror}), but Ray needs it; {fix}"
    return ""
