"""A run that has begun, as the checks of its training see it."""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sunspot.run.attempts import Attempt, recorded_number, recorded_setting
from sunspot.run.failures import Failure
from sunspot.run.overview import RunView
from sunspot.run.status import RunState
from sunspot.submitter.cluster.views import PodView

MAX_REASON = 600


@dataclass(frozen=True)
class Case:
    """What is known of the run, from storage and the cluster."""

    view: RunView
    state: RunState
    reason: str
    "From cluster and storage together, like the state."
    windows: Sequence[dict[str, Any]] = ()
    "The numbers of each rank in the newest attempt that has any (`ranks.newest_rank_records`)."
    failures: Sequence[Failure] = ()
    pods: Sequence[PodView] = ()
    now: float = 0.0
    "Seconds since the epoch."
    local: bool = False
    "True if the run trains outside any cluster. Advice then names processes and this machine instead of pods."

    @property
    def newest(self) -> Attempt | None:
        return self.view.attempts[-1] if self.view.attempts else None

    def setting(self, name: str) -> str:
        """Return a setting of the newest attempt."""
        return recorded_setting(self.view.attempts, name)

    def number(self, name: str) -> float:
        """Return a setting of the newest attempt that is a number."""
        return recorded_number(self.view.attempts, name)

    def host(self, attempt: int, rank: int) -> str:
        """Return the machine or pod of a rank; empty when unknown."""
        return next((a.metadata.nodes.get(str(rank), "") for a in self.view.attempts if a.number == attempt), "")

    def place(self, attempt: int, rank: int) -> dict[str, Any]:
        """Return where a rank is, for programs."""
        host = self.host(attempt, rank)
        return {"rank": rank, "host": host or None, "node": self._node(host)}

    def name(self, attempt: int, rank: int) -> str:
        """`rank 1 (run-1-x-worker-1 on node-3)`."""
        host = self.host(attempt, rank)
        node = self._node(host)
        return f"rank {rank}" + (f" ({host}{f' on {node}' if node else ''})" if host else "")

    def _node(self, host: str) -> str | None:
        return next((pod.node for pod in self.pods if pod.name == host), None)


def advise_full(case: Case, text: str) -> str:
    """Say what to do about a full disk, if that is what an error is about; else empty."""
    if not any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT)):
        return ""
    return f"free space: `sunspot checkpoints gc {case.view.run.name}` shows what of the run is of no use"


def cut(text: str) -> str:
    """Cut a reason, which may quote a page, to its beginning and its end."""
    words = " ".join(text.split())
    half = MAX_REASON // 2
    return words if len(words) <= MAX_REASON else f"{words[:half]} ... {words[-half:]}"
