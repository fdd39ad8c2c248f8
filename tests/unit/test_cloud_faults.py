"""Tests for faults of all object stores. test_storage.py tests the faults of S3 only."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from sunspot.errors import NotFoundError, StorageError
from sunspot.storage import bucket, open_storage
from sunspot.storage.azure import AzureStorage
from sunspot.storage.base import Storage
from sunspot.storage.bucket import Part
from sunspot.storage.google import ComposedUpload, put
from tests.harness import clouds, s3
from tests.harness.constants import SetConstants
from tests.harness.s3 import FaultProxy, Request

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20


class Cloud(NamedTuple):
    """A service behind a proxy, with functions that classify requests."""

    part: int
    "Size of a part in bytes."
    storage: Storage
    proxy: FaultProxy
    is_part: Callable[[Request], bool]
    "True for a request that sends a part."
    is_completion: Callable[[Request], bool]
    is_download: Callable[[Request], bool]


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants) -> None:
    """Use small parts, short timeouts, and no pauses between attempts."""
    from azure.storage.blob import ExponentialRetry
    from google.cloud.storage import retry

    set_constants(bucket, PART=MIB, READ_TIMEOUT_S=0.5, REQUEST_TRIES=3)
    monkeypatch.setattr(retry, "DEFAULT_RETRY", retry.DEFAULT_RETRY.with_delay(initial=0.01, maximum=0.02))
    monkeypatch.setattr(ExponentialRetry, "get_backoff_time", lambda self, settings: 0.01)


@pytest.fixture(params=["s3", *clouds.CLOUDS])
def cloud(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> Iterator[Cloud]:
    if request.param == "s3":
        set_constants(bucket, PART=5 * MIB, READ_TIMEOUT_S=1.5)  # the smallest part that S3 accepts
        tell = (
            lambda request: request.operation == "UploadPart",
            lambda request: request.operation == "CompleteMultipartUpload",
            lambda request: request.operation == "GetObject",
        )
        proxy, name = request.getfixturevalue("s3_proxy"), request.getfixturevalue("s3_bucket")
        yield Cloud(5 * MIB, open_storage(f"s3://{name}/runs"), proxy, *tell)
        return
    if request.param == "gs":
        name, port = (request.getfixturevalue(fixture) for fixture in ("google_bucket", "google_server"))
        use = clouds.use_google
        tell = (
            lambda request: request.method in ("POST", "PUT") and b".part" in request.target.encode() + request.body,
            lambda request: request.path.endswith("/compose"),
            lambda request: request.path.startswith("/download"),
        )
    else:
        name, port = (request.getfixturevalue(fixture) for fixture in ("azure_container", "azure_server"))
        use = clouds.use_azure
        tell = (
            lambda request: request.query.get("comp") == "block",
            lambda request: request.query.get("comp") == "blocklist" and request.method == "PUT",
            lambda request: request.method == "GET" and "comp" not in request.query,
        )
    proxy = FaultProxy("127.0.0.1", port)
    use(proxy.server_address[1], monkeypatch)
    yield Cloud(MIB, open_storage(f"{request.param}://{name}/runs"), proxy, *tell)
    proxy.end()


def pattern(size: int) -> bytes:
    """Return bytes that are different in every part."""
    return b"".join(n.to_bytes(8, "big") for n in range(size // 8 + 1))[:size]


def write(storage: Storage, content: bytes) -> Any:
    with storage.writer("run/model.pt") as writer:
        writer.write(content)
    return writer


def assert_nothing_left(storage: Storage) -> None:
    assert storage.list("") == []
    assert storage.list_unfinished("") == []


def test_an_object_replaced_after_its_listing_is_not_deleted(cloud: Cloud) -> None:
    def is_conditional(request: Request) -> bool:
        return request.method == "DELETE" and ("if-match" in request.headers or "ifGenerationMatch" in request.query)

    cloud.storage.write("run/run.json", b"old")
    [old] = cloud.storage.list("run")
    code = "ConditionNotMet" if isinstance(cloud.storage, AzureStorage) else "PreconditionFailed"
    cloud.proxy.on(is_conditional, s3.answer(412, code))
    cloud.storage.delete("run/run.json", old.version)
    assert cloud.storage.exists("run/run.json")


@pytest.mark.parametrize("fault", [s3.reset, s3.carry_out_then_reset, s3.stall, s3.answer(503, "ServerBusy")])
def test_a_failed_part_upload_is_retried(cloud: Cloud, fault: s3.Fault) -> None:
    content = pattern(5 * MIB + 1) if cloud.part == MIB else pattern(2 * cloud.part + 1)
    cloud.proxy.on(cloud.is_part, fault, times=1)
    writer = write(cloud.storage, content)
    assert writer.verified or cloud.part > MIB, "the S3 server used in tests verifies nothing"
    assert cloud.storage.digest("run/model.pt") == (len(content), hashlib.sha256(content).hexdigest())
    assert cloud.storage.list_unfinished("") == []


def test_an_object_is_written_even_if_the_response_is_lost(cloud: Cloud) -> None:
    content = pattern(3 * cloud.part)
    cloud.proxy.on(cloud.is_completion, s3.carry_out_then_reset, times=1)
    write(cloud.storage, content)
    assert cloud.storage.read("run/model.pt") == content
    assert cloud.storage.list_unfinished("") == []


def test_creating_an_object_succeeds_even_if_the_response_was_lost(cloud: Cloud) -> None:
    cloud.proxy.on(lambda request: request.method in ("POST", "PUT"), s3.carry_out_then_reset, times=1)
    assert cloud.storage.create("run/run.json", b"first")
    assert not cloud.storage.create("run/run.json", b"second")
    assert cloud.storage.read("run/run.json") == b"first"


@pytest.mark.parametrize("kind", ["is_part", "is_completion"])
def test_a_failed_upload_leaves_no_object(cloud: Cloud, kind: str) -> None:
    cloud.proxy.on(getattr(cloud, kind), s3.answer(403, "Forbidden"), times=1)
    with pytest.raises(StorageError, match=r"cannot upload .*://.*/runs/run/model\.pt: "):
        write(cloud.storage, pattern(3 * cloud.part))
    assert_nothing_left(cloud.storage)


def test_an_uploaded_part_damaged_in_transit_is_rejected(cloud: Cloud) -> None:
    cloud.proxy.on(cloud.is_part, s3.damage(s3.pass_on if cloud.part == MIB else s3.refuse_damage))
    with pytest.raises(StorageError, match="cannot upload"):
        write(cloud.storage, pattern(3 * cloud.part))
    assert cloud.storage.list("") == []


@pytest.mark.parametrize("cloud", clouds.CLOUDS, indirect=True)  # on S3, the reader itself retries
@pytest.mark.parametrize("how", ["close", "reset", "stall"])
def test_an_interrupted_read_continues(cloud: Cloud, how: str) -> None:
    content = pattern(3 * cloud.part + 5)
    write(cloud.storage, content)
    cloud.proxy.on(cloud.is_download, s3.cut_body(1000, how), times=1)
    assert cloud.storage.digest("run/model.pt") == (len(content), hashlib.sha256(content).hexdigest())


def test_a_read_without_a_response_fails(cloud: Cloud) -> None:
    write(cloud.storage, pattern(MIB))
    cloud.proxy.on(cloud.is_download, s3.stall)
    with pytest.raises(StorageError, match=r"cannot read .*/runs/run/model\.pt: "):
        cloud.storage.read("run/model.pt")


def test_reads_never_mix_versions_of_an_object(cloud: Cloud) -> None:
    old, new = bytes(4 * cloud.part), bytes([1]) * (4 * cloud.part)
    write(cloud.storage, old)
    with cloud.storage.open("run/model.pt") as stream:
        first = stream.read(10)
        write(cloud.storage, new)
        with pytest.raises(StorageError, match="replaced while it was being read; try again"):
            first += stream.read()
    assert set(first) == {0}


def test_a_missing_bucket_is_not_reported_as_a_missing_object(cloud: Cloud) -> None:
    scheme = cloud.storage.locate("").partition("://")[0]
    elsewhere = open_storage(f"{scheme}://test-not-there/runs")
    for ask in (elsewhere.list, elsewhere.exists):
        with pytest.raises(StorageError, match="correct SUNSPOT_STORAGE_PATH") as raised:
            ask("run")
        assert not isinstance(raised.value, NotFoundError)
        assert raised.value.final, "no other cluster would find it either"


def test_the_error_for_an_unreachable_service_says_what_to_check(cloud: Cloud) -> None:
    cloud.proxy.end()
    with pytest.raises(StorageError, match=r"cannot write .*; check ") as raised:
        cloud.storage.write("run/a", b"")
    assert not raised.value.final, "it may be back when another cluster tries"


def test_the_error_for_a_missing_account_includes_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StorageError, match="set AZURE_STORAGE_ACCOUNT or AZURE_STORAGE_CONNECTION_STRING"):
        open_storage("az://container/runs")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "nonsense")
    with pytest.raises(StorageError, match=r"AZURE_STORAGE_\* environment variables are not usable"):
        open_storage("az://container/runs")


def test_the_error_for_expired_credentials_says_to_sign_in_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The single sign-on token is read from a file, so no request is sent."""
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL")
    for name in keys:
        monkeypatch.delenv(name, raising=False)
    sso = "sso_start_url=https://x.invalid\nsso_region=us-east-1\nsso_account_id=1\nsso_role_name=r\n"
    (tmp_path / "config").write_text(f"[default]\n{sso}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StorageError, match=r"Error loading SSO Token: .*; sign in again, for example with `aws sso"):
        open_storage("s3://bucket").read("run.json")


def test_google_composes_an_object_from_the_generations_that_were_uploaded() -> None:
    """Requests include generations, because a part can be replaced. The emulator ignores this condition."""
    asked: dict[str, Any] = {}
    joined = SimpleNamespace(size=7, generation=30, compose=lambda blobs, **more: asked.update(more, blobs=blobs))

    def blob(name: str, generation: int | None = None) -> Any:
        return SimpleNamespace(name=name, generation=generation) if generation else joined

    bucket: Any = SimpleNamespace(blob=blob, name="bucket", list_blobs=lambda **_: [])
    request = lambda *_: contextlib.nullcontext()  # noqa: E731
    storage: Any = SimpleNamespace(_bucket=bucket, _full=lambda key: key, _request=request, _limits={})
    upload = ComposedUpload(storage, "model.pt", "token")
    assert upload.complete([Part(1, "20"), Part(0, "10")], 7)
    assert [source.generation for source in asked["blobs"]] == [10, 20]
    assert asked["if_source_generation_match"] == [10, 20]


def test_damaged_bytes_raise_an_error_even_if_google_accepts_them() -> None:
    """The service verifies the bytes too, so checking its response is a second check."""
    blob: Any = SimpleNamespace(upload_from_file=lambda *_, **__: None, crc32c="AAAAAA==", generation=1)
    with pytest.raises(ValueError, match="the service received bytes with CRC-32C AAAAAA=="):
        put(blob, b"content", {})


def test_google_composes_many_parts_in_order(google_bucket: str, set_constants: SetConstants) -> None:
    set_constants(bucket, PART=1 << 10)
    storage, content = open_storage(f"gs://{google_bucket}"), pattern(70 << 10)
    write(storage, content)
    assert storage.read("run/model.pt") == content
    assert [entry.key for entry in storage.list("")] == ["run/model.pt"]
    assert storage.list_unfinished("") == []
