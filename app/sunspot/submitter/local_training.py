"""Prepares training on this machine. Training runs in a subprocess, so this process needs neither torch nor Ray."""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from sunspot.errors import SettingsError
from sunspot.extras import how_to_install
from sunspot.settings import PREFIX, Settings, load_settings
from sunspot.settings.file import FILE, as_variables, read_settings_file
from sunspot.submitter.printing import warn
from sunspot.task_file import SUFFIX, extend_path, find_module

COMMAND = (sys.executable, "-m", "sunspot.train")

TASK = f"{PREFIX}TASK"


def find_missing_packages() -> list[str]:
    """Return the names of packages that training needs but that are not installed."""
    return [package for package in ("ray", "torch") if not find_spec(package)]


def refuse_without_training(what: str = "training") -> None:
    """Raise `SettingsError` if the packages for training are not installed. `what` is the message's subject."""
    missing = find_missing_packages()
    if missing:
        raise SettingsError(f"{what} on this machine needs {' and '.join(missing)}; {how_to_install('train')}")


def training_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a training process.

    Settings in `given` override this process's environment, and the environment overrides the settings file (FILE). If
    the task is a file's path, the file's module replaces the path, and the module's folder is added to PYTHONPATH.
    Raises `SettingsError` if a setting or the settings file is invalid.
    """
    os.getcwd()  # raises FileNotFoundError if it was deleted; torch would abort the process
    kept = as_variables(read_settings_file(FILE))
    if kept:
        warn(f"{FILE} sets {', '.join(name.removeprefix(PREFIX) for name in kept)}")
    environment = {**kept, **os.environ, **as_variables(given)}
    task = environment.get(TASK, "")
    if task.endswith(SUFFIX):
        module, folder = find_module(task)
        environment |= {TASK: module, **extend_path(environment, folder)}
    return environment


def settings_in(environment: Mapping[str, str]) -> Settings:
    """Load the settings of a process with this environment. Raises `SettingsError` if a setting is invalid."""
    return load_settings({name: value for name, value in environment.items() if name.startswith(PREFIX)})
