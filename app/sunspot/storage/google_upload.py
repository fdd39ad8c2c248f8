"""An upload in parts to Google Cloud Storage: objects of their own, which the service joins to one without a copy.

Its other ways do not serve: a resumable upload is one stream, and multipart uploads belong to the API for S3's clients.
"""

from __future__ import annotations

import base64
import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any

from sunspot.errors import StorageError
from sunspot.storage.base import Errors, map_parallel
from sunspot.storage.parts import Part, PartUpload

JOINED_AT_ONCE = 32
"""Objects that the service joins by one request, at most (Cloud Storage's documentation, "Composite objects")."""

PART_SUFFIX = ".part"
"""Ends the name of a part's object, so that a lifecycle rule finds what a killed writer left."""

PART_OBJECT = re.compile(r"\.(?P<token>[0-9a-f]{32})\.\d-\d{5}\.part$")
"""The end of a part's name: the upload, how often it was joined, its number."""


class ComposedUpload(PartUpload):
    """An upload in parts."""

    def __init__(self, bucket: Any, name: str, errors: Errors, limits: dict[str, Any], token: str) -> None:
        """`token` tells its parts from those of other uploads of the object."""
        self._bucket, self._name, self._errors, self._limits = bucket, name, errors, limits
        self._token = token

    def send(self, number: int, body: bytes | bytearray) -> Part:
        with self._errors():
            generation = put(self._bucket.blob(self._part_name(0, number)), body, self._limits)
        return Part(number, generation)

    def complete(self, parts: Sequence[Part], size: int) -> bool:
        sources = [(self._part_name(0, part.number), part.version) for part in sorted(parts)]
        level = 0
        while len(sources) > JOINED_AT_ONCE:
            level += 1
            groups = [sources[first : first + JOINED_AT_ONCE] for first in range(0, len(sources), JOINED_AT_ONCE)]
            names = [self._part_name(level, number) for number in range(len(groups))]
            sources = map_parallel(lambda group: (group[0], self._join(*group)), list(zip(names, groups, strict=True)))
        self._join(self._name, sources, size)
        with contextlib.suppress(StorageError):  # they are listed as unfinished, and go with the checkpoint
            self.remove_parts()
        return True

    def _join(self, name: str, sources: Sequence[tuple[str, str]], size: int | None = None) -> str:
        """Make one object of several, by their names and generations; returns its generation."""
        blob = self._bucket.blob(name)
        blobs = [self._bucket.blob(source, generation=int(generation)) for source, generation in sources]
        with self._errors():
            blob.content_type = "application/octet-stream"
            blob.compose(blobs, if_source_generation_match=[source.generation for source in blobs], **self._limits)
        if size is not None and blob.size != size:
            raise StorageError(
                f"gs://{self._bucket.name}/{name}: has {blob.size} bytes of {size} after its parts were joined"
            )
        return str(blob.generation)

    def abort(self) -> None:
        with contextlib.suppress(Exception):  # if that fails too, the bucket's lifecycle rules have to free the space
            self.remove_parts()

    def remove_parts(self) -> None:
        """Delete the objects of the parts."""
        from google.api_core.exceptions import NotFound

        def delete(blob: Any) -> None:
            with contextlib.suppress(NotFound):
                blob.delete(**self._limits)

        with self._errors():
            map_parallel(delete, list(self._bucket.list_blobs(prefix=f"{self._name}.{self._token}.", **self._limits)))

    def _part_name(self, level: int, number: int) -> str:
        return f"{self._name}.{self._token}.{level}-{number:05d}{PART_SUFFIX}"  # PART_OBJECT


def put(blob: Any, body: bytes | bytearray, limits: dict[str, Any], **condition: int) -> str:
    """Write an object and return its generation; raises `ValueError` when other bytes arrived than were sent."""
    from google_crc32c import Checksum

    checksum = base64.b64encode(Checksum(bytes(body)).digest()).decode()
    blob.upload_from_file(
        io.BytesIO(body),
        size=len(body),
        content_type="application/octet-stream",
        checksum="crc32c",
        crc32c_checksum_value=checksum,
        **condition,
        **limits,
    )
    if blob.crc32c != checksum:
        raise ValueError(f"the service has got bytes of CRC-32C {blob.crc32c} for {checksum}")
    return str(blob.generation)
