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
        what = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"
        yield Check("training here", Result.FAILED, what, how_to_install("train"))
    else:
        seen = f"torch {version('torch')} and Ray {version('ray')} are installed; `sunspot check` tests a task"
        yield Check("training here", Result.OK, seen)
