"""Judges what ended a worker group: prints it on the console, and decides whether another group starts.

Ray Train asks, in its controller (`ray_internals/controller.py`), about each group that ended without having been told
to. An error that a user's program raises on all ranks alike would come again, so it ends the run at once. Other losses
are counted, and forgotten with the next checkpoint. Groups to which Ray Data brought no rows are counted apart, and so
are those that a copy in memory keeps from a step, until it is passed over for storage (copies.py). Processes that run
out of memory soon after each other are counted even if there was a checkpoint in between (out_of_memory.py).
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from ray.exceptions import RayError

from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.copies import RESTORES
from sunspot.elastic.messages import OUT_OF_MEMORY, FailureCounts, GroupEnd, RankError
from sunspot.elastic.out_of_memory import (
    advise_memory,
    find_killed_for_memory,
    find_short_of_memory,
    is_out_of_memory,
)
from sunspot.errors import SunspotError, error_chain, shorten
from sunspot.formatting import in_words, plural
from sunspot.run.attempts import Attempt
from sunspot.run.failures import BRING_ROWS, INSTALLED, LOST_PEER, OURS, Failure, blame, describe_failure, starved

OTHERS_S = 5.0
"""The longest wait for the errors of the other ranks: Ray tells of the first, and ranks fail alike within a moment."""

MAX_STARVED = 10
"""Groups in a row, without a new checkpoint, to which Ray Data may bring no rows. Each has waited HANG_TIMEOUT_S, and
for its first ones FIRST_STEP_S more (watchdog.py): in all for hours."""

LOOP_S = 600.0
"""Longest time in seconds between two ends of the same kind that count as a loop, because the workers had no time to be
of use in between."""

MAX_REASON = 200
"""Characters kept of what Ray says of a lost worker."""

MAX_ERROR = 1500
"""Characters kept of the first line of a rank's error. PyTorch puts its fixes there, after 300 to 1,000 characters."""

CHECK = "`sunspot check` tries the task in seconds"
"""The advice for an error that all ranks raise alike."""

NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
"""Matches the numbers in a message, such as ranks and addresses, because they differ between ranks."""

DEVICE_ERROR = re.compile(
    r"\b(CUDA|cuDNN|cuBLAS|cuFFT|cuSOLVER|cuSPARSE|HIP|MIOpen)( driver| unknown)? error\b"
    r"|No CUDA GPUs are available|Found no NVIDIA driver",
    re.IGNORECASE,
)
"""Matches what PyTorch says of a device and its libraries in a plain RuntimeError, as of cuDNN on a broken GPU."""

NETWORK_CLIENTS = re.compile(r"(aiohttp|azure\.core|botocore|google\.api_core|grpc|httpcore|httpx|urllib3)(\.|$)")
"""Matches the modules of network clients whose errors are no OSError, as of a service that is too busy."""

FROM_OUTSIDE = (
    OSError,
    MemoryError,
    EOFError,
    RayError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    dist.DistError,
)
"""Errors of networks, disks, memory and devices: they may be gone the next time, even if all ranks meet them alike."""

Suspects = dict[str, int | None]
"""Nodes whose GPU may have ended a rank, with CUDA's code (0: not known); None: the rank was lost without one."""

LeaveOut = Callable[[Suspects], list[str]]
"""Leaves out those of these nodes whose GPU is broken, and returns a line on each."""


class WorkersFailedError(Exception):
    """The workers failed, and no other group starts: the text says what ended which ranks, on one line."""

    def __init__(self, text: str, final: bool = False) -> None:
        """`final` is True if workers on any other cluster would fail in the same way."""
        super().__init__(text)
        self.final = final


def describe_end(error: Exception, attempt: Attempt, rank: int, step: int, node: str = "") -> RankError:
    """Describe the error that ends a rank on `node` after `step`."""
    return RankError(
        failure=describe_failure(error, attempt.number, rank, step),
        world_size=attempt.metadata.world_size,
        taken=step - attempt.step,
        from_outside=any(is_from_outside(one) for one in error_chain(error)),
        from_memory=attempt.metadata.tier == "memory",
        node=node,
        cuda_error=find_cuda_error(error),
        out_of_memory=any(is_out_of_memory(one) for one in error_chain(error)),
    )


def is_from_outside(error: BaseException) -> bool:
    """Return True for an error of a network, a disk, memory or a device, which may be gone the next time."""
    of_device = isinstance(error, RuntimeError) and DEVICE_ERROR.search(str(error))
    of_client = any(NETWORK_CLIENTS.match(kind.__module__) for kind in type(error).__mro__)
    return isinstance(error, FROM_OUTSIDE) or is_out_of_memory(error) or bool(of_device) or of_client


def find_cuda_error(error: Exception) -> int | None:
    """Return CUDA's code (0: not known) if CUDA is behind an error; None: it is not, or had too little memory."""
    if any(isinstance(one, torch.OutOfMemoryError) for one in error_chain(error)):
        return None
    codes = [getattr(one, "error_code", 0) for one in error_chain(error) if isinstance(one, torch.AcceleratorError)]
    return None if OUT_OF_MEMORY in codes else next(iter(codes), None)


class FailureJudge:
    """Decides whether a worker group is followed by another.

    At most `max_failures` are, in a row without a new checkpoint, or a new step where the others train on, besides
    MAX_STARVED that got no rows, and RESTORES that came to no step from a copy in memory. Where the others train on,
    the losses within one step end the run only if they are as many as the group had workers, because a zone's workers
    are lost within seconds of each other. The control channel keeps the counts, as each of Ray's trainers has a judge
    of its own. `leave_out` is called before each group; what it raises as `SunspotError` ends the run.
    """

    def __init__(
        self,
        control: ControlClient,
        max_failures: int,
        leave_out: LeaveOut = lambda errors: [],
        survivor_mode: bool = False,
        one_machine: bool = False,
    ) -> None:
        """`outlive`: the other workers train on when some are lost. `one_machine`: all workers are on this machine."""
        self._control, self._max, self._leave_out, self._survivor_mode = control, max_failures, leave_out, survivor_mode
        self._one_machine = one_machine

    def __call__(self, errors: dict[int, Exception]) -> bool:
        """Decide whether another group starts after one that ended with these errors, by rank."""
        lost = [isinstance(error, RayError) for error in errors.values()]
        end = self._ask(at_once=any(lost))
        if end.fatal:  # it says more, and no restart can fix it
            return False
        for error in errors.values():
            killed, figures = find_killed_for_memory(error)
            if killed:
                self._control.send(ControlChannel.explain_loss, figures)
        alone, short = self._survivor_mode and all(lost), find_short_of_memory(errors, end.errors)
        replacements = min(len(lost), end.failed_replacements) if alone else 0
        lost_members = sum(lost) - replacements
        what, (goes_on, why, counts) = describe(end, errors), self._judge(end, lost_members, alone, short)
        self._control.send(ControlChannel.set_counts, counts, replacements)
        if alone:  # Ray's ranks are not those of the group that trains
            what = f"{plural(len(errors), 'worker')} lost: {reason(next(iter(errors.values()))).rstrip('.')}"
        if goes_on:
            goes_on, why = self._leave_out_broken(find_suspects(end, errors), why)
        following = ControlChannel.log if alone else ControlChannel.start_next_group
        self._control.send(following if goes_on else ControlChannel.give_up, f"{what}{why}")
        return goes_on

    def _judge(self, end: GroupEnd, lost: int, alone: bool, short: set[str]) -> tuple[bool, str, FailureCounts]:
        """Decide whether another group starts, and count the end of this one.

        `lost` is the number of workers that were lost, without replacements that could not train, and `short` has the
        nodes that were short of memory. Returns the decision, its reason (or how many failures are left) and the new
        counts.
        """
        same_line = in_user_code_alike(end.errors)
        alike = same_line or same_message(end.errors)
        counts = end.counts.since(end.progress.step if alone else end.progress.committed)
        again, counts = alike == counts.error, replace(counts, error=alike)
        if alike and (again or (same_line and not any(error.taken for error in end.errors))):
            return False, f"; all ranks ended so, and would again; {CHECK}", replace(counts, final=True)
        if short and self._one_machine and not end.progress.attempt:
            why = f"; before the first step, and it would come again: {advise_memory(end.errors, True)}"
            return False, why, replace(counts, final=True)
        kinds = short or ({str(alike[:-1])} if alike else set())
        counts = replace(counts, loops=count_ends(counts.loops, kinds, time.time()))
        times = max((counts.loops[kind][0] for kind in kinds), default=0)
        if times > max(self._max, 1):
            row = f"{plural(times, 'time')} in a row, each within {in_words(LOOP_S)} of the one before"
            fix = advise_memory(end.errors, self._one_machine) if short else f"all ranks ended so; {CHECK}"
            return False, f"; {row} (SUNSPOT_MAX_FAILURES={self._max}): {fix}", replace(counts, final=True)
        if end.hangs and starved(end.hangs, end.hangs[0].world_size):
            counts = replace(counts, starved=counts.starved + 1)
            if counts.starved > MAX_STARVED:
                since = f"since {MAX_STARVED} groups before got none either"
                return False, f". {BRING_ROWS}; no new checkpoint {since}", counts
            left = f"{MAX_STARVED - counts.starved} of {MAX_STARVED} such times left"
            return True, f". {BRING_ROWS}; starting again, {left}, and SUNSPOT_MAX_FAILURES is not charged", counts
        stepless = bool(end.errors) and all(one.from_memory and not one.taken for one in end.errors)
        if stepless and not lost and counts.restores < RESTORES:
            counts = replace(counts, restores=counts.restores + 1)
            whence = "once more from that copy" if counts.restores < RESTORES else "from storage"
            return True, f"; it came to no step from a copy in memory, so another starts {whence}, at no charge", counts
        if alone and not lost:
            why = "; SUNSPOT_MAX_FAILURES is not charged for replacements that could not train, and others start"
            return True, why, counts
        counts = replace(counts, charged=counts.charged + 1)
        if alone:
            counts = replace(counts, lost=counts.lost + lost, workers=counts.workers or len(end.nodes))
        some_left = self._max > 0 and counts.lost < counts.workers
        if counts.charged > self._max and not (alone and some_left):
            since = f"since the SUNSPOT_MAX_FAILURES={self._max} losses before"
            return False, f"; no new {'step' if alone else 'checkpoint'} {since}", counts
        remaining = max(0, self._max - counts.charged)
        return True, f"; starting again, {remaining} of {self._max} SUNSPOT_MAX_FAILURES left", counts

    def _leave_out_broken(self, suspects: Suspects, why: str) -> tuple[bool, str]:
        """Leave out the nodes whose GPU is broken; returns whether another group starts, and what to say."""
        try:
            left_out = self._leave_out(suspects)
        except SunspotError as error:
            return False, f"; {error}"
        except Exception as error:  # another Ray may raise anything
            return True, f"; whether a GPU is broken is not known: {shorten(error)}{why}"
        self._control.send(ControlChannel.add_left_out, left_out)
        return True, "".join(f"; {line}" for line in left_out) + why

    def _ask(self, at_once: bool) -> GroupEnd:
        """Ask the control channel: `at_once`, or when all ranks have reported their errors, or OTHERS_S later."""
        until = time.monotonic() + OTHERS_S
        end = GroupEnd()
        while True:
            end = self._control.call_or_none(ControlChannel.group_end) or end
            complete = end.errors and len(end.errors) >= end.errors[0].world_size
            if at_once or end.fatal or complete or time.monotonic() > until:
                return end
            time.sleep(0.2)


def count_ends(loops: Mapping[str, tuple[int, float]], kinds: set[str], now: float) -> dict[str, tuple[int, float]]:
    """Count one more end of each of these kinds; `now` is in seconds since the epoch."""
    recent = {kind: (times, then) for kind, (times, then) in loops.items() if now - then <= LOOP_S}
    return {**recent, **{kind: (recent.get(kind, (0, now))[0] + 1, now) for kind in kinds}}


def find_suspects(end: GroupEnd, errors: dict[int, Exception]) -> Suspects:
    """Find the nodes that had an error of CUDA, and those of lost ranks.

    NCCL ends a process whose GPU fails, often before it can tell, and some GPUs hang when they do.
    """
    ranks = [rank for rank, error in errors.items() if isinstance(error, RayError) and rank in end.nodes]
    lost = end.lost_on or [end.nodes[rank] for rank in ranks]
    known = {error.node: error.cuda_error for error in end.errors if error.cuda_error is not None}
    return {**dict.fromkeys(lost), **known}


def in_user_code_alike(errors: list[RankError]) -> tuple[object, ...] | None:
    """Return kind, place and step of the error that all ranks raised alike in the user's code; None: they did not."""
    kind = find_only(errors, lambda one: (one.type, one.file, one.line, one.step))
    return kind if kind and kind[1] and not OURS.match(str(kind[1])) and not INSTALLED.search(str(kind[1])) else None


def same_message(errors: list[RankError]) -> tuple[object, ...] | None:
    """Return type, message and step of the error that all ranks raised, in any code; None if they did not.

    An error in the backward pass names no line of the user's code, although its cause is there.
    """
    return find_only(errors, lambda one: (one.type, NUMBER.sub("#", one.message), one.step))


def find_only(errors: list[RankError], describe: Callable[[Failure], tuple[object, ...]]) -> tuple[object, ...] | None:
    """Return the description that all ranks' errors share; None if they differ, or have a cause outside the program."""
    kinds = {describe(one.failure) for one in errors}
    if len(kinds) != 1 or len(errors) < errors[0].world_size:
        return None
    return None if any(one.from_outside or one.failure.consequence for one in errors) else kinds.pop()


def describe(end: GroupEnd, errors: dict[int, Exception]) -> str:
    """Say in one line what ended which ranks. An error that only follows from another's end is left out.

    Of ranks that hung, and ended themselves, it says which the others waited for.
    """
    told = [one.failure for one in end.errors]
    known = {failure.rank for failure in told}
    lost = {rank: error for rank, error in errors.items() if isinstance(error, RayError) and rank not in known}
    lost = {} if end.hangs else lost  # the ranks have ended themselves
    step = max([end.progress.step, *(failure.step for failure in told)])
    parts: dict[str, list[int]] = {}
    for failure in [failure for failure in told if not failure.consequence] or ([] if lost else told):
        parts.setdefault(describe_failure_in_line(failure), []).append(failure.rank or 0)
    for rank, error in lost.items():
        parts.setdefault(f"lost after step {step}: {reason(error).rstrip('.')}", []).append(rank)
    for rank, error in {} if known or end.hangs else errors.items():  # it ended before it could tell
        if rank not in lost and not (lost and LOST_PEER.search(str(error))):
            parts.setdefault(reason(error), []).append(rank)
    lines = [f"rank {', '.join(map(str, sorted(ranks)))}: {text}" for text, ranks in parts.items()]
    if end.hangs:
        where = blame(end.hangs, end.hangs[0].world_size)
        step = max(step, *(hang.step for hang in end.hangs))
        lines.append(f"{where}, after step {step} (stacks: `sunspot events --stacks`)")
    return "; ".join(lines)


def describe_failure_in_line(failure: Failure) -> str:
    """`NameError: name 'functional' is not defined, in loss at buggy.py:6, after step 0`."""
    place = f", in {failure.function} at {failure.file}:{failure.line}" if failure.file else ""
    return f"{failure.summary[:MAX_ERROR]}{place}, after step {failure.step}"


def reason(error: Exception) -> str:
    """Return the line of an error that says why: for a lost worker, Ray puts a page of text before it."""
    killed, figures = find_killed_for_memory(error)
    if killed:
        return figures
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if line.startswith("The actor")), lines[0])[:MAX_REASON]
