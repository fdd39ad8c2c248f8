"""Trains gradient-boosted trees, one round per epoch.

Example: SUNSPOT_TASK_ARGS={"library": "lightgbm", "num_leaves": 31}. Each row is an image, unless
`columns` lists columns of a table. In that case, each row consists of the numbers in these columns, and the column
`label` contains numbers, or classes if `classes` is true. All other arguments are passed to the library.
"""

from sunspot.data.columns import Column
from sunspot.data.image_sources import find_sources as find_images
from sunspot.data.source import Source
from sunspot.data.table import open_table
from sunspot.errors import SettingsError
from sunspot.settings import Settings
from sunspot.tasks.tree_models import KINDS, Trees

__all__ = ["build_trees", "find_sources"]


def find_sources(settings: Settings) -> tuple[Source, Source | None]:
    """Return sources of images, or of a table's rows if TASK_ARGS has `columns`."""
    columns, classes = settings.task_args.get("columns"), settings.task_args.get("classes", False)
    if not columns:
        return find_images(settings)
    if not (isinstance(columns, list) and all(isinstance(name, str) for name in columns)) or "label" in columns:
        raise SettingsError(f"SUNSPOT_TASK_ARGS: columns must be a list of names without 'label', but it is {columns}")
    label = {"label": Column("int64") if classes else Column()}
    return open_table(settings, {name: Column() for name in columns} | label)


def build_trees(settings: Settings, source: Source) -> Trees:
    """Build trees with the `library` in TASK_ARGS, which is xgboost by default."""
    options = {name: value for name, value in settings.task_args.items() if name not in ("columns", "classes")}
    library = options.pop("library", "xgboost")
    if library not in KINDS:
        raise SettingsError(f"SUNSPOT_TASK_ARGS: library must be {' or '.join(KINDS)}, not {library!r}")
    return KINDS[library](library, options, settings, source)
