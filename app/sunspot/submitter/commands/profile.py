"""`sunspot profile`: profiles a few steps on some ranks of a live run, and shows where the traces are."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sunspot.errors import ConflictError, GaveUpError, NotFoundError, SettingsError
from sunspot.formatting import plural
from sunspot.run import Run
from sunspot.run.profiles import (
    MAX_STEPS,
    ProfileRequest,
    RankProfile,
    read_rank_profile,
    read_request,
    request_profile,
    trace_key,
    withdraw_request,
)
from sunspot.run.seen import look
from sunspot.run.status import RunState, Status
from sunspot.submitter.commands.arguments import add_run, count, seconds
from sunspot.submitter.printing import print_json, print_text, warn
from sunspot.submitter.runs import find_run

POLL_S = 1.0
"""Seconds between two checks for the traces."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--steps", metavar="N", type=count, default=3, help="number of steps to record; default: 3")
    parser.add_argument(
        "--ranks", metavar="N,N", type=_ranks, default=(0,), help="ranks that record, such as 0,1; default: 0"
    )
    parser.add_argument(
        "--timeout", metavar="S", type=seconds, default=600, help="seconds to wait for the traces; default: 600"
    )


def run(args: argparse.Namespace) -> None:
    """Ask for a profile, wait until the chosen ranks have written their traces, and show them."""
    run = find_run(args.run, args.storage)
    status = _require_training(run)
    if args.ranks[-1] >= status.world_size:
        workers = plural(status.world_size, "worker")
        raise SettingsError(f"--ranks {args.ranks[-1]}: the run has {workers}, and ranks count from 0")
    most = min(MAX_STEPS, status.steps_per_epoch - 1)  # the step before them must be in the same epoch
    if args.steps > most:
        limit = f"a profile has at most {MAX_STEPS} steps, and fewer than an epoch ({status.steps_per_epoch})"
        raise SettingsError(f"--steps {args.steps}: the limit for this run is {most}, because {limit}")
    request = request_profile(run, status.attempt, args.steps, args.ranks)
    pace = f" of about {status.step_time_s:.2g} s" if status.step_time_s else ""
    warn(f"waiting until {run.name} has recorded {plural(args.steps, 'step')}{pace} on {_name(args.ranks)}")
    try:
        profiles = _await_profiles(run, request, time.monotonic() + args.timeout)
    finally:
        withdraw_request(run, request)
    records = [_describe(run, request, profile) for profile in profiles]
    if args.json:
        print_json({"run": run.name, "attempt": request.attempt, "steps": request.steps, "ranks": records})
    else:
        _print(request, records)


def _require_training(run: Run) -> Status:
    """Return the status of a run that is training. Raises `NotFoundError` or `ConflictError` for any other run."""
    seen = look(run)
    if seen.status and seen.state is RunState.RUNNING:
        return seen.status
    if seen.state in (RunState.STARTING, RunState.FINISHING, RunState.STOPPING):
        raise ConflictError(f"{run.name} is {seen.state}: {seen.reason}; a profile needs a run that is training")
    raise NotFoundError(f"a profile needs a live run, but the state of {run.name} is {seen.state}: {seen.reason}")


def _await_profiles(run: Run, request: ProfileRequest, until: float) -> list[RankProfile]:
    """Wait until all chosen ranks have reported, and return their profiles.

    Raises `GaveUpError` if a rank fails, can no longer report or has not reported in time, and `ConflictError` if
    another request has replaced this one.
    """
    while True:
        found = {rank: read_rank_profile(run, request, rank) for rank in request.ranks}
        profiles = [profile for profile in found.values() if profile]
        for profile in profiles:
            if profile.error:
                raise GaveUpError(f"rank {profile.rank} could not record the steps: {profile.error}; the run continues")
        if len(profiles) == len(found):
            return profiles
        seen = look(run)
        if seen.state.terminal:
            raise GaveUpError(f"the profile was dropped, because {run.name} is {seen.state}: {seen.reason}")
        if seen.status and seen.status.attempt != request.attempt:
            raise GaveUpError(
                f"the profile was dropped, because the run's workers changed or restarted (see `sunspot events "
                f"{run.name}`). The run continues with its new workers; run the command again to record a profile"
            )
        if read_request(run) != request:
            raise ConflictError(
                f"another profile request for {run.name} has replaced this one; run the command again later"
            )
        if time.monotonic() > until:
            late = f"{_name(sorted(found.keys() - {each.rank for each in profiles}))} wrote no trace in time"
            raise GaveUpError(
                f"{late} (the run is {seen.state}), so the request was withdrawn; run the command again with a longer "
                "--timeout"
            )
        time.sleep(POLL_S)


def _describe(run: Run, request: ProfileRequest, profile: RankProfile) -> dict[str, Any]:
    """Return the location of a rank's trace, and the time that the profile cost."""
    cost_s = max(0.0, profile.recorded_s - profile.usual_s) + profile.overhead_s
    found = {"cost_s": cost_s, "trace": run.storage.locate(trace_key(run, request, profile.rank))}
    return {name: value for name, value in asdict(profile).items() if name != "error"} | found


def _print(request: ProfileRequest, records: list[dict[str, Any]]) -> None:
    for record in records:
        first = record["first_step"]
        print_text(f"rank {record['rank']}, steps {first} to {first + request.steps - 1}: {record['trace']}")
        print_text(
            f"  {record['recorded_s']:.3g} s with the profiler, and {record['usual_s']:.3g} s for as many steps before "
            f"it; the profile cost {record['cost_s']:.3g} s in total"
        )
    print_text("open a trace in https://ui.perfetto.dev, which does not upload it")


def _ranks(text: str) -> tuple[int, ...]:
    """Parse a list of ranks, such as `0,1`."""
    ranks = text.split(",")
    if not all(map(str.isdecimal, ranks)):
        raise argparse.ArgumentTypeError(f"{text}: must be ranks, such as 0 or 0,1")
    return tuple(sorted({int(rank) for rank in ranks}))


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
