"""Tests of `sunspot dashboard`: forwarding, rejected requests, and how it ends."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import websocket

from sunspot.errors import ClusterError, SettingsError
from sunspot.run import Run
from sunspot.run.status import RunState, Status, write_status
from sunspot.submitter.cluster.port_forward import LocalPort, find_problem, rewrite
from tests.harness import REPOSITORY
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import FakeCluster, _Handler, answer, pod, rayjob
from tests.harness.runs import begin

JOB = "run-1"
CLUSTER = "run-1-x"
HEAD = "run-1-x-head"
TOKEN = "s3cret"
MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""Constant of the WebSocket handshake (RFC 6455)."""


class Dashboard(BaseHTTPRequestHandler):
    """A dashboard that requires a token, streams, and echoes WebSocket messages."""

    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.send(401, b"no token")
        elif self.headers.get("Upgrade") == "websocket":
            self.echo()
        elif self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number in range(3):
                line = f"line {number}\n".encode()
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.wfile.flush()
                time.sleep(0.05)
            self.wfile.write(b"0\r\n\r\n")
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send(200, f"{self.command} {self.path} {len(body)} {hashlib.sha256(body).hexdigest()}".encode())

    do_GET = do_POST = handle_any

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.headers.get("Connection") == "close":  # like aiohttp, which Ray's dashboard uses
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def echo(self) -> None:
        shake_hands(self)
        while data := self.connection.recv(65536):
            self.connection.sendall(unmask(data))
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def shake_hands(handler: BaseHTTPRequestHandler, **headers: str) -> None:
    """Accept a WebSocket handshake."""
    key = hashlib.sha1((handler.headers["Sec-WebSocket-Key"] + MAGIC).encode()).digest()
    handler.send_response(101)
    headers |= {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": base64.b64encode(key).decode()}
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()


def unmask(data: bytes) -> bytes:
    """Convert a client's frame of less than 126 bytes to a server's."""
    mask, masked = data[2:6], data[6:]
    return bytes((data[0], data[1] & 0x7F)) + bytes(byte ^ mask[place % 4] for place, byte in enumerate(masked))


@pytest.fixture
def dashboard() -> Iterator[int]:
    """Port of a running dashboard."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Dashboard)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


# ------------------------------------------------------------------------------------------------------ the local port


class Direct:
    """A connection to a port of this machine instead of a pod."""

    error = ""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))

    def fileno(self) -> int:
        return self._socket.fileno()

    def pending(self) -> bool:
        return False

    def receive(self) -> bytes | None:
        return self._socket.recv(1000) or None

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def local(dashboard: int) -> Iterator[LocalPort]:
    with LocalPort(0, lambda: Direct(dashboard), {"Authorization": f"Bearer {TOKEN}"}) as port:
        threading.Thread(target=port.serve_forever, args=(0.01,), daemon=True).start()
        yield port
        port.shutdown()


def ask(port: int, method: str = "GET", path: str = "/", body: bytes = b"", **headers: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_the_token_is_added_to_requests_without_changing_their_bodies(local: LocalPort, dashboard: int) -> None:
    port = local.server_address[1]
    assert ask(dashboard) == (401, "no token")
    assert ask(port)[0] == 200
    assert ask(port, Authorization="Bearer of another cluster")[0] == 200
    body = os.urandom(300_000)
    assert ask(port, "POST", "/jobs?x=1", body) == (200, f"POST /jobs?x=1 300000 {hashlib.sha256(body).hexdigest()}")
    assert ask(port, path="/stream") == (200, "line 0\nline 1\nline 2\n")
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        for _ in range(2):  # the client connects again by itself
            connection.request("GET", "/", headers={"Connection": "keep-alive"})
            response = connection.getresponse()
            assert response.headers["Connection"] == "close"
            assert response.read().startswith(b"GET / 0")


@pytest.mark.parametrize(
    ("headers", "served"),
    [
        ({"Host": "127.0.0.1:8265"}, True),
        ({"Host": "localhost:9000"}, True),
        ({"Host": "127.0.0.1:8265", "Origin": "http://127.0.0.1:8265"}, True),
        ({"Host": "127.0.0.1:8265", "Origin": "http://127.0.0.1:3000"}, False),
        ({"Host": "127.0.0.1:8265", "Origin": "https://evil.example"}, False),
        ({"Host": "127.0.0.1:8265", "Origin": "null"}, False),
        ({"Host": "evil.example:8265"}, False),
        ({"Host": "127.0.0.1.evil.example"}, False),
        ({"Host": ""}, False),
        ({"Host": "[127.0.0.1"}, False),
        ({"Host": "localhost:9000", "Sec-Fetch-Site": "none"}, True),
        ({"Host": "localhost:9000", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Host": "localhost:9000", "Sec-Fetch-Site": "same-site"}, False),
        ({"Host": "localhost:9000", "Sec-Fetch-Site": "cross-site"}, False),
    ],
)
def test_requests_from_other_sites_are_rejected(local: LocalPort, headers: dict[str, str], served: bool) -> None:
    status, said = ask(local.server_address[1], **headers)
    assert (status == 200) is served, said
    head = "\r\n".join(["GET / HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())])
    assert (not find_problem(f"{head}\r\n\r\n".encode())) is served


@pytest.mark.parametrize("name", ["Host", "origin", "Sec-Fetch-Site"])
def test_requests_with_a_repeated_security_header_are_rejected(name: str) -> None:
    """The dashboard might read the other of two equal headers."""
    lines = ["Host: localhost:1", "Origin: http://localhost:1", "Sec-Fetch-Site: same-origin"]
    head = "\r\n".join(["GET / HTTP/1.1", *lines])
    assert not find_problem(f"{head}\r\n\r\n".encode())
    for other in ("evil.example", "localhost:1"):
        assert "is repeated" in find_problem(f"{head}\r\n{name} : {other}\r\n\r\n".encode())


def test_a_client_that_sends_its_request_headers_slowly_is_disconnected(
    local: LocalPort, set_constants: SetConstants
) -> None:
    set_constants("sunspot.machine.local_http", HEAD_WITHIN_S=0.5)
    began = time.monotonic()
    with socket.create_connection(local.server_address[:2], timeout=10) as client, contextlib.suppress(OSError):
        while time.monotonic() - began < 5:
            client.sendall(b"G")
            client.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                assert client.recv(1) == b""
                break
    assert time.monotonic() - began < 3


def test_the_dashboard_listens_only_on_the_loopback_address(local: LocalPort) -> None:
    assert local.server_address[0] == "127.0.0.1"
    with pytest.raises(SettingsError, match="choose another --port"):
        LocalPort(local.server_address[1], lambda: Direct(1), {})


def test_a_connection_error_is_returned_to_the_client() -> None:
    def refuse() -> Direct:
        raise ClusterError("the API server is away")

    with LocalPort(0, refuse, {}) as port:
        threading.Thread(target=port.serve_forever, args=(0.01,), daemon=True).start()
        assert ask(port.server_address[1]) == (502, "the API server is away\n")
        port.shutdown()


def test_only_the_necessary_headers_are_rewritten() -> None:
    head = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\nauthorization: old\r\nCookie: a=b\r\n\r\n"
    wanted = b"GET /a HTTP/1.1\r\nHost: x\r\nCookie: a=b\r\nAuthorization: new\r\nConnection: close\r\n\r\n"
    assert rewrite(head, {"Authorization": "new"}) == wanted
    upgrade = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert rewrite(upgrade, {}) == upgrade


# -------------------------------------------------------------------------------------------- through the API server


class Kubelet:
    """An API server's port forwarding to a port of this machine."""

    def __init__(self, port: int, error: str = "") -> None:
        self.port, self.error = port, error
        self.asked: list[str] = []

    def __call__(self, handler: _Handler) -> None:
        assert handler.headers["Sec-WebSocket-Protocol"] == "v4.channel.k8s.io"
        assert handler.headers["Authorization"] == "Bearer t"
        self.asked.append(handler.path)
        handler.close_connection = True
        shake_hands(handler, **{"Sec-WebSocket-Protocol": "v4.channel.k8s.io"})
        near = handler.connection
        for channel in (0, 1):
            send_frame(near, bytes((channel,)) + struct.pack("<H", 8265))
        if self.error:
            send_frame(near, b"\x01" + self.error.encode())
            return
        with socket.create_connection(("127.0.0.1", self.port)) as far:
            threading.Thread(target=self.pass_back, args=(far, near), daemon=True).start()
            while (frame := read_frame(handler.rfile)) is not None:
                assert frame[:1] == b"\x00"
                far.sendall(frame[1:])

    def pass_back(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(20_000):
                send_frame(near, b"\x00" + data)
            send_frame(near, b"", operation=8)


def send_frame(connection: socket.socket, data: bytes, operation: int = 2) -> None:
    length = bytes((len(data),)) if len(data) < 126 else b"\x7e" + struct.pack(">H", len(data))
    connection.sendall(bytes((0x80 | operation,)) + length + data)


def read_frame(source: Any) -> bytes | None:
    """Return the payload of a client's next frame, or None at the end."""
    head = source.read(2)
    if len(head) < 2 or head[0] & 0xF == 8:
        return None
    length = head[1] & 0x7F
    if length > 125:
        length = struct.unpack(">H" if length == 126 else ">Q", source.read(2 if length == 126 else 8))[0]
    mask, masked = source.read(4), source.read(length)
    return bytes(byte ^ mask[place % 4] for place, byte in enumerate(masked))


def make_live(cluster: FakeCluster, run: Run, token: bool = True) -> None:
    begin(run)
    write_status(run, Status(RunState.RUNNING, JOB, step=3, attempt=1))
    cluster.put_job(rayjob(JOB))
    cluster.set_status(JOB, "Running", "RUNNING", rayClusterName=CLUSTER)
    head = pod(HEAD, CLUSTER, head=True)
    source = {"secretKeyRef": {"name": CLUSTER, "key": "auth_token"}}
    variables = [{"name": "RAY_AUTH_MODE", "value": "token"}, {"name": "RAY_AUTH_TOKEN", "valueFrom": source}]
    head["spec"]["containers"] = [{"name": "ray", "env": variables if token else []}]
    cluster.pods = [head, pod(f"{CLUSTER}-worker", CLUSTER)]
    secret = {"metadata": {"name": CLUSTER}, "data": {"auth_token": base64.b64encode(TOKEN.encode()).decode()}}
    cluster.on("GET", f"/secrets/{CLUSTER}", lambda handler: handler.reply(200, secret))


class Process:
    """A process of `sunspot dashboard`."""

    def __init__(self, run: Run, *words: str) -> None:
        storage = run.storage.locate("")
        command = [sys.executable, "-m", "sunspot.cli", "dashboard", "run", "--storage", storage, *words]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout
        self.first = self.process.stdout.readline()

    def answer(self, port: int) -> tuple[int, str]:
        """Send one request, interrupt the process, and return the response."""
        try:
            return ask(port)
        finally:
            self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Return the exit code and the text on stderr."""
        _, said = self.process.communicate(timeout=20)
        return self.process.returncode, said


def test_the_dashboard_is_forwarded_with_its_token_until_the_command_is_interrupted(
    cluster: FakeCluster, run: Run, dashboard: int
) -> None:
    make_live(cluster, run)
    kubelet = Kubelet(dashboard)
    cluster.on("GET", f"/pods/{HEAD}/portforward", kubelet)
    port = free_port()
    process = Process(run, "--port", str(port), "--json")
    try:
        about = json.loads(process.first)
        assert about == {"run": "run", "url": f"http://127.0.0.1:{port}", "pod": HEAD, "token_added": True}
        body = os.urandom(200_000)
        assert ask(port, "POST", "/a", body) == (200, f"POST /a 200000 {hashlib.sha256(body).hexdigest()}")
        assert ask(port, path="/stream") == (200, "line 0\nline 1\nline 2\n")
        with contextlib.closing(websocket.create_connection(f"ws://127.0.0.1:{port}/ws", timeout=10)) as client:
            client.send("hello")
            assert client.recv() == "hello"
        assert kubelet.asked[0].endswith(f"/pods/{HEAD}/portforward?ports=8265")
    finally:
        process.process.send_signal(signal.SIGINT)
    code, said = process.end()
    assert code == 0, said
    assert "all users of this machine have access" in said
    assert TOKEN not in process.first + said


def test_forwarding_ends_if_the_head_is_gone(cluster: FakeCluster, run: Run, dashboard: int) -> None:
    make_live(cluster, run, token=False)
    cluster.on("GET", "/portforward", Kubelet(dashboard))
    process = Process(run, "--port", str(free_port()))
    assert f"is the Ray dashboard of run (pod {HEAD})" in process.first
    cluster.pods = []
    cluster.set_status(JOB, "Complete", "SUCCEEDED")
    code, said = process.end()
    assert code == 3
    assert f"the head {HEAD} is gone, and its dashboard with it; run is " in said
    assert "token" not in said


def test_forwarding_ends_if_the_head_has_failed(cluster: FakeCluster, run: Run, dashboard: int) -> None:
    make_live(cluster, run, token=False)
    cluster.on("GET", "/portforward", Kubelet(dashboard))
    process = Process(run, "--port", str(free_port()))
    assert process.first
    cluster.pods[0]["status"]["phase"] = "Failed"
    assert process.end()[0] == 3


def test_a_refused_connection_in_the_pod_is_reported(cluster: FakeCluster, run: Run) -> None:
    make_live(cluster, run)
    cluster.on("GET", "/portforward", Kubelet(0, error="connection refused in the pod"))
    port = free_port()
    process = Process(run, "--port", str(port))
    assert process.answer(port) == (502, "connection refused in the pod\n")
    assert process.end()[0] == 0


def test_the_user_is_told_if_the_dashboard_token_cannot_be_read(cluster: FakeCluster, run: Run, dashboard: int) -> None:
    make_live(cluster, run)
    cluster.on("GET", "/portforward", Kubelet(dashboard))
    cluster.faults.insert(0, ("GET", "/secrets/", answer(403, 'User "me" cannot get secrets'), 9))
    port = free_port()
    process = Process(run, "--port", str(port))
    assert process.answer(port) == (401, "no token")
    code, said = process.end()
    assert code == 0
    assert f"the dashboard will ask for its token (auth_token of Secret {CLUSTER}), because it cannot be read: " in said
    assert "ask for the Role sunspot-dashboard of k8s/base" in said


def test_a_rejected_port_forward_fails_immediately(cluster: FakeCluster, run: Run, sunspot: Command) -> None:
    make_live(cluster, run)
    cluster.on("GET", "/portforward", answer(403, 'User "me" cannot get pods/portforward'))
    assert sunspot("dashboard", "run") == 4
    assert 'User "me" cannot get pods/portforward; ask for the Role sunspot-dashboard of k8s/base' in sunspot.err


def test_a_run_without_a_head_has_no_dashboard(cluster: FakeCluster, run: Run, sunspot: Command) -> None:
    assert sunspot("dashboard", "run") == 3
    assert "no run run in" in sunspot.err
    begin(run)
    write_status(run, Status(RunState.SUCCEEDED, JOB, "done"))
    assert sunspot("dashboard", "run") == 3
    assert "run has no ready head, so it has no dashboard: succeeded, done; `sunspot report run" in sunspot.err
    cluster.put_job(rayjob(JOB))
    cluster.set_status(JOB, "Initializing", rayClusterName=CLUSTER)
    cluster.pods = [pod(HEAD, CLUSTER, head=True, phase="Pending")]
    assert sunspot("dashboard", "run") == 3
    assert "no ready head" in sunspot.err
    cluster.down()
    assert sunspot("dashboard", "run") == 4


def test_an_unknown_run_is_reported_even_without_a_cluster(
    sunspot: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert sunspot("dashboard", "run") == 3
    assert "no run run in" in sunspot.err
