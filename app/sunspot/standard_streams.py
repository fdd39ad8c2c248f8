"""The standard streams of a process, which may be closed or full, or lack characters in their encoding."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def prepare_streams() -> None:
    """Replace closed standard streams, and have the others print characters that they cannot encode as escapes."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # open until the process ends
        elif mode == "w":
            print_escapes(stream)


def print_escapes(stream: TextIO) -> None:
    """Have a stream print characters that it cannot encode as escapes such as `\\xfc`; a notebook's can encode all."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure:
        reconfigure(errors="backslashreplace")


def flush_output(more: str = "") -> OSError | None:
    """Print `more` and flush stdout. If stdout cannot be written, mute it and return the error."""
    try:
        print(more, end="", flush=True)
    except OSError as error:
        mute(sys.stdout)
        return error
    return None


def mute(stream: TextIO) -> None:
    """Discard a stream's output, because it cannot be written and Python would report that when the process exits."""
    with suppress(OSError, ValueError):  # the streams of notebooks and tests have no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
