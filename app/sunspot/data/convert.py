"""Converts a dataset to Parquet that is fast to read, or indexes tar files (`python -m sunspot.data.convert`)."""

import contextlib
import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sunspot.background import AT_ONCE, map_parallel
from sunspot.command_line import CommandParser
from sunspot.data.columns import SCALED
from sunspot.data.dataset_files import list_folders
from sunspot.data.images import USUAL_SIDE, decode_picture
from sunspot.data.labels import CLASS_NAMES
from sunspot.data.mnist import open_mnist
from sunspot.data.splits import OTHER_HELD_OUT, pair_folders
from sunspot.data.table_files import PictureFolder, rows_per_group
from sunspot.data.tar_index import index_shards
from sunspot.errors import DataError, SettingsError, StorageError, run_and_exit, shorten
from sunspot.formatting import plural, some_of
from sunspot.log import print_logs

log = logging.getLogger("sunspot.data.convert")  # __name__ is "__main__" if this module runs as a program

FILE_BYTES = 256 << 20
"""Largest number of bytes of pixels in a file. Larger datasets get several files."""

DESCRIPTION = """\
Write a dataset as Parquet that is fast to read, or index tar files, which then need no conversion.

    --from mnist [--data-root DIR] OUT            OUT/train/*.parquet and OUT/test/*.parquet
    --from imagefolder --root DIR [--size N] OUT  one folder of images per class; if DIR contains train and test
                                                  (or val), OUT contains train and test too
    --from tar FOLDER                             an index beside each *.tar of samples (WebDataset) in FOLDER, which
                                                  can be a URL

OUT is a new local directory. It appears once all files are complete. Class names are stored in the files' metadata.
Training can also read the image folders directly, but then decodes the images again in every epoch."""

Rows = tuple[np.ndarray, np.ndarray]
"""Images, uint8 [n, H, W] or [n, H, W, 3], and labels, int64 [n]."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("python -m sunspot.data.convert", DESCRIPTION)
    parser.add_argument(
        "--from", dest="form", choices=["mnist", "imagefolder", "tar"], required=True, help="type of dataset"
    )
    parser.add_argument("--data-root", default="data", help="mnist: torchvision's data directory (default: data)")
    parser.add_argument("--root", help="imagefolder: folder with the class folders, or with train and test (or val)")
    parser.add_argument(
        "--size", type=int, default=USUAL_SIDE, help="imagefolder: image height and width (default: %(default)s)"
    )
    parser.add_argument(
        "out", metavar="OUT", help="a local directory that does not exist yet; tar: the folder with the tar files"
    )
    given = parser.parse_args(arguments)
    print_logs()
    if given.form == "tar":
        rows = index_shards(given.out)
    elif given.form == "mnist":
        rows = convert_mnist(given.data_root, given.out)
    elif not given.root:
        raise SettingsError("--from imagefolder needs a folder; set it with --root DIR")
    elif given.size < 1:
        raise SettingsError(f"--size must be a positive integer, not {given.size}")
    else:
        rows = convert_image_folder(given.root, given.size, given.out)
    written = [f"{plural(count, 'row')}{' in ' + split if split else ''}" for split, count in rows.items()]
    print(f"{given.out}: {', '.join(written)}")
    return 0


def convert_mnist(data_root: str, out: str) -> dict[str, int]:
    """Write MNIST to `out`, and return the number of rows in each split.

    Raises `SettingsError` if `out` exists, `StorageError` if it cannot be written, and the errors of `open_mnist`.
    """
    with _new_directory(out) as directory:
        written = {}
        for split, source in zip(("train", "test"), open_mnist(data_root), strict=True):
            groups = (source.read(group) for group in range(len(source.row_groups)))
            rows = ((group["image"][:, 0], group["label"]) for group in groups)
            written[split] = write_files(directory / split, rows, [str(digit) for digit in range(source.classes)])
        return written


def convert_image_folder(root: str, size: int, out: str) -> dict[str, int]:
    """Write image folders to `out`, and return the number of rows in each split.

    Images are scaled and cropped to `size` x `size` pixels, and become RGB unless all of them are gray. Rows are
    shuffled once, because folders are sorted by class and a streaming reader only shuffles within a window. Raises
    `DataError` for invalid images or folders.
    """
    folders = {split: PictureFolder(str(folder)) for split, folder in _split_folders(Path(root)).items()}
    labels = {split: folder.read(["label"])["label"].to_pylist() for split, folder in folders.items()}
    for folder in folders.values():
        folder.folders.refuse_lost_classes()
        for note in folder.notes:
            log.warning(note)
    next(iter(folders.values())).folders.refuse_wrong_level()
    classes = sorted(set(next(iter(labels.values()))))
    unknown = set(labels.get("test", [])) - set(classes)
    if unknown:
        raise DataError(
            f"{folders['test'].path}/{min(unknown)} is not a class of the training images ({some_of(classes)})"
        )
    number = {name: label for label, name in enumerate(classes)}
    channels = 1 if all(len(folder.find_dims(size)) == 2 for folder in folders.values()) else 3
    with _new_directory(out) as directory:
        written = {}
        for split, folder in folders.items():
            numbers = np.array([number[name] for name in labels[split]])
            rows = _load_images(folder, numbers, (channels, size, size))
            written[split] = write_files(directory / split, rows, classes, scaled=True)
        return written


# -------------------------------------------------------------------------------------------------------------- writing


def write_files(directory: Path, rows: Iterator[Rows], classes: list[str], scaled: bool = False) -> int:
    """Write batches of rows as part-00000.parquet and so on, and return the number of rows.

    All files are synced to disk before this function returns.
    """
    directory.mkdir(parents=True, exist_ok=True)
    total = files = in_file = 0
    writer = None
    for images, labels in rows:
        about = {CLASS_NAMES: json.dumps(classes).encode(), **({SCALED: b"true"} if scaled else {})}
        table = to_table(images, labels, about)
        if writer and in_file + images.nbytes > FILE_BYTES:
            writer.close()
            writer = None
        if writer is None:
            writer = open_writer(directory / f"part-{files:05}.parquet", table.schema, compression_level=3)
            files += 1
            in_file = 0
        writer.write_table(table, row_group_size=rows_per_group(images[0].nbytes))
        in_file += images.nbytes
        total += len(table)
    if writer:
        writer.close()
    for path in (*directory.iterdir(), directory):
        _fsync(path)
    return total


def to_table(images: np.ndarray, labels: np.ndarray, metadata: dict[bytes, bytes]) -> pa.Table:
    """Return a table with the columns `image`, a fixed_shape_tensor of uint8, and `label`, int64."""
    image = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(images))
    return pa.table({"image": image, "label": pa.array(labels, pa.int64())}).replace_schema_metadata(metadata)


def open_writer(path: Path, schema: pa.Schema, compression_level: int) -> pq.ParquetWriter:
    """Open a writer for the tables of `to_table`.

    Parquet stores a uint8 as four bytes. BYTE_STREAM_SPLIT separates the three zero bytes, which makes MNIST's files a
    third smaller and a sixth faster to read.
    """
    encoding = {"image.list.element": "BYTE_STREAM_SPLIT"}
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=compression_level,
        use_dictionary=False,
        column_encoding=encoding,
    )


@contextlib.contextmanager
def _new_directory(out: str) -> Iterator[Path]:
    """Context manager that yields a temporary directory. It is renamed to `out`, or deleted after an error.

    Raises `SettingsError` if `out` exists, and `StorageError` if it cannot be written.
    """
    if "://" in out:
        raise SettingsError(f"{out} is a URL; use a local directory, and copy it afterwards (aws s3 cp --recursive)")
    target = Path(os.path.abspath(os.path.expanduser(out)))
    if os.path.lexists(target):
        raise SettingsError(f"{target} already exists; remove it, or use another directory")
    # The leading dot hides the directory from list_files. mkdtemp would make it readable only by its owner.
    aside = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    try:
        aside.mkdir(parents=True)
        yield aside
        _fsync(aside)
        os.rename(aside, target)
        _fsync(target.parent)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {shorten(error)}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -------------------------------------------------------------------------------------------------------- image folders


def _split_folders(root: Path) -> dict[str, Path]:
    """Return each split's folder of class folders, keyed by split. Without splits, the only key is ''."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; set --root to the folder that contains the class folders")
    names = list_folders(str(root))
    pair = pair_folders(names) or pair_folders(names, OTHER_HELD_OUT)
    if not pair:
        return {"": root}
    for name in pair.others:
        log.warning("%s is not converted, because %s/ contains the held-out rows", root / name, pair.test)
    return {"train": root / pair.train, "test": root / pair.test}


def _load_images(folder: PictureFolder, labels: np.ndarray, shape: tuple[int, int, int]) -> Iterator[Rows]:
    """Yield the images and labels in random order, one row group at a time."""

    def load(row: int) -> np.ndarray:
        path = folder.name_row(row)
        try:
            return decode_picture(Path(path).read_bytes(), shape, scales=True)
        except DataError as error:
            raise DataError(f"{path} {error}") from error

    order = np.random.default_rng(0).permutation(len(labels))
    per_batch = rows_per_group(math.prod(shape))
    for batch in np.split(order, range(per_batch, len(order), per_batch)):
        pixels = np.stack(map_parallel(load, batch, max(AT_ONCE, os.cpu_count() or 1)))
        yield pixels[:, 0] if len(pixels[0]) == 1 else pixels.transpose(0, 2, 3, 1), labels[batch]


if __name__ == "__main__":
    run_and_exit(main)
