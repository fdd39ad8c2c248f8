"""Checks that a task's functions accept the arguments with which they are called."""

import inspect
from types import ModuleType
from typing import Any

from sunspot.errors import SettingsError
from sunspot.settings import PREFIX

CALLED_WITH = {
    "build_model": ("settings", "source"),
    "load_pretrained": ("model",),
    "loss": ("model", "batch"),
    "build_dataset": ("settings",),
    "find_sources": ("settings",),
    "compute_metrics": ("scores", "rows"),
    "build_optimizer": ("model", "settings"),
    "build_scheduler": ("optimizer", "settings", "total_steps"),
    "schedule": ("step", "total_steps"),
    "train": ("run",),
}
"""The positional arguments of each function."""

CALLED_WITH_NAMED = {"build_scheduler": ("steps_per_epoch",)}
"""Arguments that are passed by name to functions that accept them."""


def refuse_other_arguments(task: str, module: ModuleType) -> None:
    """Raise `SettingsError` if a function in a task's module does not accept the arguments in CALLED_WITH."""
    for name, arguments in CALLED_WITH.items():
        function = getattr(module, name, None)
        if not callable(function):
            continue
        try:
            signature = inspect.signature(function)
        except ValueError:  # functions written in C have no signature
            continue
        try:
            named = [each for each in CALLED_WITH_NAMED.get(name, ()) if each in signature.parameters]
            signature.bind(*arguments, **dict.fromkeys(named))
        except TypeError as error:
            raise SettingsError(
                f"{PREFIX}TASK={task}: {name}{signature}{place_of_function(function)}, is called as "
                f"{name}({', '.join(arguments)}); define it with these arguments"
            ) from error


def place_of_function(function: Any) -> str:
    """Return `, defined at FILE:LINE` for a function, or an empty string for other callables."""
    own = inspect.unwrap(function)
    return f", defined at {own.__code__.co_filename}:{own.__code__.co_firstlineno}" if inspect.isfunction(own) else ""
