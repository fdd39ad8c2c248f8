"""Where runs are kept: a directory or an S3 bucket, behind the same few operations."""

from __future__ import annotations

from app.storage.base import Storage
from app.storage.local import LocalStorage
from app.storage.s3 import S3Storage


def open_storage(storage_path: str) -> Storage:
    """The storage at a local path or `s3://bucket/prefix`."""
    return S3Storage(storage_path) if storage_path.startswith("s3://") else LocalStorage(storage_path)
