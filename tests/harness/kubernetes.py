"""Simulates a small Kubernetes API server over HTTP, with RayJobs, pods, events, access reviews and faults."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sunspot.submitter.cluster.applied import as_submission
from tests.harness.constants import SetConstants

JOBS = "/apis/ray.io/v1/namespaces/sunspot/rayjobs"
CORE = "/api/v1/namespaces/sunspot"

DEPLOYMENT_STATUSES = (
    "",
    "Initializing",
    "Waiting",
    "Running",
    "Complete",
    "Failed",
    "ValidationFailed",
    "Suspending",
    "Suspended",
    "Retrying",
)
"""Values of a RayJob's `jobDeploymentStatus` (KubeRay 1.7), in any combination with JOB_STATUSES."""

JOB_STATUSES = ("", "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED")
"""Values of a RayJob's `jobStatus`."""

Fault = Callable[["_Handler"], None]
"""A function that handles a request instead of the server."""


def answer(status: int, message: str = "", **headers: str) -> Fault:
    """Answer with this status, like the API server does if it rejects a request."""

    def act(handler: _Handler) -> None:
        handler.reply(status, {"kind": "Status", "status": "Failure", "message": message, "code": status}, headers)

    return act


def hang_up(handler: _Handler) -> None:
    """Carry out the request, and close the connection without an answer."""
    handler.muted = True
    handler.answer()
    handler.close_connection = True


def drop(handler: _Handler) -> None:
    """Close the connection without carrying out the request."""
    handler.close_connection = True


class FakeCluster:
    """The state of the cluster, which a test changes like an operator would."""

    def __init__(self, folder: Path) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.deleted: list[tuple[str, int | None]] = []
        "Names of deleted pods, with the requested grace periods."
        self.on_delete: Callable[[str], Any] = lambda name: None
        "Function called after a pod was deleted."
        self.events: list[dict[str, Any]] = []
        self.objects = {f"{CORE}/secrets/sunspot-storage", f"{CORE}/serviceaccounts/sunspot-train", CORE}
        "Paths of other existing objects."
        self.documents: dict[str, dict[str, Any]] = {}
        "Content of other objects and lists, keyed by path."
        self.on_create: Callable[[dict[str, Any]], Any] = lambda pod: None
        "Function called after a pod was created."
        self.forbidden: set[str] = set()
        "Permissions that access reviews deny, as `verb resource`, and paths that cannot be read."
        self.has_operator, self.has_kueue = True, False
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str] = set()
        "Tokens with which requests were signed."
        self.faults: list[tuple[str, str, Fault, float]] = []
        self._version = 100
        self.lock = threading.RLock()
        self._server: _Server | None = None
        self.port = 0
        self.up()
        self.kubeconfig = folder / "kubeconfig"
        self.write_kubeconfig()

    # ------------------------------------------------------------------------------------------ what a test does to it

    def write_kubeconfig(self) -> None:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "me", "user": {"token": "t"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}}],
            "current-context": "fake",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def on(self, method: str, part: str, fault: Fault, times: float = float("inf")) -> None:
        """Answer the next `times` requests of this method with `fault` if their path contains `part`."""
        self.faults.append((method, part, fault, times))

    def down(self) -> None:
        """Stop the server. Connections break, and new ones are rejected."""
        assert self._server
        self._server.end()
        self._server = None

    def up(self) -> None:
        """Start the server again at the same address."""
        self._server = _Server(("127.0.0.1", self.port), self)
        self.port = self._server.server_address[1]

    @property
    def ended(self) -> bool:
        return self._server is None

    def put_job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Create a RayJob, or replace it."""
        with self.lock:
            name = job["metadata"]["name"]
            self._version += 1
            job["metadata"]["resourceVersion"] = str(self._version)
            job["metadata"].setdefault("uid", f"uid-{self._version}")
            job["metadata"].setdefault("namespace", "sunspot")
            job["metadata"].setdefault("creationTimestamp", timestamp(time.time()))
            self.jobs[name] = job
            return job

    def set_status(self, name: str, deployment: str, ray: str = "", **more: Any) -> None:
        """Change a RayJob's status, like the operator does."""
        job = json.loads(json.dumps(self.jobs[name]))
        job["status"] = {**job.get("status", {}), "jobDeploymentStatus": deployment, "jobStatus": ray, **more}
        self.put_job(job)

    def delete_job(self, name: str) -> None:
        with self.lock:
            del self.jobs[name]
            self.pods = [p for p in self.pods if not p["metadata"]["name"].startswith(name)]

    def delete_pod(self, name: str, grace_s: int | None) -> None:
        with self.lock:
            self.pods = [p for p in self.pods if p["metadata"]["name"] != name]
            self.deleted.append((name, grace_s))
        self.on_delete(name)

    # ------------------------------------------------------------------------------------------------ what it answers

    def fault_for(self, method: str, path: str) -> Fault | None:
        for position, (wanted, part, fault, left) in enumerate(self.faults):
            if method == wanted and part in path and left > 0:
                self.faults[position] = (wanted, part, fault, left - 1)
                return fault
        return None

    def list_jobs(self, labels: str) -> list[dict[str, Any]]:
        name, equals, value = labels.partition("=")
        with self.lock:
            labeled = [(job, job["metadata"].get("labels", {}).get(name)) for job in self.jobs.values()]
            return [job for job, found in labeled if found is not None and (not equals or found == value)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], cluster: FakeCluster) -> None:
        super().__init__(address, _Handler)
        self.cluster = cluster
        self._open: set[Any] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error, because clients disconnect in many tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    muted = False

    def handle_any(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        target = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(target.query).items()}
        self.target = target.path
        cluster = self.server.cluster
        cluster.requests.append((self.command, self.path))
        cluster.tokens.add(self.headers.get("Authorization", ""))
        fault = cluster.fault_for(self.command, self.path)
        if fault:
            fault(self)
        else:
            self.answer()

    do_GET = do_POST = do_PATCH = do_DELETE = handle_any

    def answer(self) -> None:
        cluster = self.server.cluster
        path = self.target
        query = self.query
        if path in cluster.forbidden:
            self.refuse(403, f'{path} is forbidden: User "me" cannot get it')
        elif path == "/apis/ray.io/v1":
            if cluster.has_operator:
                self.reply(200, {"resources": [{"name": "rayjobs"}, {"name": "rayclusters"}]})
            else:
                self.refuse(404, "the server could not find the requested resource")
        elif path.endswith("selfsubjectaccessreviews"):
            asked = json.loads(self.body)["spec"]["resourceAttributes"]
            denied = f"{asked['verb']} {asked['resource']}" in cluster.forbidden
            self.reply(201, {"status": {"allowed": not denied}})
        elif path == JOBS:
            self.reply_page(cluster.list_jobs(query["labelSelector"]))
        elif path.startswith(f"{JOBS}/"):
            self.one_job(path.rpartition("/")[2])
        elif path == f"{CORE}/pods" and self.command == "POST":
            pod = json.loads(self.body)
            pod["metadata"]["uid"] = f"uid-of-{pod['metadata']['name']}"
            if query.get("dryRun") != "All":
                cluster.pods.append(pod)
                cluster.on_create(pod)
            self.reply(201, pod)
        elif path == f"{CORE}/pods":
            names = query["labelSelector"].partition("(")[2].rstrip(")").split(",")
            self.reply_page([p for p in cluster.pods if p["metadata"]["labels"]["ray.io/cluster"] in names])
        elif path.startswith(f"{CORE}/pods/"):
            self.one_pod(path.rpartition("/")[2])
        elif path == f"{CORE}/events":
            self.reply_page(cluster.events)
        elif path in cluster.documents:
            document = cluster.documents[path]
            if "items" in document:
                key, _, value = query.get("labelSelector", "").partition("=")
                items = document["items"]
                self.reply_page([i for i in items if not key or i["metadata"].get("labels", {}).get(key) == value])
            else:
                self.reply(200, document)
        elif path in (f"{CORE}/resourcequotas", f"{CORE}/limitranges"):
            self.reply_page([])
        elif path in cluster.objects:
            self.reply(200, {"metadata": {"name": path.rpartition("/")[2]}})
        else:
            self.refuse(404, f"{path} not found")

    def one_job(self, name: str) -> None:
        cluster = self.server.cluster
        if self.headers["Content-Type"] == "application/merge-patch+json":
            self.annotate(name)
        elif self.command == "PATCH":
            assert self.headers["Content-Type"] == "application/apply-patch+yaml"
            assert self.query["fieldManager"] == "sunspot"
            job, before = json.loads(self.body), cluster.jobs.get(name)
            if before is None and cluster.has_kueue and "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]:
                job["spec"]["suspend"] = True
            if self.query.get("dryRun") == "All":
                job = {**(before or {}), **job, "metadata": {**(before or job)["metadata"], **job["metadata"]}}
            else:
                if before is None or before["spec"] != job["spec"]:
                    job = cluster.put_job({**(before or {}), **job})
            self.reply(200, job)
        elif name not in cluster.jobs:
            self.refuse(404, f'rayjobs.ray.io "{name}" not found')
        elif self.command == "DELETE":
            wanted = json.loads(self.body)["preconditions"]["uid"]
            if wanted != cluster.jobs[name]["metadata"]["uid"]:
                self.refuse(409, "the UID in the precondition does not match")
                return
            cluster.delete_job(name)
            self.reply(200, {})
        else:
            self.reply(200, cluster.jobs[name])

    def annotate(self, name: str) -> None:
        changes, job = json.loads(self.body)["metadata"], self.server.cluster.jobs.get(name)
        assert self.query["fieldManager"] != "sunspot", "its own fields would be taken back"
        if job is None:
            self.refuse(404, f'rayjobs.ray.io "{name}" not found')
        elif changes["uid"] != job["metadata"]["uid"]:
            self.refuse(422, f'RayJob "{name}" is invalid: metadata.uid: field is immutable')
        else:
            notes = {**job["metadata"].get("annotations", {}), **changes["annotations"]}
            self.reply(200, self.server.cluster.put_job({**job, "metadata": {**job["metadata"], "annotations": notes}}))

    def one_pod(self, name: str) -> None:
        found = next((p for p in self.server.cluster.pods if p["metadata"]["name"] == name), None)
        if found is None:
            self.refuse(404, f'pods "{name}" not found')
            return
        if self.command == "GET":
            self.reply(200, found)
            return
        options, uid = json.loads(self.body), found["metadata"]["uid"]
        if uid != options["preconditions"]["uid"]:
            self.refuse(409, "the UID in the precondition does not match")
        else:
            self.server.cluster.delete_pod(name, options.get("gracePeriodSeconds"))
            self.reply(200, {})

    def reply_page(self, items: list[Any]) -> None:
        """Reply with the requested number of items, and a token for the rest."""
        begin = int(self.query.get("continue", 0))
        end = begin + int(self.query["limit"])
        more = {"continue": str(end)} if end < len(items) else {}
        self.reply(200, {"metadata": more, "items": items[begin:end]})

    def refuse(self, status: int, message: str) -> None:
        answer(status, message)(self)

    def reply(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        if self.muted:
            return
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, text in (headers or {}).items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because `requests` is the log."""


def timestamp(moment: float) -> str:
    """Return a time in Kubernetes's format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def rayjob(name: str, run: str = "run", created: float | None = None, **spec: Any) -> dict[str, Any]:
    """Return a RayJob with two workers."""
    pod = {
        "containers": [{"name": "ray", "image": "sunspot:1", "env": [{"name": "SUNSPOT_NUM_WORKERS", "value": "2"}]}]
    }
    cluster = {
        "headGroupSpec": {"template": {"spec": pod}},
        "workerGroupSpecs": [{"groupName": "workers", "replicas": 2, "template": {"spec": pod}}],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {
            "name": name,
            "uid": f"uid-of-{name}",
            "labels": {"sunspot/run": run},
            "creationTimestamp": timestamp(time.time() if created is None else created),
        },
        "spec": {"rayClusterSpec": cluster, **spec},
    }


def submitted(job: dict[str, Any]) -> dict[str, Any]:
    """Return the RayJob in the form in which `sunspot submit` applies it."""
    metadata = {name: job["metadata"][name] for name in ("name", "labels")} | {"namespace": "sunspot"}
    manifest = as_submission({**{name: job[name] for name in ("apiVersion", "kind", "spec")}, "metadata": metadata})
    return {**job, **manifest, "metadata": {**job["metadata"], **manifest["metadata"]}}


def kept(job: dict[str, Any], manager: str = "argocd-controller") -> dict[str, Any]:
    """Return the RayJob in the form in which a GitOps tool applies it."""
    managed = [{"manager": "kuberay-operator", "operation": "Update"}, {"manager": manager, "operation": "Apply"}]
    return {**job, "metadata": {**job["metadata"], "managedFields": managed}}


def pod(name: str, cluster: str, head: bool = False, phase: str = "Running", **status: Any) -> dict[str, Any]:
    """Return a RayCluster's pod. It is ready if it is Running, unless `status` says otherwise."""
    ready = {"type": "Ready", "status": "True" if phase == "Running" else "False"}
    labels = {"ray.io/cluster": cluster, "ray.io/node-type": "head" if head else "worker"}
    labels["ray.io/group"] = "headgroup" if head else "workers"
    return {
        "metadata": {"name": name, "uid": f"uid-of-{name}", "labels": labels},
        "spec": {"nodeName": f"node-of-{name}"},
        "status": {"phase": phase, "conditions": [ready], **status},
    }


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants) -> Iterator[FakeCluster]:
    """Provide a cluster that KUBECONFIG points to, with short timeouts."""
    fake = FakeCluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    set_constants("sunspot.submitter.cluster.api", RETRY_PAUSES_S=(0.01, 0.02, 0.04))
    for module in ("waiting", "observation", "start", "stopping"):
        set_constants(f"sunspot.submitter.cluster.{module}", POLL_EVERY_S=0.03)
    yield fake
    if not fake.ended:
        fake.down()
