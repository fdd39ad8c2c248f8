"""Gradient-boosted trees, one round for each epoch: SUNSPOT_TASK_ARGS={"library": "lightgbm", "num_leaves": 31}.

Each row is an image, or the numbers in `columns`: then `label` is a class if `classes` is true, and else a number. What
else is in SUNSPOT_TASK_ARGS are the library's own parameters.
"""

from typing import Any

from sunspot.data.columns import Column
from sunspot.data.source import Source
from sunspot.data.source import find_sources as find_images
from sunspot.data.table import open_table
from sunspot.errors import SettingsError
from sunspot.settings import Settings
from sunspot.tasks.trees_adapter import KINDS, Trees

__all__ = ["build_trees", "find_sources"]


def find_sources(settings: Settings) -> tuple[Source, Source | None]:
    """Find images, or a table with `columns`."""
    _, columns, classes = _split(settings)
    if not columns:
        return find_images(settings)
    if not (isinstance(columns, list) and all(isinstance(name, str) for name in columns)) or "label" in columns:
        raise SettingsError(f"SUNSPOT_TASK_ARGS: columns {columns}: list the names of columns, without label")
    label = {"label": Column("int64") if classes else Column()}
    return open_table(settings, {name: Column() for name in columns} | label)


def build_trees(settings: Settings, source: Source) -> Trees:
    """Build trees of the `library` (default: xgboost)."""
    options, _, _ = _split(settings)
    library = options.pop("library", "xgboost")
    if library not in KINDS:
        raise SettingsError(f"SUNSPOT_TASK_ARGS: library {library!r}: set it to one of {', '.join(KINDS)}")
    return KINDS[library](library, options, settings, source)


def _split(settings: Settings) -> tuple[dict[str, Any], Any, Any]:
    """Return the library's options (and `library`), `columns`, and `classes`."""
    options = dict(settings.task_args)
    return options, options.pop("columns", None), options.pop("classes", False)
