"""`sunspot tune`: trains one run per trial of a search over settings, like `python -m sunspot.tune`."""

import argparse

from sunspot.submitter.commands import train

add_arguments = train.add_arguments


def run(args: argparse.Namespace) -> None:
    """Replace this process with `python -m sunspot.tune`. Settings are passed as in `sunspot train`."""
    train.become("sunspot.tune", args)
