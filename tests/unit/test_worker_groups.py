"""Tests of profiles with several groups of training pods."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from sunspot.errors import SettingsError
from sunspot.settings import NodeGroup
from sunspot.settings.search_space import load_search
from sunspot.submitter.cluster.state import ClusterSeen, count_workers
from sunspot.submitter.cluster.views import job_view, pod_view
from sunspot.submitter.manifest.profile import load_profile
from sunspot.submitter.manifest.render import Rendered, settings_of
from tests.harness import REPOSITORY
from tests.harness.kubernetes import pod
from tests.harness.manifests import OF_THE_IMAGE, render

SPOT_FIRST = """
extends: gke-spot
settings: {NUM_WORKERS: 2..8}
worker: {gpu_selector: {cloud.google.com/gke-accelerator: nvidia-l4}}
workers:
- {memory: 20Gi}
- {spot: false, after_s: 600, max: 4, cpu: 4, placement: null}
"""

SPOT = {"key": "cloud.google.com/gke-spot", "operator": "NotIn", "values": ["true"]}


def rendered(folder: Path, text: str, **settings: str) -> Rendered:
    path = folder / "mine.yaml"
    path.write_text(text)
    return render(str(path), settings)


def groups_of(job: Rendered) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = job.manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return groups


def all_groups_of(job: Rendered) -> list[dict[str, Any]]:
    """Return the head group and the worker groups of a rendered job."""
    return [job.manifest["spec"]["rayClusterSpec"]["headGroupSpec"], *groups_of(job)]


def test_each_worker_group_inherits_from_the_worker_key(tmp_path: Path) -> None:
    first, second = groups_of(rendered(tmp_path, SPOT_FIRST))
    assert [first["groupName"], second["groupName"]] == ["workers", "workers-2"]
    pods = [group["template"]["spec"] for group in (first, second)]
    requests = [spec["containers"][0]["resources"]["requests"] for spec in pods]
    assert [(each["cpu"], each["memory"], each["nvidia.com/gpu"]) for each in requests] == [
        ("6", "20Gi", "1"),
        ("4", "24Gi", "1"),
    ]
    assert all(spec["nodeSelector"]["cloud.google.com/gke-accelerator"] == "nvidia-l4" for spec in pods)
    assert "podAffinity" in pods[0]["affinity"]
    assert "podAffinity" not in pods[1]["affinity"]


def test_only_groups_with_the_spot_key_run_on_spot_nodes(tmp_path: Path) -> None:
    first, second = (group["template"]["spec"] for group in groups_of(rendered(tmp_path, SPOT_FIRST)))
    assert first["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert "nodeAffinity" not in first["affinity"]
    assert "cloud.google.com/gke-spot" not in second["nodeSelector"]
    required = second["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required == {"nodeSelectorTerms": [{"matchExpressions": [SPOT]}]}
    assert SPOT["key"] not in [toleration["key"] for toleration in second["tolerations"]]


def test_each_worker_group_has_a_ray_resource_named_after_the_group(tmp_path: Path) -> None:
    """The driver uses the resource to request and recognize the group's nodes. No group must be ready at the start."""
    job = rendered(tmp_path, SPOT_FIRST)
    first, second = groups_of(job)
    assert [[g["replicas"], g["minReplicas"], g["maxReplicas"]] for g in (first, second)] == [[0, 0, 8], [0, 0, 4]]
    assert (first["resources"]["workers"], second["resources"]["workers-2"]) == ("1", "1")
    assert "workers-2" not in first["resources"]
    assert load_search(settings_of(job.manifest)).settings.job.node_groups == (
        NodeGroup(name="workers", most=8, after_s=300),
        NodeGroup(name="workers-2", most=4, after_s=600),
    )
    assert (
        load_search(settings_of(job.manifest)).settings.job.nodes_timeout_s
        == job.manifest["spec"]["preRunningDeadlineSeconds"]
        == 1800
    )
    assert load_search(settings_of(job.manifest)).settings.resources_per_worker["CPU"] == 4, (
        "a worker must fit into a pod of either group"
    )
    assert job.manifest["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is True


def test_each_group_has_room_for_all_workers_of_a_run_of_fixed_size(tmp_path: Path) -> None:
    job = rendered(tmp_path, SPOT_FIRST, NUM_WORKERS="4")
    assert [group["maxReplicas"] for group in groups_of(job)] == [4, 4]
    assert job.manifest["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is True


def test_a_run_can_mix_on_demand_and_spot_workers(tmp_path: Path) -> None:
    text = "extends: eks-spot\nsettings: {NUM_WORKERS: 8}\nworker: {gpus: 2}\nworkers: [{spot: false, max: 1}, {}]"
    job = rendered(tmp_path, text)
    assert [group["maxReplicas"] for group in groups_of(job)] == [1, 4]
    assert [group.most for group in load_search(settings_of(job.manifest)).settings.job.node_groups] == [2, 8]


def test_placement_applies_across_all_groups(tmp_path: Path) -> None:
    names = {"key": "ray.io/group", "operator": "In", "values": ["workers", "workers-2"]}
    for placement in ("spread", "pack"):
        job = rendered(tmp_path, f"extends: kind\nworker: {{placement: {placement}}}\nworkers: [{{}}, {{}}]")
        for group in groups_of(job):
            spec = group["template"]["spec"]
            if placement == "spread":
                [found] = spec["topologySpreadConstraints"]
            else:
                [preferred] = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
                found = preferred["podAffinityTerm"]
            assert found["labelSelector"]["matchExpressions"] == [names]
            assert "ray.io/group" not in found["labelSelector"]["matchLabels"]


def test_each_group_can_have_its_own_pod_patch(tmp_path: Path) -> None:
    text = "extends: kind\nworkers: [{pod: {spec: {schedulerName: mine}}}, {pod: {spec: {volumes: mine}}}]"
    with pytest.raises(SettingsError, match=r"workers\.1\.pod\.spec\.volumes is already"):
        rendered(tmp_path, text)
    first, second = groups_of(rendered(tmp_path, text.replace("volumes:", "priorityClassName:")))
    assert (first["template"]["spec"]["schedulerName"], second["template"]["spec"]["priorityClassName"]) == (
        "mine",
    ) * 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("extends: gke-spot\nworkers: []", r"workers=\[\] .*set it to a list of training pod groups"),
        (
            "extends: gke-spot\nworkers: [{gpu: 1}]",
            r"workers\.0\.gpu is an unknown key; did you mean workers\.0\.gpus\?",
        ),
        ("extends: gke-spot\nworkers: [{}, {after_s: soon}]", r"workers\.1\.after_s='soon' .*set it to an integer"),
        ("extends: gke-spot\nworkers: [{}, {gpus: 4}]", "workers: the groups have 1 and 4 GPUs per pod"),
        (
            "extends: kind\nworkers: [{}, {spot: true}]",
            r"workers\.1\.spot=True: the profile has no spot nodes",
        ),
        (
            "extends: kind\nsettings: {NUM_WORKERS: 4}\nworkers: [{max: 1}, {max: 2}]",
            "at most 3 pods in total .*NUM_WORKERS=4 needs 4",
        ),
        (
            "extends: kind\nsettings: {LEARNING_RATE: 'uniform(1, 2)', CONCURRENT_TRIALS: 2}\nworkers: [{}, {}]",
            "a search with 2 concurrent trials cannot use 2 groups",
        ),
        ("extends: kind\nqueue: q\nworkers: [{}, {}]", "queue q: .*keep one group in workers"),
        (
            'extends: kind\nsettings: {NODE_GROUPS: \'[{"name": "a", "most": 1, "after_s": 0}]\'}',
            "NODE_GROUPS cannot be set",
        ),
    ],
)
def test_errors_about_invalid_worker_groups_include_the_fix(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=told):
        rendered(tmp_path, text)


FRAGMENTS = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs/cluster.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("kind", ["NodePool", "ComputeClass"])
def test_the_pods_of_documented_worker_groups_fit_their_nodes(kind: str, tmp_path: Path) -> None:
    """The profile's pods select and tolerate the labels and taints of the nodes in docs/cluster.md."""
    [(nodes, profile)] = [pair for pair in pairwise(FRAGMENTS) if yaml.safe_load(pair[0]).get("kind") == kind]
    head, worker = (group["template"]["spec"] for group in all_groups_of(rendered(tmp_path, profile)))
    made = yaml.safe_load(nodes)
    name, tolerated = made["metadata"]["name"], {each["key"] for each in worker["tolerations"]}
    if kind == "NodePool":
        assert worker["nodeSelector"] == {"karpenter.sh/nodepool": name, **OF_THE_IMAGE}
        assert {taint["key"] for taint in made["spec"]["template"]["spec"]["taints"]} <= tolerated
        assert head["nodeSelector"] == {"karpenter.sh/capacity-type": "on-demand", **OF_THE_IMAGE}
    else:
        assert worker["nodeSelector"] == {"cloud.google.com/compute-class": name, **OF_THE_IMAGE}
        assert {"cloud.google.com/compute-class", "cloud.google.com/gke-spot", "nvidia.com/gpu"} <= tolerated
        assert worker["terminationGracePeriodSeconds"] == load_profile("gke-spot", {}).notice_s
        assert head["nodeSelector"] == OF_THE_IMAGE
    asked = worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert asked == "1", "the types have one GPU"


def test_pods_of_every_worker_group_are_counted_as_workers(tmp_path: Path) -> None:
    raw = rendered(tmp_path, SPOT_FIRST).manifest
    job = job_view({**raw, "status": {"rayClusterName": "c"}})
    assert job.training_groups == ("workers", "workers-2")
    pods = [pod("head", "c", head=True), pod("a", "c"), pod("b", "c", phase="Pending"), pod("d", "c")]
    pods[3]["metadata"]["labels"]["ray.io/group"] = "workers-2"
    assert count_workers(ClusterSeen((job,), [pod_view(each) for each in pods]), job) == (3, 2)
