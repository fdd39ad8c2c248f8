"""Makes app/sunspot/data/sample.parquet, the digits bundled with Sunspot, from the published MNIST files (SAMPLE.md).

    python -m scripts.make_sample --data-root ../shared/data

With the same version of pyarrow, the output is identical to the byte.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np

from sunspot.data.convert import open_writer, to_table
from sunspot.data.image_table import SAMPLE, TRAIN_GROUPS
from sunspot.data.mnist import MnistSource, open_mnist
from sunspot.data.source import read_rows, rows_in
from sunspot.errors import run_and_exit

TRAIN_PER_DIGIT, TEST_PER_DIGIT = 1200, 200

GROUP_ROWS = 1000
"""Number of rows in a row group, so that there are enough groups for several workers to stream."""


def choose(source: MnistSource, per_digit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 [n, 28, 28], and labels, int64 [n]: `per_digit` evenly spaced rows of each digit.

    Their order is that of the files. Equal numbers give all digits the same weight in the accuracy. Even spacing is
    needed because the first half of the held-out digits is easier than the second.
    """
    columns = read_rows(source, 0, rows_in(source))
    images, labels = columns["image"][:, 0], columns["label"]
    by_digit = [np.flatnonzero(labels == digit) for digit in range(source.classes)]
    chosen = np.sort(np.concatenate([rows[np.arange(per_digit) * len(rows) // per_digit] for rows in by_digit]))
    return images[chosen], labels[chosen]


def make_sample(data_root: str, path: Path) -> None:
    """Write the sample. Row groups of training digits come first, and their number is in the metadata."""
    train, test = open_mnist(data_root)
    parts = [choose(train, TRAIN_PER_DIGIT), choose(test, TEST_PER_DIGIT)]
    metadata = {TRAIN_GROUPS: str(len(parts[0][1]) // GROUP_ROWS).encode()}
    tables = [to_table(images, labels, metadata) for images, labels in parts]
    with open_writer(path, tables[0].schema, compression_level=19) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=GROUP_ROWS)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the digits bundled with Sunspot.")
    parser.add_argument("--data-root", required=True, help="directory of torchvision's copy of MNIST")
    parser.add_argument("--out", type=Path, default=SAMPLE)
    given = parser.parse_args()
    make_sample(given.data_root, given.out)
    content = given.out.read_bytes()
    print(f"{given.out}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
