"""Makes it safe to print to standard streams that are closed or full, or that cannot encode every character."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def prepare_streams() -> None:
    """Replace closed standard streams, and make the others print escapes for characters that they cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # open until the process ends
        elif mode == "w":
            print_escapes(stream)


def print_escapes(stream: TextIO) -> None:
    """Make a stream print escapes such as `\\xfc` for characters that it cannot encode.

    Does nothing to a stream without a `reconfigure` method, such as a notebook's stream, which encodes all characters.
    """
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure:
        reconfigure(errors="backslashreplace")


def flush_output(more: str = "") -> OSError | None:
    """Print `more` and flush stdout. If that fails, mute stdout and return the error."""
    try:
        print(more, end="", flush=True)
    except OSError as error:
        mute(sys.stdout)
        return error
    return None


def mute(stream: TextIO) -> None:
    """Discard a stream's output, so that Python does not report a write error at exit."""
    with suppress(OSError, ValueError):  # the streams of notebooks and tests have no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
