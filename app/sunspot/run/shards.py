"""Checks that the parts of a sharded checkpoint contain each value of its tensors exactly once.

The format of the parts is described in checkpoint/parts.py.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sunspot.background import map_parallel
from sunspot.errors import NotFoundError, OutsideStorageError
from sunspot.run import Run

if TYPE_CHECKING:
    from sunspot.run.checkpoints import Checkpoint


class Extent(NamedTuple):
    """The position of a piece in a tensor."""

    name: str
    shape: Sequence[int]
    "The shape of the whole tensor."
    offset: Sequence[int]
    lengths: Sequence[int]


def find_indexes(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the parts' indexes, in rank order. The list is empty if the checkpoint is not sharded."""
    return sorted(file for file in checkpoint.files if re.fullmatch(r"part-\d+\.json", file))


def find_gaps(run: Run, checkpoint: Checkpoint) -> list[str]:
    """Check that the parts of a sharded checkpoint contain each value exactly once.

    Returns a list with one message if the parts lack values or overlap, or if an index cannot be read. Otherwise, the
    list is empty.
    """
    try:
        keys = [run.key("checkpoints", checkpoint.name, file) for file in find_indexes(checkpoint)]
        contents = map_parallel(lambda key: json.loads(run.storage.read(key)), keys)
        pieces = [piece for content in contents for piece in content["tensors"]]
        fault = describe_gap(Extent(*(piece[field] for field in Extent._fields)) for piece in pieces)
        return [fault] if fault else []
    except (NotFoundError, OutsideStorageError, ValueError, KeyError, TypeError, RecursionError) as error:
        return [f"the indexes of the parts cannot be read: {type(error).__name__}"]


def describe_gap(extents: Iterable[Extent]) -> str:
    """Return a line about the first tensor that is incomplete or has overlapping pieces, or an empty string."""
    tensors: dict[str, list[Extent]] = {}
    for extent in extents:
        tensors.setdefault(extent.name, []).append(extent)
    for name, pieces in tensors.items():
        if not _fill_once(pieces):
            values = math.prod(pieces[0].shape)
            return f"the parts do not contain each of the {values:,} values of {name} exactly once"
    return ""


def _fill_once(pieces: list[Extent]) -> bool:
    """Return True if pieces of one tensor contain each of its elements exactly once.

    Each piece adds a number to an array at each corner of the piece. The number is 1 at the first corner, and its sign
    changes with each dimension in which a corner lies at the piece's end. The cumulative sum of this array over all
    dimensions is the number of pieces that contain each element. So the pieces contain each element exactly once if the
    array equals the array of a single piece that covers the whole tensor. The time is proportional to the number of
    pieces.
    """
    shape = pieces[0].shape
    sums = Counter[tuple[int, ...]]()

    def add(offset: Sequence[int], lengths: Sequence[int], sign: int) -> None:
        edges = [((begin, 1), (begin + length, -1)) for begin, length in zip(offset, lengths, strict=True)]
        for corner in itertools.product(*edges):
            sums[tuple(at for at, _ in corner)] += sign * math.prod(factor for _, factor in corner)

    add([0] * len(shape), shape, -1)
    for piece in pieces:
        add(piece.offset, piece.lengths, 1)
    return not any(sums.values()) and all(list(piece.shape) == list(shape) for piece in pieces)
