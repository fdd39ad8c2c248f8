"""Where runs are kept: a directory or a bucket of Amazon's, Google's or Azure's, behind the same few operations.

A new backend is a module with a `Storage` and a line in BACKENDS (and its scheme in the pattern of STORAGE_PATH).
"""

from sunspot.storage.azure import AzureStorage
from sunspot.storage.base import Storage
from sunspot.storage.google import GoogleStorage
from sunspot.storage.local import LocalStorage
from sunspot.storage.s3 import S3Storage

__all__ = ["Storage", "open_storage"]

BACKENDS: dict[str, type[Storage]] = {
    "": LocalStorage,
    "s3": S3Storage,
    "gs": GoogleStorage,
    "az": AzureStorage,
    "abfs": AzureStorage,
}
"""By the scheme of the storage path; none: a local path."""


def open_storage(storage_path: str) -> Storage:
    """The storage at a local path or `scheme://bucket/prefix`."""
    scheme, separator, _ = storage_path.partition("://")
    return BACKENDS.get(scheme if separator else "", LocalStorage)(storage_path)
