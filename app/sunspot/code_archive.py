"""Brings your own code to a cluster without building an image.

`sunspot submit --code` makes an archive of the code (sunspot/submitter/code_files.py). Each node unpacks the archive,
and each process puts the unpacked folder first on `sys.path`. SUNSPOT_CODE contains the archive's URL and SHA-256, so a
run trains with exactly this code, or fails. The archive contains only files and folders. It is a tar file without
compression, because the compressed bytes, and thus the hash, would depend on the version of zlib.
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
from sunspot.machine.private_folder import private_folder
from sunspot.storage import open_storage
from sunspot.storage.limits import retry_storage

log = logging.getLogger(__name__)

CODE = "SUNSPOT_CODE"  # not imported from settings/, because subcommands that only read storage need no pydantic

FOLDER = "code"
"""Name of a run's folder for its code archives."""

MAX_BYTES = 100_000_000
"""Maximum size of an archive. Large files belong in the image or in a dataset."""

MAX_FILES = 10_000

MAX_DEPTH = 100
"""Maximum depth of nested folders. Python creates and removes these recursively."""

STORAGE_S = 600.0
"""Seconds for which storage may fail to return an archive."""

SETUP_HOOK = f"{__name__}.set_up_process"
"""Name of the function that Ray runs first in each of its processes."""


def code_in(text: str) -> str:
    """Return the hash in CODE, or an empty string if CODE contains no hash (for example, because it is a folder)."""
    found = re.fullmatch(r".+@sha256:([0-9a-f]{64})", text)
    return found[1] if found else ""


def enter_code(reference: str) -> None:
    """Put the code's folder first on `sys.path`, and change to the folder, so that relative paths work."""
    folder = find_code(reference)
    if folder:
        os.chdir(folder)


def set_up_process() -> None:
    """Put the code's folder first on `sys.path` if SUNSPOT_CODE is set. Log a warning if that fails.

    Ray would keep restarting a process that fails here, so the worker raises the error later (train/joining.py).
    """
    try:
        find_code(os.environ.get(CODE, ""))
    except SunspotError as error:
        log.warning(str(error))


def find_code(reference: str) -> str:
    """Put the code's folder first on `sys.path`, and return the folder.

    Returns an empty string if `reference` is empty.

    Raises `SettingsError` if the archive does not exist, `StorageError` if it cannot be fetched or unpacked, and
    `DamageError` if its hash does not match `reference`, or if a file in it would lie outside the folder.
    """
    if not reference:
        return ""
    folder = str(unpack_once(reference))
    sys.path[:] = [folder, *(place for place in sys.path if place != folder)]
    return folder


def unpack_once(reference: str) -> Path:
    """Return the folder of the unpacked archive. The first process on a node fetches and unpacks it for all others."""
    folder = private_folder() / FOLDER / code_in(reference)
    folder.parent.mkdir(exist_ok=True)
    with open(f"{folder}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the holder has a time limit, and a killed holder releases the lock
        if not folder.is_dir():
            unpack(retry_storage(STORAGE_S, "fetching the code", fetch, reference), folder, reference)
    return folder


def fetch(reference: str) -> bytes:
    """Return the content of an archive. Raises `DamageError` if its hash does not match `reference`."""
    place, _, name = reference.rpartition("@")[0].rpartition("/")
    try:
        with open_storage(place, follow_links=True).open(name) as stream:
            content = stream.read(2 * MAX_BYTES)  # MAX_BYTES does not include the file headers
    except NotFoundError as error:
        raise SettingsError(
            f"{CODE}={reference}: the archive does not exist or was deleted; `sunspot submit --code FOLDER` uploads it"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != code_in(reference):
        raise DamageError(
            f"{CODE}={reference}: the archive has a different SHA-256, {found}, so its code is not run; "
            "`sunspot submit --code FOLDER` uploads your code again"
        )
    return content


def unpack(content: bytes, folder: Path, reference: str) -> None:
    """Unpack an archive into `folder`, completely or not at all. Raises `DamageError` if it is unsafe to unpack."""
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            members = archive.getmembers()
            if len(members) > MAX_FILES or sum(member.size for member in members) > MAX_BYTES:
                raise tarfile.TarError(f"it contains more than {MAX_FILES} files or {MAX_BYTES} bytes")
            for member in members:
                name = PurePosixPath(member.name)
                safe = not name.is_absolute() and ".." not in name.parts and member.name.isprintable()
                if len(name.parts) > MAX_DEPTH:
                    raise tarfile.TarError(f"{member.name[:40]}... is more than {MAX_DEPTH} folders deep")
                if not safe or not (member.isreg() or member.isdir()):
                    raise tarfile.TarError(f"{member.name!r} is a link or a device, or lies outside the folder")
                file = unfinished / name
                file.parent.mkdir(parents=True, exist_ok=True)
                stream = archive.extractfile(member)
                if stream:
                    file.write_bytes(stream.read())
                    file.chmod(0o755 if member.mode & 0o100 else 0o644)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except tarfile.TarError as error:
        raise DamageError(f"{CODE}={reference} is not an uncompressed tar archive of code: {error}") from error
    except OSError as error:
        raise StorageError(f"the code cannot be unpacked into {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
