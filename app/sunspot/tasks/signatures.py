"""Checks the names of a task's functions, and that they accept the arguments with which they are called."""

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from sunspot.errors import SettingsError
from sunspot.settings import PREFIX
from sunspot.tasks.task import FUNCTIONS, Task

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

MISSPELLED_LIKENESS = 0.85
"""Minimum similarity (`difflib`) between a misspelled name and the name that was meant. `build_tokenizer` must not be
mistaken for a misspelled `build_optimizer`."""

OTHER_BUILDERS = re.compile("^(make|create|get|configure)_")
"""Pattern for the verbs that other libraries use instead of `build`."""


def find_misspelled(task: Task, read: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each function of a task's module that looks like a misspelled optional function.

    Helper functions can have any name, because only public functions that the module defines but never mentions again
    are considered. `read` contains the names of functions that Sunspot looks for in addition to FUNCTIONS.
    """
    module = task.module
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # the module has no file
        return
    optional = [name for name in FUNCTIONS if not hasattr(module, name) and name not in task.uncalled]
    for name, function in vars(module).items():
        own = inspect.isfunction(function) and function.__module__ == module.__name__
        if (
            not own
            or name.startswith("_")
            or name in (*FUNCTIONS, *read)
            or len(re.findall(rf"\b{name}\b", source)) > 1
        ):
            continue
        meant = difflib.get_close_matches(OTHER_BUILDERS.sub("build_", name), optional, 1, MISSPELLED_LIKENESS)
        if meant:
            yield (
                f"{PREFIX}TASK={task.settings.task}: nothing calls {name}{place_of_function(function)}; "
                f"did you mean {meant[0]}?"
            )


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
            place = place_of_function(function)
            raise SettingsError(
                f"{PREFIX}TASK={task}: {name}{signature}{place and f'{place},'} is called as "
                f"{name}({', '.join(arguments)}); define it with these arguments"
            ) from error


def place_of_function(function: Any) -> str:
    """Return `, defined at FILE:LINE` for a function, or an empty string for other callables."""
    own = inspect.unwrap(function)
    return f", defined at {own.__code__.co_filename}:{own.__code__.co_firstlineno}" if inspect.isfunction(own) else ""
