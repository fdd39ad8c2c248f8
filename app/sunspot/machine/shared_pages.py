"""Shares memory between processes. One process on a machine fills it, and the others map it instead of copying it."""

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable

import torch


class Pages:
    """A file that exists only in memory, or a temporary file on systems without such files.

    Unlike a file in /dev/shm, its size is limited only by the memory, and a killed process leaves nothing behind. The
    memory is freed when this object is closed or garbage-collected and no process maps the file any longer.
    """

    def __init__(self, size: int = 0) -> None:
        """Create a file of `size` bytes, to which `write` appends. The bytes use no memory until they are accessed."""
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
        """Append data to the file."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]


def map_pages(path: str, size: int, shared: bool = False) -> torch.Tensor:
    """Return the first `size` bytes of a file, as uint8 [size]. Changes are private unless `shared` is True."""
    with open(path, "r+b") as file:
        access = mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY
        return torch.frombuffer(mmap.mmap(file.fileno(), size, access=access), dtype=torch.uint8)


def _remove(descriptor: int, path: str) -> None:
    os.close(descriptor)
    os.unlink(path)
