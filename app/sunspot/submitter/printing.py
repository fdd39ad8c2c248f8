"""Prints the output of the `sunspot` command, and writes the files that it saves.

Results go to stdout, and warnings and progress notes go to stderr. All subcommands print through this module, because
text from a run or a cluster can contain control characters, which this module makes harmless.
"""

import contextlib
import io
import json
import math
import os
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any

from sunspot.errors import SettingsError, StorageError
from sunspot.formatting import visible
from sunspot.storage.local import local_path

NOTE_AFTER_S = 2.0
"""Seconds after which a lengthy operation is announced."""

MARKED = 64 << 10
"""Number of bytes at the start and end of a file that are searched for its mark."""

MAX_LINE_WIDTH = 10_000
"""Width of a table outside a terminal, so that no cell is wrapped."""


def print_text(text: str = "", end: str = "\n", flush: bool = False) -> None:
    """Print text from any source, with control characters replaced by visible ones."""
    print(visible(text), end=end, flush=flush)


def print_document(text: str) -> None:
    """Print a document in UTF-8, regardless of the locale's encoding.

    In another encoding, some characters would have to be escaped, which would change the document's meaning.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    print_text(text, end="")


def clear_screen() -> None:
    """Clear the terminal, or print an empty line if stdout is not a terminal."""
    print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", end="" if sys.stdout.isatty() else "\n", flush=True)


def print_json(value: Any) -> None:
    """Print one JSON document. NaN and infinity become null, because JSON has neither."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def print_json_line(value: Any) -> None:
    """Print one JSON value as a single line, and flush stdout for programs that read line by line."""
    print(json.dumps(_finite(value), allow_nan=False), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table with numbers aligned to the right. No cell is truncated."""
    from rich.console import Console
    from rich.table import Table

    cells = list(rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, name in enumerate(columns):
        numeric = any(isinstance(row[position], (int, float)) and not isinstance(row[position], bool) for row in cells)
        table.add_column(visible(name), justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(visible(_as_text(value)) for value in row))
    console = Console(width=None if sys.stdout.isatty() else MAX_LINE_WIDTH, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    # The console must not print by itself, because it would exit with 1 if stdout is closed.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def write_file(name: str, content: bytes, mark: bytes) -> Path:
    """Write a local file atomically, and return its absolute path.

    `mark` is text by which files from `sunspot` can be recognized. An existing file is replaced only if it is empty or
    contains `mark` near its start or end. Raises `SettingsError` for any other existing file, and `StorageError` if the
    file cannot be written.
    """
    path = local_path(name)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        if os.path.lexists(path) and not _is_ours(path, mark):
            raise SettingsError(f"{path} exists, but was not written by `sunspot`; remove it, or choose another name")
        try:
            with open(unfinished, "xb") as sink:
                sink.write(content)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _is_ours(path: Path, mark: bytes) -> bool:
    """Return True if the path is a regular file that is empty or contains the mark."""
    found = path.lstat()
    if not S_ISREG(found.st_mode):
        return False
    with open(path, "rb") as file:
        begin = file.read(MARKED)
        file.seek(max(0, found.st_size - MARKED))
        return not begin or mark in begin or mark in file.read(MARKED)


def warn(text: str, end: str = "\n") -> None:
    """Print a line to stderr. Errors are ignored."""
    with contextlib.suppress(OSError):
        print(visible(text), end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_note(what: str) -> Iterator[None]:
    """Print `what` to stderr if the code inside the context takes longer than NOTE_AFTER_S seconds."""
    timer = threading.Timer(NOTE_AFTER_S, warn, (f"{what} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
