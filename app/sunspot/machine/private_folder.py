"""Creates a private folder for each user of a machine, inside a folder that all users can write to."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from sunspot.errors import SettingsError


def private_folder(parent: Path | None = None) -> Path:
    """Return this user's private folder below `parent`, which defaults to the folder for temporary files.

    The folder is created if necessary. Raises `SettingsError` if it cannot be created or belongs to another user.
    """
    try:
        return make_private_folder(parent or Path(tempfile.gettempdir()))
    except OSError as error:
        raise SettingsError(f"{error}; to use another folder, set TMPDIR") from error


def make_private_folder(parent: Path) -> Path:
    """Create this user's folder below `parent` unless it exists, and make it inaccessible to other users.

    Raises `PermissionError` if another user created a folder or a link with that name, and `OSError` if `parent` is not
    writable.
    """
    folder = private_path(parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_own_folder(folder):
        raise PermissionError(f"{folder} belongs to another user or is a link; remove it")
    folder.chmod(0o700)
    return folder


def private_path(parent: Path) -> Path:
    """Return the path of this user's private folder below `parent`. The folder might not exist yet."""
    return parent / f"sunspot-{os.getuid()}"


def is_own_folder(path: Path) -> bool:
    """Return True if `path` is a folder that belongs to this user, and not a link."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False
