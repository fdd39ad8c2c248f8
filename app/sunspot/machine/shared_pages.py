"""Shares memory between processes. One process on a machine fills it, and the others map it instead of copying it."""

import fcntl
import glob
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch


class Pages:
    """A file that exists only in memory, or a temporary file on systems without such files.

    Unlike a file in /dev/shm, it can use all of the memory, and a killed process does not leave it behind. Its memory
    is freed when this object is closed or garbage-collected and no process maps the file any longer.
    """

    def __init__(self, size: int = 0, name: str = "sunspot") -> None:
        """Create a file of `size` bytes, which use no memory until they are accessed.

        If `name` is unique, other processes can find the file once `complete` has been called.
        """
        self.close: Callable[[], object]
        try:
            self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.close = weakref.finalize(self, os.close, self._descriptor)
        except (AttributeError, OSError):
            self._descriptor, self.path = tempfile.mkstemp()
            self.close = weakref.finalize(self, _remove, self._descriptor, self.path)
        os.truncate(self._descriptor, size)

    def write(self, data: bytes | bytearray) -> None:
        """Write data after the previous call's data. The first call writes at the start of the file."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def complete(self) -> None:
        """Mark the content as complete, so that `find_pages` can find it as long as any process maps it."""
        with suppress(AttributeError, OSError):  # temporary files, and systems other than Linux, have no seals
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)


def find_pages(name: str, size: int) -> torch.Tensor | None:
    """Map a file that another process of this user has completed and still maps. Return None if no such file exists.

    A process that maps the file keeps a descriptor open, and Linux lists the descriptors with the file's name in /proc.
    """
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(path) == f"/memfd:{name} (deleted)" and _is_complete(path):
                return map_pages(path, size, shared=True)
    return None


def _is_complete(path: str) -> bool:
    with open(path, "rb") as file:
        return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW)


def map_pages(path: str, size: int, shared: bool = False) -> torch.Tensor:
    """Return the first `size` bytes of a file as a uint8 tensor. Changes are private unless `shared` is True."""
    with open(path, "r+b") as file:
        access = mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY
        return torch.frombuffer(mmap.mmap(file.fileno(), size, access=access), dtype=torch.uint8)


def _remove(descriptor: int, path: str) -> None:
    os.close(descriptor)
    os.unlink(path)
