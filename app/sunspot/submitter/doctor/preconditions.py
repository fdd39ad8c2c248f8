"""`sunspot doctor` without a run: whether this cluster and this bucket are ready for one."""

from collections.abc import Iterator
from dataclasses import asdict

from sunspot.errors import ClusterError, StorageError
from sunspot.storage.probe import Check, Result, failure, probe_path
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.doctor.cluster_checks import check_cluster
from sunspot.submitter.manifest.render import Rendered
from sunspot.submitter.output import print_json, print_text


def examine(
    cluster: Cluster | None, rendered: Rendered, from_pods: bool, as_json: bool, cluster_error: str = ""
) -> None:
    """Check everything a run like `rendered` needs, and print what was seen and what to do.

    Storage is tested from here, and with `from_pods` also from pods like the run's. Raises `ClusterError` or
    `StorageError` when a check failed.
    """
    checks: list[Check] = []
    in_cluster = False
    for check, of_cluster in _every_check(cluster, rendered, from_pods, cluster_error):
        checks.append(check)
        in_cluster |= of_cluster and check.result is Result.FAILED
        if as_json:
            continue
        print_text(f"{check.result:8} {check.check}: {check.seen}", flush=True)
        if check.fix and check.result is not Result.OK:
            print_text(f"{'':8} -> {check.fix}", flush=True)
    failed = [check for check in checks if check.result is Result.FAILED]
    if as_json:
        print_json({"fit": not failed, "checks": [asdict(check) for check in checks]})
    if failed:
        kind = ClusterError if in_cluster else StorageError
        raise kind(f"not ready for a run: {len(failed)} of {len(checks)} checks failed ({failed[0].check} first)")
    if not as_json:
        warnings = sum(check.result is Result.WARNING for check in checks)
        print_text(f"ready for a run: {len(checks)} checks, {warnings} with a warning")


def _every_check(
    cluster: Cluster | None, rendered: Rendered, from_pods: bool, cluster_error: str
) -> Iterator[tuple[Check, bool]]:
    """Each check, and whether it is the cluster's."""
    if cluster is None:
        yield failure("API server", ClusterError(cluster_error)), True
    else:
        yield from ((check, True) for check in check_cluster(cluster, rendered))
    yield from ((check, False) for check in probe_path(rendered.settings.storage_path))
    if from_pods and cluster:
        from sunspot.submitter.doctor.probe_pods import try_from_pods

        yield from ((check, True) for check in try_from_pods(cluster, rendered))
