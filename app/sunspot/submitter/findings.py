"""Defines the findings of `sunspot doctor RUN` and their order.

This module is not in doctor/, because the lower layer cluster/ also uses it.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class Diagnosis(enum.StrEnum):
    """The kinds of findings. If severity and cost are equal, the kind that is defined earlier comes first."""

    UNSEEN = "cluster not seen"
    "The API server rejects this user or is unreachable."

    # Kinds of problems that keep the run's pods from running.
    NO_OPERATOR = "no operator"
    "No operator handles the RayJob."
    REFUSED = "refused"
    "The operator or the API server rejects the submitted job."
    QUEUE = "not admitted"
    "The queue has not admitted the RayJob."
    QUOTA = "quota"
    DEADLINE = "deadline"
    "A time limit has ended the job."
    IMAGE = "image"
    "An image cannot be pulled."
    MISSING = "missing object"
    "An object that the pods need, such as a Secret, does not exist."
    RESOURCES = "insufficient resources"
    "The matching nodes do not have enough free resources."
    VOLUME = "volume"
    "A volume is missing, or the nodes cannot reach it."
    AFFINITY = "affinity"
    "Other pods keep the run's pods off the nodes through affinity, topology spread or ports."
    TAINT = "taint"
    "The nodes have taints that the pods do not tolerate."
    NO_NODE = "no node matches"
    "No node has the labels that the pods select."
    NODES = "nodes unavailable"
    "The nodes are cordoned or not ready."
    OUT_OF_MEMORY = "out of memory"
    CONTAINER = "container fails"
    POD = "pod fails"
    STARTING = "starting"
    "The pods are starting, and nothing is wrong so far."

    # Kinds of problems of a run that makes no progress.
    NOT_FINITE = "not finite"
    "The loss or the weights are NaN or infinite."
    FAILED = "failed"
    HUNG = "hung"
    "Some ranks stopped taking steps, and their stacks were recorded."
    NO_ROWS = "no rows"
    "Some ranks waited for rows from Ray Data until their watchdogs stopped them."
    LOST = "lost"
    "The run's processes ended without reporting an outcome."
    SILENT = "silent"
    "The run should be training but writes no status."
    NO_STEP = "no step"
    "The run writes its status but has not taken a step for a long time."
    NOT_ENDED = "not ended"
    "All steps were taken long ago, but the run has not ended."
    STOPPED = "stopped"

    # Kinds of findings about a run that makes progress but could be faster or safer.
    THROTTLED = "throttled"
    "A container's CPU limit throttles a rank."
    STRAGGLER = "straggler"
    "One rank is slower than the others, and they wait for it."
    DATA_BOUND = "data-bound"
    "All ranks wait for rows."
    LATE = "late"
    "The run will miss its DEADLINE."
    OVER_BUDGET = "over budget"
    "The run will spend its BUDGET before it is done."
    LOW_GOODPUT = "low goodput"
    "Incidents cost a large fraction of the run's time."
    MEMORY = "memory climbing"
    STORAGE = "storage trouble"
    OLD_CHECKPOINT = "checkpoint too old"
    GONE = "checkpoint gone"
    "The last checkpoint of a finished run has been deleted."
    DAMAGED = "checkpoint damaged"
    LONG_SAVE = "save exceeds notice"
    LEFTOVERS = "leftovers"
    "Interrupted commits still take up space."

    FEWER_WORKERS = "fewer workers"
    "The run is training with fewer workers than requested."
    HEALTHY = "healthy"


UNSCHEDULABLE = (
    Diagnosis.RESOURCES,
    Diagnosis.VOLUME,
    Diagnosis.AFFINITY,
    Diagnosis.TAINT,
    Diagnosis.NO_NODE,
    Diagnosis.NODES,
)
"""The reasons why a pod fits on no node. They sort equally, because the best explanation depends on the nodes."""


class Severity(enum.StrEnum):
    """The severities of findings, from the most to the least severe."""

    ERROR = "error"
    "The run is not training and will not start training by itself."
    WARNING = "warning"
    "The problem costs time or could end the run later."
    NOTE = "note"
    "No action is needed."


@dataclass(frozen=True)
class Finding:
    """An explanation of a run's state."""

    finding: Diagnosis
    severity: Severity
    evidence: str
    "The observation, including numbers."
    advice: str
    "The recommended action."
    details: dict[str, Any] = field(default_factory=dict)
    "The evidence in machine-readable form, such as `rank`, `node`, `file` and `line`."
    cost: float = 0.0
    "Fraction of the run's time that the problem costs, if known."
    traces: tuple[str, ...] = ()
    "The full stacks or tracebacks."

    def record(self) -> dict[str, Any]:
        """Return the finding as an item of `findings` in the JSON document."""
        kind = {"finding": self.finding.value, "severity": self.severity.value}
        traces = {"traces": list(self.traces)} if self.traces else {}
        return {**kind, "evidence": self.evidence, "advice": self.advice, **self.details, **traces}


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with the most severe first.

    Findings of the same severity are sorted by cost, highest first, and then in the order of `Diagnosis`.
    """

    def rank(finding: Finding) -> tuple[int, float, int]:
        kind = UNSCHEDULABLE[0] if finding.finding in UNSCHEDULABLE else finding.finding
        return list(Severity).index(finding.severity), -finding.cost, list(Diagnosis).index(kind)

    return sorted(findings, key=rank)
