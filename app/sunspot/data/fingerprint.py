"""What identifies the bytes of a dataset without reading all of them."""

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

SAMPLES, SAMPLE_BYTES = 64, 64 << 10
"""Samples of a dataset's files, and bytes of each. Up to 4 MiB, everything is read."""


def digest(*parts: bytes | memoryview) -> str:
    """Return a short SHA-256 of some bytes, one after the other; each part's length counts too."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(b"%d " % len(part))
        sha.update(part)
    return sha.hexdigest()[:16]


def digest_array(values: np.ndarray) -> str:
    """Return a short SHA-256 of an array's values, whatever machine it is on."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).reshape(-1)
    return digest(repr((values.dtype.kind, values.dtype.itemsize, values.shape)).encode(), little.view(np.uint8).data)


def sample_ranges(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each file of a dataset, by its size in bytes, the ranges to look at: (offset, length).

    They are spread evenly over all files laid end to end, so their number does not grow with the dataset.
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
    """Return at most `most` of the numbers 0 .. count - 1, spread evenly."""
    numbers: list[int] = np.linspace(0, count - 1, min(count, most)).astype(int).tolist()
    return numbers
