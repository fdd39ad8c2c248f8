"""What `sunspot doctor RUN` can find: every name once, and the form of a finding."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class Diagnosis(enum.StrEnum):
    """What is the matter with a run; of two that weigh the same, the earlier one explains more."""

    # Its pods do not all run.
    NO_OPERATOR = "no operator"
    "Nobody looks at its RayJob."
    REFUSED = "refused"
    "The operator, or the API server, refuses what was submitted."
    QUEUE = "not admitted"
    "The queue has not let it begin."
    QUOTA = "quota"
    DEADLINE = "deadline"
    "A limit on its time has ended it."
    IMAGE = "image"
    "It cannot be pulled."
    MISSING = "missing object"
    "A Secret, say, that its pods name."
    RESOURCES = "insufficient resources"
    "Nodes that it matches have too little left."
    TAINT = "taint"
    "Nodes keep its pods away."
    NO_NODE = "no node matches"
    "No node has the labels that its pods select."
    NODES = "nodes unavailable"
    "Nodes are cordoned, or not ready."
    OUT_OF_MEMORY = "out of memory"
    CONTAINER = "container fails"
    POD = "pod fails"
    STARTING = "starting"
    "Nothing is wrong so far."

    # It does not go on.
    FAILED = "failed"
    HUNG = "hung"
    "Ranks took no step, and their stacks were recorded."
    LOST = "lost"
    "Its processes ended without a word."
    SILENT = "silent"
    "No news, though it should train."
    NO_STEP = "no step"
    "News, and for long no step."
    STOPPED = "stopped"

    # It goes on, and should go better.
    THROTTLED = "throttled"
    "Its processor quota holds it back."
    STRAGGLER = "straggler"
    "One rank is slower than the others, which wait for it."
    DATA_BOUND = "data-bound"
    "All ranks wait for rows."
    LOW_GOODPUT = "low goodput"
    "Incidents cost it much."
    MEMORY = "memory climbing"
    STORAGE = "storage trouble"
    OLD_CHECKPOINT = "checkpoint too old"
    DAMAGED = "checkpoint damaged"
    LONG_SAVE = "save exceeds notice"

    HEALTHY = "healthy"


class Severity(enum.StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"
    "The run does not train, and will not by itself."
    WARNING = "warning"
    "It costs time, or may end the run later."
    NOTE = "note"
    "Nothing has to be done."


@dataclass(frozen=True)
class Finding:
    """One thing that explains why a run is as it is."""

    finding: Diagnosis
    severity: Severity
    evidence: str
    "What was seen, with its figures."
    advice: str
    "What to do about it."
    about: dict[str, Any] = field(default_factory=dict)
    "The same figures and names for programs: `rank`, `node`, `file`, `line` and so on."
    cost: float = 0.0
    "The share of the run's time that it costs, as far as that is known."
    traces: tuple[str, ...] = ()
    "Whole stacks or tracebacks."

    def record(self) -> dict[str, Any]:
        """As one of the `findings` of the JSON document."""
        record = {"finding": self.finding, "severity": self.severity, "evidence": self.evidence, "advice": self.advice}
        return {**record, **self.about, **({"traces": list(self.traces)} if self.traces else {})}


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """What explains most first."""
    return sorted(findings, key=lambda f: (list(Severity).index(f.severity), -f.cost, list(Diagnosis).index(f.finding)))
