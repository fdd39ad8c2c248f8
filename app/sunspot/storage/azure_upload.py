"""An upload in parts to Azure Blob Storage: blocks of the blob, which one request makes its content."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

from sunspot.storage.base import Errors
from sunspot.storage.parts import Part, PartUpload


class BlockUpload(PartUpload):
    """An upload in parts.

    Blocks belong to a blob and not to an upload: of two writers of one blob, the first to complete takes away the
    blocks of the other, which then fails. Checkpoints have names of their own, so that only happens to tries of one.
    """

    def __init__(self, blob: Any, errors: Errors, token: str) -> None:
        """`token` tells its blocks from those of other uploads of the blob (`make_token`)."""
        self._blob, self._errors = blob, errors
        self._token = token

    def send(self, number: int, body: bytes | bytearray) -> Part:
        with self._errors():
            self._blob.stage_block(self._block(number), bytes(body), validate_content="md5")
        return Part(number, "")

    def complete(self, parts: Sequence[Part], size: int) -> bool:
        from azure.core.exceptions import HttpResponseError
        from azure.storage.blob import BlobBlock

        with self._errors():
            try:
                self._blob.commit_block_list([BlobBlock(block_id=self._block(part.number)) for part in sorted(parts)])
            except HttpResponseError as error:
                # An earlier try may have succeeded and its answer been lost: then no block is left, but the blob is.
                if error.error_code != "InvalidBlockList" or self._blob.get_blob_properties().size != size:
                    raise
        return True

    def abort(self) -> None:
        with contextlib.suppress(Exception):  # or when it was given up: a later try may be sending blocks
            self.remove_blocks()

    def remove_blocks(self) -> None:
        """Free the blocks of a blob that was never committed: only a blob's end, or a week, does that."""
        from azure.core import MatchConditions
        from azure.core.exceptions import ResourceExistsError, ResourceModifiedError, ResourceNotFoundError

        committed_meanwhile = (ResourceExistsError, ResourceModifiedError, ResourceNotFoundError)
        with self._errors(), contextlib.suppress(*committed_meanwhile):
            empty = self._blob.commit_block_list([], match_condition=MatchConditions.IfMissing)
            self._blob.delete_blob(etag=empty["etag"], match_condition=MatchConditions.IfNotModified)

    def _block(self, number: int) -> str:
        return f"{self._token}-{number:05d}"


def make_token() -> str:
    """A token for a new upload, which begins with the time."""
    return f"{int(time.time()):010d}{uuid.uuid4().hex[:22]}"


def latest_of(blocks: Sequence[Any]) -> tuple[float, str]:
    """The latest upload of these blocks: when it was begun, in seconds since the epoch, and its token."""
    token = max(block.id.rpartition("-")[0] for block in blocks)
    return float(token[:10]), token
