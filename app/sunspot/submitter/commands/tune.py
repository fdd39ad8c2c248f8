"""`sunspot tune`: trains a run for each of several settings, like `python -m sunspot.tune`."""

import argparse

from sunspot.submitter.commands import train

add_arguments = train.add_arguments


def run(args: argparse.Namespace) -> None:
    """Replace this process by `python -m sunspot.tune`, with the settings that `sunspot train` would have."""
    train.become("sunspot.tune", args)
