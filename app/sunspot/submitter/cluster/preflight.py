"""Checks the cluster and the storage before a job is sent, and reports every problem at once."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sunspot.background import map_parallel
from sunspot.errors import ClusterError, NotFoundError, StorageError
from sunspot.formatting import plural
from sunspot.run import Run
from sunspot.run.identity import read_identity, refuse_changes
from sunspot.settings import differences
from sunspot.storage.prove import Check, Result, prove
from sunspot.submitter.cluster.api import Cluster, RefusedError
from sunspot.submitter.cluster.views import JobView
from sunspot.submitter.manifest.foreign_storage import find_foreign_storage
from sunspot.submitter.manifest.quotas import ASK_FOR_LESS, CPU_LIMIT, check_limit_ranges, check_quotas, parse_exceeded
from sunspot.submitter.manifest.render import image_problem
from sunspot.submitter.manifest.requirements import pod_templates

REQUIRED_PERMISSIONS = {
    ("ray.io", "rayjobs"): ("create", "get", "list", "patch", "delete"),
    ("", "pods"): ("get", "list"),
    ("", "events"): ("list",),
}
"""Verbs of the Kubernetes API that the commands of `sunspot` use, by API group and resource."""

NO_DRY_RUN = "does not support dry run"
"""Part of the API server's message about a policy's webhook that cannot be called in a dry run."""

CANNOT_CREATE = (404, 405)
"""HTTP statuses with which an API server answers if it lets nobody create pods here."""

OWNER_MAY_PASS = (
    "the operator's own pods may pass if the policy looks at their owner; if none starts, this is the reason"
)
"""Advice on a webhook's refusal. The webhook may accept the same pods from the operator."""


def check(cluster: Cluster, run: Run, manifest: dict[str, Any]) -> tuple[JobView | None, list[str]]:
    """Check everything without any change. Returns the RayJob as the API server would complete it, and warnings.

    Raises `ClusterError` or `StorageError` with all problems and their fixes.
    """
    images = {pod["image"] for pod in _containers(manifest)}
    warnings = [problem for image in sorted(images) if (problem := image_problem(image))]
    warnings += find_foreign_storage(manifest)
    expected = None
    in_cluster: list[str] = []

    def take(problems: Iterable[Check]) -> None:
        for each in problems:
            (in_cluster if each.result is Result.FAILED else warnings).append(f"{each.seen}; {each.fix}")

    try:
        take(_find_cluster_problems(cluster, manifest))
        if not in_cluster:
            expected = cluster.apply(manifest, dry_run=True)
            take(find_queue_problem(expected))
            if not expected.version:  # the pods of a live RayJob may use up the quota
                quotas = list(find_quota_problems(cluster, manifest))
                take(quotas)
                take(find_pod_problems(cluster, manifest, quotas))
            elif expected.terminal:  # it and its remaining pods still count, but are deleted first
                empty = find_quota_problems(cluster, manifest, ignore_use=True)
                take(each for each in empty if each.result is Result.FAILED)
    except ClusterError as error:
        in_cluster.append(explain_refusal(error))
    in_storage = _find_storage_problems(run)
    problems = in_cluster + in_storage
    if problems:
        kind = ClusterError if in_cluster else StorageError
        lines = "\n".join(f"  {line}" for line in problems)
        raise kind(f"{plural(len(problems), 'problem')}, and nothing was sent:\n{lines}")
    return expected, warnings


def find_queue_problem(expected: JobView) -> Iterator[Check]:
    """Find what keeps Kueue from managing a new RayJob that names a queue. `expected` is the result of a dry run."""
    if expected.queue and not expected.version and not expected.spec.get("suspend"):
        what = f"queue {expected.queue}: Kueue would not hold the job back, so the job would ignore the quota"
        install = "install Kueue with ray.io/rayjob among its integrations, and let it manage this namespace"
        yield Check("Kueue", Result.FAILED, what, f"{install}, or remove the queue")


def find_quota_problems(cluster: Cluster, manifest: dict[str, Any], ignore_use: bool = False) -> Iterator[Check]:
    """Find ResourceQuotas without room for all pods of the run. If a run can never fit, the check is FAILED.

    With `ignore_use`, the namespace is treated as empty. Yields nothing if this user may not list quotas.
    """
    quotas = list_if_allowed(cluster, "quotas")
    if quotas and ignore_use:
        quotas = [{**quota, "status": {**quota.get("status", {}), "used": {}}} for quota in quotas]
    if quotas:
        checks = check_quotas(quotas, list_if_allowed(cluster, "limit ranges"), manifest)
        yield from (check for check in checks if check.result is not Result.OK)


def find_pod_problems(cluster: Cluster, manifest: dict[str, Any], quotas: Sequence[Check] = ()) -> Iterator[Check]:
    """Find what keeps the pods of a RayJob from being created, by a dry run for each kind of pod.

    Pod security, limits, quotas and policies only examine pods. Without this check, the RayJob would be accepted, and
    its first nodes would be paid for before the operator is refused. If this user may not create pods, only LimitRanges
    are examined, if the user may list them. Problems with a quota that are in `quotas` (from `find_quota_problems`) are
    not repeated.
    """
    if not cluster.allows("create", "", "pods"):
        yield from check_limit_ranges(list_if_allowed(cluster, "limit ranges") or (), manifest)
        return
    for group, template in pod_templates(manifest).items():
        name = f"{manifest['metadata']['name']}-{group}"
        pod = {**template, "apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": name}}
        try:
            cluster.create_pod(pod, dry_run=True)
        except RefusedError as error:
            message = str(error)
            if error.status in CANNOT_CREATE or NO_DRY_RUN in message:
                continue
            exceeded = parse_exceeded(message)
            if exceeded and any(check.seen.startswith(f"{exceeded.name}: ") for check in quotas):
                continue
            result, fix = Result.FAILED, "change the profile, or ask the owner of the namespace to allow it"
            if exceeded and exceeded.never_fits(manifest):
                fix = f"the run can never fit; {ASK_FOR_LESS}, or ask for a larger ResourceQuota {exceeded.name}"
            elif "exceeded quota" in message:
                result, fix = Result.WARNING, "they wait until others end or are deleted"
            elif "admission webhook" in message:
                result, fix = Result.WARNING, OWNER_MAY_PASS
            elif "limits.cpu" in message or "cpu limit" in message:
                fix = CPU_LIMIT
            yield Check("pods", result, f"pods of the group {group} would be refused now: {message}", fix)


def list_if_allowed(cluster: Cluster, kind: str) -> list[dict[str, Any]] | None:
    """Return all objects at a path in `api.PATHS`, or None if this user may not list them."""
    try:
        return cluster.list_all(kind)
    except RefusedError as error:
        if error.status == 403:
            return None
        raise


def explain_refusal(error: ClusterError) -> str:
    """Return the API server's refusal of a RayJob, with a fix if one is known."""
    exceeded = parse_exceeded(str(error))
    if exceeded:
        delete = "RayJobs that have ended count, too: delete some (`sunspot delete`)"
        return f"{error}; {delete}, or ask for a larger ResourceQuota {exceeded.name}"
    if "workload slicing" not in str(error):
        return str(error)
    needs = "Kueue 0.18 or later (or its feature gate ElasticJobsViaWorkloadSlices)"
    advice = "give SUNSPOT_NUM_WORKERS one number, or remove the queue"
    return f"{error}. A changing number of pods needs {needs}; {advice}"


def check_identity(run: Run, variables: Mapping[str, str]) -> None:
    """Raise `ConflictError` with a diff if the run cannot continue under these settings.

    The job would find that out by itself, but minutes later. Settings that the image sets cannot be compared here.
    """
    try:
        begun = read_identity(run).settings
    except NotFoundError:
        return
    wanted = {name: variables[name] for name in begun if name in variables}
    # The run records a path inside the image as an absolute path.
    kept = {name: begun[name] for name in wanted if not begun[name].endswith(f"/{wanted[name]}")}
    refuse_changes(run, differences(kept, {name: wanted[name] for name in kept}))


def _find_cluster_problems(cluster: Cluster, manifest: dict[str, Any]) -> Iterator[Check]:
    missing = list(find_missing_resources(cluster)) or list(find_missing_namespace(cluster))
    yield from missing
    if not missing:
        yield from find_missing_rights(cluster)
        for kind, name in sorted(set(find_references(manifest))):
            yield from find_missing_object(cluster, kind, name)


def find_missing_resources(cluster: Cluster) -> Iterator[Check]:
    """Find KubeRay's resources that the API server does not know."""
    known = {resource["name"] for resource in (cluster.find("ray") or {}).get("resources", ())}
    missing = [name for name in ("rayjobs", "rayclusters") if name not in known]
    if missing:
        what = f"{cluster.server} does not know {' or '.join(missing)} (ray.io/v1)"
        yield Check("KubeRay", Result.FAILED, what, "install the KubeRay operator with its CRDs, 1.7 or later")


def find_missing_namespace(cluster: Cluster) -> Iterator[Check]:
    """Yield a failed check if the namespace does not exist."""
    if cluster.exists("namespace", cluster.namespace) is False:
        fix = "`kubectl apply -k k8s/base` creates sunspot; or choose another --namespace"
        yield Check("namespace", Result.FAILED, f"there is no namespace {cluster.namespace}", fix)


def find_missing_rights(cluster: Cluster) -> Iterator[Check]:
    """Yield a failed check for each resource on which this user lacks permissions."""
    permissions = [
        (verb, group, resource) for (group, resource), verbs in REQUIRED_PERMISSIONS.items() for verb in verbs
    ]
    allowed = map_parallel(lambda permission: cluster.allows(*permission), permissions)
    missing: dict[str, list[str]] = {}
    for (verb, _, resource), granted in zip(permissions, allowed, strict=True):
        if not granted:
            missing.setdefault(resource, []).append(verb)
    for resource, verbs in missing.items():
        what = f"no permission to {', '.join(verbs)} {resource} in namespace {cluster.namespace}"
        fix = "ask for the Role sunspot-submitter of k8s/base, which grants it"
        yield Check("permissions", Result.FAILED, what, fix)


def find_missing_object(cluster: Cluster, kind: str, name: str) -> Iterator[Check]:
    """Yield a check if an object that pods need to start does not exist, or if this user may not see it."""
    there = cluster.exists(kind, name)
    if there is False:
        what = f"{kind} {name} is not in namespace {cluster.namespace}"
        yield Check(f"{kind} {name}", Result.FAILED, what, _how_to_create(kind, name, cluster.namespace))
    elif there is None:
        what = f"this user may not see whether {kind} {name} exists"
        yield Check(f"{kind} {name}", Result.WARNING, what, "pods cannot start without it")


def _find_storage_problems(run: Run) -> list[str]:
    try:
        prove(run.storage, run.name)
        return []
    except StorageError as error:
        if "AWS_ENDPOINT_URL" not in str(error):
            return [str(error)]
        other = "which may differ from the pods' own endpoint inside the cluster"
        advice = "If this machine cannot reach the storage, apply the output of `sunspot render`"
        return [f"{error}. This machine used its own AWS_ENDPOINT_URL, {other}. {advice}"]


def find_references(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield kind and name of each object that the pods of a RayJob need to start. An object may be repeated."""
    for pod in (template["spec"] for template in pod_templates(manifest).values()):
        if "serviceAccountName" in pod:
            yield "ServiceAccount", pod["serviceAccountName"]
        if "priorityClassName" in pod:
            yield "PriorityClass", pod["priorityClassName"]
        yield from (("Secret", secret["name"]) for secret in pod.get("imagePullSecrets", ()))
        for volume in pod.get("volumes", ()):
            yield from _named(
                volume, secret="Secret", configMap="ConfigMap", persistentVolumeClaim="PersistentVolumeClaim"
            )
    cluster = manifest["spec"].get("rayClusterSpec", {})
    if "secretName" in cluster.get("authOptions", {}):
        yield "Secret", cluster["authOptions"]["secretName"]
    password = cluster.get("gcsFaultToleranceOptions", {}).get("redisPassword", {})
    yield from _named(password.get("valueFrom", {}), secretKeyRef="Secret")
    for container in _containers(manifest):
        for source in container.get("envFrom", ()):
            yield from _named(source, secretRef="Secret", configMapRef="ConfigMap")
        for variable in container.get("env", ()):
            yield from _named(variable.get("valueFrom", {}), secretKeyRef="Secret", configMapKeyRef="ConfigMap")


def _containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    pods = [template["spec"] for template in pod_templates(manifest).values()]
    return [c for pod in pods for c in (*pod.get("initContainers", ()), *pod["containers"])]


def _named(source: dict[str, Any], **kinds: str) -> Iterator[tuple[str, str]]:
    for field, kind in kinds.items():
        reference = source.get(field)
        if reference and not reference.get("optional"):
            name = reference.get("name") or reference.get("secretName") or reference.get("claimName")
            if name:  # otherwise, the API server refuses the reference
                yield kind, name


def _how_to_create(kind: str, name: str, namespace: str) -> str:
    """Return how to create an object that pods need to start."""
    if kind == "Secret":
        return (
            f"create it: kubectl -n {namespace} create secret generic {name} --from-env-file=/dev/stdin, and give it "
            "the lines AWS_ACCESS_KEY_ID=... and AWS_SECRET_ACCESS_KEY=... (with AWS_ENDPOINT_URL for other servers "
            "than Amazon's), or whatever else the pods take from it"
        )
    if kind == "ServiceAccount":
        return "`kubectl apply -k k8s/base` creates Sunspot's own; create any other one yourself"
    return "create it, or remove it from the profile"
