"""An S3 bucket as storage."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, BinaryIO

from app.background import start_thread
from app.errors import NotFoundError, StorageError, shorten
from app.storage.base import (
    CHUNK,
    RACE_PAUSE_S,
    RACE_TRIES,
    READS_IN_FLIGHT,
    Entry,
    Errors,
    ObjectReader,
    Storage,
    Unfinished,
    Writer,
    completed,
    map_parallel,
)
from app.storage.deadline import OPERATION_S, operation

if TYPE_CHECKING:
    from botocore.client import BaseClient

PART, EVEN_PARTS, GROWTH = 16 << 20, 1000, 136 << 10
"""Bytes of a part of a multipart upload, for so many parts (16 GiB); from there on each has GROWTH more than the one
before, so that the 10,000 parts which S3 allows make up the 5 TiB which it allows, in parts of at most 1.2 GiB."""

PARTS_IN_FLIGHT = 4
"""Parts uploaded at once. With their size this bounds the memory of one upload besides the part being filled: 64 MiB,
and half a percent of an object of 200 GiB."""

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
        errors = functools.partial(self._s3_errors, "upload", key)
        with completed(_S3Writer(self._client, self.bucket, self._full(key), errors)) as writer:
            yield writer

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


class _S3Writer(Writer):
    """A multipart upload, a few parts at once; what fits into one part is a plain PUT.

    boto3's `upload_fileobj` pulls from a file and torch.save pushes into one; joining them would take a temporary file
    or a second copy of the state in memory.
    """

    def __init__(self, client: BaseClient, bucket: str, key: str, errors: Errors) -> None:
        super().__init__()
        self._errors = errors
        self._client: Any = client
        self._target = {"Bucket": bucket, "Key": key}
        self._filling = bytearray()
        self._upload_id = ""
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
            self._upload_id = self._client.create_multipart_upload(**self._target)["UploadId"]
        if len(self._parts) >= PARTS_IN_FLIGHT:
            self._parts[-PARTS_IN_FLIGHT].result()  # bounds the memory, and stops at the first part that failed
        body, self._filling = self._filling, bytearray()
        self._parts.append(start_thread(functools.partial(self._upload_part, len(self._parts) + 1, body), "s3-part"))

    def _upload_part(self, number: int, body: bytearray) -> dict[str, Any]:
        answer = self._client.upload_part(**self._target, UploadId=self._upload_id, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def complete(self) -> None:
        if not self._upload_id:
            with self._errors():
                self._client.put_object(**self._target, Body=self._filling)
            return
        with self._errors():
            self._send_part()
            parts = [part.result() for part in self._parts]
        with self._errors():  # not begun when the upload was given up meanwhile
            self._complete_upload(parts)

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
        if self._upload_id:
            with contextlib.suppress(Exception):
                self._client.abort_multipart_upload(**self._target, UploadId=self._upload_id)


def part_size(number: int) -> int:
    """Bytes of a part, counted from 1; the last one may have fewer."""
    return PART + max(0, number - EVEN_PARTS) * GROWTH


def _s3_client(url: str) -> Any:
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
                s3={"addressing_style": "path"},
                # Checksums in trailers are AWS-only; we hash every byte ourselves and read it back.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                max_pool_connections=max(2 * PARTS_IN_FLIGHT, READS_IN_FLIGHT),
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise StorageError(f"{url}: the AWS environment cannot be used: {shorten(error)}") from error
