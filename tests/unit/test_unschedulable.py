"""Tests of the reasons why a pod fits on no node, and their order."""

from __future__ import annotations

from typing import Any

import pytest

from sunspot.submitter.cluster.pod_problems import PodProblem
from sunspot.submitter.doctor.unschedulable import UnplacedPods, explain_unplaced, find_refusals, parse_refusals
from sunspot.submitter.findings import Diagnosis, Finding, Severity, by_severity

RESOURCES = Diagnosis.RESOURCES
TAINT = Diagnosis.TAINT
NO_NODE = Diagnosis.NO_NODE
NODES = Diagnosis.NODES
VOLUME = Diagnosis.VOLUME
AFFINITY = Diagnosis.AFFINITY

MASTER = "1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }"
UNNAMED = "1 node(s) had untolerated taint(s)"
LABELS = "2 node(s) didn't match Pod's node affinity/selector"
CONFLICT = "had volume node affinity conflict"
NOT_READY = "node.kubernetes.io/not-ready"
GPU = "nvidia.com/gpu"


def message(*reasons: str) -> str:
    """Return the scheduler's message about a pod that fits on no node."""
    preemption = " no new claims to deallocate, preemption: 0/3 nodes are available: 3 No preemption victims found."
    return f"0/3 nodes are available: {', '.join(reasons)}.{preemption}"


@pytest.mark.parametrize(
    ("reasons", "found"),
    [
        (
            ["1 node(s) didn't match Pod's node affinity/selector", "1 Insufficient nvidia.com/gpu", MASTER],
            [(RESOURCES, 1, GPU), (NO_NODE, 1, "didn't match Pod's node affinity/selector")],
        ),
        (["2 Insufficient cpu", "1 Insufficient memory"], [(RESOURCES, 2, "cpu"), (RESOURCES, 1, "memory")]),
        ([MASTER], [(TAINT, 1, "node-role.kubernetes.io/control-plane")]),
        ([f"1 node(s) had untolerated taint {{{NOT_READY}: }}"], [(NODES, 1, NOT_READY)]),
        (["3 node(s) were unschedulable"], [(NODES, 3, "cordoned")]),
        (["3 Too many pods"], [(RESOURCES, 3, "pods")]),
        (["4 node(s) had untolerated taint(s)"], [(TAINT, 4, "")]),
        (["1 node(s) had untolerated taint(s) {a: b}, {c: }"], [(TAINT, 1, "a=b"), (TAINT, 1, "c")]),
        ([UNNAMED, LABELS], [(NO_NODE, 2, "didn't match Pod's node affinity/selector"), (TAINT, 1, "")]),
        ([UNNAMED, "2 node(s) were unschedulable"], [(NODES, 2, "cordoned"), (TAINT, 1, "")]),
        (
            ["1 node(s) had untolerated taint {nvidia.com/gpu: present}", "2 Insufficient nvidia.com/gpu"],
            [(TAINT, 1, "nvidia.com/gpu=present"), (RESOURCES, 2, GPU)],
        ),
        (
            ["1 node(s) had volume node affinity conflict", "2 Insufficient cpu"],
            [(RESOURCES, 2, "cpu"), (VOLUME, 1, "had volume node affinity conflict")],
        ),
        (
            [LABELS, "1 node(s) had volume node affinity conflict"],
            [(VOLUME, 1, CONFLICT), (NO_NODE, 2, "didn't match Pod's node affinity/selector")],
        ),
        (
            ["pod has unbound immediate PersistentVolumeClaims"],
            [(VOLUME, 3, "pod has unbound immediate PersistentVolumeClaims")],
        ),
        (['persistentvolumeclaim "data" not found'], [(VOLUME, 3, 'persistentvolumeclaim "data" not found')]),
        (["3 node(s) didn't match pod affinity rules"], [(AFFINITY, 3, "didn't match pod affinity rules")]),
        (
            ["3 node(s) didn't match pod topology spread constraints"],
            [(AFFINITY, 3, "didn't match pod topology spread constraints")],
        ),
        (["3 cannot allocate all claims"], [(RESOURCES, 3, "devices for its claim")]),
    ],
)  # fmt: skip
def test_the_reasons_in_a_scheduler_message_are_sorted_by_usefulness(
    reasons: list[str], found: list[tuple[Diagnosis, int, str]]
) -> None:
    assert [refusal[:3] for refusal in parse_refusals(message(*reasons))] == found
    assert parse_refusals("nothing of the kind") == []
    assert parse_refusals("no nodes available to schedule pods") == []


def node(name: str, labels: dict[str, str] | None = None, taints: Any = (), **more: Any) -> dict[str, Any]:
    """Return a node with 8 CPUs."""
    conditions = [{"type": "Ready", "status": "True" if more.pop("ready", True) else "Unknown"}]
    size = {"cpu": more.pop("cpu", "8"), GPU: more.pop("gpus", "0")}
    spec = {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints], **more}
    metadata = {"name": name, "labels": labels or {}}
    return {"metadata": metadata, "spec": spec, "status": {"conditions": conditions, "allocatable": size}}


def pod(gpus: int = 0, cpu: str = "4", **spec: Any) -> dict[str, Any]:
    asks = {"cpu": cpu, **({GPU: str(gpus)} if gpus else {})}
    return {"containers": [{"name": "ray", "resources": {"requests": asks}}], **spec}


MAIN = node("main", taints=["node-role.kubernetes.io/control-plane"])
PLAIN = [node("a"), node("b")]
L4 = {"gpu": "l4"}
ON_L4 = {"nodeSelector": L4}


@pytest.mark.parametrize(
    ("said", "asked", "nodes", "first"),
    [
        ([UNNAMED, LABELS], pod(**ON_L4), [MAIN, *PLAIN], (NO_NODE, 2, "not labeled gpu=l4")),
        (["3 node(s) had untolerated taint(s)"], pod(), [MAIN, node("a", taints=["team"])], (TAINT, 1, "team")),
        ([UNNAMED], pod(), [MAIN], (TAINT, 1, "node-role.kubernetes.io/control-plane")),
        # A node has the labels, so they are right. Its taint keeps the pod away.
        ([UNNAMED, LABELS], pod(**ON_L4), [*PLAIN, node("l4", L4, ["team"])], (TAINT, 1, "team")),
        # A toleration would not help, because that node lacks the label, too.
        ([UNNAMED, LABELS], pod(**ON_L4), [*PLAIN, node("c", taints=["team"])], (NO_NODE, 2, "not labeled gpu=l4")),
        ([UNNAMED], pod(**ON_L4), [*PLAIN, node("l4", L4, ready=False)], (NODES, 1, "not ready")),
        ([UNNAMED], pod(**ON_L4), [*PLAIN, node("l4", L4, unschedulable=True)], (NODES, 1, "cordoned")),
        # Nodes without GPUs are not GPU nodes that are too small.
        ([UNNAMED, f"2 Insufficient {GPU}"], pod(1), [*PLAIN, node("g", None, ["team"], gpus="8")], (TAINT, 1, "team")),
        ([f"3 Insufficient {GPU}"], pod(4), [*PLAIN, node("g", gpus="2")], (RESOURCES, 1, GPU)),
        # A node that would be suitable without its present pods is full.
        ([f"3 Insufficient {GPU}"], pod(2), [*PLAIN, node("g", gpus="2")], (RESOURCES, 1, GPU)),
        (["2 Insufficient cpu", UNNAMED], pod(), [MAIN, *PLAIN], (RESOURCES, 2, "cpu")),
        (
            [LABELS, "1 node(s) had volume node affinity conflict"],
            pod(**ON_L4),
            [*PLAIN, node("l4", L4)],
            (VOLUME, 1, "had volume node affinity conflict"),
        ),
        # The nodes have changed since. One of them has no obstacle now.
        ([UNNAMED], pod(), PLAIN, (TAINT, 1, "")),
    ],
)  # fmt: skip
def test_the_reasons_why_a_pod_is_not_scheduled_are_read_from_the_nodes(
    said: list[str], asked: dict[str, Any], nodes: list[Any], first: tuple[Diagnosis, int, str]
) -> None:
    assert find_refusals(message(*said), asked, nodes)[0][:3] == first


def test_both_reasons_why_a_node_does_not_fit_are_reported() -> None:
    tainted = node("a", taints=["team"])
    [one, other] = find_refusals(message(UNNAMED), pod(**ON_L4), [MAIN, tainted])
    assert (one.kind, one.others) == (TAINT, ("not labeled gpu=l4",))
    assert (other.kind, other.others) == (NO_NODE, ("taint team not tolerated",))


def explain(said: dict[str, list[str]], nodes: Any = (), **spec: Any) -> list[Finding]:
    problems = [
        PodProblem(NO_NODE, name, "workers", f"no node takes it ({text.partition('. ')[0]})")
        for text, names in said.items()
        for name in names
    ]
    return list(explain_unplaced(UnplacedPods("workers", problems, pod(**spec)), nodes, Severity.ERROR))


def test_each_reason_is_reported_once() -> None:
    """The scheduler's messages differ from pod to pod, because nodes come and go."""
    said = {message("3 node(s) had untolerated taint(s)"): ["w-1", "w-2"], message(UNNAMED, LABELS): ["w-3"]}
    findings = explain(said, nodeSelector=L4)
    assert [finding.finding for finding in findings] == [NO_NODE, TAINT]
    assert [finding.details["pods"] for finding in findings] == [["w-3"], ["w-1", "w-2", "w-3"]]
    [finding] = explain(said, [MAIN, *PLAIN], nodeSelector=L4)
    assert finding.evidence.startswith("no node has what 3 pods (w-1, w-2, w-3) select (gpu=l4): 2 nodes not labeled")


def test_scheduling_findings_keep_their_order_when_they_are_sorted_with_other_findings() -> None:
    found = explain({message(UNNAMED, LABELS): ["w-1"]}, nodeSelector=L4)
    quota = Finding(Diagnosis.QUOTA, Severity.ERROR, "x", "y")
    late = Finding(Diagnosis.CONTAINER, Severity.ERROR, "x", "y")
    assert [each.finding for each in by_severity([late, *found, quota])] == [
        *(Diagnosis.QUOTA, NO_NODE, TAINT, Diagnosis.CONTAINER)
    ]


def test_a_label_missing_on_some_nodes_is_not_reported_for_all_nodes() -> None:
    said = {message(UNNAMED, LABELS): ["w-1"]}
    taint, labels = explain(said, [*PLAIN, node("l4", L4, ["team"])], nodeSelector=L4)
    assert taint.finding is TAINT
    assert labels.evidence.startswith("2 nodes lack what pod w-1 selects (gpu=l4)")


def test_an_unknown_scheduler_message_is_shown_unchanged() -> None:
    [finding] = explain({"no nodes available to schedule pods": ["w-1"]})
    assert "no nodes available to schedule pods" in finding.evidence


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("1 node(s) had volume node affinity conflict", "kubectl get pvc,pv shows the volumes"),
        ("1 node(s) didn't match pod affinity rules", "correct worker.placement"),
        ("1 Insufficient cpu", "lower worker.cpu in the profile, end other pods there"),
        ("1 node(s) were unschedulable", "kubectl uncordon"),
    ],
)
def test_every_reason_for_an_unschedulable_pod_has_its_own_advice(reason: str, advice: str) -> None:
    [finding] = explain({message(reason): ["w-1"]})
    assert advice in finding.advice


def test_advice_on_a_pod_too_large_for_every_node_does_not_say_to_wait() -> None:
    [finding] = explain({message("2 Insufficient cpu", UNNAMED): ["w-1"]}, [MAIN, *PLAIN], cpu="64")
    assert finding.evidence == ("2 nodes would have too little cpu for pod w-1 (cpu 64), even without other pods")
    assert finding.advice == "lower worker.cpu in the profile, or add larger nodes"


def test_nodes_without_a_running_device_plugin_offer_no_gpus() -> None:
    said = {message(f"2 Insufficient {GPU}", UNNAMED): ["w-1"]}
    [finding] = explain(said, [MAIN, node("l4", L4), node("m4", L4)], nodeSelector=L4, gpus=1)
    assert finding.evidence == f"no node has {GPU}, which pod w-1 asks for"
    assert "device plugin" in finding.advice
