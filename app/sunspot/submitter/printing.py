"""What the command prints: a table or a JSON document on stdout, everything else on stderr; and the files it writes.

All verbs print through here: what a run or a cluster has stored never commands the terminal.
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
"""What takes longer than this is announced."""

MARKED = 64 << 10
"""Bytes at the beginning and the end of a file in which its mark is looked for."""

MAX_LINE_WIDTH = 10_000
"""Width of a table that does not go to a terminal: no cell is broken or cut there."""


def print_text(text: str = "", end: str = "\n", flush: bool = False) -> None:
    """Print text, whoever wrote it."""
    print(visible(text), end=end, flush=flush)


def print_document(text: str) -> None:
    """Print a document for another program in UTF-8 in any locale, because escapes would change its content."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    print_text(text, end="")


def clear_screen() -> None:
    """Clear a terminal, so that what is printed next replaces what was; elsewhere, begin a new paragraph."""
    print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", end="" if sys.stdout.isatty() else "\n", flush=True)


def print_json(value: Any) -> None:
    """Print one JSON document; NaN and infinity, which JSON lacks, become null."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def print_json_line(value: Any) -> None:
    """Print one JSON value on its own line and flush it, for readers that follow."""
    print(json.dumps(_finite(value), allow_nan=False), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under their columns: numbers aligned right, nothing cut."""
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
    # Not by the console, which would exit with 1 when the reader of the output goes away.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def write_file(name: str, content: bytes, mark: bytes) -> Path:
    """Write a local file whole or not at all; returns its absolute path.

    What is there already is replaced only if it is empty, or has `mark` near its beginning or end: one of ours. Raises
    `SettingsError` for anything else, and `StorageError` when it cannot be written.
    """
    path = local_path(name)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        if os.path.lexists(path) and not _is_ours(path, mark):
            raise SettingsError(f"{path}: exists, and `sunspot` did not write it; remove it, or choose another name")
        try:
            with open(unfinished, "xb") as sink:
                sink.write(content)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def _is_ours(path: Path, mark: bytes) -> bool:
    """Whether it is a regular file, no link, and has the mark or nothing in it."""
    found = path.lstat()
    if not S_ISREG(found.st_mode):
        return False
    with open(path, "rb") as file:
        begin = file.read(MARKED)
        file.seek(max(0, found.st_size - MARKED))
        return not begin or mark in begin or mark in file.read(MARKED)


def warn(text: str, end: str = "\n") -> None:
    """Print a line on stderr that is not part of the answer. A full stderr does not end the command."""
    with contextlib.suppress(OSError):
        print(visible(text), end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_note(what: str) -> Iterator[None]:
    """Announce on stderr what the context does, once it has taken NOTE_AFTER_S."""
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
