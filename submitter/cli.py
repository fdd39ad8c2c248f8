"""The command `sunspot`: which verbs there are, what each takes, and where each begins.

Nothing heavy is imported before a verb has begun: help and wrong usage answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from app.errors import NotFoundError, SettingsError, StorageError, run_and_exit

if TYPE_CHECKING:
    from app.layout import Run
    from app.layout.storage import Storage

MOST_NAMED = 5
"""Runs that are named when the one asked for is not there, the nearest names first."""


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Do what the words of the command line say, and end the process."""

    def program() -> int:
        arguments = _parser().parse_args(words)
        arguments.begin(arguments)
        return 0

    run_and_exit(program)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("sunspot", description="Ray Train on Kubernetes spot GPUs.", allow_abbrev=False)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    checkpoints = verbs.add_parser("checkpoints", help="the run's checkpoints", allow_abbrev=False)
    checkpoint_verbs = checkpoints.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_verb(checkpoint_verbs, "ls", _checkpoints_ls, "list them, every byte verified")
    verify = _add_verb(
        checkpoint_verbs, "verify", _checkpoints_verify, "verify all or one; exit code 7 if any is damaged"
    )
    verify.add_argument("name", metavar="NAME", nargs="?", help="a checkpoint, as ls names it")

    metrics = _add_verb(verbs, "metrics", _metrics, "the run's metric history")
    metrics.add_argument("--csv", action="store_true", help="comma-separated values on stdout")

    _add_verb(verbs, "audit", _audit, "prove which rows each epoch consumed; exit code 7 if any is missing or repeated")
    return parser


def _add_verb(
    verbs: Any, name: str, begin: Callable[[argparse.Namespace], None], about: str
) -> argparse.ArgumentParser:
    """Add a verb about one run, with the options that all of them take."""
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=about, description=about, allow_abbrev=False)
    verb.set_defaults(begin=begin)
    verb.add_argument("run", metavar="RUN", help="name of the run")
    verb.add_argument("--storage", metavar="PATH", help="where runs are kept; default: SUNSPOT_STORAGE_PATH, or runs")
    verb.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return verb


def _checkpoints_ls(arguments: argparse.Namespace) -> None:
    from submitter.checkpoints import list_all

    list_all(_find_run(arguments), arguments.json)


def _checkpoints_verify(arguments: argparse.Namespace) -> None:
    from submitter.checkpoints import verify

    verify(_find_run(arguments), arguments.name, arguments.json)


def _metrics(arguments: argparse.Namespace) -> None:
    from submitter.metrics import show

    if arguments.json and arguments.csv:
        raise SettingsError("--json and --csv: choose one")
    show(_find_run(arguments), "json" if arguments.json else "csv" if arguments.csv else "table")


def _audit(arguments: argparse.Namespace) -> None:
    from submitter.audit import audit

    audit(_find_run(arguments), arguments.json)


def _find_run(arguments: argparse.Namespace) -> Run:
    """The run that RUN and --storage mean; raises `NotFoundError` when nothing is there."""
    from app.layout import open_run
    from app.settings import load_settings

    given = {"RUN_NAME": arguments.run}
    if arguments.storage is not None:
        given["STORAGE_PATH"] = arguments.storage
    if "" in given.values():  # as a setting, it would mean the default
        raise SettingsError("RUN and --storage may not be empty")
    settings = load_settings(given)
    run = open_run(settings.storage_path, settings.run_name)
    if not run.storage.exists(run.key("run.json")):
        raise NotFoundError(
            f"no run {run.name} in {run.storage.locate('').rstrip('/')}{_name_others(run.storage, run.name)}"
        )
    return run


def _name_others(storage: Storage, name: str) -> str:
    runs: list[str] = []
    with contextlib.suppress(StorageError):  # a folder of somebody else's: the run is not there all the same
        runs = [
            e.key.removesuffix("/run.json")
            for e in storage.list("")
            if e.key.count("/") == 1 and e.key.endswith("/run.json")
        ]
    nearest = difflib.get_close_matches(name, runs, n=MOST_NAMED, cutoff=0.0)
    more = f" and {len(runs) - len(nearest)} more" if len(runs) > len(nearest) else ""
    return f"; there are {', '.join(nearest)}{more}" if runs else "; no run is there"


if __name__ == "__main__":
    main()
