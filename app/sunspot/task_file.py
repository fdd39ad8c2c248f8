"""Turns the path of a task's file, such as tasks/my_task.py, into a module name."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from sunspot.errors import SettingsError

SUFFIX = ".py"
"""Suffix that distinguishes a path from a module name."""

PATH = "PYTHONPATH"


def find_module(path: str) -> tuple[str, str]:
    """Return a file's module name, and the folder to import it from. The folder is empty for the working directory.

    The name includes the file's package, if any. Raises `SettingsError` if the file does not exist, or if an import
    would not find it.
    """
    file = Path(os.path.abspath(os.path.expanduser(path)))
    if not file.is_file():
        raise SettingsError(f"{path}: no such file; pass the path of the task's file, or its module as TASK=MODULE")
    names = [] if file.stem == "__init__" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    wrong = [name for name in names if not name.isidentifier()]
    if wrong:
        raise SettingsError(f"{path}: {wrong[0]!r} is not a valid module name; use only letters, digits and '_'")
    if folder.samefile("."):
        return ".".join(names), ""
    first = Path(names[0])
    if first.with_suffix(SUFFIX).exists() or (first / "__init__.py").exists():
        raise SettingsError(
            f"{path}: {first} in the working directory would be imported instead; rename one of them, or run the "
            f"command in {folder}"
        )
    return ".".join(names), str(folder)


def extend_path(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the changes to `environment` that put `folder` first in its PYTHONPATH.

    The dictionary is empty if `folder` is empty.
    """
    before = environment.get(PATH)
    return {PATH: f"{folder}{os.pathsep}{before}" if before else folder} if folder else {}


def import_as_module_run(environment: Mapping[str, str]) -> None:
    """Add the working directory and the environment's PYTHONPATH to `sys.path`, as `python -m` does."""
    places = ["", *filter(None, environment.get(PATH, "").split(os.pathsep))]
    sys.path[:0] = [place for place in places if place not in sys.path]
