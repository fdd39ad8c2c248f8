"""Reads the bytes of a file, or of Python's language reference, as rows for language models."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from sunspot.errors import DataError, shorten
from sunspot.settings import PREFIX

REFERENCE = "pydoc_data.topics"
"""The module with the language reference that `help()` shows: 465 kB of English, shipped with Python."""

HELD_OUT_FRACTION = 0.1
"""Fraction of the text that is held out. The held-out part is the end of the text."""

GROUP_ROWS = 256
"""Rows in a row group, which LOADER=ray reads as a unit."""


@dataclass(frozen=True)
class TextSource:
    """A `Source` of consecutive windows of a text.

    The only column is `text`, uint8 [n, length]. The model predicts each byte of a row except the first. Each row
    begins with the last byte of the previous row, so every byte of the text except the first is predicted once.
    """

    location: str
    "A file path, or REFERENCE."
    length: int
    first: int
    "The offset of row 0 in the text, in bytes."
    rows: int
    fingerprint: str
    "A digest of the text and of how it is cut into rows."
    classes: int = 256
    "The number of possible byte values."

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of bytes in a row."""
        return (self.length,)

    @cached_property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(min(GROUP_ROWS, self.rows - begin) for begin in range(0, self.rows, GROUP_ROWS))

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        chosen = np.arange(self.row_groups[group]) if rows is None else rows
        begins = self.first + (group * GROUP_ROWS + chosen) * (self.length - 1)
        text = np.frombuffer(read_text(self.location), np.uint8)
        if self.first + self.rows * (self.length - 1) >= len(text):
            raise DataError(f"{self.location} has changed since it was opened; restart the run")
        return {"text": text[begins[:, None] + np.arange(self.length)]}

    def where(self, group: int, row: int) -> str:
        return f"{self.location}, from byte {self.first + (group * GROUP_ROWS + row) * (self.length - 1)}"


def open_text(dataset: str, context: int) -> tuple[TextSource, TextSource | None]:
    """Open the training and held-out rows of a text. Each row has `context` + 1 bytes.

    `dataset` is 'sample' for Python's language reference, or a file that all nodes can read. Raises `DataError`.
    """
    location = REFERENCE if dataset == "sample" else dataset
    text = read_text(location)
    cut = round(len(text) * (1 - HELD_OUT_FRACTION))
    train = _between(location, context, 0, cut)
    if not train.rows:
        raise DataError(f"{location} has only {len(text)} bytes, too few for a training row of {context + 1} bytes")
    test = _between(location, context, cut, len(text))
    return train, test if test.rows else None


def _between(location: str, context: int, first: int, last: int) -> TextSource:
    rows = max(0, last - first - 1) // context
    text = read_text(location)[first : first + rows * context + 1]
    fingerprint = hashlib.sha256(b"%d %d %d " % (context, GROUP_ROWS, first) + text).hexdigest()[:16]
    return TextSource(location, context + 1, first, rows, fingerprint)


@lru_cache(maxsize=1)
def read_text(location: str) -> bytes:
    """Return the whole text at a location. The most recent text is cached."""
    if location == REFERENCE:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        with open(location, "rb") as file:
            return file.read()
    except OSError as error:
        raise DataError(
            f"{PREFIX}DATASET={location} cannot be read as text: {shorten(error)}; set it to a file that all nodes "
            "can read, or to 'sample' for Python's language reference"
        ) from error
