"""Where runs are kept: a directory or a bucket of Amazon's, Google's or Azure's, behind the same few operations.

A new backend is a module with a `Storage` and a line in BACKENDS (and its scheme in the pattern of STORAGE_PATH).
"""

import importlib

from sunspot.errors import RefusedStorageError
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
"""Module and class by the scheme of the storage path, and the extra that installs what the module imports (none: it
comes with Sunspot); no scheme: a local path. A module brings its cloud's client, which is slow to import: only the one
that is needed is."""


def open_storage(storage_path: str, follow_links: bool = False) -> Storage:
    """Open the storage at a local path or `scheme://bucket/prefix`.

    Use `follow_links` only to read files that the user has named. They may be links to anywhere, as in Hugging Face's
    cache.
    """
    scheme, separator, _ = storage_path.partition("://")
    if not separator or scheme not in BACKENDS:
        return LocalStorage(storage_path, follow_links)
    module, name, extra = BACKENDS[scheme]
    try:
        backend: type[Storage] = getattr(importlib.import_module(f"sunspot.storage.{module}"), name)
    except ImportError as error:
        if not extra:
            raise
        missing = f"{storage_path}: {module.capitalize()}'s client is not installed"
        raise RefusedStorageError(f"{missing}; {how_to_install(extra)}") from error
    return backend(storage_path)
