"""A folder of this user's alone for what processes of one machine share: others may write in the folder above it."""

import os
import tempfile
from pathlib import Path
from stat import S_IMODE, S_ISDIR

from sunspot.errors import SettingsError


def private_folder() -> Path:
    """Return the folder, made if it is not there; raises `SettingsError` for one that another user made."""
    folder = Path(tempfile.gettempdir()) / f"sunspot-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SettingsError(
            f"{folder}: is a link or belongs to another user, who could change what is kept there; set TMPDIR to "
            "another folder"
        )
    if S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder
