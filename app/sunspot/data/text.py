"""Text as rows of bytes, for language models: Python's own reference, or any file."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from sunspot.errors import DataError, shorten
from sunspot.settings import PREFIX

REFERENCE = "pydoc_data.topics"
"""Python's language reference as `help()` shows it: about 465 kB of English that come with Python."""

HELD_OUT_FRACTION = 0.1
"""Fraction of the text, at its end, that is held out."""

GROUP_ROWS = 256
"""Rows in a row group, the unit in which LOADER=ray reads."""


@dataclass(frozen=True)
class TextSource:
    """Consecutive windows of a text; a `Source`.

    A row is `text`, uint8 [length]: `length` - 1 input bytes, each followed by the byte to predict for it. Each row
    begins with the last byte of the previous row, so every byte but the first is predicted once.
    """

    location: str
    "Path of a file, or REFERENCE."
    length: int
    first: int
    "Offset of row 0 in the text."
    rows: int
    fingerprint: str
    "Digest of the text and of how it is cut into rows."
    classes: int = 256
    "Number of values of the next byte."

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of bytes in a row."""
        return (self.length,)

    @cached_property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(min(GROUP_ROWS, self.rows - begin) for begin in range(0, self.rows, GROUP_ROWS))

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        chosen = np.arange(self.row_groups[group]) if rows is None else rows
        begins = self.first + (group * GROUP_ROWS + chosen) * (self.length - 1)
        text = np.frombuffer(read_text(self.location), np.uint8)
        if self.first + self.rows * (self.length - 1) >= len(text):
            raise DataError(f"{self.location}: has changed since it was opened; start the run again")
        return {"text": text[begins[:, None] + np.arange(self.length)]}

    def where(self, group: int, row: int) -> str:
        return f"{self.location}, from byte {self.first + (group * GROUP_ROWS + row) * (self.length - 1)}"


def open_text(dataset: str, context: int) -> tuple[TextSource, TextSource | None]:
    """Open the training and held-out rows of a text, each of `context` + 1 bytes.

    `dataset` is DATASET: 'sample' for Python's reference, or a file that all nodes see. Raises `DataError`.
    """
    location = REFERENCE if dataset == "sample" else dataset
    text = read_text(location)
    cut = round(len(text) * (1 - HELD_OUT_FRACTION))
    train = _between(location, context, 0, cut)
    if not train.rows:
        raise DataError(f"{location}: {len(text)} bytes of text are too few for rows of {context + 1}")
    test = _between(location, context, cut, len(text))
    return train, test if test.rows else None


def _between(location: str, context: int, first: int, last: int) -> TextSource:
    rows = max(0, last - first - 1) // context
    text = read_text(location)[first : first + rows * context + 1]
    fingerprint = hashlib.sha256(b"%d %d %d " % (context, GROUP_ROWS, first) + text).hexdigest()[:16]
    return TextSource(location, context + 1, first, rows, fingerprint)


@lru_cache(maxsize=1)
def read_text(location: str) -> bytes:
    """Read a complete text, once per process."""
    if location == REFERENCE:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        with open(location, "rb") as file:
            return file.read()
    except OSError as error:
        raise DataError(
            f"{PREFIX}DATASET={location}: cannot be read as text: {shorten(error)}; set it to a file that all nodes "
            "see, or to 'sample' for Python's own reference"
        ) from error
