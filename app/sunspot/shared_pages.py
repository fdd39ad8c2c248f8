"""Memory that one process of a machine fills and the others map, instead of a copy in each."""

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable

import torch


class Pages:
    """A file that lies in memory alone; where the system has none such, a temporary one.

    Unlike one in /dev/shm it has no limit but the memory itself, and a process that is killed leaves nothing behind.
    Its memory is free once this is closed, or forgotten, and no process maps it any more.
    """

    def __init__(self, size: int = 0) -> None:
        """`size` in bytes, which take memory once they are used; `write` adds to it."""
        self.close: Callable[[], object]
        try:
            self._descriptor = os.memfd_create("sunspot")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.close = weakref.finalize(self, os.close, self._descriptor)
        except (AttributeError, OSError):
            self._descriptor, self.path = tempfile.mkstemp()
            self.close = weakref.finalize(self, _remove, self._descriptor, self.path)
        os.truncate(self._descriptor, size)

    def write(self, data: bytes | bytearray) -> None:
        """Append."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]


def map_pages(path: str, size: int, shared: bool = False) -> torch.Tensor:
    """The first `size` bytes of a file, uint8 [size]; unless `shared`, who changes them changes a copy of its own."""
    with open(path, "r+b") as file:
        access = mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY
        return torch.frombuffer(mmap.mmap(file.fileno(), size, access=access), dtype=torch.uint8)


def _remove(descriptor: int, path: str) -> None:
    os.close(descriptor)
    os.unlink(path)
