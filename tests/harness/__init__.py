"""Shared test code: programs, servers and clusters to test against, and runs to read."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

GOLDEN = REPOSITORY / "tests" / "unit" / "golden"
"""Folder with the expected manifests."""

SHELL = dict(os.environ)
"""Environment in which the tests were started, for tests on a real cluster."""


def skip_without(package: str, extra: str) -> None:
    """Skip a test if a package is missing that its other processes need.

    The package is not imported here, because a process with both TensorFlow and Triton aborts.
    """
    if not find_spec(package):
        pytest.skip(f"the extra `{extra}` is not installed")
