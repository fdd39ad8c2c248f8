"""An S3 bucket as storage."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from app.background import start_thread
from app.errors import NotFoundError, StorageError, shorten
from app.storage import s3_parts
from app.storage.base import (
    CHUNK,
    RACE_PAUSE_S,
    RACE_TRIES,
    READS_IN_FLIGHT,
    Entry,
    ObjectReader,
    PartUpload,
    Storage,
    Unfinished,
    Writer,
    completed,
    map_parallel,
)
from app.storage.deadline import OPERATION_S, operation
from app.storage.s3_parts import MultipartUpload, MultipartWriter

DELETED_AT_ONCE = 1000
"""Objects that S3 deletes in one request, at most."""

CONNECT_TIMEOUT_S, READ_TIMEOUT_S, REQUEST_TRIES = 5, 20, 4
"""A request fails after about 4 x 20 s of silence plus backoff (botocore's standard mode)."""

S3_FIXES = {
    "NoSuchBucket": "create the bucket, or correct STORAGE_PATH",
    "AccessDenied": "allow s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject, s3:DeleteObject and "
    "s3:AbortMultipartUpload on its objects",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
    "NoCredentialsError": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod's service account a role",
    "PartialCredentialsError": "set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "PreconditionFailed": "it was replaced while it was read; try again",
    "RequestTimeTooSkewed": "set this machine's clock by NTP",
    "EndpointConnectionError": "check AWS_ENDPOINT_URL, and that it can be reached from here",
    "ConnectTimeoutError": "check AWS_ENDPOINT_URL, and that it can be reached from here",
}
"""What to do about an error, by S3's error code or botocore's class."""


class S3Storage(Storage):
    """A prefix of a bucket, through boto3: endpoint, region and credentials come from the usual AWS environment."""

    is_bucket = True

    def __init__(self, storage_path: str) -> None:
        self.bucket, _, prefix = storage_path.removeprefix("s3://").partition("/")
        self.prefix = prefix.strip("/")
        self._client = _s3_client(storage_path)
        self._verification = s3_parts.Verification()

    @functools.cached_property
    def _transfers(self) -> Any:
        """A client for parts, whose checksum is signed in place of a SHA-256: at 0.3 GB/s without the CPU's help, that
        would cost more than everything else."""
        return _s3_client(f"s3://{self.bucket}", payload_signing_enabled=False)

    def locate(self, key: str) -> str:
        return f"s3://{self.bucket}/{self._full(key)}"

    @contextlib.contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        errors = functools.partial(self._s3_errors, "read", key, gives_s=0)
        part = {"Range": f"bytes={offset}-"} if offset else {}
        with self._s3_errors("read", key):
            body = self._client.get_object(Bucket=self.bucket, Key=self._full(key), **part)["Body"]
        with io.BufferedReader(ObjectReader(body, errors), CHUNK) as stream:
            yield stream

    def chunks(self, key: str) -> Iterator[bytearray]:
        first = self._begin_range(key, 0)
        if first is None:
            return
        size, version = int(first.get("ContentRange", "0").rpartition("/")[2]), first["ETag"]  # none: it is all there

        def read_part(begin: int) -> bytearray:
            answer = self._begin_range(key, begin, IfMatch=version)
            assert answer
            return self._read_range(key, answer)

        begins = deque(range(s3_parts.PART, size, s3_parts.PART))
        parts = deque([start_thread(functools.partial(self._read_range, key, first), "s3-part")])
        while parts:
            while begins and len(parts) < s3_parts.PARTS_IN_FLIGHT:
                parts.append(start_thread(functools.partial(read_part, begins.popleft()), "s3-part"))
            yield parts.popleft().result()

    def _begin_range(self, key: str, begin: int, **condition: str) -> dict[str, Any] | None:
        """The answer to a request for as many bytes of an object as a part has; None when it is empty."""
        from botocore.exceptions import ClientError

        with self._s3_errors("read", key):
            try:
                answer: dict[str, Any] = self._client.get_object(
                    Bucket=self.bucket,
                    Key=self._full(key),
                    Range=f"bytes={begin}-{begin + s3_parts.PART - 1}",
                    **condition,
                )
            except ClientError as error:
                if begin == 0 and error.response["Error"]["Code"] == "InvalidRange":
                    return None
                raise
        return answer

    def _read_range(self, key: str, answer: dict[str, Any]) -> bytearray:
        content, size = bytearray(answer["ContentLength"]), 0
        with ObjectReader(answer["Body"], functools.partial(self._s3_errors, "read", key, gives_s=0)) as source:
            while got := source.readinto(memoryview(content)[size : size + CHUNK]):
                size += got
        if size != len(content):
            raise StorageError(f"{self.locate(key)}: cannot read: cut off after {size} of {len(content)} bytes")
        return content

    def write(self, key: str, data: bytes) -> None:
        with self._s3_errors("write", key):
            self._client.put_object(Bucket=self.bucket, Key=self._full(key), Body=data)

    def create(self, key: str, data: bytes) -> bool:
        from botocore.exceptions import ClientError

        for tries in range(RACE_TRIES):
            with self._s3_errors("create", key):
                try:
                    self._client.put_object(Bucket=self.bucket, Key=self._full(key), Body=data, IfNoneMatch="*")
                    return True
                except ClientError as error:
                    if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (409, 412):
                        raise
            # It is ours when an earlier try was carried out and only its answer was lost.
            with contextlib.suppress(NotFoundError):  # another writer was busy with it (409), or has deleted it
                return self.read(key) == data
            time.sleep(RACE_PAUSE_S * (tries + 1))
        raise StorageError(f"{self.locate(key)}: cannot create: refused {RACE_TRIES} times, though no object is there")

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        def put(body: bytearray) -> None:
            with self._s3_errors("upload", key):
                self._transfers.put_object(Bucket=self.bucket, Key=self._full(key), Body=body)

        with completed(MultipartWriter(lambda: self.upload(key), put)) as writer:
            yield writer

    def upload(self, key: str, token: str = "") -> PartUpload:
        errors = functools.partial(self._s3_errors, "upload", key)
        return MultipartUpload(self._transfers, self.bucket, self._full(key), errors, self._verification, token)

    def list(self, prefix: str) -> list[Entry]:
        # Keys ending in '/' are folders made by bucket browsers.
        return sorted(entry for entry in self._keys(prefix) if not entry.key.endswith("/"))

    def _keys(self, prefix: str) -> Sequence[Entry]:
        """Like `list`, including folders."""
        skip = len(self.prefix) + 1 if self.prefix else 0
        with self._s3_errors("list", prefix):
            found = []
            for page in self._pages(self._full(prefix)):
                self._note_clock(page["ResponseMetadata"]["HTTPHeaders"].get("date"))
                found += [
                    Entry(item["Key"][skip:], item["Size"], item["LastModified"].timestamp(), _etag_and_time(item))
                    for item in page.get("Contents", ())
                ]
        return [entry for entry in found if _is_below(entry.key, prefix)]

    def _pages(self, prefix: str) -> Iterator[dict[str, Any]]:
        """Pages of a listing with the object `prefix` and its folder, and others beside them on the first page only.

        S3 goes by the first letters: a listing of `search` would read its way through `search-01/` and all the others.
        """
        list_pages = functools.partial(self._client.get_paginator("list_objects_v2").paginate, Bucket=self.bucket)
        folder = prefix.rstrip("/") + "/"
        if prefix in ("", folder):
            yield from list_pages(Prefix=prefix)
            return
        first = self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix)
        yield first
        last = first["Contents"][-1]["Key"] if first.get("IsTruncated") else ""
        if last.startswith(folder):
            yield from list_pages(Prefix=folder, StartAfter=last)
        elif last and last < folder:
            yield from list_pages(Prefix=folder)

    def _note_clock(self, date: str | None) -> None:
        """Compare the server's clock, to the second, with this machine's: of an answer that has just arrived."""
        with contextlib.suppress(TypeError, ValueError):  # no date, or none that can be read
            self.ahead_s = parsedate_to_datetime(date or "").timestamp() + 0.5 - time.time()

    def list_unfinished(self, prefix: str) -> Sequence[Unfinished]:
        skip = len(self.prefix) + 1 if self.prefix else 0
        with self._s3_errors("list the unfinished uploads of", prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self._full(prefix)
            )
            uploads = [upload for page in pages for upload in page.get("Uploads", ())]
        return sorted(
            Unfinished(key, *self._so_far(key, upload), upload["UploadId"])
            for upload in uploads
            if _is_below(key := upload["Key"][skip:], prefix)
        )

    def _so_far(self, key: str, upload: dict[str, Any]) -> tuple[int, float]:
        """Bytes of an upload's parts, and when it was started or got its last part."""
        parts: list[dict[str, Any]] = []
        with self._s3_errors("list the parts of", key), _unless_upload_is_gone():
            pages = self._client.get_paginator("list_parts").paginate(
                Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
            parts += [part for page in pages for part in page.get("Parts", ())]
        times = [upload["Initiated"], *(part["LastModified"] for part in parts)]
        return sum(part["Size"] for part in parts), max(times).timestamp()

    def discard(self, unfinished: Unfinished) -> None:
        with self._s3_errors("abort the upload of", unfinished.key), _unless_upload_is_gone():
            self._client.abort_multipart_upload(
                Bucket=self.bucket, Key=self._full(unfinished.key), UploadId=unfinished.token
            )

    def delete(self, key: str) -> None:
        # S3 answers 204 when there is nothing, others NoSuchKey.
        with contextlib.suppress(NotFoundError), self._s3_errors("delete", key):
            self._client.delete_object(Bucket=self.bucket, Key=self._full(key))

    def delete_many(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), DELETED_AT_ONCE):
            batch = keys[first : first + DELETED_AT_ONCE]
            map_parallel(self.delete, self._delete_batch(batch))

    def _delete_batch(self, keys: Sequence[str]) -> Sequence[str]:
        """Delete up to DELETED_AT_ONCE objects in one request; returns those left to delete one by one."""
        from botocore.exceptions import ClientError

        full = {self._full(key): key for key in keys}
        with self._s3_errors("delete", keys[0]):
            try:
                objects = [{"Key": key} for key in full]
                answer = self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True})
            except ClientError:  # some servers lack this request, or want another checksum
                return keys
        return [full[refused["Key"]] for refused in answer.get("Errors", ())]

    def delete_folders(self, prefix: str) -> None:
        everything = self._keys(prefix)
        holding = [entry.key for entry in everything if not entry.key.endswith("/")]
        folders = [entry.key for entry in everything if entry.key.endswith("/")]
        self.delete_many([key for key in folders if not any(held.startswith(key) for held in holding)])

    def keeps_versions(self) -> bool | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            # Also when suspended: existing versions stay.
            return "Status" in self._client.get_bucket_versioning(Bucket=self.bucket)
        except (ClientError, BotoCoreError):
            return None

    def drops_unfinished(self) -> bool | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            rules = self._client.get_bucket_lifecycle_configuration(Bucket=self.bucket)["Rules"]
        except ClientError as error:
            return False if error.response["Error"]["Code"] == "NoSuchLifecycleConfiguration" else None
        except BotoCoreError:
            return None
        return any(
            rule["Status"] == "Enabled"
            and "AbortIncompleteMultipartUpload" in rule
            and self._full("").startswith(_prefix_of(rule))
            for rule in rules
        )

    def exists(self, key: str) -> bool:
        # Not by HEAD: its 404 has no body, so a missing bucket would pass for a missing object.
        return any(entry.key == key for entry in self.list(key))

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    @contextlib.contextmanager
    def _s3_errors(self, action: str, key: str, gives_s: float = OPERATION_S) -> Iterator[None]:
        """An operation whose errors become a `StorageError`; `gives_s` as in `operation`."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            with operation(self.locate(key), gives_s):
                yield
        except (ClientError, BotoCoreError, HTTPError, OSError, ValueError) as error:
            name = error.response["Error"]["Code"] if isinstance(error, ClientError) else type(error).__name__
            if name == "NoSuchKey":
                raise NotFoundError(f"{self.locate(key)}: not found") from error
            fix = _padded_credential() or S3_FIXES.get(name, "")
            raise StorageError(
                f"{self.locate(key)}: cannot {action}: {shorten(error)}{'; ' if fix else ''}{fix}"
            ) from error


def _is_below(key: str, prefix: str) -> bool:
    """Whether `key` is the object `prefix` or lies in the folder `prefix`; S3 itself has no folders."""
    return not prefix or key == prefix or key.startswith(prefix.rstrip("/") + "/")


def _padded_credential() -> str:
    """The fix for a credential with white space around it; empty if there is none."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    padded = next((name for name in names if (value := os.environ.get(name, "")) != value.strip()), "")
    return padded and f"{padded} has white space around it, as from a Secret made with `echo`; `echo -n` leaves it away"


def _prefix_of(rule: dict[str, Any]) -> str:
    """The key prefix a lifecycle rule applies to; rules without a filter have the older form."""
    return str(rule.get("Filter", {}).get("Prefix") or rule.get("Prefix") or "")


def _etag_and_time(item: dict[str, Any]) -> str:
    return item["ETag"].strip('"') + f"-{item['LastModified'].timestamp():.0f}"


@contextlib.contextmanager
def _unless_upload_is_gone() -> Iterator[None]:
    """Ignore an upload completed or aborted meanwhile, by its writer or the bucket's lifecycle rules."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchUpload":
            raise


def _s3_client(url: str, **options: Any) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.session.Session()
        return session.client(
            "s3",
            region_name=os.environ.get("AWS_REGION") or session.region_name or "us-east-1",
            config=Config(
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": REQUEST_TRIES},
                s3={"addressing_style": "path", **options},
                # In trailers they are AWS-only. Parts get theirs as a header, and what is read is compared with hashes.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                max_pool_connections=max(4 * s3_parts.PARTS_IN_FLIGHT, READS_IN_FLIGHT),
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise StorageError(f"{url}: the AWS environment cannot be used: {shorten(error)}") from error
