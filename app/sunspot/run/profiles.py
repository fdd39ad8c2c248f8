"""Profiles of a live run: the request for a profile, and the report of each profiled rank.

    profile.json                        the request, which exists while `sunspot profile` waits
    profiles/20261129T141013Z3f2a9c1e/
        rank-0000.json.gz               the trace of rank 0, written first
        rank-0000.json                  the steps in the trace, and the cost of tracing (`RankProfile`)

A thread of rank 0 looks for a request every few seconds. A request is for one attempt. If the attempt ends before
the profile is complete, because a worker joined or was lost, the profile is dropped. The next attempt does not try
again, because a profile that makes a worker crash could make the next worker crash, too. A newer request replaces an
older request.
"""

import time
import uuid
from dataclasses import asdict, dataclass
from typing import Annotated

from annotated_types import Ge, Le, Len, Predicate

from sunspot.run import Run, to_json
from sunspot.run.objects import Count, FiniteFloat, SmallCount, read, read_if_usable

FOLDER, REQUEST = "profiles", "profile.json"

MAX_STEPS = 50
"""Largest number of steps in a profile. A step adds 1 MB (ResNet-18) to 40 MB (3,000 modules) to a trace."""


@dataclass(frozen=True)
class ProfileRequest:
    """A request to profile some steps of a run."""

    name: Annotated[str, Predicate(str.isalnum), Len(1, 40)]
    "Name of the profile's folder."
    attempt: Count
    "The attempt to profile."
    steps: Annotated[int, Ge(1), Le(MAX_STEPS)]
    ranks: tuple[SmallCount, ...]


@dataclass(frozen=True)
class RankProfile:
    """A rank's report about its trace."""

    rank: SmallCount
    first_step: Count = 0
    "Number of the first step in the trace."
    recorded_s: FiniteFloat = 0.0
    "Seconds that the steps in the trace took."
    usual_s: FiniteFloat = 0.0
    "Seconds that the same number of steps took just before, without the profiler."
    overhead_s: FiniteFloat = 0.0
    "Seconds that it took to start and stop the profiler, and to write its file."
    error: str = ""
    "The reason why there is no trace, or an empty string."


def request_profile(run: Run, attempt: int, steps: int, ranks: tuple[int, ...]) -> ProfileRequest:
    """Ask an attempt of the run for a profile, and return the request."""
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}{uuid.uuid4().hex[:8]}"
    request = ProfileRequest(name, attempt, steps, ranks)
    run.storage.write(run.key(REQUEST), to_json(asdict(request)))
    return request


def read_request(run: Run) -> ProfileRequest | None:
    """Return the request for a profile, or None if there is no usable request."""
    return read_if_usable(lambda: read(run, ProfileRequest, REQUEST))


def withdraw_request(run: Run, request: ProfileRequest) -> None:
    """Delete a request, unless a newer request has replaced it."""
    if read_request(run) == request:
        run.storage.delete(run.key(REQUEST))


def trace_key(run: Run, request: ProfileRequest, rank: int) -> str:
    """Return the storage key of a rank's trace."""
    return run.key(FOLDER, request.name, f"rank-{rank:04d}.json.gz")


def write_rank_profile(run: Run, request: ProfileRequest, profile: RankProfile) -> None:
    """Write a rank's report. The rank's trace must have been written before."""
    run.storage.write(trace_key(run, request, profile.rank).removesuffix(".gz"), to_json(asdict(profile)))


def read_rank_profile(run: Run, request: ProfileRequest, rank: int) -> RankProfile | None:
    """Return the report of a rank, or None if the rank has not written a report."""
    return read_if_usable(lambda: read(run, RankProfile, FOLDER, request.name, f"rank-{rank:04d}.json"))
