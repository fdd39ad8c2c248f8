"""Storage for runs: a local directory, or a bucket of Amazon, Google or Azure, behind one interface (`Storage`).

`open_storage` chooses the backend by the scheme of the storage path:

    base.py      `Storage`, what a run needs of its storage, and the rules for a new backend
    local.py     a directory, local or on NFS
    bucket.py    what the object stores share, and the base class of their backends: s3.py, google.py, azure.py
    limits.py    deadlines and retries for work on storage
    prove.py     checks that a storage does what runs rely on, and the measurements of `sunspot doctor`
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
"""Module, class and extra of each scheme's backend. The extra installs the cloud's client; it is empty if that comes
with Sunspot. Only the module that is needed is imported, because the clients are slow to import."""

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_storage(storage_path: str, follow_links: bool = False) -> Storage:
    """Open the storage at a local path or `scheme://bucket/prefix`.

    Use `follow_links` only to read files that the user has named. They may be links to anywhere, as in Hugging Face's
    cache. Raises `SettingsError` for an unknown scheme, and `RefusedStorageError` if the backend's client is not
    installed.
    """
    url = SCHEME.match(storage_path)
    if not url:
        return LocalStorage(storage_path, follow_links)
    scheme = url[1]
    if scheme not in BACKENDS:
        known = ", ".join(f"{each}://" for each in BACKENDS)
        raise SettingsError(f"{storage_path}: no storage has the scheme {scheme}://; use {known} or a local path")
    module, name, extra = BACKENDS[scheme]
    try:
        backend: type[Storage] = getattr(importlib.import_module(f"sunspot.storage.{module}"), name)
    except ImportError as error:
        if not extra:
            raise
        missing = f"{storage_path}: {module.capitalize()}'s client is not installed"
        raise RefusedStorageError(f"{missing}; {how_to_install(extra)}") from error
    return backend(storage_path)
