"""What tests share: programs, servers and clusters to test against, and runs to look at."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

GOLDEN = REPOSITORY / "tests" / "unit" / "golden"
"""Rendered manifests as they have to be."""

SHELL = dict(os.environ)
"""The environment that the tests were started in, for those of a real cluster."""


def skip_without(package: str, extra: str) -> None:
    """Skip a test of other processes without a package that they need. It is not imported in this one, which aborts
    when it comes to have both TensorFlow and Triton.
    """
    if not find_spec(package):
        pytest.skip(f"the extra `{extra}` is not installed")
