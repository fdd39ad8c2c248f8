"""Storage in an S3 bucket."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from typing import Any, ClassVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from sunspot.background import map_parallel, start_thread
from sunspot.errors import NotFoundError, RefusedStorageError, StorageError, shorten
from sunspot.storage import bucket
from sunspot.storage.base import CHUNK, Entry, UnfinishedWrite
from sunspot.storage.bucket import Bucket, ByteRange, ListingPage, Part, PartUpload, is_below
from sunspot.storage.limits import record_progress

DELETED_AT_ONCE = 1000
"""Largest number of objects that S3 deletes per request."""

PROBE_PART = 10_000
"""Number of the damaged part that is sent as a test. Only objects of almost 5 TiB have a real part with this number."""

WRONG_CHECKSUM = {"BadDigest", "XAmzContentChecksumMismatch"}
"""Error codes of S3 and MinIO for a part that does not match its checksum."""

EXPIRED_FIX = "sign in again, for example with `aws sso login`, or renew AWS_SESSION_TOKEN and its keys"

EXPIRED_CODES = (
    *("ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestExpired", "TokenRefreshRequired"),
    *("SSOTokenLoadError", "TokenRetrievalError", "UnauthorizedSSOTokenError"),
)
"""Error codes of S3, and exception classes of botocore, for expired credentials."""


class S3Storage(Bucket):
    """A prefix in a bucket, accessed through boto3.

    The endpoint, region and credentials come from the usual AWS environment variables.
    """

    SCHEME = "s3"
    FIXES: ClassVar[dict[str, str]] = {
        "NoSuchBucket": "create the bucket, or correct SUNSPOT_STORAGE_PATH",
        "AccessDenied": "allow s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject, s3:DeleteObject and "
        "s3:AbortMultipartUpload on its objects",
        "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
        "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
        "AuthorizationHeaderMalformed": "set AWS_REGION to the bucket's region",
        "PermanentRedirect": "set AWS_REGION to the bucket's region",
        "NoCredentialsError": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod's service "
        "account a role",
        "PartialCredentialsError": "set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        **dict.fromkeys(EXPIRED_CODES, EXPIRED_FIX),
        "PreconditionFailed": "the object was replaced while it was being read; try again",
        "RequestTimeTooSkewed": "synchronize this machine's clock with NTP",
        "EndpointConnectionError": "check AWS_ENDPOINT_URL, and that it can be reached from here",
        "ConnectTimeoutError": "check AWS_ENDPOINT_URL, and that it can be reached from here",
    }
    REFUSALS = ("NoSuchBucket", "InvalidBucketName", "AuthorizationHeaderMalformed", "PermanentRedirect")
    KEY_REFUSALS = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken")
    KEYS = ("AWS_ACCESS_KEY_ID",)
    MISSING = "NoSuchKey"
    VERSIONS_FIX = "disable versioning for this bucket, or add a lifecycle rule that deletes noncurrent versions"
    VERSIONS_RIGHT = "s3:GetBucketVersioning"
    UNFINISHED_FIX = "add a lifecycle rule with AbortIncompleteMultipartUpload after a few days"
    UNFINISHED_RIGHT = "s3:GetLifecycleConfiguration"
    FAILURES = (ClientError, BotoCoreError, HTTPError, OSError, ValueError)

    def __init__(self, storage_path: str) -> None:
        super().__init__(storage_path)
        self._client = _s3_client(storage_path)

    @functools.cached_property
    def _transfers(self) -> Any:
        """A client for large objects, which signs requests without hashing their content.

        On a CPU without SHA instructions, computing the SHA-256 would be the slowest step, at 0.3 GB/s. Instead, the
        signature covers a faster checksum of the content.
        """
        return _s3_client(f"s3://{self.bucket}", payload_signing_enabled=False)

    def _read_range(self, key: str, begin: int, size: int, version: str = "") -> ByteRange | None:
        part = {"Range": f"bytes={begin}-{begin + size - 1}"} | ({"IfMatch": version} if version else {})
        with self._request("read", key):
            try:
                answer = self._client.get_object(Bucket=self.bucket, Key=self._full(key), **part)
            except ClientError as error:
                if begin == 0 and error.response["Error"]["Code"] == "InvalidRange":
                    return None
                raise
            body = bytearray(answer["ContentLength"])
            filled = 0
            with contextlib.closing(answer["Body"]) as source:
                while got := source.readinto(memoryview(body)[filled : filled + CHUNK]):
                    record_progress(got)
                    filled += got
            if filled != len(body):
                raise StorageError(
                    f"cannot read {self.locate(key)}: the response ended after {filled} of {len(body)} bytes"
                )
            total = int(
                answer.get("ContentRange", "0").rpartition("/")[2]
            )  # without this header, the body is the whole object
            return ByteRange(body, total, _etag_of(answer))

    def _put(self, key: str, data: bytes | bytearray) -> None:
        client = self._transfers if len(data) > CHUNK else self._client
        client.put_object(Bucket=self.bucket, Key=self._full(key), Body=data)

    def _put_new(self, key: str, data: bytes) -> bool:
        try:
            self._client.put_object(Bucket=self.bucket, Key=self._full(key), Body=data, IfNoneMatch="*")
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (409, 412):
                raise
            return False
        return True

    def _begin_upload(self, key: str) -> MultipartUpload:
        return MultipartUpload(self, key)

    def _list_pages(self, prefix: str) -> Iterator[ListingPage]:
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
            self._note_clock(page["ResponseMetadata"]["HTTPHeaders"].get("date"))
            yield ListingPage([self._entry(item) for item in page.get("Contents", ())], page.get("IsTruncated", False))

    def _entry(self, item: dict[str, Any]) -> Entry:
        written = item["LastModified"].timestamp()
        etag = _etag_of(item).strip('"')
        return Entry(self._relative(item["Key"]), item["Size"], written, f"{etag}-{written:.0f}")

    def _list_prefixes(self, prefix: str) -> Iterable[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix, Delimiter="/")
        return [found["Prefix"] for page in pages for found in page.get("CommonPrefixes", ())]

    def list_unfinished(self, prefix: str) -> Sequence[UnfinishedWrite]:
        with self._request("list the unfinished uploads of", prefix):
            uploads = self._list_all("list_multipart_uploads", "Uploads", Prefix=self._full(prefix))
        keys = [(self._relative(upload["Key"]), upload) for upload in uploads]
        return sorted(
            UnfinishedWrite(key, *self._measure_upload(key, upload), upload["UploadId"])
            for key, upload in keys
            if is_below(key, prefix)
        )

    def _measure_upload(self, key: str, upload: dict[str, Any]) -> tuple[int, float]:
        """Return the total size of an upload's parts, and the time when the newest part was sent.

        If the upload has no parts, returns 0 and the time when it began.
        """
        parts: list[dict[str, Any]] = []
        with self._request("list the parts of", key), self._ignore_gone_upload():
            parts = self._list_all("list_parts", "Parts", Key=upload["Key"], UploadId=upload["UploadId"])
        times = [upload["Initiated"], *(part["LastModified"] for part in parts)]
        return sum(part["Size"] for part in parts), max(times).timestamp()

    def _list_all(self, request: str, field: str, **parameters: str) -> list[dict[str, Any]]:
        pages = self._client.get_paginator(request).paginate(Bucket=self.bucket, **parameters)
        return [item for page in pages for item in page.get(field, ())]

    def _ignore_gone_upload(self) -> contextlib.AbstractContextManager[None]:
        """Context manager that ignores the error for an upload that no longer exists."""
        return contextlib.suppress(self._client.exceptions.NoSuchUpload)

    def discard(self, unfinished: UnfinishedWrite) -> None:
        with self._request("abort the upload of", unfinished.key), self._ignore_gone_upload():
            key = self._full(unfinished.key)
            self._client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=unfinished.token)

    def delete(self, key: str, version: str = "") -> None:
        condition = {"IfMatch": version.rpartition("-")[0]} if version else {}
        # For a missing object, S3 returns 204, and other servers return NoSuchKey.
        with contextlib.suppress(NotFoundError), self._request("delete", key):
            try:
                self._client.delete_object(Bucket=self.bucket, Key=self._full(key), **condition)
            except ClientError as error:
                code = self._code(error)
                if version and code == "NotImplemented":  # some servers do not support the condition
                    self.delete(key)
                elif code != "PreconditionFailed":
                    raise

    def delete_many(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), DELETED_AT_ONCE):
            map_parallel(self.delete, self._delete_batch(keys[first : first + DELETED_AT_ONCE]))

    def _delete_batch(self, keys: Sequence[str]) -> Sequence[str]:
        """Delete up to DELETED_AT_ONCE objects in one request. Return the keys that must be deleted individually."""
        full = {self._full(key): key for key in keys}
        with self._request("delete", keys[0]):
            try:
                objects = [{"Key": key} for key in full]
                answer = self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True})
            except ClientError:  # some servers lack this request or require a different checksum
                return keys
        return [full[refused["Key"]] for refused in answer.get("Errors", ())]

    def keeps_versions(self) -> bool | None:
        try:
            # A bucket with suspended versioning also has a status, because it keeps existing versions.
            return "Status" in self._client.get_bucket_versioning(Bucket=self.bucket)
        except (ClientError, BotoCoreError):
            return None

    def drops_unfinished(self) -> bool | None:
        try:
            rules = self._client.get_bucket_lifecycle_configuration(Bucket=self.bucket)["Rules"]
        except ClientError as error:
            return False if error.response["Error"]["Code"] == "NoSuchLifecycleConfiguration" else None
        except BotoCoreError:
            return None
        return any(
            rule["Status"] == "Enabled"
            and "AbortIncompleteMultipartUpload" in rule
            # Older rules have a prefix instead of a filter.
            and self._full("").startswith(rule.get("Filter", {}).get("Prefix") or rule.get("Prefix") or "")
            for rule in rules
        )

    def _code(self, error: Any) -> str:
        return error.response["Error"]["Code"] if isinstance(error, ClientError) else type(error).__name__

    def _fix(self, code: str) -> str:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            value = os.environ.get(name, "")
            if value != value.strip():
                return f"{name} has surrounding white space, perhaps from a Secret made with `echo`; use `echo -n`"
        return super()._fix(code)


def _etag_of(answer: dict[str, Any]) -> str:
    """Return the ETag, which identifies an object's version. Raises `ValueError` if the response has no ETag."""
    if "ETag" not in answer:
        raise ValueError("the server's response has no ETag, so an object's versions look the same; use another server")
    return str(answer["ETag"])


def _s3_client(url: str, **options: Any) -> Any:
    try:
        session = boto3.session.Session()
        return session.client(
            "s3",
            region_name=os.environ.get("AWS_REGION") or session.region_name or "us-east-1",
            config=Config(
                connect_timeout=bucket.CONNECT_TIMEOUT_S,
                read_timeout=bucket.READ_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": bucket.REQUEST_TRIES},
                s3={"addressing_style": "path", **options},
                # Checksums in trailers only work on AWS. Parts send their checksums in headers, and reads are verified
                # by hashes.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                max_pool_connections=bucket.CONNECTIONS,
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise RefusedStorageError(f"{url}: the AWS environment variables are not usable: {shorten(error)}") from error


# -------------------------------------------------------------------------------------------------------------- uploads


class MultipartUpload(PartUpload):
    """A multipart upload. The constructor starts the upload."""

    def __init__(self, storage: S3Storage, key: str) -> None:
        super().__init__(storage, key)
        self._client = storage._transfers
        self._object = {"Bucket": storage.bucket, "Key": storage._full(key)}
        with self._request():
            upload = self._client.create_multipart_upload(**self._object, ChecksumAlgorithm="CRC32")
        self._upload = {**self._object, "UploadId": upload["UploadId"]}
        self._verifies = start_thread(self._refuses_damage, "storage-part")
        "True if the server rejects a part that does not match its checksum."

    def send(self, number: int, body: bytes | bytearray) -> Part:
        checksum = zlib.crc32(body)
        with self._request():
            etag = _etag_of(self._upload_part(number, body, checksum))
        return Part(number, etag, checksum)

    def _upload_part(self, number: int, body: bytes | bytearray, checksum: int) -> Any:
        return self._client.upload_part(**self._upload, PartNumber=number, Body=body, ChecksumCRC32=as_base64(checksum))

    def _refuses_damage(self) -> bool:
        """Return True if the server rejects a part with a wrong checksum.

        To find out, this sends a part with a wrong checksum, under a number that the object's own parts never use.
        """
        try:
            self._upload_part(PROBE_PART, b"damaged", zlib.crc32(b"whole"))
        except ClientError as error:
            return error.response["Error"]["Code"] in WRONG_CHECKSUM
        except BotoCoreError:  # if the real parts do not fail as well, the object is read back
            pass
        return False

    def complete(self, parts: Sequence[Part], size: int) -> bool:
        verified = self._verifies.result()
        listed = [
            {"PartNumber": number, "ETag": etag, "ChecksumCRC32": as_base64(checksum)}
            for number, etag, checksum in sorted(parts)
        ]
        with self._request():  # raises an error if the upload was aborted
            try:
                self._client.complete_multipart_upload(**self._upload, MultipartUpload={"Parts": listed})
            except self._client.exceptions.NoSuchUpload:
                # If an earlier attempt succeeded but its response was lost, the object exists.
                if not self._exists_with_size(size):
                    raise
        return verified

    def _exists_with_size(self, size: int) -> bool:
        with contextlib.suppress(ClientError):
            return bool(self._client.head_object(**self._object)["ContentLength"] == size)
        return False

    def abort(self) -> None:
        wait([self._verifies])
        self._client.abort_multipart_upload(**self._upload)


def as_base64(checksum: int) -> str:
    """Return a CRC-32 in S3's encoding."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()
