"""DATASET=mnist: the published files as torchvision keeps them in DATA_sunspot/MNIST/raw, downloaded if missing."""

import contextlib
import gzip
import hashlib
import json
import logging
import math
import os
import shutil
import socket
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from sunspot.data.fingerprint import digest, digest_array
from sunspot.errors import DataError, shorten

CLASSES = 10

GROUP_ROWS = 4096
"""Rows of a row group: the files themselves have none."""

FILES = tuple(f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))

HEADERS = {"images": (2051, 4), "labels": (2049, 2)}
"""How files of each kind begin: the magic number, and the count of big-endian numbers including it."""

SOCKET_TIMEOUT_S = 15
"""A server that is silent for so long is given up."""

WAIT_S = 900
"""How long a process waits for the one that downloads."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MnistSource:
    """One split of MNIST; a `Source`. Each node reads its own files, and downloads them if missing."""

    data_root: str
    split: str
    "The files' name for it: train or t10k."
    row_groups: tuple[int, ...]
    shape: tuple[int, int, int]
    classes: int = CLASSES

    @cached_property
    def fingerprint(self) -> str:
        """Of the files' names and shape and, after a '-', of every byte: 0.1 s for the training digits."""
        layout = json.dumps([_names(self.split), self.row_groups, self.shape])
        content = digest(*(digest_array(array).encode() for array in _load(self.data_root, self.split)))
        return f"{hashlib.sha256(layout.encode()).hexdigest()[:16]}-{content}"

    def where(self, group: int, row: int) -> str:
        return f"{_raw(self.data_root) / _names(self.split)[0]}, row {group * GROUP_ROWS + row}"

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        images, labels = _load(self.data_root, self.split)
        if len(labels) != sum(self.row_groups):
            raise DataError(f"{self.where(0, 0)}: has changed since it was opened; start the run again")
        mine = slice(group * GROUP_ROWS, group * GROUP_ROWS + self.row_groups[group])
        image, label = images[mine], labels[mine]
        return {"image": image, "label": label} if rows is None else {"image": image[rows], "label": label[rows]}


def open_mnist(data_root: str) -> tuple[MnistSource, MnistSource]:
    """The 60,000 training and 10,000 held-out digits; raises `DataError` if neither found nor downloaded."""
    data_root = os.path.abspath(os.path.expanduser(data_root))
    _load.cache_clear()  # the files may have been replaced
    sources = []
    for split in ("train", "t10k"):
        images, labels = _load(data_root, split)
        groups = tuple(min(GROUP_ROWS, len(labels) - begin) for begin in range(0, len(labels), GROUP_ROWS))
        sources.append(MnistSource(data_root, split, groups, images.shape[1:]))
    return sources[0], sources[1]


def _raw(data_root: str) -> Path:
    return Path(data_root) / "MNIST" / "raw"


def _names(split: str) -> tuple[str, str]:
    return f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte"


@lru_cache(maxsize=4)
def _load(data_root: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (uint8 [n, 1, H, W], read-only: a memory map unless gzipped) and labels (int64 [n])."""
    _make_complete(data_root)
    images, labels = (_parse(_raw(data_root), name) for name in _names(split))
    if len(images) != len(labels):
        raise DataError(f"{_raw(data_root) / _names(split)[1]}: {len(labels)} labels for {len(images)} images")
    wrong = labels >= CLASSES
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{_raw(data_root) / _names(split)[1]}, row {row}: label {labels[row]}; labels are 0 to {CLASSES - 1}"
        )
    return images[:, None], labels.astype(np.int64)


def _parse(folder: Path, name: str) -> np.ndarray:
    """A file, plain or gzipped, as uint8 in the shape that its header gives.

    Raises `FileNotFoundError` if there is neither, `DataError` if it is incomplete.
    """
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
        try:
            content = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: damaged: {shorten(error)}") from error
    else:
        content = np.asarray(np.memmap(path, np.uint8, mode="r")) if path.stat().st_size else np.empty(0, np.uint8)
    magic, numbers = HEADERS["images" if "images" in name else "labels"]
    header = struct.unpack(f">{numbers}I", content[: 4 * numbers].tobytes()) if len(content) >= 4 * numbers else (0,)
    if header[0] != magic or math.prod(header[1:]) != len(content) - 4 * numbers or not len(content) > 4 * numbers:
        raise DataError(f"{path}: damaged: {len(content)} bytes do not match its header")
    return content[4 * numbers :].reshape(header[1:])


def _faults(data_root: str) -> list[str]:
    """What is wrong with each of the four files; empty if all are complete."""
    faults = []
    for name in FILES:
        try:
            _parse(_raw(data_root), name)
        except FileNotFoundError:
            faults.append(f"{name}: missing")
        except OSError as error:
            faults.append(f"{name}: {error.strerror}")
        except DataError as error:
            faults.append(str(error))
    return faults


# ------------------------------------------------------------------------------------------------------------- download


def _make_complete(data_root: str) -> None:
    """Download missing or damaged files; of all processes that share DATA_ROOT one does, the others wait."""
    faults = _faults(data_root)
    if not faults:
        return
    try:
        os.makedirs(data_root, exist_ok=True)
        with _download_lock(data_root):
            faults = _faults(data_root)
            if faults:
                _download(data_root)
    except Exception as error:  # torchvision's mirrors fail in many ways
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"MNIST is not complete in {_raw(data_root)} ({'; '.join(faults)}), and torchvision cannot download it: "
            f"{shorten(error)}. Put the four files (or their .gz) there: "
            f"{', '.join((*_names('train'), *_names('t10k')))}; or set SUNSPOT_DATASET=sample, which needs no download"
        ) from error


@contextlib.contextmanager
def _download_lock(data_root: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(os.path.join(data_root, ".mnist.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log.warning("waiting up to %d s for another process to download MNIST into %s", WAIT_S, data_root)
        try:
            lock.acquire(timeout=WAIT_S)
        except Timeout as error:
            raise DataError(
                f"{lock.lock_file}: another process has held it for {WAIT_S} s to download MNIST into {data_root}; "
                "end that process, or put the files there by hand"
            ) from error
    try:
        yield
    finally:
        lock.release()


def _download(data_root: str) -> None:
    """Download to a temporary folder, then move the files: one in its final place is complete."""
    aside = Path(data_root) / ".mnist-download"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        log.warning("downloading MNIST into %s", data_root)
        _fetch(str(aside))
        faults = _faults(str(aside))
        if faults:
            raise OSError(f"the download is not complete: {'; '.join(faults)}")
        _raw(data_root).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            os.replace(_raw(str(aside)) / name, _raw(data_root) / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fetch(folder: str) -> None:
    """torchvision's own download, with checksums. It sets no timeout itself."""
    from torchvision.datasets import MNIST

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SOCKET_TIMEOUT_S)
    try:
        MNIST(folder, download=True)
    finally:
        socket.setdefaulttimeout(before)
