"""Explains why a pod fits on no node, from the scheduler's message and, if this user can list them, the nodes.

For each node, the scheduler reports only the first filter that fails: taints, then labels, then free resources, then
volumes and other pods. A node that is reported as tainted might therefore lack required labels, too, but a node that
is reported as short of resources has the required labels. Since Kubernetes 1.34, the message does not name the taints.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sunspot.formatting import plural
from sunspot.submitter.cluster.pod_problems import PodProblem
from sunspot.submitter.cluster.views import Nodes
from sunspot.submitter.doctor.schedulable_nodes import CONTROL_PLANE, Obstacle, find_obstacles, kind_of_taint
from sunspot.submitter.findings import UNSCHEDULABLE, Diagnosis, Finding, Severity

ONLY_THE_SCHEDULER_KNOWS = (Diagnosis.VOLUME, Diagnosis.AFFINITY)
"""Reasons that node objects do not show."""

MAX_OTHERS = 3
"""Maximum number of other obstacles on the same nodes that a finding lists."""


class Refusal(NamedTuple):
    """A reason why a pod does not fit on some nodes."""

    kind: Diagnosis
    nodes: int
    what: str
    "The resource, the taint, or the scheduler's own description."
    others: tuple[str, ...] = ()
    "Other obstacles on the same nodes. The pod fits only if all obstacles are removed."
    when_empty: bool = False
    "True if the nodes would lack the resource even if they were empty."

    @property
    def is_unnamed_taint(self) -> bool:
        return self.kind is Diagnosis.TAINT and not self.what


class UnplacedPods(NamedTuple):
    """Pods of one group that fit on no node."""

    group: str
    problems: Sequence[PodProblem]
    "The scheduler's message about each pod."
    spec: Mapping[str, Any]

    @property
    def section(self) -> str:
        """The profile section that configures these pods."""
        return {"head": "head", "data": "data_workers"}.get(self.group, "worker")

    def __str__(self) -> str:
        return name_pods(self.names)

    @property
    def names(self) -> list[str]:
        """The pods' names, without duplicates."""
        return list(dict.fromkeys(problem.pod for problem in self.problems))


def explain_unplaced(pods: UnplacedPods, nodes: Nodes, severity: Severity) -> Iterator[Finding]:
    """Yield a finding for each reason why some pods fit on no node, starting with the most useful one.

    `nodes` are all nodes of the cluster, or an empty sequence if this user cannot list nodes.
    """
    alike: dict[tuple[str, str], list[PodProblem]] = {}
    for problem in pods.problems:
        alike.setdefault((problem.evidence, problem.fix), []).append(problem)
    merged: dict[tuple[Diagnosis, str], tuple[Refusal, list[PodProblem]]] = {}
    for (message, fix), problems in alike.items():
        refusals = find_refusals(message, pods.spec, nodes)
        if not refusals:
            names = [problem.pod for problem in problems]
            details = {"group": pods.group, "pods": names}
            advice = fix or "kubectl describe pod shows more"
            yield Finding(Diagnosis.NO_NODE, severity, f"{name_pods(names)}: {message}", advice, details)
        for refusal in refusals:
            _, refused = merged.setdefault((refusal.kind, refusal.what), (refusal, []))
            refused += problems
    for refusal, problems in sorted(merged.values(), key=lambda each: each[0].is_unnamed_taint):
        yield _describe(pods._replace(problems=problems), refusal, severity, len(merged) == 1)


def name_pods(names: Sequence[str]) -> str:
    """Return text such as `pod run-1-head` or `2 pods (run-1-a, run-1-b)`."""
    return f"pod {names[0]}" if len(names) == 1 else f"{len(names)} pods ({', '.join(names)})"


def find_refusals(message: str, pod: Mapping[str, Any], nodes: Nodes) -> list[Refusal]:
    """Return the reasons why a pod fits on no node, starting with the most useful one.

    `message` is the scheduler's message. `nodes` are all nodes, or an empty sequence if this user cannot list nodes.
    """
    parsed = parse_refusals(message)
    if not nodes:
        return parsed
    found = [list(find_obstacles(pod, node)) for node in nodes]
    usual = [obstacles for obstacles in found if obstacles and not any(map(_is_control_plane, obstacles))]
    if all(found):
        return _nearest(usual or found)
    # If a node has no obstacle, only the scheduler knows the reason, such as other pods or a volume.
    hidden = [
        _without_empty(each, found) for each in parsed if each.kind in (Diagnosis.RESOURCES, *ONLY_THE_SCHEDULER_KNOWS)
    ]
    return [*hidden, *_nearest([obstacles for obstacles in usual if len(obstacles) == 1])] if hidden else parsed


def _without_empty(refusal: Refusal, found: Sequence[Sequence[Obstacle]]) -> Refusal:
    """Return the refusal with a count that excludes the nodes that are too small even when empty."""
    lack = sum(any(each.what in (refusal.what, f"without {refusal.what}") for each in obstacles) for obstacles in found)
    return refusal._replace(nodes=max(1, refusal.nodes - lack))


def _nearest(found: Sequence[Sequence[Obstacle]]) -> list[Refusal]:
    """Return a refusal for each obstacle on the nodes that have the fewest obstacles."""
    fewest = min(map(len, found), default=0)
    nearest = [obstacles for obstacles in found if len(obstacles) == fewest]
    refusals = []
    for obstacle in dict.fromkeys(each for obstacles in nearest for each in obstacles):
        having = [obstacles for obstacles in nearest if obstacle in obstacles]
        others = dict.fromkeys(str(each) for obstacles in having for each in obstacles if each != obstacle)
        refusals.append(Refusal(obstacle.kind, len(having), obstacle.what, tuple(others)[:MAX_OTHERS], True))
    # Labels come last, because they are not at fault if a node with the right labels has a different obstacle.
    order = (Diagnosis.RESOURCES, Diagnosis.TAINT, Diagnosis.NODES, Diagnosis.NO_NODE)
    return sorted(refusals, key=lambda refusal: (order.index(refusal.kind), -refusal.nodes))


def parse_refusals(message: str) -> list[Refusal]:
    """Parse the reasons in the scheduler's message, and return them, starting with the most useful one.

    Missing resources come first, because the nodes that lack them pass the checks of taints and labels. There is
    one exception: a taint named after a missing resource, such as nvidia.com/gpu, comes even before missing resources.
    The nodes with this taint have GPUs, but the nodes that are reported as short of GPUs have none. A taint without a
    name comes last, because it is usually the control plane's. Named taints of the control plane are dropped unless
    they are the only reason.
    """
    text = message.partition(" are available: ")[2].partition(". ")[0].rstrip(".) ")
    total = re.search(r"0/(\d+) nodes", message)
    found: list[Refusal] = []
    for part in re.split(r", (?=\d+ )", text):
        number, _, words = part.partition(" ")
        if not number.isdigit():  # a reason that applies to all nodes
            number, words = total[1] if total else "0", part
        found += [Refusal(kind, int(number), what) for kind, what in _read_reason(words) if part]
    others = [refusal for refusal in found if refusal.what not in CONTROL_PLANE]
    short = [refusal.what for refusal in found if refusal.kind is Diagnosis.RESOURCES]

    def place(refusal: Refusal) -> tuple[bool, bool, int]:
        of_lacking = refusal.kind is Diagnosis.TAINT and refusal.what.partition("=")[0] in short
        return refusal.is_unnamed_taint, not of_lacking, UNSCHEDULABLE.index(refusal.kind)

    return sorted(others or found, key=place)


def _read_reason(words: str) -> Iterator[tuple[Diagnosis, str]]:
    words = words.removeprefix("node(s) ")
    lower = words.lower()
    if words.startswith("Insufficient "):
        yield Diagnosis.RESOURCES, words.removeprefix("Insufficient ")
    elif lower.startswith("too many pods"):
        yield Diagnosis.RESOURCES, "pods"
    elif "claims" in lower and "volume" not in lower:
        yield Diagnosis.RESOURCES, "devices for its claim"
    elif "taint" in lower:
        for taint in re.findall(r"\{([^}]*)\}", words) or [""]:
            key, _, value = (part.strip() for part in taint.partition(":"))
            yield kind_of_taint(key), f"{key}={value}" if value else key
    elif "unschedulable" in lower:
        yield Diagnosis.NODES, "cordoned"
    elif "volume" in lower:
        yield Diagnosis.VOLUME, words
    elif any(sign in lower for sign in ("pod affinity", "anti-affinity", "topology spread", "free ports")):
        yield Diagnosis.AFFINITY, words
    else:
        yield Diagnosis.NO_NODE, words


def _is_control_plane(obstacle: Obstacle) -> bool:
    return obstacle.kind is Diagnosis.TAINT and obstacle.what.partition("=")[0] in CONTROL_PLANE


def _describe(pods: UnplacedPods, refusal: Refusal, severity: Severity, alone: bool) -> Finding:
    """Return the finding for a refusal. `alone` is True if there is no other refusal."""
    nodes = plural(refusal.nodes, "node")
    details: dict[str, Any] = {"group": pods.group, "pods": pods.names, "nodes": refusal.nodes}
    explain = {
        Diagnosis.RESOURCES: _explain_resources,
        Diagnosis.TAINT: _explain_taint,
        Diagnosis.NODES: _explain_nodes,
        Diagnosis.VOLUME: _explain_volume,
        Diagnosis.AFFINITY: _explain_affinity,
    }
    if refusal.kind in explain:
        evidence, advice, more = explain[refusal.kind](pods, refusal, nodes)
    else:
        lack = "lacks" if refusal.nodes == 1 else "lack"
        evidence, advice, more = _explain_labels(pods, refusal, "no node has" if alone else f"{nodes} {lack}")
    if refusal.others:
        evidence += f"; other obstacles on these nodes: {', '.join(refusal.others)}"
    return Finding(refusal.kind, severity, evidence, advice, details | more)


Explanation = tuple[str, str, dict[str, Any]]
"""The evidence, the advice and the details of a finding."""


def _explain_resources(pods: UnplacedPods, refusal: Refusal, nodes: str) -> Explanation:
    container = (pods.spec.get("containers") or [{}])[0]
    asked = container.get("resources", {}).get("requests", {}).get(refusal.what)
    figure = f" ({refusal.what} {asked})" if asked else ""
    key = {"cpu": "cpu", "memory": "memory", "ephemeral-storage": "ephemeral_storage"}.get(refusal.what, "gpus")
    evidence = f"{nodes} would fit, except that too little {refusal.what} is left for {pods}{figure}"
    advice = f"lower {pods.section}.{key} in the profile, end other pods there, or add nodes with more"
    if refusal.what == "pods":
        advice = "end other pods there, or add nodes, because these have reached their maximum number of pods"
    elif refusal.when_empty:
        evidence = f"{nodes} would have too little {refusal.what} for {pods}{figure}, even without other pods"
        advice = f"lower {pods.section}.{key} in the profile, or add larger nodes"
    return evidence, advice, {"resource": refusal.what, "asked": asked}


def _explain_taint(pods: UnplacedPods, refusal: Refusal, nodes: str) -> Explanation:
    key, _, value = refusal.what.partition("=")
    named = f"the taint {refusal.what}" if key else "an untolerated taint"
    evidence = f"{named} on {nodes} keeps {pods} away"
    toleration = f"{pods.section}.tolerations: [{{key: {key or 'KEY'}, operator: Exists}}]"
    advice = f"if the run can use these nodes, tolerate the taint in the profile ({toleration}); otherwise add others"
    if not key:
        advice += "; kubectl describe nodes shows the taints"
    return evidence, advice, {"taint": key or None, "value": value or None}


def _explain_nodes(pods: UnplacedPods, refusal: Refusal, nodes: str) -> Explanation:
    evidence = f"{pods} cannot run on {nodes} that reject new pods ({refusal.what}), and no other node fits"
    return evidence, "kubectl get nodes shows them; bring them back (kubectl uncordon), or add nodes", {}


def _explain_volume(pods: UnplacedPods, refusal: Refusal, nodes: str) -> Explanation:
    evidence = f"a volume keeps {pods} from {nodes}: {refusal.what}"
    advice = "kubectl get pvc,pv shows the volumes; create what is missing, or add nodes in the volume's zone"
    return evidence, advice, {}


def _explain_affinity(pods: UnplacedPods, refusal: Refusal, nodes: str) -> Explanation:
    evidence = f"other pods keep {pods} from {nodes}: {refusal.what}"
    advice = f"correct {pods.section}.placement or the affinity, spread and ports in {pods.section}.pod, or add nodes"
    return evidence, advice, {}


def _explain_labels(pods: UnplacedPods, refusal: Refusal, which: str) -> Explanation:
    selector = pods.spec.get("nodeSelector") or {}
    if refusal.what.startswith("without "):
        ask = f"{pods} ask{'s' * (len(pods.names) == 1)} for"
        evidence = f"{which} {refusal.what.removeprefix('without ')}, which {ask}"
        plugin = "check that the device plugin runs on the nodes that should offer it"
        return evidence, f"add nodes with it, or {plugin} (kubectl describe nodes)", {"selector": dict(selector)}
    wants = ", ".join(f"{name}={value}" for name, value in selector.items()) or _affinity(pods.spec)
    select = f"{pods} select{'s' * (len(pods.names) == 1)}"
    evidence = f"{which} what {select} ({wants or 'see its spec'}): {plural(refusal.nodes, 'node')} {refusal.what}"
    keys = f"{pods.section}.node_selector"
    keys += ", worker.gpu_selector and spot" if pods.section == "worker" else " and spot"
    advice = f"correct {keys} in the profile, or label the nodes (kubectl get nodes --show-labels)"
    return evidence, advice, {"selector": dict(selector)}


def _affinity(spec: Mapping[str, Any]) -> str:
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = [e for term in required.get("nodeSelectorTerms", ()) for e in term.get("matchExpressions", ())]
    return ", ".join(f"{e['key']} {e['operator']} {'|'.join(e.get('values', ()))}".strip() for e in terms)
