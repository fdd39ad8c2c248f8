"""Writes the same rows of small images as Parquet files and as tar shards."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from sunspot.data.convert import main


def image_rows(rows: int, side: int = 8) -> pa.Table:
    """Return learnable images in three classes as PNG, with their labels and a number."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 100, (rows, side, side), dtype=np.uint8)
    labels = np.arange(rows) % 3
    pixels[np.arange(rows), labels] = 255
    return pa.table({"image": [encode(each) for each in pixels], "label": labels, "size": np.arange(rows) / 2})


def encode(pixels: np.ndarray, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def write_parquet(folder: Path, rows: pa.Table, files: int, group: int = 64) -> str:
    """Write the rows in files of equal size, as 000.parquet and so on, and return the folder."""
    folder.mkdir(parents=True)
    each = len(rows) // files
    for number in range(files):
        pq.write_table(rows[number * each : (number + 1) * each], folder / f"{number:03}.parquet", row_group_size=group)
    return str(folder)


def write_shards(folder: Path, rows: pa.Table, files: int) -> str:
    """Write the rows in indexed tar files of equal size, as 000.tar and so on, and return the folder."""
    folder.mkdir(parents=True)
    each = len(rows) // files
    for number in range(files):
        members: list[tuple[str, bytes]] = []
        for row, values in enumerate(rows[number * each : (number + 1) * each].to_pylist()):
            key = f"{number:03}/{row:05}"
            fields = json.dumps({"size": values["size"]}).encode()
            members += [(f"{key}.png", values["image"]), (f"{key}.cls", b"%d\n" % values["label"])]
            members += [(f"{key}.json", fields)]
        write_tar(folder / f"{number:03}.tar", members)
    assert main(["--from", "tar", str(folder)]) == 0
    return str(folder)


def write_tar(path: Path, members: Iterable[tuple[str, Any]]) -> Path:
    """Write a tar file. A member whose content is text is a link to that path."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            if isinstance(content, str):
                header.type = tarfile.SYMTYPE
                header.linkname = content
                archive.addfile(header)
            else:
                header.size = len(content)
                archive.addfile(header, io.BytesIO(content))
    return path
