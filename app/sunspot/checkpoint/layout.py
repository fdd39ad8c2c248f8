"""The file that `torch.save` would make of a state in a slot, without a copy of the tensors' bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sunspot.checkpoint.slots import Slot

Span = range | bytes
"""Bytes of a file: those at a place in the slot, or others."""


class Layout:
    """A file as the spans that make it up."""

    def __init__(self, state: Any, slot: Slot) -> None:
        self._address, self._slot_size = np.frombuffer(slot.map, np.uint8).ctypes.data, slot.size
        self.size = 0
        self.spans: list[Span] = []
        torch.save(state, self)  # type: ignore[arg-type]  # it needs only write()

    def write(self, data: Any) -> int:
        """Take what torch.save writes: the bytes of a tensor are where they lie in the slot."""
        view = memoryview(data).cast("B")
        if len(view):
            begin = np.frombuffer(view, np.uint8).ctypes.data - self._address
            in_slot = 0 <= begin < self._slot_size
            self.spans.append(range(begin, begin + len(view)) if in_slot else bytes(view))
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Does nothing; torch.save calls it."""

    def cut(self, part_size: Callable[[int], int]) -> list[list[Span]]:
        """The spans of each part, where the one with a number, counted from 1, has `part_size` bytes."""
        parts: list[list[Span]] = []
        room = 0
        for span in self.spans:
            while span:
                if not room:
                    parts.append([])
                    room = part_size(len(parts))
                parts[-1].append(span[:room])
                span, room = span[room:], room - len(span[:room])
        return parts


def views(spans: Sequence[Span], slot: Slot) -> list[memoryview]:
    """The bytes of some spans, without a copy."""
    memory = memoryview(slot.map)
    return [memory[span.start : span.stop] if isinstance(span, range) else memoryview(span) for span in spans]


def read_spans(spans: Sequence[Span], slot: Slot) -> bytearray:
    """A copy of the bytes of some spans."""
    return bytearray().join(views(spans, slot))


def crc32_of(spans: Sequence[Span], slot: Slot) -> int:
    """The CRC-32 of the bytes of some spans."""
    checksum = 0
    for view in views(spans, slot):
        checksum = zlib.crc32(view, checksum)
    return checksum


def layout_to_json(spans: Sequence[Span]) -> list[Any]:
    """Spans as JSON holds them."""
    return [[span.start, span.stop] if isinstance(span, range) else span.hex() for span in spans]


def layout_from_json(spans: Sequence[Any]) -> list[Span]:
    """What `layout_to_json` was given."""
    return [bytes.fromhex(span) if isinstance(span, str) else range(*span) for span in spans]
