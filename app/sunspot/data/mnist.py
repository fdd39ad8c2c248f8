"""DATASET=mnist: reads torchvision's MNIST from DATA_ROOT, and downloads it if it is missing."""

import hashlib
import json
import logging
import os
import shutil
import socket
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from sunspot.data.fingerprint import digest, digest_array
from sunspot.errors import DataError, shorten

CLASSES = 10

FILES = tuple(f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
"""The names of the four unpacked files."""

GROUP_ROWS = 4096
"""Rows in a row group. The files themselves have no groups."""

SOCKET_TIMEOUT_S = 15
"""Seconds to wait for a response before a server counts as unreachable."""

WAIT_S = 900
"""Seconds to wait for another process to download the files."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MnistSource:
    """A `Source` of one split of MNIST. Each node reads its own files, and downloads them if they are missing."""

    data_root: str
    split: str
    "The prefix of the split's file names: train or t10k."
    row_groups: tuple[int, ...]
    shape: tuple[int, int, int]
    classes: int = CLASSES

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the file names and the shape, then a '-' and a digest of all bytes."""
        names = (f"{self.split}-images-idx3-ubyte", f"{self.split}-labels-idx1-ubyte")
        layout = json.dumps([names, self.row_groups, self.shape])
        content = digest(*(digest_array(array).encode() for array in _load(self.data_root, self.split)))
        return f"{hashlib.sha256(layout.encode()).hexdigest()[:16]}-{content}"

    def where(self, group: int, row: int) -> str:
        return f"{_raw(self.data_root) / self.split}-images-idx3-ubyte, row {group * GROUP_ROWS + row}"

    def read(self, group: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        images, labels = _load(self.data_root, self.split)
        if len(labels) != sum(self.row_groups):
            raise DataError(f"{_raw(self.data_root)} has changed since it was opened; restart the run")
        mine = slice(group * GROUP_ROWS, group * GROUP_ROWS + self.row_groups[group])
        image = images[mine]
        label = labels[mine]
        return {"image": image, "label": label} if rows is None else {"image": image[rows], "label": label[rows]}


def open_mnist(data_root: str) -> tuple[MnistSource, MnistSource]:
    """Open the 60,000 training and 10,000 held-out digits. Raises `DataError` if the files are missing or damaged."""
    data_root = os.path.abspath(os.path.expanduser(data_root))
    _load.cache_clear()  # the files might have been replaced
    sources = []
    for split in ("train", "t10k"):
        images, labels = _load(data_root, split)
        groups = tuple(min(GROUP_ROWS, len(labels) - begin) for begin in range(0, len(labels), GROUP_ROWS))
        sources.append(MnistSource(data_root, split, groups, images.shape[1:]))
    return sources[0], sources[1]


@lru_cache(maxsize=4)
def _load(data_root: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a split's images, uint8 [n, 1, H, W], and labels, int64 [n]."""
    from torchvision.datasets import MNIST

    if _find_missing(data_root):
        _download(data_root)
    try:
        digits = MNIST(data_root, train=split == "train")
        images = digits.data.numpy()[:, None]
        labels = digits.targets.numpy().astype(np.int64)
        if not len(images) == len(labels) > 0:
            raise ValueError(f"{split}: {len(images)} images but {len(labels)} labels")
        if labels.max() >= CLASSES:
            raise ValueError(f"{split}: label {labels.max()} is larger than {CLASSES - 1}")
    except Exception as error:  # torchvision's parser raises many kinds of errors
        raise DataError(
            f"{_raw(data_root)}: the {split} files are damaged: {shorten(error)}; delete the folder to download them "
            "again"
        ) from error
    return images, labels


def _raw(data_root: str) -> Path:
    return Path(data_root) / "MNIST" / "raw"


def _find_missing(data_root: str) -> list[str]:
    return [name for name in FILES if not (_raw(data_root) / name).exists()]


def _download(data_root: str) -> None:
    """Download the missing files, or wait until another process has downloaded them.

    The files are unpacked in a temporary folder and then moved, so a file in its final location is complete.
    """
    from filelock import FileLock, Timeout

    aside = Path(data_root) / ".mnist-download"
    try:
        os.makedirs(data_root, exist_ok=True)
        log.warning("downloading MNIST into %s; if another process is doing so, waiting up to %d s", data_root, WAIT_S)
        with FileLock(os.path.join(data_root, ".mnist.lock"), timeout=WAIT_S):
            missing = _find_missing(data_root)
            if not missing:
                return
            shutil.rmtree(aside, ignore_errors=True)
            try:
                if _raw(data_root).exists():
                    shutil.copytree(_raw(data_root), _raw(str(aside)))  # torchvision only unpacks existing .gz files
                _fetch(str(aside))
                _raw(data_root).mkdir(parents=True, exist_ok=True)
                for name in missing:
                    os.replace(_raw(str(aside)) / name, _raw(data_root) / name)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except Timeout as error:
        raise DataError(
            f"{error.lock_file}: another process that downloads MNIST has held this lock for {WAIT_S} s; stop that "
            f"process, or copy the files into {_raw(data_root)} yourself"
        ) from error
    except Exception as error:  # torchvision's mirrors raise many kinds of errors
        failed = DataError(
            f"{_raw(data_root)} lacks MNIST files, and torchvision cannot download them: {shorten(error)}; copy the "
            f"unpacked files there ({', '.join(FILES)}), or set SUNSPOT_DATASET=sample, which needs no download"
        )
        failed.final = False  # the mirror might respond to the next attempt
        raise failed from error


def _fetch(folder: str) -> None:
    """Download MNIST with torchvision, which verifies checksums but sets no timeout."""
    from torchvision.datasets import MNIST

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SOCKET_TIMEOUT_S)
    try:
        MNIST(folder, download=True)
    finally:
        socket.setdefaulttimeout(before)
