"""Large objects in S3, cut into parts: how large they are, how many are in flight, and their upload."""

from __future__ import annotations

import base64
import contextlib
import functools
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from app.background import start_thread
from app.storage.base import Errors, Writer

if TYPE_CHECKING:
    from botocore.client import BaseClient

PART, EVEN_PARTS, GROWTH = 16 << 20, 1000, 136 << 10
"""Bytes of a part of a multipart upload, for so many parts (16 GiB); from there on each has GROWTH more than the one
before, so that the 10,000 parts which S3 allows make up the 5 TiB which it allows, in parts of at most 1.2 GiB."""

PARTS_IN_FLIGHT = 8
"""Parts of an object sent or read at once, each over a connection of its own, as servers limit the speed of one. With
their size this bounds the memory of one transfer besides the part being filled: 128 MiB, and one percent of an object
of 200 GiB."""

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
                self._proof = start_thread(refuses_damage, "s3-part")
            return self._proof


class MultipartWriter(Writer):
    """A multipart upload, a few parts at once; what fits into one part is a plain PUT.

    boto3's `upload_fileobj` pulls from a file and torch.save pushes into one; joining them would take a temporary file
    or a second copy of the state in memory.
    """

    def __init__(self, client: BaseClient, bucket: str, key: str, errors: Errors, verification: Verification) -> None:
        super().__init__()
        self._errors = errors
        self._client: Any = client
        self._target = {"Bucket": bucket, "Key": key}
        self._filling = bytearray()
        self._upload_id = ""
        self._verification = verification
        self._verifies: Future[bool] | None = None
        self._parts: list[Future[dict[str, Any]]] = []

    def _store(self, view: memoryview) -> None:
        while len(view):
            room = part_size(len(self._parts) + 1) - len(self._filling)
            if not room:
                with self._errors():
                    self._send_part()
                continue
            self._filling += view[:room]
            view = view[room:]

    def _send_part(self) -> None:
        if not self._upload_id:
            upload = self._client.create_multipart_upload(**self._target, ChecksumAlgorithm="CRC32")
            self._upload_id = upload["UploadId"]
            self._verifies = self._verification.prove(self._refuses_damage)
        if len(self._parts) >= PARTS_IN_FLIGHT:
            self._parts[-PARTS_IN_FLIGHT].result()  # bounds the memory, and stops at the first part that failed
        body, self._filling = self._filling, bytearray()
        self._parts.append(start_thread(functools.partial(self._upload_part, len(self._parts) + 1, body), "s3-part"))

    def _upload_part(self, number: int, body: bytearray) -> dict[str, Any]:
        part = {"PartNumber": number, "ChecksumCRC32": crc32(body)}
        answer = self._client.upload_part(**self._target, UploadId=self._upload_id, Body=body, **part)
        return {**part, "ETag": answer["ETag"]}

    def _refuses_damage(self) -> bool:
        """Try a part that is not the one whose checksum comes with it, under a number that the object will not have."""
        from botocore.exceptions import BotoCoreError, ClientError

        damaged = {"PartNumber": NO_PART, "Body": b"damaged", "ChecksumCRC32": crc32(b"whole")}
        try:
            self._client.upload_part(**self._target, UploadId=self._upload_id, **damaged)
        except ClientError as error:
            return error.response["Error"]["Code"] in WRONG_CHECKSUM
        except BotoCoreError:  # then parts fail too, or what arrived is read back
            pass
        return False

    def complete(self) -> None:
        if not self._upload_id:
            with self._errors():
                self._client.put_object(**self._target, Body=self._filling)
            return
        with self._errors():
            self._send_part()
            parts = [part.result() for part in self._parts]
            verified = bool(self._verifies and self._verifies.result())
        with self._errors():  # not begun when the upload was given up meanwhile
            self._complete_upload(parts)
        self.verified = verified

    def _complete_upload(self, parts: list[dict[str, Any]]) -> None:
        from botocore.exceptions import ClientError

        try:
            self._client.complete_multipart_upload(
                **self._target, UploadId=self._upload_id, MultipartUpload={"Parts": parts}
            )
        except ClientError as error:
            # An earlier try may have succeeded and its answer been lost: no upload is left, but the object is there.
            if error.response["Error"]["Code"] != "NoSuchUpload" or not self._is_there():
                raise

    def _is_there(self) -> bool:
        from botocore.exceptions import ClientError

        with contextlib.suppress(ClientError):
            return bool(self._client.head_object(**self._target)["ContentLength"] == self.size)
        return False

    def abort(self) -> None:
        """Free the space of the parts; if that fails too, the bucket's lifecycle rules have to."""
        wait(self._parts)  # one that arrives after the upload's end would stay
        if self._verifies:
            wait([self._verifies])
        if self._upload_id:
            with contextlib.suppress(Exception):
                self._client.abort_multipart_upload(**self._target, UploadId=self._upload_id)


def crc32(data: bytes | bytearray) -> str:
    """CRC-32 as S3 writes it."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def part_size(number: int) -> int:
    """Bytes of a part, counted from 1; the last one may have fewer."""
    return PART + max(0, number - EVEN_PARTS) * GROWTH
