"""Storage for runs: a local directory or a bucket, behind one interface (`Storage`).

`open_storage` chooses the backend by the scheme of the storage path. The modules are:

    base.py      the interface `Storage`, and how to add a backend
    local.py     a directory, local or on NFS
    bucket.py    the base class of the object stores in s3.py, google.py and azure.py
    limits.py    deadlines and retries for reading and writing
    prove.py     checks that storage is suitable for runs, and measures its speed for `sunspot doctor`
"""

import importlib
import re

from sunspot.errors import RefusedStorageError, SettingsError
from sunspot.extras import how_to_install
from sunspot.storage.base import Storage
from sunspot.storage.local import LocalStorage

__all__ = ["Storage", "open_storage"]

BACKENDS = {
    "s3": ("s3", "S3Storage", ""),
    "gs": ("google", "GoogleStorage", "gcs"),
    "az": ("azure", "AzureStorage", "azure"),
    "abfs": ("azure", "AzureStorage", "azure"),
}
"""A mapping from URL schemes to the backend's module, class and extra.

The extra installs the cloud's client, and is empty if Sunspot depends on the client. Modules are imported lazily,
because the clients are slow to import.
"""

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_storage(storage_path: str, follow_links: bool = False) -> Storage:
    """Open the storage at a local path or `scheme://bucket/prefix`.

    If `follow_links` is True, links may point outside the storage path, as they do in Hugging Face's cache. Set it only
    for files that the user chose. Raises `SettingsError` for an unknown scheme, and `RefusedStorageError` if the
    backend's client is not installed.
    """
    url = SCHEME.match(storage_path)
    if not url:
        return LocalStorage(storage_path, follow_links)
    scheme = url[1]
    if scheme not in BACKENDS:
        known = ", ".join(f"{each}://" for each in BACKENDS)
        raise SettingsError(f"{storage_path}: the scheme {scheme}:// is not supported; use {known} or a local path")
    module, name, extra = BACKENDS[scheme]
    try:
        backend: type[Storage] = getattr(importlib.import_module(f"sunspot.storage.{module}"), name)
    except ImportError as error:
        if not extra:
            raise
        missing = f"{storage_path}: {module.capitalize()}'s client is not installed"
        raise RefusedStorageError(f"{missing}; {how_to_install(extra)}") from error
    return backend(storage_path)
