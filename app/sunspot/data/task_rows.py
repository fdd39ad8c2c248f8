"""Opens a run's rows with the task's `find_sources` or `build_dataset`, or else opens the images of DATASET."""

from typing import Any

from sunspot.data.held_out import hold_out
from sunspot.data.image_sources import find_sources
from sunspot.data.mixed_source import open_mixture
from sunspot.data.source import Source
from sunspot.errors import SettingsError
from sunspot.formatting import kind_of
from sunspot.settings import PREFIX, Settings
from sunspot.settings.mixture import parse_mixture


def open_rows_of_task(settings: Settings, task: Any) -> tuple[Source, Source | None]:
    """Open the training rows and the held-out rows, if any.

    If the dataset has no held-out rows, a fraction (TEST_SHARE) of its rows is held out. Each source of a mixture is
    opened in this way. Raises `SettingsError` if the task's function returns anything but sources or datasets, and
    `DataError` or `StorageError` if the rows cannot be opened.
    """
    mixture = parse_mixture(settings.dataset)
    if mixture:
        if task.build_dataset or task.full_batch:
            fix = (
                "mix the rows in build_dataset"
                if task.build_dataset
                else "set a single dataset, because trees use all rows"
            )
            raise SettingsError(f"{PREFIX}DATASET={settings.dataset}: {settings.task} cannot train on a mixture; {fix}")
        return open_mixture(settings, mixture, lambda alone: open_rows_of_task(alone, task))
    train, test = _open_dataset(settings, task)
    if test is None and settings.test_share:
        return hold_out(train, settings.test_share, settings.seed)
    return train, test


def open_without_test_share(settings: Settings, task: Any) -> tuple[Source, Source | None]:
    """Open the same rows as `open_rows_of_task`, but ignore TEST_SHARE."""
    return open_rows_of_task(settings.model_copy(update={"test_share": 0}), task)


def _open_dataset(settings: Settings, task: Any) -> tuple[Source, Source | None]:
    if task.find_sources:
        return _check_sources(task.find_sources(settings), settings.task)
    if task.build_dataset:
        from sunspot.data.torch_dataset import open_datasets

        return open_datasets(settings)
    return find_sources(settings)


def _check_sources(returned: Any, task: str) -> tuple[Source, Source | None]:
    """Return the sources that `find_sources` returned. Raises `SettingsError` if it returned anything else."""
    parts = list(returned) if isinstance(returned, (tuple, list)) and len(returned) == 2 else [returned]
    wrong = [each for each in parts if not _is_source(each)]
    if len(parts) == 2 and wrong in ([], [None]) and parts[0] is not None:
        return parts[0], parts[1]
    found = kind_of(wrong[0]) if wrong else "one Source"
    raise SettingsError(
        f"{PREFIX}TASK={task}: find_sources returned {found}; return a tuple of two Sources: the training rows, and "
        "the held-out rows or None. To use a torch.utils.data.Dataset, define build_dataset(settings) instead "
        "(docs/data.md)"
    )


def _is_source(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("row_groups", "read", "where"))
