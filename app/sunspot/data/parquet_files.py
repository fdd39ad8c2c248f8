"""A dataset's files on disk or in a bucket: listing and opening them, with Arrow's errors turned into ours."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq

from sunspot.errors import DataError, StorageError, shorten

OPEN_FILES = 128
"""Files kept open, with their footers, by each process."""

STATE, MAX_STATE_BYTES = "state.json", 16 << 20
"""What `datasets` writes beside the files of a saved dataset: their names, in order."""

CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, REQUEST_TRIES = 5, 10, 2
"""An S3 server that does not answer is given up after less than 30 s."""

OF_CLIENTS = ("AWS Error", "google::cloud::Status", "Azure Error")
"""What Arrow's errors say when a cloud's client has failed: they are OSErrors without a number, as of damaged files."""


def absolute(location: str) -> str:
    return location.rstrip("/") if "://" in location else os.path.abspath(os.path.expanduser(location))


def join(location: str, name: str) -> str:
    """Return the file `name` below `location`; `location` itself when `name` is empty."""
    return f"{location.rstrip('/')}/{name}" if name else location


def list_files(location: str) -> list[str]:
    """Names of the Parquet files below a folder, sorted; [""] when `location` is a file.

    Of a folder that Hugging Face's `datasets` saved, those that its STATE names, in that order.
    """
    system, path = _file_system(location)
    with parquet_errors(location):
        kind = system.get_file_info(path).type
        if kind == fs.FileType.File:
            return [""]
        if kind == fs.FileType.NotFound:
            raise DataError(
                f"{location}: not found; set DATASET to sample, mnist, or a path or URL of Parquet that exists"
            )
        found = system.get_file_info(fs.FileSelector(path, recursive=True))
    names = [os.path.relpath(info.path, path) for info in found if info.type == fs.FileType.File]
    if STATE in names:
        return _list_saved(location, read_range(join(location, STATE), 0, MAX_STATE_BYTES))
    hidden = ("_", ".")
    names = [n for n in names if n.endswith(".parquet") and not any(p.startswith(hidden) for p in n.split("/"))]
    if not names:
        raise DataError(f"{location}: no *.parquet file in it (names that begin with '_' or '.' are skipped)")
    return sorted(names)


def _list_saved(location: str, state: bytes) -> list[str]:
    """List the files of a saved dataset by the content of its STATE."""
    try:
        names = [str(file["filename"]) for file in json.loads(state)["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{join(location, STATE)}: names no files: {shorten(error)}; save the dataset again") from error
    if not names or any("/" in name for name in names):
        raise DataError(f"{join(location, STATE)}: names no files of its folder; save the dataset again")
    return names


def split_folder(location: str, split: str) -> str:
    """Return the folder of a split when `location` has folders `train` and `test`, else `location` itself."""
    location = absolute(location)
    system, path = _file_system(location)
    with parquet_errors(location):
        infos = system.get_file_info([join(path, name) for name in ("train", "test")])
    return join(location, split) if all(info.type == fs.FileType.Directory for info in infos) else location


def open_file(path: str) -> pq.ParquetFile:
    """Open a reader of its own for each call: readers have state, the open file below them has none."""
    kept = _keep_open(path)
    return pq.ParquetFile(kept.handle, metadata=kept.metadata, pre_buffer=True)


def file_size(path: str) -> int:
    """Bytes of a file."""
    with parquet_errors(path):
        return int(_keep_handle(path).size())


def read_range(path: str, offset: int, length: int) -> bytes:
    """Read some bytes of a file."""
    with parquet_errors(path):
        return bytes(_keep_handle(path).read_at(length, offset))


def forget_open_files() -> None:
    """Open files anew from now on: they may have been rewritten."""
    _keep_handle.cache_clear()
    _keep_open.cache_clear()


@contextlib.contextmanager
def parquet_errors(path: str) -> Iterator[None]:
    """Turn Arrow's errors into ours. It raises OSError both for storage that fails and for damaged files."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: not found; check DATASET and TEST_DATASET") from error
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:  # the last two of names and numbers
        if isinstance(error, OSError) and (error.errno or any(said in str(error) for said in OF_CLIENTS)):
            raise StorageError(f"{path}: cannot be read: {shorten(error)}") from error
        raise DataError(f"{path}: not a Parquet file, or damaged: {shorten(error)}") from error


class _OpenFile(NamedTuple):
    handle: pa.NativeFile
    metadata: pq.FileMetaData


@lru_cache(maxsize=OPEN_FILES)
def _keep_handle(path: str) -> pa.NativeFile:
    system, inner = _file_system(path)
    return system.open_input_file(inner)


@lru_cache(maxsize=OPEN_FILES)
def _keep_open(path: str) -> _OpenFile:
    handle = _keep_handle(path)
    metadata = pq.ParquetFile(handle).metadata
    # Arrow takes a row group's word for the number of its columns, and then reads beyond those of the schema.
    if any(metadata.row_group(number).num_columns != metadata.num_columns for number in range(metadata.num_row_groups)):
        raise DataError(f"{path}: damaged: its row groups have other columns than its schema")
    return _OpenFile(handle, metadata)


def _file_system(location: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or URL, and the path in it."""
    if "://" not in location:
        return fs.LocalFileSystem(), location
    scheme, _, path = location.partition("://")
    if scheme not in CLIENTS or not path:
        raise DataError(f"{location}: set DATASET to a local path or to s3://bucket/prefix, gs://... or az://...")
    connect, names = CLIENTS[scheme]
    return connect(*(os.environ.get(name, "") for name in names)), path


@lru_cache(maxsize=4)
def _s3(endpoint_s3: str, endpoint: str, region: str, default_region: str, authorities: str) -> fs.FileSystem:
    """Connect Arrow's S3 client by the usual AWS environment; it finds the credentials by itself."""
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
    """Connect Arrow's client for Google Cloud Storage with Application Default Credentials; an emulator wants none."""
    scheme, _, host = emulator.rpartition("://")
    return fs.GcsFileSystem(
        anonymous=bool(host),
        scheme=scheme or ("http" if host else "https"),
        endpoint_override=host or None,
        retry_time_limit=timedelta(seconds=REQUEST_TRIES * REQUEST_TIMEOUT_S),
    )


@lru_cache(maxsize=4)
def _azure(connection: str, account: str, key: str) -> fs.FileSystem:
    """Connect Arrow's client for Azure Blob Storage; without a key it finds the identity by itself."""
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
"""File system by the scheme of a URL, and the variables it is made by: when they change, another is made."""
