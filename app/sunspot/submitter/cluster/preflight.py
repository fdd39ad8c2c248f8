"""Checks the cluster and the storage before a job is submitted, and reports every problem at once."""

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
"""The Kubernetes API verbs that `sunspot` uses, keyed by API group and resource."""

NO_DRY_RUN = "does not support dry run"
"""Part of the API server's message about a webhook that cannot be called in a dry run."""

CANNOT_CREATE = (404, 405)
"""HTTP statuses of an API server that does not allow anyone to create pods."""

OWNER_MAY_PASS = (
    "the operator's own pods might pass if the policy checks their owner; if no pods start, this is the reason"
)
"""Advice for a webhook's rejection. The webhook might accept the same pods from the operator."""


def check(cluster: Cluster, run: Run, manifest: dict[str, Any]) -> tuple[JobView | None, list[str]]:
    """Check the cluster and storage. The only change is a test object in storage, which is then deleted.

    Returns the RayJob with the API server's defaults, and warnings. Raises `ClusterError` or `StorageError`, which
    lists all problems and their fixes.
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
            if not expected.version:  # the pods of a live RayJob might use up the quota
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
        raise kind(f"found {plural(len(problems), 'problem')}, so nothing was submitted:\n{lines}")
    return expected, warnings


def find_queue_problem(expected: JobView) -> Iterator[Check]:
    """Yield a failed check if a RayJob has a queue, but Kueue does not manage the RayJob.

    `expected` is the RayJob that a dry run returned.
    """
    if expected.queue and not expected.version and not expected.spec.get("suspend"):
        what = f"queue {expected.queue}: Kueue does not manage this job, so the job would ignore the queue's quota"
        install = "install Kueue with ray.io/rayjob among its integrations, and let it manage this namespace"
        yield Check("Kueue", Result.FAILED, what, f"{install}, or remove the queue")


def find_quota_problems(cluster: Cluster, manifest: dict[str, Any], ignore_use: bool = False) -> Iterator[Check]:
    """Yield a check for each ResourceQuota that does not have room for all of the run's pods.

    The check is FAILED if the run can never fit into the quota, and otherwise a warning. With `ignore_use`, all quotas
    count as unused. Yields nothing if this user cannot list quotas.
    """
    quotas = list_if_allowed(cluster, "quotas")
    if quotas and ignore_use:
        quotas = [{**quota, "status": {**quota.get("status", {}), "used": {}}} for quota in quotas]
    if quotas:
        checks = check_quotas(quotas, list_if_allowed(cluster, "limit ranges"), manifest)
        yield from (check for check in checks if check.result is not Result.OK)


def find_pod_problems(cluster: Cluster, manifest: dict[str, Any], quotas: Sequence[Check] = ()) -> Iterator[Check]:
    """Find the reasons why a RayJob's pods cannot be created, with a dry run for each kind of pod.

    Pod security, limits, quotas and policies apply only to pods. Without this check, the RayJob would be accepted, and
    nodes would be paid for before the pods were rejected. If this user cannot create pods, only the LimitRanges are
    checked. Quota problems that are already in `quotas` are not repeated.
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
                result, fix = Result.WARNING, "they wait until other pods end or are deleted"
            elif "admission webhook" in message:
                result, fix = Result.WARNING, OWNER_MAY_PASS
            elif "limits.cpu" in message or "cpu limit" in message:
                fix = CPU_LIMIT
            yield Check("pods", result, f"pods of group {group} would be rejected now: {message}", fix)


def list_if_allowed(cluster: Cluster, kind: str) -> list[dict[str, Any]] | None:
    """Return all objects of one kind in `api.PATHS`, or None if this user cannot list them."""
    try:
        return cluster.list_all(kind)
    except RefusedError as error:
        if error.status == 403:
            return None
        raise


def explain_refusal(error: ClusterError) -> str:
    """Return the API server's error for a RayJob, with a fix if one is known."""
    exceeded = parse_exceeded(str(error))
    if exceeded:
        delete = "RayJobs that have ended also count; delete some (`sunspot delete`)"
        return f"{error}; {delete}, or ask for a larger ResourceQuota {exceeded.name}"
    if "workload slicing" not in str(error):
        return str(error)
    needs = "Kueue 0.18 or later (or its feature gate ElasticJobsViaWorkloadSlices)"
    advice = "set SUNSPOT_NUM_WORKERS to a single number, or remove the queue"
    return f"{error}. A variable number of pods needs {needs}; {advice}"


def check_identity(run: Run, variables: Mapping[str, str]) -> None:
    """Raise `ConflictError` with a diff if the run cannot continue with these settings.

    The job would fail for the same reason, but minutes later. Settings from the image cannot be compared here.
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
    """Yield a failed check if the API server does not have KubeRay's resources."""
    known = {resource["name"] for resource in (cluster.find("ray") or {}).get("resources", ())}
    missing = [name for name in ("rayjobs", "rayclusters") if name not in known]
    if missing:
        what = f"{cluster.server} does not know {' or '.join(missing)} (ray.io/v1)"
        yield Check("KubeRay", Result.FAILED, what, "install the KubeRay operator with its CRDs, 1.7 or later")


def find_missing_namespace(cluster: Cluster) -> Iterator[Check]:
    """Yield a failed check if the namespace does not exist."""
    if cluster.exists("namespace", cluster.namespace) is False:
        fix = "create the namespace sunspot with `kubectl apply -k k8s/base`, or choose another --namespace"
        yield Check("namespace", Result.FAILED, f"there is no namespace {cluster.namespace}", fix)


def find_missing_rights(cluster: Cluster) -> Iterator[Check]:
    """Yield a failed check for each resource for which this user lacks permissions."""
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
        fix = "ask for the Role sunspot-submitter in k8s/base, which grants it"
        yield Check("permissions", Result.FAILED, what, fix)


def find_missing_object(cluster: Cluster, kind: str, name: str) -> Iterator[Check]:
    """Yield a check if an object that pods refer to is missing, or is hidden from this user."""
    there = cluster.exists(kind, name)
    if there is False:
        what = f"{kind} {name} is not in namespace {cluster.namespace}"
        yield Check(f"{kind} {name}", Result.FAILED, what, _how_to_create(kind, name, cluster.namespace))
    elif there is None:
        what = f"this user cannot see whether {kind} {name} exists"
        yield Check(f"{kind} {name}", Result.WARNING, what, "pods cannot start without it")


def _find_storage_problems(run: Run) -> list[str]:
    try:
        prove(run.storage, run.name)
        return []
    except StorageError as error:
        if "AWS_ENDPOINT_URL" not in str(error):
            return [str(error)]
        other = "which might differ from the pods' endpoint inside the cluster"
        advice = "If this machine cannot reach the storage, apply the output of `sunspot render` instead"
        return [f"{error}. This machine used its own AWS_ENDPOINT_URL, {other}. {advice}"]


def find_references(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the kind and name of each object that a RayJob's pods require before they can start.

    An object is yielded more than once if it is used more than once.
    """
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
            if name:  # the API server rejects a reference without a name
                yield kind, name


def _how_to_create(kind: str, name: str, namespace: str) -> str:
    """Return instructions for creating an object that pods require."""
    if kind == "Secret":
        return (
            f"create it: kubectl -n {namespace} create secret generic {name} --from-env-file=/dev/stdin, and enter "
            "the lines AWS_ACCESS_KEY_ID=... and AWS_SECRET_ACCESS_KEY=... (and AWS_ENDPOINT_URL if the server is not "
            "Amazon's), or whatever else the pods read from it"
        )
    if kind == "ServiceAccount":
        return "if it is one of Sunspot's, create it with `kubectl apply -k k8s/base`; otherwise create it yourself"
    return "create it, or remove it from the profile"
