"""Large objects in S3, cut into parts: how large they are, how many are in flight, and their upload."""

from __future__ import annotations

import base64
import contextlib
import functools
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from app.background import start_thread
from app.storage.base import Errors, Part, PartUpload, Writer, map_parallel

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


class MultipartUpload(PartUpload):
    """A multipart upload."""

    def __init__(
        self, client: BaseClient, bucket: str, key: str, errors: Errors, verification: Verification, token: str = ""
    ) -> None:
        """Begins it, unless another process has begun the one with this `token`."""
        self._client: Any = client
        self._target, self._errors = {"Bucket": bucket, "Key": key}, errors
        self._verifies: Future[bool] | None = None
        self.token = token
        if not token:
            with errors():
                upload = self._client.create_multipart_upload(**self._target, ChecksumAlgorithm="CRC32")
            self.token = upload["UploadId"]
            self._verifies = verification.prove(self._refuses_damage)

    def part_size(self, number: int) -> int:
        return part_size(number)

    def send(self, number: int, body: bytes | bytearray) -> Part:
        checksum = zlib.crc32(body)
        with self._errors():
            answer = self._upload_part(number, body, checksum)
        return Part(number, answer["ETag"], checksum)

    def send_all(self, numbers: Iterable[int], read: Callable[[int], bytearray]) -> list[Part]:
        return map_parallel(lambda number: self.send(number, read(number)), numbers, PARTS_IN_FLIGHT)

    def _upload_part(self, number: int, body: bytes | bytearray, checksum: int) -> Any:
        return self._client.upload_part(
            **self._target, UploadId=self.token, PartNumber=number, Body=body, ChecksumCRC32=as_base64(checksum)
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

        verified = bool(self._verifies and self._verifies.result())
        listed = [
            {"PartNumber": number, "ETag": etag, "ChecksumCRC32": as_base64(checksum)}
            for number, etag, checksum in sorted(parts)
        ]
        with self._errors():  # not begun when the upload was given up meanwhile
            try:
                self._client.complete_multipart_upload(
                    **self._target, UploadId=self.token, MultipartUpload={"Parts": listed}
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
        if self._verifies:
            wait([self._verifies])
        with contextlib.suppress(Exception):  # if that fails too, the bucket's lifecycle rules have to free the space
            self._client.abort_multipart_upload(**self._target, UploadId=self.token)


class MultipartWriter(Writer):
    """Writes a multipart upload, a few parts at once; what fits into one part is a plain PUT.

    boto3's `upload_fileobj` pulls from a file and torch.save pushes into one; joining them would take a temporary file
    or a second copy of the state in memory.
    """

    def __init__(self, begin: Callable[[], PartUpload], put: Callable[[bytearray], None]) -> None:
        super().__init__()
        self._begin, self._put = begin, put
        self._filling = bytearray()
        self._upload: PartUpload | None = None
        self._parts: list[Future[Part]] = []

    def _store(self, view: memoryview) -> None:
        while len(view):
            room = part_size(len(self._parts) + 1) - len(self._filling)
            if not room:
                self._send_part()
                continue
            self._filling += view[:room]
            view = view[room:]

    def _send_part(self) -> None:
        self._upload = self._upload or self._begin()
        if len(self._parts) >= PARTS_IN_FLIGHT:
            self._parts[-PARTS_IN_FLIGHT].result()  # bounds the memory, and stops at the first part that failed
        number, body, self._filling = len(self._parts) + 1, self._filling, bytearray()
        self._parts.append(start_thread(functools.partial(self._upload.send, number, body), "s3-part"))

    def complete(self) -> None:
        if self._upload is None:
            self._put(self._filling)
            return
        self._send_part()
        self.verified = self._upload.complete([part.result() for part in self._parts], self.size)

    def abort(self) -> None:
        wait(self._parts)  # one that arrives after the upload's end would stay
        if self._upload:
            self._upload.abort()


def as_base64(checksum: int) -> str:
    """A CRC-32 as S3 writes it."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def part_size(number: int) -> int:
    """Bytes of a part, counted from 1; the last one may have fewer."""
    return PART + max(0, number - EVEN_PARTS) * GROWTH
