"""Tests of ResourceQuotas and LimitRanges for runs that never fit, fit later, or fit only in part."""

from __future__ import annotations

from typing import Any

import pytest

from sunspot.storage.prove import Check, Result
from sunspot.submitter.manifest.quantities import format_like
from sunspot.submitter.manifest.quotas import check_limit_ranges, check_quotas, parse_exceeded
from sunspot.submitter.manifest.requirements import requests_of
from tests.harness.manifests import render

OK = Result.OK
WARNING = Result.WARNING
FAILED = Result.FAILED


def quota(hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "team"}, "spec": {"hard": hard, **spec}, "status": {"hard": hard, "used": used or {}}}


def limit_range(**item: Any) -> dict[str, Any]:
    return {"metadata": {"name": "sizes"}, "spec": {"limits": [{"type": "Container", **item}]}}


def of_priority(operator: str, *values: str) -> dict[str, Any]:
    """Return a scope that selects pods by priority class."""
    rule = {"scopeName": "PriorityClass", "operator": operator, "values": list(values)}
    return {"scopeSelector": {"matchExpressions": [rule]}}


def check(made: dict[str, Any], workers: str = "2", profile: str = "kind", ranges: Any = ()) -> Check:
    """Check one quota against a run with a profile."""
    [found] = check_quotas([made], ranges, render(profile, {"NUM_WORKERS": workers}).manifest)
    return found


@pytest.mark.parametrize(
    ("hard", "used", "workers", "result", "seen"),
    [
        ("4Gi", "0", "2", FAILED, "requests.memory: 11Gi needed (head 5Gi + 2 workers 6Gi) of only 4Gi"),
        ("9Gi", "0", "2", FAILED, "requests.memory: 11Gi needed (head 5Gi + 2 workers 6Gi) of only 9Gi"),
        ("11Gi", "0", "2", OK, "team has room for a run"),
        ("11264Mi", "0", "2", OK, "team has room for a run"),
        ("10240Mi", "0", "2", FAILED, "11264Mi needed (head 5120Mi + 2 workers 6144Mi) of only 10240Mi"),
        ("20Gi", "10Gi", "2", WARNING, "requests.memory: 11Gi needed, 10Gi free of 20Gi"),
        ("20Gi", "30Gi", "2", WARNING, "11Gi needed, 0Gi free of 20Gi"),  # lowered while pods run
        ("14Gi", "0", "2..4", WARNING, "requests.memory: 14Gi, enough for 2 of 2..4 worker pods"),
        ("15Gi", "0", "2..4", WARNING, "enough for 3 of 2..4 worker pods"),
        ("40Gi", "24Gi", "2..4", WARNING, "requests.memory: 16Gi free of 40Gi, enough for 3 of 2..4 worker pods"),
        ("8Gi", "0", "2..4", FAILED, "11.5Gi needed (head 5.5Gi + 2 workers 6Gi) of only 8Gi"),  # with the autoscaler
    ],
)  # fmt: skip
def test_a_quota_is_compared_with_the_resources_of_the_whole_run(
    hard: str, used: str, workers: str, result: Result, seen: str
) -> None:
    found = check(quota({"requests.memory": hard}, {"requests.memory": used}), workers)
    assert found.result is result
    assert seen in found.seen
    assert ("wait until other runs end" in found.fix) is (result is WARNING and ".." not in workers)
    assert ("can never fit" in found.fix) is (result is FAILED)


@pytest.mark.parametrize(
    ("resource", "enough", "profile"),
    [
        ("cpu", "1250m", "kind"),
        ("requests.cpu", "1250m", "kind"),
        ("memory", "11Gi", "kind"),
        ("limits.memory", "11Gi", "kind"),
        ("requests.ephemeral-storage", "6Gi", "kind"),
        ("limits.ephemeral-storage", "6Gi", "kind"),
        ("pods", "3", "kind"),
        ("count/pods", "3", "kind"),
        ("requests.nvidia.com/gpu", "2", "gke-spot"),
        ("count/rayjobs.ray.io", "1", "kind"),
        ("count/rayclusters.ray.io", "1", "kind"),
        ("services", "1", "kind"),
        ("count/secrets", "1", "kind"),
    ],
)
def test_every_kind_of_quota_limit_is_checked(resource: str, enough: str, profile: str) -> None:
    assert check(quota({resource: enough}), profile=profile).result is OK
    assert check(quota({resource: "0"}), profile=profile).result is FAILED
    less = {"1250m": "1200m", "11Gi": "10Gi", "6Gi": "5Gi", "3": "2", "2": "1", "1": "0"}[enough]
    found = check(quota({resource: less}), profile=profile)
    assert found.result is FAILED
    assert f"{enough} needed" in found.seen


@pytest.mark.parametrize("resource", ["persistentvolumeclaims", "configmaps", "count/jobs.batch", "services.nodeports"])
def test_quotas_on_objects_that_runs_do_not_create_are_ignored(resource: str) -> None:
    assert check(quota({resource: "0"})).result is OK


def test_finished_rayjobs_count_against_a_quota() -> None:
    found = check(quota({"count/rayjobs.ray.io": "3"}, {"count/rayjobs.ray.io": "3"}))
    assert found.result is FAILED, "the API server rejects the next RayJob immediately"
    assert "RayJobs that have ended also count" in found.fix


@pytest.mark.parametrize(
    ("scope", "counts"),
    [
        ({"scopes": ["NotTerminating"]}, True),
        ({"scopes": ["Terminating"]}, False),
        ({"scopes": ["BestEffort"]}, False),
        ({"scopes": ["NotBestEffort", "NotTerminating"]}, True),
        ({"scopes": ["PriorityClass"]}, True),
        ({"scopes": ["CrossNamespacePodAffinity"]}, False),
        ({"scopes": ["VolumeAttributesClass"]}, False),
        (of_priority("In", "low"), True),
        (of_priority("In", "high"), False),
        (of_priority("NotIn", "high"), True),
        (of_priority("DoesNotExist"), False),
    ],
)  # fmt: skip
def test_a_quota_counts_only_pods_in_its_scopes(tmp_path: Any, scope: dict[str, Any], counts: bool) -> None:
    profile = tmp_path / "low.yaml"
    profile.write_text("extends: kind\npriority_class: low\n")
    assert check(quota({"pods": "1"}, **scope), profile=str(profile)).result is (FAILED if counts else OK)


def test_a_limit_range_can_supply_a_required_limit() -> None:
    counted = quota({"limits.cpu": "10"})
    assert check(counted).result is FAILED
    assert "set cpu_limit" in check(counted).fix
    assert check(counted, ranges=None).result is WARNING, "a LimitRange that cannot be listed might set a default"
    given = limit_range(default={"cpu": "2"}, defaultRequest={"cpu": "1"})
    assert check(counted, ranges=[given]).result is OK
    found = check(quota({"limits.cpu": "5"}), ranges=[given])
    assert found.result is FAILED
    assert "limits.cpu: 6 needed (head 2 + 2 workers 4) of only 5" in found.seen


def test_the_worker_groups_with_the_smallest_pods_determine_how_many_workers_fit_into_a_quota(tmp_path: Any) -> None:
    profile = tmp_path / "two.yaml"
    profile.write_text("extends: kind\nworkers: [{memory: 8Gi, max: 2}, {memory: 4Gi, max: 2}]\n")
    found = check(quota({"requests.memory": "13Gi"}), "2..4", str(profile))
    assert found.result is FAILED
    assert "13.5Gi needed (head 5.5Gi + 2 workers 8Gi)" in found.seen
    found = check(quota({"requests.memory": "22Gi"}), "2..4", str(profile))
    assert "enough for 3 of 2..4 worker pods" in found.seen


@pytest.mark.parametrize(("degree", "pods"), [("", 3), ("8", 3), ("16", 2)])
def test_a_quota_has_room_only_for_pods_that_form_complete_replicas(degree: str, pods: int) -> None:
    settings = {"NUM_WORKERS": "16..32", "PARALLEL": "hsdp", "SHARD_DEGREE": degree}
    made = quota({"requests.nvidia.com/gpu": "31"})
    [found] = check_quotas([made], (), render("gke-a3-8gpu", settings).manifest)
    assert f"requests.nvidia.com/gpu: 31, enough for {pods} of 2..4 worker pods" in found.seen


@pytest.mark.parametrize(
    ("item", "seen"),
    [
        ({"max": {"memory": "4Gi"}}, "a Container can have at most 4Gi of memory, but has 5Gi"),
        ({"max": {"memory": "5Gi"}}, ""),
        ({"type": "Pod", "max": {"memory": "4Gi"}}, "a Pod can have at most 4Gi of memory, but has 5Gi"),
        ({"type": "Pod", "max": {"cpu": "4"}}, "a Pod can have at most 4 of cpu, but has no limit"),
        ({"min": {"cpu": "1"}}, "a Container must request at least 1 of cpu, but requests 0.25"),
        ({"default": {"cpu": "200m"}}, "the default cpu limit is below the container's request"),
        ({"default": {"cpu": "8"}, "maxLimitRequestRatio": {"cpu": "4"}}, "can be at most 4 times its request"),
        ({"type": "PersistentVolumeClaim", "max": {"storage": "1Gi"}}, ""),
    ],
)
def test_pods_are_checked_against_limit_ranges(item: dict[str, Any], seen: str) -> None:
    found = list(check_limit_ranges([limit_range(**item)], render("kind", {}).manifest))
    assert bool(found) is bool(seen)
    assert all(each.result is FAILED for each in found)
    assert not seen or seen in found[0].seen
    assert len({each.seen for each in found}) == len(found), "each problem is reported once"


def test_init_containers_and_pod_overhead_are_counted_as_the_scheduler_counts_them() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"name": "c", "resources": {"requests": {"cpu": cpu}}, **more}

    init = [container("3"), container("1", restartPolicy="Always"), container("2")]
    assert requests_of({"containers": [container("500m")]}) == {"cpu": 0.5}
    assert requests_of({"containers": [container("1")], "initContainers": init}) == {"cpu": 3}
    assert requests_of({"containers": [container("4")], "initContainers": init}) == {"cpu": 5}
    assert requests_of({"containers": [container("1")], "overhead": {"cpu": "250m"}}) == {"cpu": 1.25}
    assert requests_of({"containers": [container("1")], "resources": {"requests": {"cpu": "7"}}}) == {"cpu": 7}


@pytest.mark.parametrize(
    ("amount", "pattern", "text"),
    [
        (4 * 2**30, "4Gi", "4Gi"),
        (11.5 * 2**30, "4Gi", "11.5Gi"),
        (11.5 * 2**30, "100Mi", "11776Mi"),
        (4e9, "1G", "4G"),
        (1.25, "10", "1.25"),
        (1.25, "500m", "1250m"),
        (11811160064, "4294967296", "11811160064"),
        (0.1 + 0.2, "1", "0.3"),
        (3, 5, "3"),
    ],
)
def test_resource_amounts_are_printed_in_the_unit_of_the_quota(amount: float, pattern: Any, text: str) -> None:
    assert format_like(amount, pattern) == text


SAID = "exceeded quota: team, requested: limits.memory=3Gi,requests.memory=3Gi, used: limits.memory=8Gi"


def test_the_limit_in_a_quota_error_is_compared_with_the_resources_of_the_whole_run() -> None:
    manifest = render("kind", {"NUM_WORKERS": "2"}).manifest
    found = parse_exceeded(f"pods x is forbidden: {SAID}, limited: limits.memory=9Gi,requests.memory=9Gi; and so on")
    assert found
    assert found.never_fits(manifest), "its own head and worker use all of the 8Gi"
    wider = parse_exceeded(f"{SAID}, limited: limits.memory=12Gi")
    assert wider
    assert not wider.never_fits(manifest)
    assert parse_exceeded(f"{SAID}, limited: limits.mem...") is None, "a truncated error is not parsed"
    assert parse_exceeded("violates PodSecurity") is None
