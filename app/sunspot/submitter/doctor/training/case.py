"""The input of the checks: everything known of a run that has begun."""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sunspot.run.attempts import Attempt, recorded_number, recorded_setting
from sunspot.run.failures import Failure
from sunspot.run.seen import RunDetails
from sunspot.run.status import RunState
from sunspot.submitter.cluster.views import PodView

MAX_REASON = 600
"""Largest number of characters of an error in a finding."""


@dataclass(frozen=True)
class Case:
    """Everything known of a run, from storage and the cluster."""

    seen: RunDetails
    state: RunState
    reason: str
    "Reason for the state. Both are judged from cluster and storage together."
    windows: Sequence[dict[str, Any]] = ()
    "Metric records with the figures of each rank (`history.newest_rank_records`)."
    failures: Sequence[Failure] = ()
    pods: Sequence[PodView] = ()
    now: float = 0.0
    "Time of the examination, in seconds since the epoch."
    local: bool = False
    "True if the run trains outside any cluster. Advice then names processes instead of pods."

    @property
    def newest(self) -> Attempt | None:
        return self.seen.attempts[-1] if self.seen.attempts else None

    def setting(self, name: str) -> str:
        """Return the text of a setting in the newest attempt."""
        return recorded_setting(self.seen.attempts, name)

    def number(self, name: str) -> float:
        """Return the number in a setting of the newest attempt."""
        return recorded_number(self.seen.attempts, name)

    def host(self, attempt: int, rank: int) -> str:
        """Return the machine or pod of a rank, or "" if it is unknown."""
        return next((a.metadata.nodes.get(str(rank), "") for a in self.seen.attempts if a.number == attempt), "")

    def locate_rank(self, attempt: int, rank: int) -> dict[str, Any]:
        """Return the rank, its host and its node, for the JSON document."""
        host = self.host(attempt, rank)
        return {"rank": rank, "host": host or None, "node": self._node(host)}

    def describe_rank(self, attempt: int, rank: int) -> str:
        """Return a text such as `rank 1 (run-1-x-worker-1 on node-3)`."""
        host = self.host(attempt, rank)
        node = self._node(host)
        return f"rank {rank}" + (f" ({host}{f' on {node}' if node else ''})" if host else "")

    def _node(self, host: str) -> str | None:
        return next((pod.node for pod in self.pods if pod.name == host), None)


def advise_on_full_disk(case: Case, text: str) -> str:
    """Return advice if an error is about a full disk, or "" for any other error."""
    if not any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT)):
        return ""
    return f"free space: `sunspot checkpoints gc {case.seen.run.name}` lists files of the run that can be deleted"


def abridge(text: str) -> str:
    """Return the beginning and the end of a long text, in one line. A short text stays complete."""
    words = " ".join(text.split())
    half = MAX_REASON // 2
    return words if len(words) <= MAX_REASON else f"{words[:half]} ... {words[-half:]}"
