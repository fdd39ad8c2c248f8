"""Loads a task: the module that defines what a run trains.

1. `load_task` imports the module set in SUNSPOT_TASK.
2. A module that uses PyTorch defines a model and a loss, and may define an optimizer, a schedule or a training loop.
   `PlainTask` (defaults.py) adds the defaults. signatures.py checks the arguments of the module's functions.
3. A module that uses another library defines a single function, such as `build_keras`. An adapter (sunspot/adapters)
   turns the library's model into a task.
4. Either way, the result is a `Task` (task.py), which has the task's functions and chooses the training loop. No other
   code depends on the library that a task uses.

The other modules in this package are tasks to use or to copy, and code that they share.
"""

import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sunspot.data.source import Batch
from sunspot.errors import SettingsError, shorten
from sunspot.extras import how_to_install
from sunspot.settings import Settings
from sunspot.spelling import find_meant
from sunspot.tasks.defaults import PlainTask
from sunspot.tasks.signatures import find_misspelled, refuse_other_arguments
from sunspot.tasks.task import Task, TrainingRun

__all__ = ["Task", "TrainingRun", "describe_misspelled", "find_predict", "load_predict", "load_task"]

Predict = Callable[[torch.nn.Module, Batch], torch.Tensor]
"""A task's `predict`."""


def load_predict(settings: Settings) -> Predict:
    """Import the task and return its `predict`, wrapped so that it always takes a batch.

    A task's own `predict` may take only the images of a batch.

    Raises `SettingsError` if the task does not define `predict`.
    """
    return find_predict(load_task(settings))


def find_predict(task: Task) -> Predict:
    """Return a loaded task's `predict`, wrapped so that it always takes a batch (see `load_predict`)."""
    predict = task.predict
    if predict is None:
        raise task.error(
            "does not define predict(model, batch) -> scores, so its models cannot predict; docs/predict.md has an "
            "example to copy"
        )
    takes_batch = list(inspect.signature(predict).parameters)[1:] == ["batch"]
    return lambda model, batch: predict(model, batch if takes_batch or "image" not in batch else batch["image"])


def place_of(error: Exception) -> str:
    """Return the file and line at which an import failed."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    place = next(frame for frame in reversed(frames) if "importlib" not in frame.filename)
    return f"{place.filename}:{place.lineno}"


def _how_to_find(package: str, settings: Settings) -> str:
    """Return advice for a task whose top-level module was not found."""
    if settings.job.job_id:
        return f"`sunspot submit --code FOLDER` uploads the folder of {package}.py, or use an image that contains it"
    meant = find_meant(package, [path.stem for path in Path.cwd().glob("*.py")])
    hint = f"did you mean {meant}? Or " if meant else ""
    return f"{hint}run the command in the folder of {package}.py, or put that folder on PYTHONPATH"


def load_task(settings: Settings) -> Task:
    """Import the task and add its defaults. Raises `SettingsError` if the task cannot be used."""
    adapters = find_adapters()
    try:
        module = importlib.import_module(settings.task)
        function = next((name for name in adapters if hasattr(module, name)), "")
        adapt = pkgutil.resolve_name(adapters[function].location) if function else PlainTask
    except Exception as error:
        package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        extra = next((adapter.extra for adapter in adapters.values() if package in adapter.packages), "")
        if extra:
            fix = how_to_install(extra)
        else:
            absent = package == settings.task.partition(".")[0]
            fix = _how_to_find(package, settings) if absent else f"fix {place_of(error)}"
        raise SettingsError(f"SUNSPOT_TASK={settings.task} cannot be imported: {shorten(error)}; {fix}") from error
    if not function:
        refuse_missing_functions(module, settings, list(adapters))
        refuse_other_arguments(settings.task, module)
    task: Task = adapt(module, settings)
    refuse_unused_functions(task)
    return task


def describe_misspelled(task: Task) -> Iterator[str]:
    """Yield a warning for each function in a task's module that is never called and seems to be misspelled."""
    return find_misspelled(task, find_adapters())


def find_adapters() -> Mapping[str, Any]:
    """Return the adapters, keyed by the function that a task's module defines to select the library.

    The import is dynamic because adapters import modules that import this package.
    """
    return importlib.import_module("sunspot.adapters").ADAPTERS


def refuse_missing_functions(module: ModuleType, settings: Settings, selectors: list[str]) -> None:
    """Raise `SettingsError` if a PyTorch module lacks a required function.

    The message also lists `selectors`, the functions by which a module selects another library, such as `build_keras`.
    """
    needed = ("build_model",) if hasattr(module, "train") else ("build_model", "loss")
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        raise SettingsError(
            f"SUNSPOT_TASK={settings.task}: {module.__file__} does not define {' or '.join(missing)}. "
            f"A plain PyTorch task must define {' and '.join(needed)}; a task for another library must define "
            f"{', '.join(selectors[:-1])} or {selectors[-1]}"
        )


def refuse_unused_functions(task: Task) -> None:
    """Raise `SettingsError` if a task defines a function that would never be called.

    A function is never called if the task also defines an alternative to it, or lacks a function that it needs.
    """
    if task.build_dataset and hasattr(task.module, "find_sources"):
        raise task.error("the module defines both build_dataset and find_sources; keep one of them")
    if not task.compute_metrics:
        return
    if not task.predict:
        raise task.error("compute_metrics needs the scores from predict(model, batch); define predict, too")
    if not task.loss:
        raise task.error(
            "compute_metrics would never be called, because held-out rows cannot be evaluated without "
            "loss(model, batch); define loss, too"
        )
