"""The command `sunspot`: which verbs there are, what each takes, and where each begins.

Nothing heavy is imported before a verb has begun: help and wrong usage answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from app.errors import NotFoundError, SettingsError, StorageError, run_and_exit

if TYPE_CHECKING:
    from app.layout import Run
    from app.layout.storage import Storage

MOST_NAMED = 10
"""Runs that are named when the one asked for is not there."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Do what the words of the command line say, and end the process."""

    def program() -> int:
        chosen = _parser().parse_args(arguments)
        chosen.begin(chosen)
        return 0

    run_and_exit(program)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sunspot", description="Ray Train on Kubernetes spot GPUs.", allow_abbrev=False
    )
    verbs = _subverbs(parser)

    checkpoints = _subverbs(_add_group(verbs, "checkpoints", "the run's checkpoints"))
    _add_verb(checkpoints, "ls", "list them, every byte verified", _checkpoints_ls)
    verify = _add_verb(checkpoints, "verify", "verify all of them, or one; 7 if any is damaged", _checkpoints_verify)
    verify.add_argument("name", metavar="NAME", nargs="?", help="a checkpoint, as ls names it")

    metrics = _add_verb(verbs, "metrics", "the run's metric history", _metrics, forms=("json", "csv"))
    del metrics
    _add_verb(verbs, "audit", "prove which rows each epoch consumed; 7 if any is missing or repeated", _audit)
    return parser
