"""Lists and opens a dataset's files on disk or in a bucket, and translates Arrow's errors."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq

from sunspot.data.disk_cache import read_through_cache
from sunspot.data.images import is_picture
from sunspot.data.splits import refuse_mixed_splits
from sunspot.errors import DataError, StorageError, shorten
from sunspot.formatting import brief, plural
from sunspot.settings import BUCKET_URLS

OPEN_FILES = 128
"""Number of open files, with their footers, that each process caches."""

SUPPORTED = (
    "the path or URL of Parquet, CSV (.csv), JSON lines (.jsonl), tar shards (.tar), an Iceberg table, a folder with "
    "one folder of images per class, or a folder written by Hugging Face's save_to_disk"
)
"""The datasets that DATASET accepts besides the bundled digits and MNIST, for messages."""

KINDS_BY_SUFFIX = {
    (".parquet",): "Parquet",
    (".csv",): "CSV",
    (".jsonl", ".ndjson", ".json"): "JSON lines",
    (".tar",): "tar",
}

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
"""Suffixes of compressed files. Compression inside Parquet adds no suffix."""

DELTA_LOG = "_delta_log/"
"""Folder with the log of a Delta table."""

LANCE = ".lance"
"""Suffix of the data files in a Lance dataset."""

INDEX = ".index"
"""Suffix of a tar file's index. It is appended to the name of the tar file."""

PICTURES = "*/*"
"""The entry in `DatasetFiles.names` that stands for all images of a folder."""

STATE_FILE = "state.json"
"""The file in which `datasets` lists the names of a saved dataset's files, in order."""

MAX_STATE_BYTES = 16 << 20
"""Number of bytes after which reading a STATE_FILE stops."""

DICT_FILE = "dataset_dict.json"
"""The file that `datasets` writes if a folder contains several saved datasets."""

CONNECT_TIMEOUT_S = 5
"""Seconds to wait for a connection to an S3 server."""
REQUEST_TIMEOUT_S = 10
"""Seconds to wait for a server's response."""
REQUEST_TRIES = 2
"""Number of attempts per request. A request to an unresponsive S3 server fails within 30 s."""

CLIENT_ERRORS = ("AWS Error", "google::cloud::Status", "Azure Error")
"""Substrings of Arrow's messages about failed cloud requests.

They distinguish these failures from damaged files, because both are an OSError without an errno.
"""


@dataclass(frozen=True)
class Listing:
    """All files and folders below a folder, sorted by path."""

    sizes: dict[str, int]
    "The size of each file in bytes."
    folders: list[str]
    others: list[str]
    "Paths of anything else, such as broken links and pipes."


class DatasetFiles(NamedTuple):
    """The files to read from a dataset."""

    location: str
    "The dataset's folder or file, as an absolute path or URL."
    names: list[str]
    "Sorted paths below `location`, or [''] if the dataset is a single file."
    notes: tuple[str, ...] = ()
    "Notes for the user about files that are not read."
    field_ids: Mapping[str, int] = {}
    "The field IDs of an Iceberg table's columns, keyed by name. A different ID in a file means a different column."


def absolute(location: str) -> str:
    """Return `location` as a URL without a trailing slash, or as an absolute path."""
    return location.rstrip("/") if "://" in location else os.path.abspath(os.path.expanduser(location))


def join(location: str, name: str) -> str:
    """Return the path of the file `name` below `location`, or `location` itself if `name` is empty."""
    return f"{location.rstrip('/')}/{name}" if name else location


def list_files(location: str) -> DatasetFiles:
    """List a dataset's files, which all have the same format. Raises `DataError` if the format is ambiguous.

    A dataset saved by Hugging Face's `datasets` lists its files, in order, in STATE_FILE. For folders of images, the
    result contains only the name PICTURES. If there are indexed tar files, only tar files are read. Otherwise, if there
    are Parquet files, only Parquet files are read. In both cases, other tables and images are skipped with a note.
    """
    system, path = _file_system(location)
    with arrow_errors(location):
        kind = system.get_file_info(path).type
        if kind == fs.FileType.File:
            _refuse_compressed([location])
            return DatasetFiles(location, [""])
        if kind == fs.FileType.NotFound:
            raise DataError(f"{location} was not found; set SUNSPOT_DATASET to sample, mnist, or {SUPPORTED}")
    listing = list_all(location)
    names = [name for name in listing.sizes if not any(part.startswith(("_", ".")) for part in name.split("/"))]
    _refuse_compressed([join(location, name) for name in names])
    if STATE_FILE in names:
        state = read_range(join(location, STATE_FILE), 0, MAX_STATE_BYTES)
        return DatasetFiles(location, _list_saved_dataset(location, state))
    if DICT_FILE in names:
        splits = sorted({name.partition("/")[0] for name in names if name.endswith("/" + STATE_FILE)})
        fix = f"set SUNSPOT_DATASET to one of them, such as {location}/{splits[0]}"
        raise DataError(f"{location} contains several saved datasets ({', '.join(splits)}); {fix}")
    if any(name.endswith(LANCE) for name in names):
        raise DataError(
            f"{location} is a Lance dataset, which Sunspot cannot read; write it as Parquet, with "
            "pyarrow.dataset.write_dataset(lance.dataset(FOLDER).scanner().to_reader(), OUT, format='parquet')"
        )
    if any(name.startswith(DELTA_LOG) for name in listing.sizes):
        raise DataError(
            f"{location} is a Delta table, whose files also hold rows that were deleted or replaced; write its rows as "
            "Parquet, with pyarrow.parquet.write_table(DeltaTable(FOLDER).to_pyarrow_table(), FILE)"
        )
    kinds = {kind: [name for name in names if _kind_of(name) == kind] for kind in KINDS_BY_SUFFIX.values()}
    first = "tar" if any(name + INDEX in names for name in kinds["tar"]) else "Parquet"  # img2dataset writes both
    if kinds[first]:
        refuse_mixed_splits(location, kinds[first])
        return DatasetFiles(location, kinds[first], _note_unread(location, names, first))
    # A leading "_" only marks files without rows beside Parquet. Images can have any name.
    beside = names if any(kinds.values()) else listing.sizes
    kinds["images"] = [PICTURES] if any("/" in name and is_picture(name) for name in beside) else []
    found = [kind for kind, listed in kinds.items() if listed]
    if len(found) > 1 and all(name.endswith(".json") for name in kinds["JSON lines"]):  # mostly metadata
        found = [kind for kind in found if kind != "JSON lines"]
    if len(found) > 1:
        raise DataError(
            f"{location} contains {' and '.join(found)}; move them to separate folders, or set SUNSPOT_DATASET to "
            "one file"
        )
    if not found:
        picture = next(filter(is_picture, listing.sizes), "")
        outside = f" ({picture} is outside them)" if picture else ""
        raise DataError(
            f"{location} contains no *.parquet, *.csv, *.jsonl or *.tar (names that begin with '_' or '.' are skipped) "
            f"and no folders of images{outside}; set SUNSPOT_DATASET to {SUPPORTED}"
        )
    [chosen] = found
    if chosen == "images":
        return DatasetFiles(location, kinds[chosen])
    refuse_mixed_splits(location, kinds[chosen])
    return DatasetFiles(location, kinds[chosen], _note_unread(location, names, chosen))


def _note_unread(location: str, names: list[str], kind: str) -> tuple[str, ...]:
    """Return a note about the tables and images that are skipped because only files of one `kind` are read."""
    unread = [name for name in names if _kind_of(name) not in ("", kind) or is_picture(name)]
    if not unread:
        return ()
    others = plural(len(unread), "other file")
    return (
        f"{location}: only {kind} files are read; {others} with tables or images, such as {unread[0]}, are skipped",
    )


def _kind_of(path: str) -> str:
    """Return the kind of table that a file's suffix indicates, or an empty string."""
    return next((kind for suffixes, kind in KINDS_BY_SUFFIX.items() if path.lower().endswith(suffixes)), "")


def _refuse_compressed(paths: list[str]) -> None:
    """Raise `DataError` for a compressed table, because its rows would be missing if it were skipped."""
    tables = tuple(suffix for suffixes in KINDS_BY_SUFFIX for suffix in suffixes)
    for path in paths:
        name, suffix = os.path.splitext(path.lower())
        if (suffix in COMPRESSED and name.endswith(tables)) or suffix == ".tgz":
            raise DataError(f"{path} is compressed; unpack it, or move it out of the dataset folder")


def list_all(location: str) -> Listing:
    """List all files and folders below a folder, sorted by path."""
    system, path = _file_system(location)
    with arrow_errors(location):
        if isinstance(system, fs.LocalFileSystem):
            found = list(_walk(path.encode(), ()))
        else:
            found = [(i.path, i.type, i.size) for i in system.get_file_info(fs.FileSelector(path, recursive=True))]
    named = sorted((os.path.relpath(each, path), kind, size) for each, kind, size in found)
    return Listing(
        sizes={name: size for name, kind, size in named if kind == fs.FileType.File},
        folders=[name for name, kind, _ in named if kind == fs.FileType.Directory],
        others=[name for name, kind, _ in named if kind not in (fs.FileType.File, fs.FileType.Directory)],
    )


def list_folders(location: str) -> list[str]:
    """Return the names of a folder's subfolders, or an empty list if `location` is not a folder."""
    system, path = _file_system(location)
    with arrow_errors(location):
        if system.get_file_info(path).type != fs.FileType.Directory:
            return []
        if isinstance(system, fs.LocalFileSystem):
            with os.scandir(path.encode()) as entries:
                return sorted(_decode(entry.name) for entry in entries if entry.is_dir())
        # A non-recursive listing of Google's storage omits folders that are only prefixes of object names (Arrow 26).
        found = system.get_file_info(fs.FileSelector(path, recursive=system.type_name == "gcs"))
    below = [os.path.relpath(info.path, path) + "/" * (info.type == fs.FileType.Directory) for info in found]
    return sorted({name.split("/")[0] for name in below if "/" in name})


def _walk(folder: bytes, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, fs.FileType, int]]:
    """Yield the path, kind and size of each file and folder below a local folder.

    Links are followed. Raises `DataError` if a link leads to one of its parent folders.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            path = _decode(entry.path)
            if entry.is_dir():
                identity = (entry.stat().st_dev, entry.stat().st_ino)
                if identity in above:
                    raise DataError(f"{path} is a link to one of its own parent folders; remove it")
                yield path, fs.FileType.Directory, 0
                yield from _walk(entry.path, (*above, identity))
            elif entry.is_file():
                yield path, fs.FileType.File, entry.stat().st_size
            else:
                yield path, fs.FileType.Unknown, 0


def _decode(name: bytes) -> str:
    """Decode a name as UTF-8 in any locale, like Arrow. Raises `DataError` if it is not valid UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{name.decode(errors='surrogateescape')}: the name is not valid UTF-8; change it") from error


def _list_saved_dataset(location: str, state: bytes) -> list[str]:
    """Return the names of a saved dataset's files from the content of its STATE_FILE."""
    path = join(location, STATE_FILE)
    try:
        names = [str(file["filename"]) for file in json.loads(state)["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} lacks the list of data files: {shorten(error)}; save the dataset again") from error
    if not names:
        raise DataError(f"{path} lists no files; save the dataset again")
    elsewhere = [name for name in names if "/" in name]
    if elsewhere:
        raise DataError(f"{path} lists a file in another folder ({brief(elsewhere[0])}); save the dataset again")
    return names


def open_file(path: str) -> pq.ParquetFile:
    """Return a new reader for a Parquet file.

    The open file and its metadata are cached. The reader is not cached, because a reader has state.
    """
    return pq.ParquetFile(_cached_handle(path), metadata=_cached_metadata(path), pre_buffer=True)


def file_size(path: str) -> int:
    """Return a file's size in bytes."""
    with arrow_errors(path):
        return int(_cached_handle(path).size())


def read_range(path: str, offset: int, length: int) -> bytes:
    """Return up to `length` bytes of a file, starting at `offset`."""
    with arrow_errors(path):
        return bytes(_cached_handle(path).read_at(length, offset))


@contextlib.contextmanager
def open_output(path: str) -> Iterator[pa.NativeFile]:
    """Context manager that opens a file for writing, and replaces any existing file."""
    system, inner = _file_system(path)
    with arrow_errors(path), system.open_output_stream(inner) as file:
        yield file


@contextlib.contextmanager
def open_uncached(path: str) -> Iterator[pa.NativeFile]:
    """Context manager that opens a file without adding it to the cache of open files."""
    with arrow_errors(path), _open(path) as file:
        yield file


def clear_open_files() -> None:
    """Clear the cache of open files. Call this if the files might have been rewritten."""
    _cached_handle.cache_clear()
    _cached_metadata.cache_clear()


@contextlib.contextmanager
def arrow_errors(path: str) -> Iterator[None]:
    """Context manager that raises `StorageError` for Arrow's failed requests, and `DataError` for damaged files."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} was not found; check SUNSPOT_DATASET and SUNSPOT_TEST_DATASET") from error
    # Invalid names raise ValueError, and invalid numbers OverflowError.
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and (error.errno or any(said in str(error) for said in CLIENT_ERRORS)):
            raise StorageError(f"{path} cannot be read: {shorten(error)}") from error
        kind = _kind_of(path)
        known = kind or path.endswith(".arrow")
        also = "" if known else f"; set SUNSPOT_DATASET to {SUPPORTED}"
        raise DataError(f"{path} is not a {kind or 'Parquet'} file, or is damaged: {shorten(error)}{also}") from error


@lru_cache(maxsize=OPEN_FILES)
def _cached_handle(path: str) -> pa.NativeFile:
    return _open(path)


@lru_cache(maxsize=OPEN_FILES)
def _cached_metadata(path: str) -> pq.FileMetaData:
    metadata = pq.ParquetFile(_cached_handle(path)).metadata
    # Arrow trusts a row group's number of columns, and would read beyond the schema's columns.
    if any(metadata.row_group(number).num_columns != metadata.num_columns for number in range(metadata.num_row_groups)):
        raise DataError(f"{path} is damaged: a row group's number of columns differs from the schema's")
    return metadata


def _open(path: str) -> pa.NativeFile:
    """Open a dataset's file for reading. A file in a bucket is read through the disk cache, if there is one."""
    system, inner = _file_system(path)
    if "://" not in path:
        return system.open_input_file(inner)
    return read_through_cache(lambda: system.open_input_file(inner), path)


def _file_system(location: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or URL, and the path inside it."""
    if "://" not in location:
        return fs.LocalFileSystem(), location
    scheme, _, path = location.partition("://")
    if scheme not in CLIENTS or not path:
        raise DataError(f"{location} is not a supported URL; set SUNSPOT_DATASET to a local path, {BUCKET_URLS}")
    connect, names = CLIENTS[scheme]
    return connect(*(os.environ.get(name, "") for name in names)), path


@lru_cache(maxsize=4)
def _s3(endpoint_s3: str, endpoint: str, region: str, default_region: str, authorities: str) -> fs.FileSystem:
    """Return Arrow's S3 client, configured by the usual AWS environment variables. It finds the credentials itself."""
    scheme, _, host = (endpoint_s3 or endpoint).rpartition("://")
    return fs.S3FileSystem(
        region=region or default_region or "us-east-1",
        endpoint_override=host or None,
        scheme=scheme or "https",
        tls_ca_file_path=authorities or None,
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=REQUEST_TIMEOUT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=REQUEST_TRIES),
    )


@lru_cache(maxsize=4)
def _google(emulator: str) -> fs.FileSystem:
    """Return Arrow's client for Google Cloud Storage. Without `emulator`, it uses Application Default Credentials."""
    scheme, _, host = emulator.rpartition("://")
    return fs.GcsFileSystem(
        anonymous=bool(host),
        scheme=scheme or ("http" if host else "https"),
        endpoint_override=host or None,
        retry_time_limit=timedelta(seconds=REQUEST_TRIES * REQUEST_TIMEOUT_S),
    )


@lru_cache(maxsize=4)
def _azure(connection: str, account: str, key: str) -> fs.FileSystem:
    """Return Arrow's client for Azure Blob Storage. Without a key, it finds the credentials itself."""
    given = dict(pair.split("=", 1) for pair in connection.split(";") if "=" in pair)
    endpoint = urlsplit(given.get("BlobEndpoint", ""))
    where = {
        "blob_storage_authority": endpoint.netloc,
        "blob_storage_scheme": endpoint.scheme,
        "dfs_storage_authority": endpoint.netloc.replace(".blob.", ".dfs."),
        "dfs_storage_scheme": endpoint.scheme,
    }
    return fs.AzureFileSystem(
        account_name=given.get("AccountName") or account,
        account_key=given.get("AccountKey") or key or None,
        **(where if endpoint.netloc else {}),
    )


CLIENTS: dict[str, tuple[Callable[..., fs.FileSystem], tuple[str, ...]]] = {
    "s3": (_s3, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE")),
    "gs": (_google, ("STORAGE_EMULATOR_HOST",)),
    "az": (_azure, ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY")),
    "abfs": (_azure, ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY")),
}
"""The function that creates a client for each URL scheme, and the environment variables that the function takes.

A new client is created if a variable changes.
"""
