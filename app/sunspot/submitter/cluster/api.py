"""Client for the Kubernetes API, and the only module that sends requests to it.

Every request has a timeout and is retried a few times after a lost connection, 429 or 5xx. All requests are idempotent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sunspot.errors import ClusterError, SettingsError, shorten
from sunspot.run.owner import cluster_identity
from sunspot.submitter.cluster.kubeconfig import make_client
from sunspot.submitter.cluster.port_forward import PROTOCOL, PodConnection
from sunspot.submitter.cluster.views import JobView, PodView, WarningEvent, job_view, pod_view, warning_event
from sunspot.submitter.manifest.pods import RUN_LABEL
from sunspot.submitter.manifest.profile import NAMESPACE_PATTERN

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

NAMESPACE = "sunspot"
"""The namespace in k8s/base, and the default if the context sets none."""

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 20

RETRY_PAUSES_S = (0.5, 1, 2)
"""Seconds between attempts. A request to an unresponsive server fails after about 25 s."""

MAX_RETRY_AFTER_S = 10

PAGE = 500
"""Maximum number of objects per response, as in kubectl. Thousands of objects would take tens of megabytes."""

PATHS = {
    "namespace": "/api/v1/namespaces/{name}",
    "Secret": "/api/v1/namespaces/{namespace}/secrets/{name}",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps/{name}",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts/{name}",
    "PersistentVolumeClaim": "/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses/{name}",
    "jobs": "/apis/ray.io/v1/namespaces/{namespace}/rayjobs",
    "job": "/apis/ray.io/v1/namespaces/{namespace}/rayjobs/{name}",
    "RayCluster": "/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{name}",
    "pods": "/api/v1/namespaces/{namespace}/pods",
    "pod": "/api/v1/namespaces/{namespace}/pods/{name}",
    "port": "/api/v1/namespaces/{namespace}/pods/{name}/portforward",
    "events": "/api/v1/namespaces/{namespace}/events",
    "version": "/version",
    "nodes": "/api/v1/nodes",
    "all pods": "/api/v1/pods",
    "quotas": "/api/v1/namespaces/{namespace}/resourcequotas",
    "limit ranges": "/api/v1/namespaces/{namespace}/limitranges",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/{name}",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/{name}",
    "LocalQueue": "/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/localqueues/{name}",
    "older LocalQueue": "/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/localqueues/{name}",
    "review": "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
    "ray": "/apis/ray.io/v1",
}

CERTIFICATES = "kube-root-ca.crt"
"""Name of the ConfigMap that Kubernetes puts into every namespace."""

ROLE, POD_ROLE = "sunspot-submitter", "sunspot-chaos"
"""The Roles in k8s/base that allow most requests (ROLE) and the deletion of pods (POD_ROLE)."""

ROLES = {
    ("DELETE", "pod"): POD_ROLE,
    ("GET", "port"): "sunspot-dashboard",
    ("GET", "Secret"): "sunspot-dashboard",
    ("POST", "pods"): "sunspot-doctor",
    ("GET", "NetworkPolicy"): "sunspot-doctor",
    ("GET", "PodDisruptionBudget"): "sunspot-doctor",
}
"""The Roles that allow all other requests, keyed by method and path."""

INVALID_FIELDS = "failed to create typed patch object"
"""Start of the API server's error about an unknown field. Its status is 500 (kubernetes#122480)."""

CLUSTER_SCOPED = ("namespace", "nodes", "all pods", "PriorityClass")
"""Paths of cluster-scoped resources, which a namespace's Role cannot grant."""


class UnreachableError(ClusterError):
    """The API server is unreachable or temporarily unable to answer."""

    retry_after = 0.0
    "Number of seconds to wait before a retry, as requested by the server."


class RefusedError(ClusterError):
    """The API server rejected a request."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        "The HTTP status of the response."


@dataclass(frozen=True)
class Request:
    """A request to the API server."""

    method: str
    path: str
    "A key of PATHS."
    name: str = ""
    query: Sequence[tuple[str, str]] = ()
    body: Any = None
    kind: str = "json"


class Cluster:
    """A client for one namespace of a Kubernetes cluster."""

    def __init__(self, api: ApiClient, namespace: str, options: str = "", context: str | None = None) -> None:
        self.namespace = namespace
        self.options = options
        "Command-line options that select this namespace, each with a leading space."
        self.server: str = api.configuration.host
        self.context = context
        "The kubeconfig context, or None for the current one."
        self._api = api
        self._renewing = threading.Lock()

    @functools.cached_property
    def identity(self) -> str:
        """The cluster's identity (`owner.cluster_identity`), or an empty string if the user may not read it."""
        try:
            found = self.find("ConfigMap", CERTIFICATES) or {}
        except RefusedError as error:
            if error.status != 403:
                raise
            found = {}
        return cluster_identity((found.get("data") or {}).get("ca.crt", ""))

    # ------------------------------------------------------------------------------------------------------ RayJobs

    def list_jobs(self, run: str | None = None) -> list[JobView]:
        """Return the RayJobs of one run, or of all runs if `run` is None, newest first."""
        items = self.list_all("jobs", label=RUN_LABEL if run is None else f"{RUN_LABEL}={run}")
        jobs = [job_view(item, self.identity) for item in items]
        return sorted(jobs, key=lambda job: (job.created, job.name), reverse=True)

    def has_job(self, job: JobView) -> bool:
        """Return True if this RayJob still exists. A newer RayJob with the same name does not count."""
        found = self.find("job", job.name)
        return found is not None and job_view(found).uid == job.uid

    def apply(self, manifest: dict[str, Any], dry_run: bool = False) -> JobView:
        """Create or update a RayJob with server-side apply, and return it with defaults filled in."""
        query = [("fieldManager", "sunspot"), ("force", "true")]
        if dry_run:
            query.append(("dryRun", "All"))
        name = manifest["metadata"]["name"]
        return job_view(self._ask(Request("PATCH", "job", name, query, manifest, kind="apply-patch+yaml")))

    def annotate(self, job: JobView, annotations: Mapping[str, str]) -> None:
        """Set annotations on this RayJob.

        Does nothing if the RayJob is gone or was replaced by a new one with the same name.
        """
        body = {"metadata": {"uid": job.uid, "annotations": dict(annotations)}}
        query = [("fieldManager", "sunspot-wait")]  # with the manager of `apply`, all other fields would be removed
        try:
            self._ask(Request("PATCH", "job", job.name, query, body, kind="merge-patch+json"))
        except RefusedError as error:
            if error.status not in (404, 422):  # 422: the object has another uid
                raise

    def delete_job(self, job: JobView) -> None:
        """Delete this RayJob and its cluster. Does nothing if the RayJob is already gone."""
        self._delete("job", job.name, {"preconditions": {"uid": job.uid}})

    def change_ray_cluster(self, name: str, operations: Sequence[Mapping[str, Any]], dry_run: bool = False) -> None:
        """Change a RayCluster with a JSON patch (RFC 6902).

        The operations should include tests that fail if the RayCluster has changed since it was read.
        """
        query = [("fieldManager", "sunspot-scale"), *([("dryRun", "All")] if dry_run else [])]
        self._ask(Request("PATCH", "RayCluster", name, query, list(operations), kind="json-patch+json"))

    # -------------------------------------------------------------------------------------------------- pods and events

    def list_pods(self, jobs: Sequence[JobView]) -> list[PodView]:
        """Return the pods of these RayJobs' RayClusters."""
        clusters = ",".join(job.cluster for job in jobs if job.cluster)
        if not clusters:
            return []
        return [pod_view(item) for item in self.list_all("pods", label=f"ray.io/cluster in ({clusters})")]

    def delete_pod(self, pod: PodView, grace_s: int | None = None) -> None:
        """Delete this pod. Does nothing if it is already gone.

        The containers are killed after `grace_s` seconds, or after the pod's own grace period if `grace_s` is None.
        """
        self._delete("pod", pod.name, {"preconditions": {"uid": pod.uid}, "gracePeriodSeconds": grace_s})

    def create_pod(self, manifest: dict[str, Any], dry_run: bool = False) -> dict[str, Any]:
        """Create a pod, and return it as stored by the API server. The pod's name must be unique."""
        try:
            return self._ask(Request("POST", "pods", query=[("dryRun", "All")] if dry_run else [], body=manifest))
        except RefusedError as error:
            made = self.find("pod", manifest["metadata"]["name"]) if error.status == 409 else None
            if made is None:
                raise
            return made  # the response to an earlier attempt was lost

    def list_warnings(self, jobs: Sequence[JobView]) -> list[WarningEvent]:
        """Return the warnings about RayJobs, their RayClusters and their pods, newest first."""
        prefixes = tuple(name for job in jobs for name in (job.name, job.cluster) if name)
        events = map(warning_event, self.list_all("events", field="type=Warning"))
        ours = [event for event in events if event.object.startswith(prefixes)]
        return sorted(ours, key=lambda event: -event.time)

    # ------------------------------------------------------------------------------------------------------- dashboard

    def dial(self, pod: str, port: int) -> PodConnection:
        """Connect to a pod's port. Raises `ClusterError` if that fails."""
        from kubernetes.stream.ws_client import create_websocket, get_websocket_url
        from websocket import WebSocketBadStatusException, WebSocketException

        _, url, headers, *_ = self._api.param_serialize(
            "GET",
            PATHS["port"].format(namespace=self.namespace, name=pod),
            query_params=[("ports", str(port))],
            header_params={"sec-websocket-protocol": PROTOCOL},
            auth_settings=["BearerToken"],
        )
        try:
            return PodConnection(create_websocket(self._api.configuration, get_websocket_url(url), headers))
        except WebSocketBadStatusException as error:
            raise self._failure("GET", "port", error.status_code, error.resp_body or b"") from error
        except (WebSocketException, OSError) as error:
            raise self._unreachable(error) from error

    # ------------------------------------------------------------------------------------------------------- preflight

    def find(self, kind: str, name: str = "") -> dict[str, Any] | None:
        """Return an object, or None if it does not exist. `kind` is a key of PATHS.

        Raises `RefusedError` if this user may not read the object.
        """
        try:
            return self._ask(Request("GET", kind, name))
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def list_all(self, kind: str, label: str = "", field: str = "") -> list[dict[str, Any]]:
        """Return all matching objects of one kind in PATHS, reading page by page."""
        parameters = {"limit": str(PAGE), "labelSelector": label, "fieldSelector": field}
        items: list[dict[str, Any]] = []
        while True:
            response = self._ask(
                Request("GET", kind, query=[(name, text) for name, text in parameters.items() if text])
            )
            items += response.get("items") or ()
            parameters["continue"] = response.get("metadata", {}).get("continue", "")
            if not parameters["continue"]:
                return items

    def exists(self, kind: str, name: str) -> bool | None:
        """Return whether an object exists, or None if this user is not allowed to see it."""
        try:
            return self.find(kind, name) is not None
        except RefusedError as error:
            if error.status == 403:
                return None
            raise

    def allows(self, verb: str, group: str, resource: str) -> bool:
        """Return True if this user may use a verb on a resource in the namespace."""
        attributes = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource}
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        body = {**kind, "spec": {"resourceAttributes": attributes}}
        return bool(self._ask(Request("POST", "review", body=body))["status"].get("allowed"))

    # -------------------------------------------------------------------------------------------------------- transport

    def _delete(self, path: str, name: str, options: dict[str, Any]) -> None:
        try:
            self._ask(Request("DELETE", path, name, body=options))
        except RefusedError as error:
            if error.status not in (404, 409):  # 409: another object has the name now
                raise

    def _ask(self, request: Request) -> dict[str, Any]:
        """Send a request with retries and return the response. Renews expired credentials once."""
        pauses = iter(RETRY_PAUSES_S)
        renewed = False
        while True:
            api = self._api
            try:
                return self._send(request)
            except UnreachableError as error:
                pause = next(pauses, None)
                if pause is None:
                    raise
                time.sleep(max(pause, error.retry_after))
            except RefusedError as error:
                if error.status != 401 or renewed:
                    raise
                self._renew(api)
                renewed = True

    def _renew(self, refused: ApiClient) -> None:
        """Reload the credentials, unless another thread has already replaced the `refused` client."""
        with self._renewing:
            if self._api is refused:
                self._api, _ = make_client(self.context)

    def _send(self, request: Request) -> dict[str, Any]:
        """Send a request once and return the response body. Raises `ClusterError` unless it succeeds."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        call = self._api.param_serialize(
            request.method,
            PATHS[request.path].format(namespace=self.namespace, name=request.name),
            query_params=list(request.query),
            header_params={"Accept": "application/json", "Content-Type": f"application/{request.kind}"},
            body=request.body,
            auth_settings=["BearerToken"],
        )
        if "json" not in request.kind:  # the client encodes the other kinds itself
            call = (*call[:3], json.dumps(request.body), call[4])
        try:
            response = self._api.call_api(*call, _request_timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S)).response
            content = response.data  # reading it to the end returns the connection to the pool
        except (HTTPError, ApiException, OSError) as error:
            raise self._unreachable(error) from error
        if 200 <= response.status <= 299:
            return dict(json.loads(content or b"{}"))
        failure = self._failure(request.method, request.path, response.status, content)
        after = response.headers.get("Retry-After", "")
        if isinstance(failure, UnreachableError) and after.isdigit():
            failure.retry_after = min(float(after), MAX_RETRY_AFTER_S)
        raise failure

    def _unreachable(self, error: Exception) -> UnreachableError:
        why = shorten(error).rpartition("Failed to establish a new connection: ")[2]
        check = "check the network and --context, and that the cluster is up"
        return UnreachableError(f"{self.server}: the API server cannot be reached ({why}); {check}")

    def _failure(self, method: str, path: str, status: int, body: bytes) -> ClusterError:
        """Return the error for an unsuccessful response."""
        answer: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            answer = dict(json.loads(body))
        reason = shorten(Exception(answer.get("message") or answer.get("reason") or "without a reason"))
        if reason.startswith(INVALID_FIELDS):
            faults = reason.partition("): ")[2].removeprefix("errors: ")
            text = f"{self.server} rejected the RayJob: {faults}; correct pod or rayjob in the profile"
            return RefusedError(text, 400)
        if status == 429 or status >= 500:
            return UnreachableError(f"{self.server}: {status} {reason}; try again later")
        role = "" if path in CLUSTER_SCOPED else ROLES.get((method, path), ROLE)
        no_right = status == 403 and re.search(r'\bUser "[^"]*" cannot ', reason)
        if status == 401:
            text = f"{self.server} rejected these credentials ({reason}); renew them, or choose another --context"
        elif no_right and role:
            text = f"{reason}; ask for the Role {role} of k8s/base, which grants this permission"
        elif no_right:
            text = f"{reason}; ask the owner of the cluster"
        elif status == 404 and "could not find the requested resource" in reason:
            text = f"{self.server} does not know RayJobs (ray.io/v1); install the KubeRay operator and its CRDs"
        else:
            text = f"{self.server} rejected a {method} request with {status}: {reason}"
        return RefusedError(text, status)


def connect(context: str | None = None, namespace: str | None = None) -> Cluster:
    """Return the cluster of a kubeconfig context, or the cluster that this process runs in. Sends no requests.

    The namespace defaults to the context's own, then to NAMESPACE. Raises `ClusterError` if no cluster is configured,
    or if the context or its credential is missing, and `SettingsError` if the namespace's name is invalid.
    """
    api, own = make_client(context)
    chosen = namespace or own or NAMESPACE
    if not re.fullmatch(NAMESPACE_PATTERN, chosen):
        raise SettingsError(f"namespace {chosen!r} is not a valid name; correct --namespace or the context's namespace")
    options = f" --context {context}" if context else ""
    if chosen != (own or NAMESPACE):
        options += f" --namespace {chosen}"
    return Cluster(api, chosen, options, context)


def try_connect(context: str | None, namespace: str | None) -> tuple[Cluster | None, str]:
    """Return the cluster and an empty string, or None and the reason why there is no cluster.

    Raises `ClusterError` instead if a context or a namespace was given, and `SettingsError` if the namespace's name is
    invalid.
    """
    try:
        return connect(context, namespace), ""
    except ClusterError as error:
        if context or namespace:
            raise
        return None, str(error)
