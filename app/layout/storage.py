"""Where runs are kept: a local (or NFS) directory, or an S3 bucket, behind the same few operations.

Keys are `/`-separated and relative to the storage path. Every operation either does the whole of what it says or
raises `StorageError` naming the object (`NotFoundError` when it is not there), within the limits below.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TypeVar

from app.errors import NotFoundError, StorageError, shorten

if TYPE_CHECKING:
    from botocore.client import BaseClient

CHUNK = 1 << 20
"""Bytes read at a time when an object is hashed."""

PART = 16 << 20
"""Bytes of one part of a multipart upload. S3 allows 10,000 parts, so an object may have 156 GiB."""

PARTS_IN_FLIGHT = 4
"""Parts uploaded at once: with PART, the most memory (64 MiB) that one upload holds besides the part being filled."""

READS_IN_FLIGHT = 16
"""Small objects read at once by whoever needs many of them: each waits for an answer, not for bytes."""

DELETED_AT_ONCE = 1000
"""Objects that S3 takes in one request to delete them."""

CONNECT_TIMEOUT_S, READ_TIMEOUT_S, REQUEST_TRIES = 5, 20, 4
"""One request is given up after about 4 x 20 s of silence and the backoff between (botocore's standard mode)."""

RACE_TRIES, RACE_PAUSE_S = 5, 0.2
"""Tries of a write that another process's write or delete of a neighbour got in the way of."""

S3_FIXES = {
    "NoSuchBucket": "create the bucket, or correct STORAGE_PATH",
    "AccessDenied": "allow s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject, s3:DeleteObject and "
    "s3:AbortMultipartUpload on its objects",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
    "NoCredentialsError": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod's service account a role",
    "PartialCredentialsError": "set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "EndpointConnectionError": "check AWS_ENDPOINT_URL, and that it can be reached from here",
    "ConnectTimeoutError": "check AWS_ENDPOINT_URL, and that it can be reached from here",
}
"""What to do about an error, by the code that S3 answers or the class that botocore raises."""


Item = TypeVar("Item")
Result = TypeVar("Result")

Errors = Callable[[], contextlib.AbstractContextManager[None]]
"""Turns the errors of one object's storage into `StorageError`. Goes around storage's own calls, never around a
caller's: a `FileNotFoundError` of theirs would pass for a missing object."""


class Entry(NamedTuple):
    """An object in a listing."""

    key: str
    size: int
    "Bytes."
    modified: float
    "When it was last written, in seconds since the epoch."
    version: str
    """Another one after every write, also of the same number of bytes, and for every copy: S3's ETag and time, or a
    file's number and time of change. The time is for servers that keep the ETag of a file which changed under them."""


class Unfinished(NamedTuple):
    """What a writer left behind that was killed: it takes space, and is no object."""

    key: str
    "The object that it would have become."
    size: int
    "Bytes."
    modified: float
    "When it was begun or last written, in seconds since the epoch."
    token: str
    "Names it to storage."


class Writer(Protocol):
    """An object being written: bytes go in, and its size and SHA-256 come out."""

    size: int

    def write(self, data: Any) -> int: ...

    def flush(self) -> None: ...

    @property
    def sha256(self) -> str: ...


class Storage(ABC):
    """The operations that a run needs of the place it is kept in."""

    @abstractmethod
    def locate(self, key: str) -> str:
        """The path or URL of `key`, for messages."""

    @abstractmethod
    def open(self, key: str, offset: int = 0) -> contextlib.AbstractContextManager[BinaryIO]:
        """A stream of the object's bytes from `offset` on, which must lie before its end (or be 0)."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Write a small object whole: a reader sees the old bytes or the new ones, never a part."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write a small object if there is none; False when other content is there. Atomic among all writers.

        Writers that must be told apart write different bytes: content that is there already may pass for one's own.
        """

    @abstractmethod
    def writer(self, key: str) -> contextlib.AbstractContextManager[Writer]:
        """Stream a large object; it may be visible half-written, or absent, until the context ends without error."""

    @abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """Every object below `prefix`, in the order of the keys."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object; not being there is no error."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; not being there is no error. After an error, some may be left."""
        for key in keys:
            self.delete(key)

    @abstractmethod
    def delete_folders(self, prefix: str) -> None:
        """Remove the folders in and at `prefix` that hold no object: what no listing shows. Others stay."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the object is there."""

    @abstractmethod
    def list_unfinished(self, prefix: str) -> Sequence[Unfinished]:
        """What killed writers left below `prefix`, and what living ones are at."""

    @abstractmethod
    def discard(self, unfinished: Unfinished) -> None:
        """Give back the space of what a killed writer left; being gone already is no error."""

    def keeps_versions(self) -> bool | None:
        """Whether deleted and replaced objects go on taking space; None: this user may not know."""
        return False

    def drops_unfinished(self) -> bool | None:
        """Whether the place itself removes what killed writers left, some day; None: this user may not know."""
        return False

    def read(self, key: str) -> bytes:
        """All bytes of an object."""
        with self.open(key) as stream:
            return stream.read()

    def digest(self, key: str) -> tuple[int, str]:
        """Size in bytes and SHA-256 (hex) of what storage gives back for an object."""
        size, sha = 0, hashlib.sha256()
        with self.open(key) as stream:
            while chunk := stream.read(CHUNK):
                size += len(chunk)
                sha.update(chunk)
        return size, sha.hexdigest()

    def prove(self, prefix: str) -> None:
        """Prove that objects below `prefix` can be created, read, listed and deleted, and that a second create fails.

        The last is what keeps two processes from owning one run. Raises `StorageError`.
        """
        key, content = f"{prefix}/probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
        created = self.create(key, content)
        try:
            # Before the second create, which would replace the content where it is not refused.
            found = self.read(key) == content and [entry.key for entry in self.list(key)] == [key]
            again = self.create(key, b"another writer")
        finally:
            self.delete(key)
        if not created or not found:
            raise StorageError(
                f"{self.locate(key)}: written, but not found again; check that STORAGE_PATH is one consistent store"
            )
        if self.exists(key):
            raise StorageError(f"{self.locate(key)}: deleted, but still there; allow deleting below STORAGE_PATH")
        if again:
            raise StorageError(
                f"{self.locate(key)}: created twice; this store ignores 'If-None-Match: *', without which two "
                "processes could write one run. Use a server that supports conditional writes"
            )


def open_storage(storage_path: str) -> Storage:
    """The storage at a local path or `s3://bucket/prefix`."""
    return S3Storage(storage_path) if storage_path.startswith("s3://") else LocalStorage(storage_path)


def in_parallel(act: Callable[[Item], Result], items: Iterable[Item], at_once: int = READS_IN_FLIGHT) -> list[Result]:
    """What `act` returns for each item, in their order. The first error ends it: what has not begun never does."""
    with ThreadPoolExecutor(at_once, thread_name_prefix="storage") as pool:
        return list(pool.map(act, items))


class HashingWriter:
    """Counts and hashes the bytes on their way to storage; after a failure it takes no more."""

    def __init__(self) -> None:
        self.size = 0
        self.failure: Exception | None = None
        self._sha = hashlib.sha256()

    def write(self, data: Any) -> int:
        if self.failure:
            raise self.failure
        view = memoryview(data).cast("B")
        self._sha.update(view)
        try:
            self._store(view)
        except Exception as error:
            self.failure = error
            raise
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing to do before the end: an object is complete when its context is."""

    def complete(self) -> None:
        """Make the object what was written."""
        raise NotImplementedError

    def abort(self) -> None:
        """Leave nothing behind, as far as storage allows; raises nothing."""
        raise NotImplementedError

    @property
    def sha256(self) -> str:
        return self._sha.hexdigest()

    def _store(self, view: memoryview) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def _completed(writer: HashingWriter) -> Iterator[Writer]:
    """Complete `writer` at the end of the context, or abort it on any error."""
    try:
        yield writer
        if writer.failure:
            raise writer.failure
        writer.complete()
    except Exception as error:
        writer.abort()
        # torch.save turns the error of a write into one of its own, which says nothing of storage.
        if writer.failure and error is not writer.failure:
            raise writer.failure from writer.failure.__cause__
        raise
    except BaseException:
        writer.abort()
        raise


class _Source(io.RawIOBase):
    """Bytes of an object: `errors` names it in the errors of reading, and in those only."""

    def __init__(self, source: Any, errors: Errors) -> None:
        super().__init__()
        self._source, self._errors = source, errors

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._errors():
            return self._source.readinto(buffer)

    def readall(self) -> bytes:
        with self._errors():
            return self._source.read()

    def close(self) -> None:
        self._source.close()
        super().close()


# ---------------------------------------------------------------------------------------------------------------- local


TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")
"""A file of `write` or `create` that is not yet, or never became, the object in the group."""


class LocalStorage(Storage):
    """A directory. Also right for NFS: only rename and link, which are atomic there, are relied on."""

    def __init__(self, root: str) -> None:
        self.root = Path(root).expanduser().absolute()

    def locate(self, key: str) -> str:
        return str(self.root / key)

    @contextlib.contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        errors = functools.partial(_os_errors, self.locate(key), reading=True)
        with errors():
            source = io.FileIO(self.root / key)
            source.seek(offset)
        with io.BufferedReader(_Source(source, errors), CHUNK) as stream:
            yield stream

    def write(self, key: str, data: bytes) -> None:
        with _os_errors(self.locate(key)), self._temporary(key, data) as temporary:
            os.replace(temporary, self.root / key)
            _sync_directory((self.root / key).parent)

    def create(self, key: str, data: bytes) -> bool:
        with _os_errors(self.locate(key)), self._temporary(key, data) as temporary:
            try:
                os.link(temporary, self.root / key)
            except FileExistsError:
                # NFS says so too when its server had made the link and the answer was lost.
                if temporary.stat().st_nlink == 1:
                    return False
            _sync_directory((self.root / key).parent)
            return True

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        with _completed(_LocalWriter(self.root / key)) as writer:
            yield writer

    def list(self, prefix: str) -> list[Entry]:
        return sorted(
            Entry(path.relative_to(self.root).as_posix(), about.st_size, about.st_mtime, _version(about))
            for path, about in self._files(prefix)
            if not TEMPORARY.fullmatch(path.name)
        )

    def list_unfinished(self, prefix: str) -> Sequence[Unfinished]:
        found = []
        for path, about in self._files(prefix):
            if match := TEMPORARY.fullmatch(path.name):
                key = path.with_name(match[1]).relative_to(self.root).as_posix()
                found.append(Unfinished(key, about.st_size, about.st_mtime, str(path)))
        return sorted(found)

    def discard(self, unfinished: Unfinished) -> None:
        with _os_errors(unfinished.token):
            Path(unfinished.token).unlink(missing_ok=True)

    def _files(self, prefix: str) -> Iterator[tuple[Path, os.stat_result]]:
        top = self.root / prefix
        with _os_errors(self.locate(prefix)):
            for path in [top] if top.is_file() else _walk(top):
                with contextlib.suppress(FileNotFoundError):  # deleted since the walk saw it
                    yield path, path.stat()

    def delete(self, key: str) -> None:
        path = self.root / key
        with _os_errors(str(path)), contextlib.suppress(FileNotFoundError):
            path.unlink()
            if path.parent != self.root:
                with contextlib.suppress(OSError):  # not empty yet, or another deletion was first
                    path.parent.rmdir()

    def delete_folders(self, prefix: str) -> None:
        top = self.root / prefix
        for folder in sorted((Path(folder) for folder, _, _ in os.walk(top)), reverse=True):
            if folder != self.root:
                with contextlib.suppress(OSError):  # not empty: it is another's
                    folder.rmdir()

    def exists(self, key: str) -> bool:
        with _os_errors(self.locate(key)):
            return (self.root / key).is_file()

    @contextlib.contextmanager
    def _temporary(self, key: str, data: bytes) -> Iterator[Path]:
        path = self.root / key
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # TEMPORARY
        try:
            with _open_new(temporary) as sink:
                sink.write(data)
                sink.flush()
                os.fsync(sink.fileno())
            yield temporary
        finally:
            with contextlib.suppress(OSError):  # or it would hide why it is still there
                temporary.unlink()


class _LocalWriter(HashingWriter):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        with _os_errors(str(path)):
            self._sink = _open_new(path)

    def _store(self, view: memoryview) -> None:
        with _os_errors(str(self._path)):
            self._sink.write(view)

    def complete(self) -> None:
        with _os_errors(str(self._path)):
            with self._sink:
                self._sink.flush()
                os.fsync(self._sink.fileno())
            _sync_directory(self._path.parent)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _open_new(path: Path) -> BinaryIO:
    """Open for writing, the directory made: again where another process's `delete` removed it, empty, in between."""
    for _ in range(RACE_TRIES - 1):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path, "wb")
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "wb")


def _walk(top: Path) -> Iterator[Path]:
    """Every file below `top`. A directory that cannot be read is an error: its files would seem not to exist."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # nothing written there yet, or deleted meanwhile
            raise error

    for folder, _, names in os.walk(top, onerror=refuse):
        yield from (Path(folder, name) for name in names)


def _version(about: os.stat_result) -> str:
    return f"{about.st_ino}-{about.st_ctime_ns}"


def _sync_directory(path: Path) -> None:
    """Make a rename or a new name survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _os_errors(location: str, reading: bool = False) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if reading and isinstance(error, FileNotFoundError):
            raise NotFoundError(f"{location}: not found") from error
        raise StorageError(
            f"{location}: {error.strerror or shorten(error)}; check that STORAGE_PATH can be read and written"
        ) from error


# ------------------------------------------------------------------------------------------------------------------- S3


class S3Storage(Storage):
    """A prefix of a bucket, through boto3: endpoint, region and credentials come from the usual AWS environment."""

    def __init__(self, url: str) -> None:
        self.bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self.prefix = prefix.strip("/")
        self._client = _s3_client(url)

    def locate(self, key: str) -> str:
        return f"s3://{self.bucket}/{self._full(key)}"

    @contextlib.contextmanager
    def open(self, key: str, offset: int = 0) -> Iterator[BinaryIO]:
        errors = functools.partial(self._s3_errors, "read", key)
        part = {"Range": f"bytes={offset}-"} if offset else {}
        with errors():
            body = self._client.get_object(Bucket=self.bucket, Key=self._full(key), **part)["Body"]
        with io.BufferedReader(_Source(body, errors), CHUNK) as stream:
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
            # Ours after all when an earlier try was carried out and only its answer was lost.
            with contextlib.suppress(NotFoundError):  # another writer was at it (409), or has deleted it
                return self.read(key) == data
            time.sleep(RACE_PAUSE_S * (tries + 1))
        raise StorageError(f"{self.locate(key)}: cannot create: refused {RACE_TRIES} times, though no object is there")

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        errors = functools.partial(self._s3_errors, "upload", key)
        with _completed(_S3Writer(self._client, self.bucket, self._full(key), errors)) as writer:
            yield writer

    def list(self, prefix: str) -> list[Entry]:
        # A key that ends in '/' is a folder that somebody's browser of the bucket made.
        return sorted(entry for entry in self._keys(prefix) if not entry.key.endswith("/"))

    def _keys(self, prefix: str) -> Sequence[Entry]:
        """Like `list`, with the folders."""
        skip = len(self.prefix) + 1 if self.prefix else 0
        with self._s3_errors("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self._full(prefix)
            )
            found = [
                Entry(item["Key"][skip:], item["Size"], item["LastModified"].timestamp(), _etag_and_time(item))
                for page in pages
                for item in page.get("Contents", ())
            ]
        return [entry for entry in found if _is_below(entry.key, prefix)]

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
        """The bytes of an upload's parts, and when it was begun or got the last of them."""
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
        # S3 answers 204 when there is nothing; others answer NoSuchKey.
        with contextlib.suppress(NotFoundError), self._s3_errors("delete", key):
            self._client.delete_object(Bucket=self.bucket, Key=self._full(key))

    def delete_many(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), DELETED_AT_ONCE):
            batch = keys[first : first + DELETED_AT_ONCE]
            in_parallel(self.delete, self._delete_batch(batch))

    def _delete_batch(self, keys: Sequence[str]) -> Sequence[str]:
        """One request for up to DELETED_AT_ONCE objects; returns those that are to be removed one by one."""
        from botocore.exceptions import ClientError

        full = {self._full(key): key for key in keys}
        with self._s3_errors("delete", keys[0]):
            try:
                objects = [{"Key": key} for key in full]
                answer = self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True})
            except ClientError:  # some servers know no such request, or want another checksum of it
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
            # Also when suspended: it keeps those that it has.
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
        # Not by HEAD: its 404 has no body, so a bucket that is gone would pass for an object that is not there.
        return any(entry.key == key for entry in self.list(key))

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    @contextlib.contextmanager
    def _s3_errors(self, action: str, key: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (ClientError, BotoCoreError, HTTPError, OSError) as error:
            name = error.response["Error"]["Code"] if isinstance(error, ClientError) else type(error).__name__
            if name == "NoSuchKey":
                raise NotFoundError(f"{self.locate(key)}: not found") from error
            fix = f"; {S3_FIXES[name]}" if name in S3_FIXES else ""
            raise StorageError(f"{self.locate(key)}: cannot {action}: {shorten(error)}{fix}") from error


def _is_below(key: str, prefix: str) -> bool:
    """Whether `key` is the object `prefix` or lies in the folder `prefix`; S3 itself knows no folders."""
    return not prefix or key == prefix or key.startswith(prefix.rstrip("/") + "/")


def _prefix_of(rule: dict[str, Any]) -> str:
    """The beginning of the keys that a lifecycle rule is about; the form without a filter is the older one."""
    return str(rule.get("Filter", {}).get("Prefix") or rule.get("Prefix") or "")


def _etag_and_time(item: dict[str, Any]) -> str:
    return item["ETag"].strip('"') + f"-{item['LastModified'].timestamp():.0f}"


@contextlib.contextmanager
def _unless_upload_is_gone() -> Iterator[None]:
    """Completed or aborted meanwhile, by its writer or by the bucket's lifecycle rules."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchUpload":
            raise


class _S3Writer(HashingWriter):
    """A multipart upload, a few parts at once; what fits into one part is one plain PUT.

    boto3's `upload_fileobj` pulls from a file; torch.save pushes into one. Between the two would stand a temporary
    file or a second copy of the state in memory.
    """

    def __init__(self, client: BaseClient, bucket: str, key: str, errors: Errors) -> None:
        super().__init__()
        self._errors = errors
        self._client: Any = client
        self._target = {"Bucket": bucket, "Key": key}
        self._filling = bytearray()
        self._upload_id = ""
        self._parts: list[Future[dict[str, Any]]] = []
        self._pool = ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="s3-part")

    def _store(self, view: memoryview) -> None:
        while len(view):
            if len(self._filling) == PART:
                with self._errors():
                    self._send_part()
            room = PART - len(self._filling)
            self._filling += view[:room]
            view = view[room:]

    def _send_part(self) -> None:
        if not self._upload_id:
            self._upload_id = self._client.create_multipart_upload(**self._target)["UploadId"]
        if len(self._parts) >= PARTS_IN_FLIGHT:
            self._parts[-PARTS_IN_FLIGHT].result()  # bounds the memory, and stops at the first part that failed
        body, self._filling = self._filling, bytearray()
        number = len(self._parts) + 1
        self._parts.append(self._pool.submit(self._upload_part, number, body))

    def _upload_part(self, number: int, body: bytearray) -> dict[str, Any]:
        answer = self._client.upload_part(**self._target, UploadId=self._upload_id, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def complete(self) -> None:
        with self._errors():
            if self._upload_id:
                self._send_part()
                self._complete_upload([part.result() for part in self._parts])
            else:
                self._client.put_object(**self._target, Body=self._filling)
        self._pool.shutdown()

    def _complete_upload(self, parts: list[dict[str, Any]]) -> None:
        from botocore.exceptions import ClientError

        try:
            self._client.complete_multipart_upload(
                **self._target, UploadId=self._upload_id, MultipartUpload={"Parts": parts}
            )
        except ClientError as error:
            # An earlier try may have been carried out, and its answer lost: the upload is gone, and the object there.
            if error.response["Error"]["Code"] != "NoSuchUpload" or not self._is_there():
                raise

    def _is_there(self) -> bool:
        from botocore.exceptions import ClientError

        with contextlib.suppress(ClientError):
            return bool(self._client.head_object(**self._target)["ContentLength"] == self.size)
        return False

    def abort(self) -> None:
        """Give back the space of the parts; an abort that fails too leaves them to the bucket's lifecycle rules."""
        self._pool.shutdown(cancel_futures=True)
        if self._upload_id:
            with contextlib.suppress(Exception):
                self._client.abort_multipart_upload(**self._target, UploadId=self._upload_id)


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
                # Checksums in trailers are AWS's own; we hash every byte ourselves and read it back.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                max_pool_connections=max(2 * PARTS_IN_FLIGHT, READS_IN_FLIGHT),
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise StorageError(f"{url}: the AWS environment cannot be used: {shorten(error)}") from error
