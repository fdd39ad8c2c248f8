"""What tests share: programs, servers and clusters to test against, and runs to look at."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

GOLDEN = REPOSITORY / "tests" / "unit" / "golden"
"""Rendered manifests as they have to be."""

SHELL = dict(os.environ)
"""The environment that the tests were started in, for those of a real cluster."""
