"""What `sunspot doctor RUN` can find, and the form of a finding."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class Diagnosis(enum.StrEnum):
    """What is wrong with a run; of two with equal weight, the earlier explains more."""

    UNSEEN = "cluster not seen"
    "The API server refuses this user, or cannot be reached."

    # Its pods do not all run.
    NO_OPERATOR = "no operator"
    "No operator handles its RayJob."
    REFUSED = "refused"
    "The operator, or the API server, refuses what was submitted."
    QUEUE = "not admitted"
    "The queue has not admitted it."
    QUOTA = "quota"
    DEADLINE = "deadline"
    "A time limit has ended it."
    IMAGE = "image"
    "It cannot be pulled."
    MISSING = "missing object"
    "Its pods refer to it: a Secret, say."
    RESOURCES = "insufficient resources"
    "Matching nodes have too little left."
    VOLUME = "volume"
    "A volume is missing, or the nodes cannot reach it."
    AFFINITY = "affinity"
    "Other pods keep its pods away: by affinity, spread or ports."
    TAINT = "taint"
    "Nodes repel its pods."
    NO_NODE = "no node matches"
    "No node has the labels its pods select."
    NODES = "nodes unavailable"
    "Nodes are cordoned, or not ready."
    OUT_OF_MEMORY = "out of memory"
    CONTAINER = "container fails"
    POD = "pod fails"
    STARTING = "starting"
    "Nothing is wrong so far."

    # It makes no progress.
    NOT_FINITE = "not finite"
    "The loss or the weights are NaN or infinite."
    FAILED = "failed"
    HUNG = "hung"
    "Ranks stopped taking steps, and their stacks were recorded."
    NO_ROWS = "no rows"
    "Ranks waited for rows of Ray Data until they were ended like hung ones."
    LOST = "lost"
    "Its processes ended without reporting."
    SILENT = "silent"
    "No status, though it should train."
    NO_STEP = "no step"
    "A status, but no step for long."
    STOPPED = "stopped"

    # It makes progress, but should do better.
    THROTTLED = "throttled"
    "Its CPU quota holds it back."
    STRAGGLER = "straggler"
    "One rank is slower than the others, which wait for it."
    DATA_BOUND = "data-bound"
    "All ranks wait for rows."
    LOW_GOODPUT = "low goodput"
    "Incidents cost it a lot."
    MEMORY = "memory climbing"
    STORAGE = "storage trouble"
    OLD_CHECKPOINT = "checkpoint too old"
    GONE = "checkpoint gone"
    "The run ended with one that somebody else has deleted."
    DAMAGED = "checkpoint damaged"
    LONG_SAVE = "save exceeds notice"
    LEFTOVERS = "leftovers"
    "Commits that were killed take space."

    FEWER_WORKERS = "fewer workers"
    "It trains, but with fewer workers than requested."
    HEALTHY = "healthy"


UNSCHEDULABLE = (
    Diagnosis.RESOURCES,
    Diagnosis.VOLUME,
    Diagnosis.AFFINITY,
    Diagnosis.TAINT,
    Diagnosis.NO_NODE,
    Diagnosis.NODES,
)
"""Reasons why no node takes a pod. The best explanation depends on the nodes, so the given order is kept."""


class Severity(enum.StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"
    "The run does not train, and will not by itself."
    WARNING = "warning"
    "It costs time, or may end the run later."
    NOTE = "note"
    "Nothing needs to be done."


@dataclass(frozen=True)
class Finding:
    """One explanation of a run's state."""

    finding: Diagnosis
    severity: Severity
    evidence: str
    "What was seen, with its figures."
    advice: str
    "What to do about it."
    details: dict[str, Any] = field(default_factory=dict)
    "The same figures and names for programs: `rank`, `node`, `file`, `line` and so on."
    cost: float = 0.0
    "Share of the run's time it costs, if known."
    traces: tuple[str, ...] = ()
    "Whole stacks or tracebacks."

    def record(self) -> dict[str, Any]:
        """Return it as one of the `findings` of the JSON document."""
        kind = {"finding": self.finding.value, "severity": self.severity.value}
        traces = {"traces": list(self.traces)} if self.traces else {}
        return {**kind, "evidence": self.evidence, "advice": self.advice, **self.details, **traces}


def most_explaining_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorted by how much they explain."""

    def place(finding: Finding) -> tuple[int, float, int]:
        kind = UNSCHEDULABLE[0] if finding.finding in UNSCHEDULABLE else finding.finding
        return list(Severity).index(finding.severity), -finding.cost, list(Diagnosis).index(kind)

    return sorted(findings, key=place)
