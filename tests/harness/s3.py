"""Runs an S3 server (moto) in this process, behind a proxy that injects faults. Both only listen on 127.0.0.1."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import socket
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from scripts.object_stores import S3_KEYS

HOP_BY_HOP = {"connection", "content-length", "date", "expect", "keep-alive", "server", "transfer-encoding"}


@dataclass(frozen=True)
class Request:
    """A request as the proxy saw it, with header names in lower case."""

    method: str
    target: str
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    @property
    def operation(self) -> str:
        """S3's name for the operation, if Sunspot uses it."""
        if self.path.strip("/").count("/") == 0:
            return {"GET": "ListObjects", "HEAD": "HeadBucket", "PUT": "CreateBucket"}.get(self.method, self.method)
        if self.query.get("partNumber") == "10000":
            return "TryPart"
        if "uploadId" in self.query:
            names = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}
            return names.get(self.method, "ListParts")
        if self.method == "POST":
            return "CreateMultipartUpload"
        return self.method.capitalize() + "Object"


Fault = Callable[["_Handler", Request], None]
"""A function that answers a request instead of the server, or leaves it unanswered."""


def answer(status: int, code: str) -> Fault:
    """Return a fault that answers with S3's XML for an error `code`. A failed completion can have the status 200."""

    def act(handler: _Handler, request: Request) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to fail</Message></Error>".encode()
        handler.reply(status, {"Content-Type": "application/xml"}, body)

    return act


def reset(handler: _Handler, request: Request) -> None:
    """Reset the connection, so that the server never sees the request."""
    handler.reset()


def carry_out_then_reset(handler: _Handler, request: Request) -> None:
    """Let the server carry out the request, but drop its answer."""
    handler.ask_server(request)
    handler.reset()


def stall(handler: _Handler, request: Request) -> None:
    """Accept the request, but do not answer until the proxy ends."""
    handler.server.ended.wait()
    handler.reset()


def cut_body(keep: int, how: str = "close") -> Fault:
    """Return a fault that announces the full body, sends `keep` bytes, then closes, resets or stalls."""

    def act(handler: _Handler, request: Request) -> None:
        status, headers, body = handler.ask_server(request)
        handler.reply(status, headers, body[:keep], announced=len(body))
        if how == "close":
            handler.close_connection = True
        else:
            if how == "stall":
                handler.server.ended.wait()
            handler.reset()

    return act


def trickle(handler: _Handler, request: Request) -> None:
    """Return a fault that sends the body byte by byte, fast enough that the client's read timeout never expires."""
    status, headers, body = handler.ask_server(request)
    handler.reply(status, headers, b"", announced=len(body))
    for byte in body:
        if handler.server.ended.wait(0.1):
            return
        handler.wfile.write(bytes([byte]))


def delay(seconds: float) -> Fault:
    """Return a fault that passes the request on after a delay."""

    def act(handler: _Handler, request: Request) -> None:
        time.sleep(seconds)
        handler.reply(*handler.ask_server(request))

    return act


def without_header(name: str) -> Fault:
    """Return a fault that passes the request on without this header, as if the server did not support it."""

    def act(handler: _Handler, request: Request) -> None:
        headers = {key: value for key, value in request.headers.items() if key != name.lower()}
        handler.reply(*handler.ask_server(Request(request.method, request.target, headers, request.body)))

    return act


def refuse_damage(handler: _Handler, request: Request) -> None:
    """Reject a body that does not match its checksum, like S3 does. moto does not check this."""
    if request.headers.get("x-amz-checksum-crc32", crc32(request.body)) != crc32(request.body):
        answer(400, "BadDigest")(handler, request)
    else:
        handler.reply(*handler.ask_server(request))


def damage(then: Fault) -> Fault:
    """Change one byte of the body in transit."""

    def act(handler: _Handler, request: Request) -> None:
        body = request.body[:-1] + bytes([request.body[-1] ^ 1])
        then(handler, Request(request.method, request.target, request.headers, body))

    return act


def pass_on(handler: _Handler, request: Request) -> None:
    """Pass the request on to the server."""
    handler.reply(*handler.ask_server(request))


def crc32(body: bytes) -> str:
    """Return a CRC-32 in S3's format."""
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


@dataclass
class _Rule:
    matches: Callable[[Request], bool]
    fault: Fault
    left: float


class FaultProxy(ThreadingHTTPServer):
    """A proxy that applies its rules to requests, and passes on all others. `requests` holds all requests."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = (host, port)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests: list[Request] = []
        self.ended = threading.Event()
        self._rules: list[_Rule] = []
        self._open: set[Any] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), name="fault-proxy", daemon=True)
        self._thread.start()

    def on(self, which: str | Callable[[Request], bool], fault: Fault, times: float = float("inf")) -> None:
        """Answer the next `times` requests of an operation, or those for which a predicate holds, with `fault`.

        The first matching rule that is not used up applies.
        """
        matches = which if callable(which) else lambda request: request.operation == which
        with self._lock:
            self._rules.append(_Rule(matches, fault, times))

    def clear(self) -> None:
        """Remove all rules."""
        with self._lock:
            self._rules.clear()

    def seen(self, operation: str) -> list[Request]:
        """Return an operation's requests so far."""
        with self._lock:
            return [request for request in self.requests if request.operation == operation]

    def fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.left > 0 and rule.matches(request):
                    rule.left -= 1
                    return rule.fault
        return None

    def end(self) -> None:
        """Stop the proxy, and close all connections."""
        self.ended.set()
        self.shutdown()
        self.server_close()
        self._thread.join()
        with self._lock:
            still_open = list(self._open)
        for connection in still_open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        # The base class would call shutdown(SHUT_WR), which sends FIN before a reset.
        with self._lock:
            self._open.discard(request)
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error, because clients disconnect in many tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultProxy

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body)
        fault = self.server.fault_for(request)
        if fault:
            fault(self, request)
        else:
            self.reply(*self.ask_server(request))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def ask_server(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        with contextlib.closing(http.client.HTTPConnection(*self.server.upstream, timeout=30)) as upstream:
            headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
            upstream.request(request.method, request.target, request.body or None, headers)
            response = upstream.getresponse()
            headers = {name: value for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP}
            if request.method == "HEAD":
                headers["Content-Length"] = response.headers.get("Content-Length", "0")
            return response.status, headers, response.read()

    def reply(self, status: int, headers: dict[str, str], body: bytes, announced: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204 and self.command != "HEAD":
            self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def reset(self) -> None:
        """Close the connection with RST instead of FIN."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because `requests` is the log."""


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    """Run an S3 server, and yield its host and port."""
    import botocore.loaders
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    # S3 checks 'If-None-Match' and stores atomically, but moto checks first and stores later.
    one_at_a_time, put_object = threading.Lock(), S3Response.put_object

    def put_object_atomically(self: Any) -> Any:
        with one_at_a_time:
            return put_object(self)

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise each client would parse S3's description again, which would take most of a test's time.
        patch.setattr("botocore.session.create_loader", functools.cache(botocore.loaders.create_loader))
        patch.setattr(S3Response, "put_object", put_object_atomically)
        server.start()
        yield server.get_host_and_port()
        server.stop()


@pytest.fixture
def s3_bucket(s3_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty bucket. The AWS environment points to its server."""
    return make_bucket("http://{}:{}".format(*s3_server), monkeypatch)


def make_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty bucket at an endpoint with the credentials S3_KEYS. The AWS environment points to it."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        **S3_KEYS,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex}"
    plain_client().create_bucket(Bucket=bucket)
    return bucket


@pytest.fixture
def s3_proxy(s3_server: tuple[str, int], s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Run a proxy in front of the server. The AWS environment points to the proxy, and retries do not wait."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01)
    proxy = FaultProxy(*s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.end()


def plain_client() -> Any:
    """Return boto3's own client for the server in the AWS environment."""
    import boto3

    return boto3.session.Session().client("s3", region_name="us-east-1")


def leftover_uploads(bucket: str) -> list[str]:
    """Return the keys of multipart uploads that were neither completed nor aborted."""
    return [upload["Key"] for upload in plain_client().list_multipart_uploads(Bucket=bucket).get("Uploads", [])]
