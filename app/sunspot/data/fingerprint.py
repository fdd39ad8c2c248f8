"""Digests that identify a dataset without reading all of it."""

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

SAMPLES = 64
"""Number of samples read from a dataset's files."""

SAMPLE_BYTES = 64 << 10
"""Size of a sample in bytes. Datasets of up to 4 MiB are read completely."""


def digest(*parts: bytes | memoryview) -> str:
    """Return a truncated SHA-256 of the parts and their lengths."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(b"%d " % len(part))
        sha.update(part)
    return sha.hexdigest()[:16]


def digest_array(values: np.ndarray) -> str:
    """Return a truncated SHA-256 of an array, independent of the machine's byte order."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).reshape(-1)
    return digest(repr((values.dtype.kind, values.dtype.itemsize, values.shape)).encode(), little.view(np.uint8).data)


def sample_ranges(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the ranges to sample in each file as (offset, length), given the file sizes in bytes.

    SAMPLES ranges are spread evenly over the concatenated files. Files that are small in total are sampled completely.
    """
    total = sum(sizes)
    if total <= SAMPLES * SAMPLE_BYTES:
        return [[(0, size)] for size in sizes]
    begins = [(total - SAMPLE_BYTES) * sample // (SAMPLES - 1) for sample in range(SAMPLES)]
    return [
        [(begin - end + size, min(SAMPLE_BYTES, end - begin)) for begin in begins if end - size <= begin < end]
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]


def spread_evenly(count: int, most: int) -> list[int]:
    """Return up to `most` evenly spaced numbers from 0 to count - 1."""
    numbers: list[int] = np.linspace(0, count - 1, min(count, most)).astype(int).tolist()
    return numbers
