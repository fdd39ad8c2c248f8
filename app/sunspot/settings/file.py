"""Reads `sunspot.toml`, which contains a folder's settings under the same keys as `settings` in a profile."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from sunspot.errors import SettingsError
from sunspot.settings import PREFIX, setting_text, variable_of
from sunspot.task_file import SUFFIX, extend_path, find_module, import_as_module_run

FILE = Path("sunspot.toml")


def read_settings_file(file: Path) -> dict[str, str]:
    """Return a file's settings, keyed by the names in the file, or an empty dictionary if the file does not exist.

    Raises `SettingsError` if the file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # Windows editors start a file with a byte order mark
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is not in UTF-8, which TOML requires; save it as UTF-8 ({error})") from error
    try:
        return {name: setting_text(name, value) for name, value in tomllib.loads(text).items()}
    except (tomllib.TOMLDecodeError, SettingsError) as error:
        raise SettingsError(f'{file}: {error}; write lines such as EPOCHS = 3 and TASK = "my_task"') from error


def as_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings keyed by environment variable."""
    return {variable_of(name): value for name, value in settings.items()}


def find_task(given: str = "") -> str:
    """Return the module of the task `given`, or of the default task in SUNSPOT_TASK or sunspot.toml.

    If the task is a file's path, the file's folder is added to the import path of this process and its children.
    Returns an empty string if there is no task. Raises `SettingsError` if the file cannot be imported.
    """
    task = given or os.environ.get(f"{PREFIX}TASK") or as_variables(read_settings_file(FILE)).get(f"{PREFIX}TASK", "")
    if task.endswith(SUFFIX):
        task, folder = find_module(task)
        os.environ.update(extend_path(os.environ, folder))
        import_as_module_run(os.environ)
    return task
