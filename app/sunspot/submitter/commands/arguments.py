"""Adds and reads the arguments that several subcommands share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sunspot.errors import SettingsError
from sunspot.task_file import SUFFIX

if TYPE_CHECKING:
    from sunspot.submitter.manifest.render import JobRequest
    from sunspot.submitter.runs import Target

ROWS = 50
"""Default number of rows in a list. Each row costs a storage request."""


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of the run")


def add_run_and_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the run and the options that select its cluster."""
    add_run(parser)
    add_cluster(parser)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    add_context(parser)
    add_namespace(parser)


def add_context(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--context", metavar="NAME", help="kubeconfig context; default: the current context")


def add_namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace", metavar="NAME", help="namespace; default: that of the profile or the context, otherwise sunspot"
    )


def add_limit(parser: argparse.ArgumentParser) -> None:
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument(
        "--limit", metavar="N", type=count, default=ROWS, help=f"list only the newest N; default: {ROWS}"
    )
    limit.add_argument("--all", action="store_const", const=None, dest="limit", help="list all")


def count(text: str) -> int:
    """Parse an integer >= 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer >= 1")
    return int(text)


def seconds(text: str) -> float:
    """Parse a number of seconds >= 0. Rejects NaN, because a wait of NaN seconds would never end."""
    try:
        time_s = float(text)
    except ValueError:
        time_s = -1.0
    if not 0 <= time_s < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds >= 0, such as 600")
    return time_s


def add_render_options(parser: argparse.ArgumentParser) -> None:
    """Add all options that affect a manifest, except --storage."""
    parser.add_argument(
        "--profile", metavar="NAME", default="kind", help="a profile in k8s/profiles, or a path; default: kind"
    )
    parser.add_argument("--run", metavar="NAME", help="name of the run; default: SUNSPOT_RUN_NAME")
    parser.add_argument("--place", metavar="NAME", help="one of the profile's places; default: `submit` chooses one")
    add_job_options(parser)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add all options that affect a manifest, except --storage, --profile, --run and --place."""
    add_settings(parser)
    parser.add_argument("--image", metavar="REF", help="the image; default: the profile's image")
    parser.add_argument(
        "--code",
        metavar="CODE",
        help="your own code: a folder (only with submit), or an archive as URL@sha256:HASH",
    )
    add_namespace(parser)
    parser.add_argument("--queue", metavar="NAME", help="the Kueue LocalQueue for the job")
    parser.add_argument(
        "--cluster", metavar="NAME", help="run the job in this existing RayCluster instead of a new cluster"
    )
    parser.add_argument(
        "--generation",
        metavar="N",
        type=int,
        default=1,
        help="change this number to run a job again after it has ended; default: 1",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    about = "a setting that `python -m sunspot.train --help` lists; this option can be repeated"
    parser.add_argument("--set", metavar="VAR=VALUE", dest="settings", action="append", default=[], help=about)


def add_settings_and_words(parser: argparse.ArgumentParser) -> None:
    """Add positional arguments, each of which is either a setting (VAR=VALUE) or the path of the task's file.

    Only subcommands that train on this machine accept these arguments.
    """
    parser.add_argument(
        "words", metavar="WORD", nargs="*", help="a setting as VAR=VALUE, or the path of the task's file"
    )
    add_settings(parser)


def given_settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings given through `add_settings` or `add_settings_and_words`, keyed by variable name."""
    words = [
        f"TASK={word}" if word.endswith(SUFFIX) and "=" not in word else word for word in vars(args).get("words", ())
    ]
    overrides: dict[str, str] = {}
    for word in [*args.settings, *words]:
        name, equals, value = word.partition("=")
        if not name or not equals:
            example = f"{word}=VALUE" if word.isupper() else f"VAR=VALUE, such as RUN_NAME={word}"
            file = ", or the path of a task's file" if word in words else ""
            raise SettingsError(f"{word} is not a setting; write {example}{file}")
        overrides[name] = value
    return overrides


def job_request(args: argparse.Namespace) -> JobRequest:
    """Return the request described by the options that `add_render_options` adds."""
    from sunspot.settings import with_place
    from sunspot.submitter.manifest.render import JobRequest

    settings = with_place(given_settings(args), args.run, args.storage)
    options = {
        name: getattr(args, name) for name in ("image", "namespace", "queue", "cluster", "generation", "code", "place")
    }
    return JobRequest(args.profile, settings, **options)


def run_target(args: argparse.Namespace) -> Target:
    """Return the run, storage and cluster selected by the arguments."""
    from sunspot.submitter.runs import Target

    return Target(args.run, args.storage, args.context, args.namespace)
