"""Storage in a container of Azure Blob Storage.

An upload sends its parts as blocks of the blob. A final request commits the blocks as the blob's content.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from azure.core import MatchConditions, exceptions
from azure.identity import DefaultAzureCredential
from azure.storage.blob import BlobBlock, BlobServiceClient, ExponentialRetry

from sunspot.errors import NotFoundError, RefusedStorageError, shorten
from sunspot.storage import bucket
from sunspot.storage.base import Entry, UnfinishedWrite
from sunspot.storage.bucket import Bucket, ByteRange, ListingPage, Part, PartUpload, is_below
from sunspot.storage.limits import record_progress


class AzureStorage(Bucket):
    """A prefix in a container, accessed through Azure's client.

    The account and its credentials come from AZURE_STORAGE_CONNECTION_STRING, or from AZURE_STORAGE_ACCOUNT and
    AZURE_STORAGE_KEY. Without a key, `DefaultAzureCredential` finds the credentials.
    """

    SCHEME = "az"
    FIXES: ClassVar[dict[str, str]] = {
        "ContainerNotFound": "create the container, or correct SUNSPOT_STORAGE_PATH",
        "AuthorizationPermissionMismatch": "give the identity the role Storage Blob Data Contributor on the container",
        "AuthorizationFailure": "allow this network in the storage account's firewall, and the identity the role "
        "Storage Blob Data Contributor",
        "AuthenticationFailed": "check AZURE_STORAGE_CONNECTION_STRING or AZURE_STORAGE_KEY, and this machine's clock",
        "NoAuthenticationInformation": "set AZURE_STORAGE_KEY, or give the pod's service account an identity",
        "ClientAuthenticationError": "run az login, or give the pod's service account an identity (Workload Identity)",
        "ConditionNotMet": "the object was replaced while it was being read; try again",
        "ServiceRequestError": "check AZURE_STORAGE_ACCOUNT or AZURE_STORAGE_CONNECTION_STRING, and that it can be "
        "reached from here",
    }
    REFUSALS = ("ContainerNotFound",)
    KEY_REFUSALS = ("AuthorizationPermissionMismatch", "AuthorizationFailure", "AuthenticationFailed")
    KEYS = ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY")
    MISSING = "BlobNotFound"
    VERSIONS_FIX = (
        "disable blob versioning and soft delete for this storage account, or keep deleted blobs for a day only"
    )
    VERSIONS_RIGHT = "Microsoft.Storage/storageAccounts/blobServices/read"
    UNFINISHED_FIX = UNFINISHED_RIGHT = ""  # Azure always deletes unfinished uploads
    FAILURES = (exceptions.AzureError, OSError, ValueError)

    def __init__(self, storage_path: str) -> None:
        super().__init__(storage_path)
        self._service = _azure_client(storage_path)
        self._container = self._service.get_container_client(self.bucket)

    def _read_range(self, key: str, begin: int, size: int, version: str = "") -> ByteRange | None:
        condition = {"etag": version, "match_condition": MatchConditions.IfNotModified} if version else {}
        with self._request("read", key, gives_s=0):
            try:
                answer = self._container.download_blob(self._full(key), offset=begin, length=size, **condition)
                body = answer.readall()
            except exceptions.HttpResponseError as error:
                if error.status_code == 416:
                    return None
                raise
        record_progress(len(body))
        total = int(answer.properties.content_range.rpartition("/")[2])
        return ByteRange(body, total, answer.properties.etag)

    def _put(self, key: str, data: bytes | bytearray) -> None:
        self._container.upload_blob(self._full(key), bytes(data), overwrite=True, validate_content="md5")

    def _put_new(self, key: str, data: bytes) -> bool:
        try:
            self._container.upload_blob(self._full(key), data, overwrite=False, validate_content="md5")
        except (exceptions.ResourceExistsError, exceptions.ResourceModifiedError):
            return False
        return True

    def _begin_upload(self, key: str) -> BlockUpload:
        return BlockUpload(self, key)

    def _list_pages(self, prefix: str) -> Iterator[ListingPage]:
        pages = self._list_blobs(prefix).by_page()
        for page in pages:
            entries = [
                Entry(self._relative(blob.name), blob.size, blob.last_modified.timestamp(), blob.etag) for blob in page
            ]
            yield ListingPage(entries, bool(pages.continuation_token))

    def _list_blobs(self, prefix: str, **options: Any) -> Any:
        def note_clock(answer: Any) -> None:
            self._note_clock(answer.http_response.headers.get("date"))

        return self._container.list_blobs(name_starts_with=prefix, raw_response_hook=note_clock, **options)

    def _list_prefixes(self, prefix: str) -> Iterable[str]:
        found = self._container.walk_blobs(name_starts_with=prefix, delimiter="/")
        return [each.name for each in found if each.name.endswith("/")]

    def list_unfinished(self, prefix: str) -> Sequence[UnfinishedWrite]:
        found = []
        with self._request("list the unfinished uploads of", prefix):
            committed = {blob.name for blob in self._list_blobs(self._full(prefix))}
            blobs = self._list_blobs(self._full(prefix), include=["uncommittedblobs"])
            for name in [blob.name for blob in blobs if blob.name not in committed]:
                key = self._relative(name)
                if not is_below(key, prefix):
                    continue
                blocks = self._container.get_blob_client(name).get_block_list("uncommitted")[1]
                if blocks:
                    token = max(
                        block.id.rpartition("-")[0] for block in blocks
                    )  # the newest one, because a token begins with the time
                    found.append(UnfinishedWrite(key, sum(block.size for block in blocks), float(token[:10]), token))
        return sorted(found)

    def discard(self, unfinished: UnfinishedWrite) -> None:
        BlockUpload(self, unfinished.key, unfinished.token).abort()

    def delete(self, key: str, version: str = "") -> None:
        quoted = f'"{version}"'  # listings omit the quotes
        condition = {"etag": quoted, "match_condition": MatchConditions.IfNotModified} if version else {}
        changed = contextlib.suppress(exceptions.ResourceModifiedError)
        with contextlib.suppress(NotFoundError), self._request("delete", key), changed:
            self._container.delete_blob(self._full(key), **condition)

    def keeps_versions(self) -> bool | None:
        with contextlib.suppress(*self.FAILURES):
            return bool(self._service.get_service_properties()["delete_retention_policy"].enabled)
        return None

    def drops_unfinished(self) -> bool:
        return True  # after a week ("Put Block" in Azure's documentation)

    def _code(self, error: Any) -> str:
        code = getattr(error, "error_code", None) or type(error).__name__
        return str(getattr(code, "value", code))

    def _text(self, error: Exception) -> str:
        return shorten(Exception(str(error).partition("\n")[0]))  # the following lines are request IDs and XML


def _azure_client(url: str) -> Any:
    options: dict[str, Any] = {
        "connection_timeout": bucket.CONNECT_TIMEOUT_S,
        "read_timeout": bucket.READ_TIMEOUT_S,
        "retry_policy": ExponentialRetry(
            initial_backoff=1, increment_base=2, retry_total=bucket.REQUEST_TRIES - 1, random_jitter_range=0
        ),
        "max_single_get_size": bucket.PART,
        "max_chunk_get_size": bucket.PART,
    }
    connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    account = os.environ.get("AZURE_STORAGE_ACCOUNT")
    try:
        if connection:
            return BlobServiceClient.from_connection_string(connection, **options)
        if not account:
            raise RefusedStorageError(
                f"{url}: the storage account is unknown; set AZURE_STORAGE_ACCOUNT or AZURE_STORAGE_CONNECTION_STRING"
            )
        credential = os.environ.get("AZURE_STORAGE_KEY") or DefaultAzureCredential()
        return BlobServiceClient(f"https://{account}.blob.core.windows.net", credential, **options)
    except ValueError as error:
        raise RefusedStorageError(
            f"{url}: the AZURE_STORAGE_* environment variables are not usable: {shorten(error)}"
        ) from error


# -------------------------------------------------------------------------------------------------------------- uploads


class BlockUpload(PartUpload):
    """An upload that consists of several blocks.

    In Azure, blocks belong to a blob rather than to an upload. If two writers upload the same blob, the first writer to
    finish removes the other writer's blocks, and the other upload fails. Each checkpoint has a unique name, so this
    only happens between two attempts to write the same checkpoint.
    """

    def __init__(self, storage: AzureStorage, key: str, token: str = "") -> None:
        """Create an upload. `token` identifies its blocks. By default, a new token is generated."""
        super().__init__(storage, key)
        self._blob = storage._container.get_blob_client(storage._full(key))
        self._token = token or f"{int(time.time()):010d}{uuid.uuid4().hex[:22]}"  # `list_unfinished` reads the time

    def send(self, number: int, body: bytes | bytearray) -> Part:
        with self._request():
            self._blob.stage_block(self._block(number), bytes(body), validate_content="md5")
        return Part(number, "")

    def complete(self, parts: Sequence[Part], size: int) -> bool:
        with self._request():
            try:
                self._blob.commit_block_list([BlobBlock(block_id=self._block(part.number)) for part in sorted(parts)])
            except exceptions.HttpResponseError as error:
                # If an earlier attempt succeeded but its response was lost, the blob exists without blocks.
                if error.error_code != "InvalidBlockList" or self._blob.get_blob_properties().size != size:
                    raise
        return True

    def abort(self) -> None:
        # Uncommitted blocks are freed only when their blob is deleted, or after a week.
        committed = (exceptions.ResourceExistsError, exceptions.ResourceModifiedError, exceptions.ResourceNotFoundError)
        with self._request(), contextlib.suppress(*committed):
            empty = self._blob.commit_block_list([], match_condition=MatchConditions.IfMissing)
            self._blob.delete_blob(etag=empty["etag"], match_condition=MatchConditions.IfNotModified)

    def _block(self, number: int) -> str:
        return f"{self._token}-{number:05d}"
