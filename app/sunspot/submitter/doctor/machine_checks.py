"""Checks that this machine can train."""

from collections.abc import Iterator
from importlib.metadata import version

from sunspot.extras import how_to_install
from sunspot.storage.prove import Check, Result
from sunspot.submitter.local_training import find_missing_packages


def check_training_here() -> Iterator[Check]:
    """Check that the packages for training are installed."""
    missing = find_missing_packages()
    if missing:
        yield Check("training here", Result.FAILED, f"{' and '.join(missing)} not installed", how_to_install("train"))
    else:
        seen = f"torch {version('torch')} and Ray {version('ray')}; `sunspot check` tries a task"
        yield Check("training here", Result.OK, seen)
