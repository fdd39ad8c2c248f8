"""The input of the checks, which is everything known about a run that has begun."""

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
"""Maximum number of characters of an error in a finding."""


@dataclass(frozen=True)
class Case:
    """Everything known about a run, from storage and the cluster."""

    seen: RunDetails
    state: RunState
    reason: str
    "The reason for `state`. Cluster and storage together determine both."
    windows: Sequence[dict[str, Any]] = ()
    "Metric records with each rank's figures (`history.newest_rank_records`)."
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
        """Return a setting's value in the newest attempt, or its default, as text."""
        return recorded_setting(self.seen.attempts, name)

    def number(self, name: str) -> float:
        """Return a setting's value in the newest attempt, or its default, as a number.

        Raises `DamageError` if the value is not a number.
        """
        return recorded_number(self.seen.attempts, name)

    def host(self, attempt: int, rank: int) -> str:
        """Return a rank's machine or pod, or "" if it is unknown."""
        return next((a.metadata.nodes.get(str(rank), "") for a in self.seen.attempts if a.number == attempt), "")

    def locate_rank(self, attempt: int, rank: int) -> dict[str, Any]:
        """Return the rank, its host and its node, for the JSON document."""
        host = self.host(attempt, rank)
        return {"rank": rank, "host": host or None, "node": self._node(host)}

    def describe_rank(self, attempt: int, rank: int) -> str:
        """Return text such as `rank 1 (run-1-x-worker-1 on node-3)`."""
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
    """Return a text as one line. A long text is shortened to its beginning and end."""
    words = " ".join(text.split())
    half = MAX_REASON // 2
    return words if len(words) <= MAX_REASON else f"{words[:half]} ... {words[-half:]}"
