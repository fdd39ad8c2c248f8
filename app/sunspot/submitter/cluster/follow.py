"""Follows a run as it changes, to its end."""

import time
from collections.abc import Iterator
from dataclasses import replace

from sunspot.errors import ClusterError
from sunspot.formatting import in_words
from sunspot.submitter.cluster.api import RefusedError, UnreachableError
from sunspot.submitter.cluster.observation import ClusterPart, RunAccess, RunSnapshot, read_cluster, read_storage
from sunspot.submitter.printing import warn

LOOK_EVERY_S = 3.0

MAX_OUTAGE_S = 300.0
"""How long an API server may be out of reach before following gives up."""

REFUSAL_PAUSES_S = (2.0, 5.0, 15.0, 30.0, 60.0)
"""Between tries of an API server that has answered this user before: credentials are rotated, webhooks fail."""

OUTAGE_EVERY_S = 30.0
"""How often a line says that the API server or storage is still out of reach."""


def follow(access: RunAccess) -> Iterator[RunSnapshot]:
    """Yield what is known of a run, anew every few seconds; what does not answer is as it was when it last did.

    Storage is read after the cluster, whose changes it explains. Raises `ClusterError` when the API server refuses, or
    is out of reach for MAX_OUTAGE_S.
    """
    snapshot = RunSnapshot(ClusterPart(trouble=access.cluster_error))
    answered = ask_at = time.monotonic()
    refusals: Iterator[float] = iter(())  # at first, a refusal is final
    while True:
        cluster = snapshot.cluster
        if access.cluster and time.monotonic() >= ask_at:
            try:
                cluster = read_cluster(access.cluster, access.cluster.list_jobs(access.run.name))
                answered = time.monotonic()
                refusals = iter(REFUSAL_PAUSES_S)
            except UnreachableError as error:
                if time.monotonic() - answered > MAX_OUTAGE_S:
                    raise
                cluster = replace(cluster, trouble=str(error))
            except ClusterError as error:
                credentials = not isinstance(error, RefusedError) or error.status in (401, 403)
                pause = next(refusals, None) if credentials else None
                if pause is None:
                    raise
                ask_at = time.monotonic() + pause
                cluster = replace(cluster, trouble=str(error))
        storage = read_storage(access.run, cluster.newest)
        if storage.trouble:
            storage = replace(snapshot.storage, trouble=storage.trouble)
        snapshot = RunSnapshot(cluster, storage)
        yield snapshot
        time.sleep(LOOK_EVERY_S)


class OutageReporter:
    """Says on stderr, now and then, that the API server or storage is out of reach, and when it is back."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._said: dict[str, float] = {}

    def note(self, snapshot: RunSnapshot) -> None:
        """Report what this snapshot says of them."""
        now = time.monotonic()
        for what, trouble in (("the API server", snapshot.cluster.trouble), ("storage", snapshot.storage.trouble)):
            gone = in_words(now - self._since.setdefault(what, now))
            if not trouble:
                del self._since[what]
                if self._said.pop(what, None) is not None:
                    warn(f"{what} is back after {gone}")
            elif now - self._said.get(what, float("-inf")) >= OUTAGE_EVERY_S:
                self._said[what] = now
                warn(f"{what} unreachable for {gone}, still waiting; the run is not affected: {trouble}")
