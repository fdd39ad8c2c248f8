"""A multipart upload to S3."""

from __future__ import annotations

import base64
import contextlib
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from sunspot.background import start_thread
from sunspot.storage.base import Errors
from sunspot.storage.parts import Part, PartUpload

if TYPE_CHECKING:
    from botocore.client import BaseClient

NO_PART = 10_000
"""The number of a part that no object has, but those near 5 TiB: what is sent under it never becomes part of one."""

WRONG_CHECKSUM = {"BadDigest", "XAmzContentChecksumMismatch"}
"""S3's error codes for a part that does not match the checksum sent along, and MinIO's."""


class Verification:
    """Whether the server refuses a part that does not match its checksum: proven once for each client."""

    def __init__(self) -> None:
        self._proof: Future[bool] | None = None
        self._lock = threading.Lock()

    def prove(self, refuses_damage: Callable[[], bool]) -> Future[bool]:
        """The proof that there is, or else one by a try in this upload: one that failed may have met another error."""
        with self._lock:
            if self._proof is None or (self._proof.done() and not self._proof.result()):
                self._proof = start_thread(refuses_damage, "storage-part")
            return self._proof


class MultipartUpload(PartUpload):
    """A multipart upload."""

    def __init__(self, client: BaseClient, bucket: str, key: str, errors: Errors, verification: Verification) -> None:
        self._client: Any = client
        self._target, self._errors = {"Bucket": bucket, "Key": key}, errors
        with errors():
            upload = self._client.create_multipart_upload(**self._target, ChecksumAlgorithm="CRC32")
        self._id = upload["UploadId"]
        self._verifies = verification.prove(self._refuses_damage)

    def send(self, number: int, body: bytes | bytearray) -> Part:
        checksum = zlib.crc32(body)
        with self._errors():
            answer = self._upload_part(number, body, checksum)
        return Part(number, answer["ETag"], checksum)

    def _upload_part(self, number: int, body: bytes | bytearray, checksum: int) -> Any:
        return self._client.upload_part(
            **self._target, UploadId=self._id, PartNumber=number, Body=body, ChecksumCRC32=as_base64(checksum)
        )

    def _refuses_damage(self) -> bool:
        """Try a part that is not the one whose checksum comes with it, under a number that the object will not have."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._upload_part(NO_PART, b"damaged", zlib.crc32(b"whole"))
        except ClientError as error:
            return error.response["Error"]["Code"] in WRONG_CHECKSUM
        except BotoCoreError:  # then parts fail too, or what arrived is read back
            pass
        return False

    def complete(self, parts: Sequence[Part], size: int) -> bool:
        from botocore.exceptions import ClientError

        verified = self._verifies.result()
        listed = [
            {"PartNumber": number, "ETag": etag, "ChecksumCRC32": as_base64(checksum)}
            for number, etag, checksum in sorted(parts)
        ]
        with self._errors():  # not begun when the upload was given up meanwhile
            try:
                self._client.complete_multipart_upload(
                    **self._target, UploadId=self._id, MultipartUpload={"Parts": listed}
                )
            except ClientError as error:
                # An earlier try may have succeeded and its answer been lost: no upload is left, but the object is.
                if error.response["Error"]["Code"] != "NoSuchUpload" or not self._is_there(size):
                    raise
        return verified

    def _is_there(self, size: int) -> bool:
        from botocore.exceptions import ClientError

        with contextlib.suppress(ClientError):
            return bool(self._client.head_object(**self._target)["ContentLength"] == size)
        return False

    def abort(self) -> None:
        wait([self._verifies])
        with contextlib.suppress(Exception):  # if that fails too, the bucket's lifecycle rules have to free the space
            self._client.abort_multipart_upload(**self._target, UploadId=self._id)


def as_base64(checksum: int) -> str:
    """A CRC-32 as S3 writes it."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()
