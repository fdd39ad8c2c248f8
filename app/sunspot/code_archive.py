"""Own code without an image: an archive that each node unpacks once, and each process of the run has first on its path.

`sunspot submit --code` makes the archive (sunspot/submitter/code_files.py). SUNSPOT_CODE names it by its URL and its
SHA-256, so a run trains with the code that it names, or not at all. It is a tar without compression, which would give
other bytes with another version of zlib, and with nothing in it but files and folders.
"""

import fcntl
import hashlib
import io
import logging
import os
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from sunspot.errors import DamageError, NotFoundError, SettingsError, StorageError, SunspotError
from sunspot.private_folder import private_folder
from sunspot.storage import open_storage
from sunspot.storage.limits import retry_storage

log = logging.getLogger(__name__)

CODE = "SUNSPOT_CODE"  # without the settings: pydantic is slow to import, and verbs that read storage do without

FOLDER = "code"
"""Where a run keeps archives of its code."""

MAX_BYTES = 100_000_000
"""Size of the largest archive: code is small, and what is large belongs into the image or a dataset."""

MAX_FILES = 10_000

MAX_DEPTH = 100
"""Greatest depth of folders within each other, because Python makes and removes them by recursion."""

STORAGE_S = 600.0
"""The longest that storage may refuse an archive."""

SETUP_HOOK = f"{__name__}.set_up_process"
"""What Ray runs first in each of its processes."""


def code_in(text: str) -> str:
    """Return the hash in a value of CODE; empty if it has none, as a folder."""
    found = re.fullmatch(r".+@sha256:([0-9a-f]{64})", text)
    return found[1] if found else ""


def enter_code(reference: str) -> None:
    """Do what `find_code` does, and go to the code's folder: there relative paths of a task are found."""
    if folder := find_code(reference):
        os.chdir(folder)


def set_up_process() -> None:
    """Find the code that the environment names. Ray would begin a process that fails here again and again: it is the
    worker that raises (sunspot/train/joining.py)."""
    try:
        find_code(os.environ.get(CODE, ""))
    except SunspotError as error:
        log.warning(str(error))


def find_code(reference: str) -> str:
    """Put code first on this process's path; returns its folder, or nothing for no code.

    Raises `StorageError`, `SettingsError` when there is no such archive, and `DamageError` for one that has another
    hash, or that leads out of its folder.
    """
    if not reference:
        return ""
    folder = str(unpack_once(reference))
    sys.path[:] = [folder, *(place for place in sys.path if place != folder)]
    return folder


def unpack_once(reference: str) -> Path:
    """Fetch and unpack the archive, unless a process of this node has; returns the folder, which all of them share."""
    folder = private_folder() / FOLDER / code_in(reference)
    folder.parent.mkdir(exist_ok=True)
    with open(f"{folder}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever holds it fetches within a limit, and lets go when killed
        if not folder.is_dir():
            unpack(retry_storage(STORAGE_S, "fetching the code", fetch, reference), folder, reference)
    return folder


def fetch(reference: str) -> bytes:
    """Read an archive, and compare it with its hash."""
    place, _, name = reference.rpartition("@")[0].rpartition("/")
    try:
        with open_storage(place, follow_links=True).open(name) as stream:
            content = stream.read(2 * MAX_BYTES)  # with the heads of its files
    except NotFoundError as error:
        raise SettingsError(
            f"{CODE}={reference}: there is no such archive, or no more; `sunspot submit --code FOLDER` uploads one"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != code_in(reference):
        raise DamageError(
            f"{CODE}={reference}: what lies there has the SHA-256 {found}, so it is other code, and is not run; "
            "`sunspot submit --code FOLDER` uploads it again"
        )
    return content


def unpack(content: bytes, folder: Path, reference: str) -> None:
    """Unpack an archive as `folder`, whole or not at all; raises `DamageError` for one that could do harm."""
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            members = archive.getmembers()
            if len(members) > MAX_FILES or sum(member.size for member in members) > MAX_BYTES:
                raise tarfile.TarError(f"more than {MAX_FILES} files, or {MAX_BYTES} bytes")
            for member in members:
                name = PurePosixPath(member.name)
                safe = not name.is_absolute() and ".." not in name.parts and member.name.isprintable()
                if len(name.parts) > MAX_DEPTH:
                    raise tarfile.TarError(f"{member.name[:40]}... lies more than {MAX_DEPTH} folders deep")
                if not safe or not (member.isreg() or member.isdir()):
                    raise tarfile.TarError(f"{member.name!r} is a link or a device, or leads out of the folder")
                file = unfinished / name
                file.parent.mkdir(parents=True, exist_ok=True)
                if stream := archive.extractfile(member):
                    file.write_bytes(stream.read())
                    file.chmod(0o755 if member.mode & 0o100 else 0o644)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except tarfile.TarError as error:
        raise DamageError(f"{CODE}={reference}: no archive of code (tar, not compressed): {error}") from error
    except OSError as error:
        raise StorageError(f"{folder}: the code cannot be unpacked there: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
