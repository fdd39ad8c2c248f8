"""Gradient-boosted trees, one round for each epoch: SUNSPOT_TASK_ARGS={"library": "lightgbm", "num_leaves": 31}.

Each row is an image, or the numbers in the listed `columns`. With columns, `label` is a class if `classes` is true, and
a number otherwise. All other entries of SUNSPOT_TASK_ARGS are parameters of the library.
"""

from sunspot.data.columns import Column
from sunspot.data.image_sources import find_sources as find_images
from sunspot.data.source import Source
from sunspot.data.table import open_table
from sunspot.errors import SettingsError
from sunspot.settings import Settings
from sunspot.tasks.trees_adapter import KINDS, Trees

__all__ = ["build_trees", "find_sources"]


def find_sources(settings: Settings) -> tuple[Source, Source | None]:
    """Find images, or a table if TASK_ARGS list `columns`."""
    columns = settings.task_args.get("columns")
    classes = settings.task_args.get("classes", False)
    if not columns:
        return find_images(settings)
    if not (isinstance(columns, list) and all(isinstance(name, str) for name in columns)) or "label" in columns:
        raise SettingsError(f"SUNSPOT_TASK_ARGS: columns {columns}: list the names of columns, without label")
    label = {"label": Column("int64") if classes else Column()}
    return open_table(settings, {name: Column() for name in columns} | label)


def build_trees(settings: Settings, source: Source) -> Trees:
    """Build trees with the `library` of TASK_ARGS, by default xgboost."""
    options = {name: value for name, value in settings.task_args.items() if name not in ("columns", "classes")}
    library = options.pop("library", "xgboost")
    if library not in KINDS:
        raise SettingsError(f"SUNSPOT_TASK_ARGS: library {library!r}: set it to one of {', '.join(KINDS)}")
    return KINDS[library](library, options, settings, source)
