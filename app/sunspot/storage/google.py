"""Storage in a Google Cloud Storage bucket.

The parts of an upload are separate objects, which the service composes into one without copying. Resumable uploads are
not used because each is a single stream, which cannot be sent in parallel. Multipart uploads are not used because only
the S3-compatible API offers them, and this API cannot be used (see `GoogleStorage`).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import re
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from google.api_core.exceptions import GoogleAPIError, NotFound, PreconditionFailed, RequestRangeNotSatisfiable
from google.auth.exceptions import GoogleAuthError
from google.cloud import storage
from google.cloud.storage import retry
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google_crc32c import Checksum
from requests import RequestException
from requests.adapters import HTTPAdapter

from sunspot.background import map_parallel
from sunspot.errors import NotFoundError, StorageError, shorten
from sunspot.storage import bucket
from sunspot.storage.base import Entry, UnfinishedWrite
from sunspot.storage.bucket import Bucket, ByteRange, ListingPage, Part, PartUpload
from sunspot.storage.limits import record_progress

LISTED_AT_ONCE = 1000
"""Number of objects per page of a listing. The service does not allow more."""

JOINED_AT_ONCE = 32
"""Largest number of objects that the service composes per request (see "Composite objects" in its documentation)."""

PART_SUFFIX = ".part"
"""Suffix of the names of parts. A lifecycle rule finds the parts of killed writers by this suffix."""

PART_OBJECT = re.compile(r"\.(?P<token>[0-9a-f]{32})\.\d-\d{5}\.part$")
"""The end of a part's name: the upload's token, the level in the tree of composed parts, and the part's number."""


class GoogleStorage(Bucket):
    """A prefix in a bucket, accessed through Google's client with Application Default Credentials.

    The S3-compatible API cannot be used, because it ignores `If-None-Match: *`.
    """

    SCHEME = "gs"
    FIXES: ClassVar[dict[str, str]] = {
        "NotFound": "create the bucket, or correct SUNSPOT_STORAGE_PATH",
        "Forbidden": "give the identity the role Storage Object User (roles/storage.objectUser) on the bucket",
        "Unauthorized": "renew the credentials: gcloud auth application-default login, or check Workload Identity",
        "DefaultCredentialsError": "run gcloud auth application-default login, or bind the pod's service account by "
        "Workload Identity",
        "RefreshError": "renew the credentials: gcloud auth application-default login, or check Workload Identity",
        "ConnectionError": "check that storage.googleapis.com (or STORAGE_EMULATOR_HOST) can be reached from here",
        "ConnectTimeout": "check that storage.googleapis.com (or STORAGE_EMULATOR_HOST) can be reached from here",
    }
    REFUSALS = ("NotFound",)
    KEY_REFUSALS = ("Forbidden", "Unauthorized")
    KEYS = ("GOOGLE_APPLICATION_CREDENTIALS",)
    MISSING = "no such object"
    VERSIONS_FIX = (
        "disable versioning and soft delete for this bucket (gcloud storage buckets update gs://BUCKET "
        "--no-versioning --clear-soft-delete), or add a lifecycle rule that deletes noncurrent versions"
    )
    UNFINISHED_FIX = f"add a lifecycle rule that deletes objects with matchesSuffix {PART_SUFFIX} after a day"
    VERSIONS_RIGHT = UNFINISHED_RIGHT = "storage.buckets.get"
    FAILURES = (GoogleAPIError, GoogleAuthError, DataCorruption, InvalidResponse, RequestException, OSError, ValueError)

    def __init__(self, storage_path: str) -> None:
        super().__init__(storage_path)
        self._client = _google_client(storage_path)
        self._client._http.hooks["response"].append(lambda answer, **_: self._note_clock(answer.headers.get("date")))
        self._bucket = self._client.bucket(self.bucket)

    @functools.cached_property
    def _limits(self) -> dict[str, Any]:
        """Keyword arguments that limit the time of a request and its retries."""
        return {
            "timeout": (bucket.CONNECT_TIMEOUT_S, bucket.READ_TIMEOUT_S),
            "retry": retry.DEFAULT_RETRY.with_timeout(bucket.REQUEST_TRIES * bucket.READ_TIMEOUT_S),
        }

    def _read_range(self, key: str, begin: int, size: int, version: str = "") -> ByteRange | None:
        blob = self._bucket.blob(self._full(key), generation=version or None)
        content = _CountedBytes()
        with self._request("read", key, gives_s=0):
            try:
                blob.download_to_file(
                    content, start=begin, end=begin + size - 1, raw_download=True, checksum=None, **self._limits
                )
            except RequestRangeNotSatisfiable:
                return None
            except NotFound as error:
                if version:
                    raise StorageError(
                        f"cannot read {self.locate(key)}: the object was replaced while it was being read; try again"
                    ) from error
                raise
            body, total = content.getvalue(), begin + content.tell()
            if len(body) == size and not version:  # the object might be longer
                blob.reload(**self._limits)
                total = blob.size
        return ByteRange(body, total, str(blob.generation))

    def _put(self, key: str, data: bytes | bytearray) -> None:
        put(self._bucket.blob(self._full(key)), data, self._limits)

    def _put_new(self, key: str, data: bytes) -> bool:
        try:
            put(self._bucket.blob(self._full(key)), data, self._limits, if_generation_match=0)
        except PreconditionFailed:
            return False
        return True

    def _begin_upload(self, key: str) -> ComposedUpload:
        return ComposedUpload(self, key)

    def _list_pages(self, prefix: str) -> Iterator[ListingPage]:
        listing = self._bucket.list_blobs(prefix=prefix, page_size=LISTED_AT_ONCE, **self._limits)
        for page in listing.pages:
            entries = [
                Entry(self._relative(blob.name), blob.size, blob.updated.timestamp(), str(blob.generation))
                for blob in page
            ]
            yield ListingPage(entries, bool(listing.next_page_token))

    def _list_prefixes(self, prefix: str) -> Iterable[str]:
        listing = self._bucket.list_blobs(prefix=prefix, delimiter="/", page_size=LISTED_AT_ONCE, **self._limits)
        for _ in listing.pages:
            pass  # each page adds to the prefixes
        return listing.prefixes

    def list(self, prefix: str) -> list[Entry]:
        return [entry for entry in super().list(prefix) if not PART_OBJECT.search(entry.key)]

    def list_unfinished(self, prefix: str) -> Sequence[UnfinishedWrite]:
        # A listing of `run/model.pt` does not contain `run/model.pt.TOKEN...`.
        uploads = defaultdict[tuple[str, str], list[Entry]](list)
        for entry in super().list(prefix):
            match = PART_OBJECT.search(entry.key)
            if match:
                uploads[entry.key[: match.start()], match["token"]].append(entry)
        return sorted(
            UnfinishedWrite(key, sum(part.size for part in found), max(part.modified for part in found), token)
            for (key, token), found in uploads.items()
        )

    def discard(self, unfinished: UnfinishedWrite) -> None:
        ComposedUpload(self, unfinished.key, unfinished.token).abort()

    def delete(self, key: str, version: str = "") -> None:
        condition = {"if_generation_match": int(version)} if version else {}
        with contextlib.suppress(NotFoundError), self._request("delete", key), contextlib.suppress(PreconditionFailed):
            self._bucket.blob(self._full(key)).delete(**condition, **self._limits)

    def keeps_versions(self) -> bool | None:
        with contextlib.suppress(*self.FAILURES):  # the credentials might lack the permission
            self._bucket.reload(**self._limits)
            kept_s = self._bucket.soft_delete_policy.retention_duration_seconds
            return bool(self._bucket.versioning_enabled or kept_s)
        return None

    def drops_unfinished(self) -> bool | None:
        with contextlib.suppress(*self.FAILURES):  # the credentials might lack the permission
            self._bucket.reload(**self._limits)
            return any(
                rule["action"]["type"] == "Delete"
                and PART_SUFFIX in rule["condition"].get("matchesSuffix", ())
                and self._full("").startswith(tuple(rule["condition"].get("matchesPrefix", ("",))))
                for rule in self._bucket.lifecycle_rules
            )
        return None

    def _code(self, error: Any) -> str:
        # A missing bucket is a 404 too. Only the URL in the text distinguishes it from a missing object.
        name = type(getattr(error, "cause", None) or error).__name__
        text = str(error)
        return self.MISSING if name == "NotFound" and "/o/" in text and "bucket does not exist" not in text else name


class _CountedBytes(io.BytesIO):
    """A download buffer that reports received bytes as progress."""

    def write(self, data: Any) -> int:
        record_progress(len(data))
        return super().write(data)


def _google_client(url: str) -> Any:
    try:
        client = storage.Client()
        # Private, but recommended by Google for more than ten connections (google-cloud-storage 3.17).
        client._http.mount("https://", HTTPAdapter(pool_maxsize=bucket.CONNECTIONS))
        client._http.mount("http://", HTTPAdapter(pool_maxsize=bucket.CONNECTIONS))
    except (GoogleAuthError, OSError, ValueError) as error:
        fix = GoogleStorage.FIXES["DefaultCredentialsError"]
        raise StorageError(f"{url}: found no credentials for Google Cloud: {shorten(error)}; {fix}") from error
    return client


# -------------------------------------------------------------------------------------------------------------- uploads


class ComposedUpload(PartUpload):
    """An upload whose parts are separate objects until they are composed into one."""

    def __init__(self, storage: GoogleStorage, key: str, token: str = "") -> None:
        """Create an upload. `token` identifies its parts. By default, a new token is generated."""
        super().__init__(storage, key)
        self._bucket = storage._bucket
        self._name = storage._full(key)
        self._limits = storage._limits
        self._token = token or uuid.uuid4().hex

    def send(self, number: int, body: bytes | bytearray) -> Part:
        with self._request():
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
        with contextlib.suppress(StorageError):  # remaining parts are listed as unfinished
            self.abort()
        return True

    def _join(self, name: str, sources: Sequence[tuple[str, str]], size: int | None = None) -> str:
        """Compose the objects in `sources` (names and generations) into one, and return the new object's generation."""
        blob = self._bucket.blob(name)
        blobs = [self._bucket.blob(source, generation=int(generation)) for source, generation in sources]
        with self._request():
            blob.content_type = "application/octet-stream"
            blob.compose(blobs, if_source_generation_match=[source.generation for source in blobs], **self._limits)
        if size is not None and blob.size != size:
            raise StorageError(
                f"gs://{self._bucket.name}/{name} has {blob.size} bytes instead of {size} after its parts were composed"
            )
        return str(blob.generation)

    def abort(self) -> None:
        def delete(blob: Any) -> None:
            with contextlib.suppress(NotFound):
                blob.delete(**self._limits)

        with self._request():
            map_parallel(delete, list(self._bucket.list_blobs(prefix=f"{self._name}.{self._token}.", **self._limits)))

    def _part_name(self, level: int, number: int) -> str:
        return f"{self._name}.{self._token}.{level}-{number:05d}{PART_SUFFIX}"  # PART_OBJECT


def put(blob: Any, body: bytes | bytearray, limits: dict[str, Any], **condition: int) -> str:
    """Write an object, and return its generation. Raises `ValueError` if the service received different bytes."""
    checksum = base64.b64encode(Checksum(bytes(body)).digest()).decode()
    options = {"content_type": "application/octet-stream", "checksum": "crc32c", "crc32c_checksum_value": checksum}
    blob.upload_from_file(io.BytesIO(body), size=len(body), **options, **condition, **limits)
    if blob.crc32c != checksum:
        raise ValueError(f"the service received bytes with CRC-32C {blob.crc32c} instead of {checksum}")
    return str(blob.generation)
