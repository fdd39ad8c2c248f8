"""Training on this machine, by a process of its own: the command itself knows neither torch nor Ray."""

import os
import sys
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from sunspot.errors import SettingsError
from sunspot.extras import how_to_install
from sunspot.settings import PREFIX, Settings, load_settings, setting_text
from sunspot.submitter.printing import warn

FILE = Path("sunspot.toml")
"""Settings of whoever trains in this folder, by the keys that a profile has below `settings`."""

COMMAND = (sys.executable, "-m", "sunspot.train")


def refuse_without_training() -> None:
    """Raise `SettingsError` where only the command is installed."""
    if missing := [package for package in ("ray", "torch") if not find_spec(package)]:
        raise SettingsError(f"training here needs {' and '.join(missing)}; {how_to_install('train')}")


def training_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a training: FILE below this process's below what is `given`. Raises `SettingsError`."""
    kept = as_variables(read_settings_file(FILE))
    if kept:
        warn(f"{FILE} sets {', '.join(name.removeprefix(PREFIX) for name in kept)}")
    return {**kept, **os.environ, **as_variables(given)}


def settings_in(environment: Mapping[str, str]) -> Settings:
    """Load the settings that a process would load in this environment; raises `SettingsError`."""
    return load_settings({name: value for name, value in environment.items() if name.startswith(PREFIX)})


def read_settings_file(file: Path) -> dict[str, str]:
    """Read the settings in a file, by the names that it gives them; none where there is no file."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: cannot be read: {error}") from error
    try:
        return {name: setting_text(name, value) for name, value in tomllib.loads(text).items()}
    except (tomllib.TOMLDecodeError, SettingsError) as error:
        raise SettingsError(f'{file}: {error}; it has lines such as EPOCHS = 3 and TASK = "my_task"') from error


def as_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings by the names of their variables."""
    return {PREFIX + name.upper().removeprefix(PREFIX): value for name, value in settings.items()}
