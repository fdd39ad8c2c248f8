"""Writes small datasets in the supported formats, reads them, and checks their errors."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from sunspot.data.source import Source


def random_images(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def idx(values: np.ndarray) -> bytes:
    magic = 2051 if values.ndim == 3 else 2049
    return np.array([magic, *values.shape], ">u4").tobytes() + values.tobytes()


def put_mnist(data_root: Path, train: int = 5000, test: int = 10, pack: bool = False) -> dict[str, np.ndarray]:
    """Write small files in MNIST's format and return their images."""
    raw = data_root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    images = {}
    for split, rows in (("train", train), ("t10k", test)):
        images[split] = random_images(rows, 4, 4)
        labels = (np.arange(rows) % 10).astype(np.uint8)
        for name, values in ((f"{split}-images-idx3-ubyte", images[split]), (f"{split}-labels-idx1-ubyte", labels)):
            content = idx(values)
            (raw / f"{name}{'.gz' * pack}").write_bytes(gzip.compress(content) if pack else content)
    return images


def everything(source: Source) -> dict[str, np.ndarray]:
    groups = [source.read(group) for group in range(len(source.row_groups))]
    return {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}


def refusal(kind: type[Exception], *parts: str) -> object:
    """Expect an error with a short, one-line message that contains all the parts, in any order."""
    return pytest.raises(kind, match="".join(f"(?=.*{re.escape(part)})" for part in parts))
