"""Determines why a worker group ended, prints the reason, and decides whether another group starts.

Ray Train's controller calls a `FailureJudge` after each worker failure (failure_callback.py). An error that would occur
again ends the run at once. This is assumed if all ranks raise the error in user code before the group's first step, or
if all ranks raise it at the same step in two groups in a row.

Other failures are counted, and the next checkpoint resets the count. For lost workers in survivor mode, the next step
resets the count. Groups that got no rows from Ray Data are counted separately. Groups that started from an in-memory
copy and took no step have a count of their own. After a few such groups, the run continues from storage (copies.py).
Processes that run out of memory in quick succession are counted even if there was a checkpoint in between
(out_of_memory.py).
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
from sunspot.ray_internals.controller import LOST, GroupRestartError
from sunspot.run.attempts import Attempt
from sunspot.run.failures import (
    BRING_ROWS,
    INSTALLED,
    LOST_PEER,
    OURS,
    Failure,
    describe_failure,
    describe_suspects,
    waited_for_rows,
)

OTHERS_S = 5.0
"""Maximum number of seconds to wait for other ranks' errors. Ray reports only the first error, and ranks that fail
alike do so almost at the same time."""

MAX_STARVED = 10
"""Maximum number of consecutive groups without a new checkpoint that can get no rows from Ray Data.

Each group waits HANG_TIMEOUT_S, plus FIRST_STEP_S for its first rows (watchdog.py), which adds up to hours."""

LOOP_S = 600.0
"""Maximum number of seconds between two failures of the same kind that count as a loop. Workers make no useful progress
in so short a time."""

MAX_REASON = 200
"""Maximum number of characters kept from Ray's message about a lost worker."""

MAX_ERROR = 1500
"""Maximum number of characters kept from the first line of a rank's error. PyTorch suggests fixes after 300 to 1,000
characters."""

CHECK = "`sunspot check` tries the task in seconds"
"""Advice for an error that all ranks raise alike."""

NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
"""Matches the numbers in a message, such as ranks and addresses, because they differ between ranks."""

DEVICE_ERROR = re.compile(
    r"\b(CUDA|cuDNN|cuBLAS|cuFFT|cuSOLVER|cuSPARSE|HIP|MIOpen)( driver| unknown)? error\b"
    r"|No CUDA GPUs are available|Found no NVIDIA driver",
    re.IGNORECASE,
)
"""Matches PyTorch's messages about a device and its libraries in a plain RuntimeError, such as cuDNN's on a broken
GPU."""

NETWORK_CLIENTS = re.compile(r"(aiohttp|azure\.core|botocore|google\.api_core|grpc|httpcore|httpx|urllib3)(\.|$)")
"""Matches modules of network clients that raise errors other than OSError, for example if a service is overloaded."""

FROM_OUTSIDE = (
    OSError,
    MemoryError,
    EOFError,
    RayError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    dist.DistError,
)
"""Network, disk, memory and device errors. They might not occur again, even if all ranks raise them alike."""

Suspects = dict[str, int | None]
"""Nodes with a GPU that may have ended a rank, mapped to CUDA's error code. The code is 0 if it is unknown, or None if
the rank was lost without a report."""

LeaveOut = Callable[[Suspects], list[str]]
"""A function that excludes the nodes with a broken GPU, and returns a line about each of them."""


class WorkersFailedError(Exception):
    """Raised if the workers failed and no other group starts. The text says in one line which ranks failed and why."""

    def __init__(self, text: str, final: bool = False) -> None:
        """Create the error. `final` is True if workers on any other cluster would fail in the same way."""
        super().__init__(text)
        self.final = final


def describe_end(error: Exception, attempt: Attempt, rank: int, step: int, node: str = "") -> RankError:
    """Return a description of the error that ended a rank on `node` after step `step`."""
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
    """Return True for a network, disk, memory or device error. Such an error may be transient."""
    of_device = isinstance(error, RuntimeError) and DEVICE_ERROR.search(str(error))
    of_client = any(NETWORK_CLIENTS.match(kind.__module__) for kind in type(error).__mro__)
    return isinstance(error, FROM_OUTSIDE) or is_out_of_memory(error) or bool(of_device) or of_client


def find_cuda_error(error: Exception) -> int | None:
    """Return CUDA's error code, or 0 if it is unknown. Return None if CUDA did not fail or only ran out of memory."""
    if any(isinstance(one, torch.OutOfMemoryError) for one in error_chain(error)):
        return None
    codes = [getattr(one, "error_code", 0) for one in error_chain(error) if isinstance(one, torch.AcceleratorError)]
    return None if OUT_OF_MEMORY in codes else next(iter(codes), None)


class FailureJudge:
    """Decides whether another worker group follows one that failed.

    At most `max_failures` groups in a row may fail without a new checkpoint (or, in survivor mode, a new step). Up to
    MAX_STARVED groups that got no rows do not count toward this limit. Up to RESTORES groups that started from an
    in-memory copy but took no step do not count either.

    In survivor mode, more workers than the limit can be lost within seconds if a zone fails. Losses beyond the limit
    therefore do not end the run until the number of workers lost since the newest step reaches the group's size. If
    `max_failures` is 0, the first loss ends the run.

    The control channel keeps the counts, because a run can use several of Ray's trainers, and each trainer has its own
    judge. `leave_out` excludes broken nodes before each group. If it raises a `SunspotError`, the run ends.
    """

    def __init__(
        self,
        control: ControlClient,
        max_failures: int,
        leave_out: LeaveOut = lambda errors: [],
        survivor_mode: bool = False,
        one_machine: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a judge. `one_machine` is True if all workers are on this machine."""
        self._control = control
        self._max = max_failures
        self._leave_out = leave_out
        self._survivor_mode = survivor_mode
        self._one_machine = one_machine
        self._clock = clock

    def __call__(self, errors: dict[int, Exception]) -> bool:
        """Return True if Ray Train should continue after these errors, which are keyed by rank.

        In restart mode, Ray then starts another group. In survivor mode, Ray only replaces lost processes, so the
        trainer must end if a worker raised an error itself or if the group ends for a restart. The driver then decides
        whether another trainer starts.
        """
        if any(isinstance(error, GroupRestartError) for error in errors.values()):
            if not self._survivor_mode:
                self._control.send(ControlChannel.end_group)
            return not self._survivor_mode
        if any(getattr(error, "preempted", False) for error in errors.values()):
            return True
        only_lost = all(isinstance(error, LOST) for error in errors.values())
        return self._another_follows(errors) and (only_lost or not self._survivor_mode)

    def _another_follows(self, errors: dict[int, Exception]) -> bool:
        """Return True if these errors lead to another group, or to the replacement of a lost process.

        Returns False if these errors end the run.
        """
        lost = [isinstance(error, LOST) for error in errors.values()]
        end = self._fetch_end(at_once=any(lost))
        if end.fatal:  # no restart can fix this error, which explains more than the others
            return False
        for error in errors.values():
            killed, figures = find_killed_for_memory(error)
            if killed:
                self._control.send(ControlChannel.explain_loss, figures)
        only_lost = self._survivor_mode and all(lost)  # no worker raised an error, so the others keep training
        short = find_short_of_memory(errors, end.errors)
        replacements = min(len(lost), end.failed_replacements) if only_lost else 0
        lost_members = sum(lost) - replacements
        what = describe(end, errors)
        continues, why, counts = self._judge(end, lost_members, only_lost, short)
        self._control.send(ControlChannel.set_counts, counts, replacements)
        if only_lost:  # Ray's ranks are not those of the group that is training
            what = f"{plural(len(errors), 'worker')} lost: {reason(next(iter(errors.values()))).rstrip('.')}"
        if continues:
            continues, why = self._leave_out_broken(find_suspects(end, errors), why)
        following = ControlChannel.log if only_lost else ControlChannel.start_next_group
        self._control.send(following if continues else ControlChannel.give_up, f"{what}{why}")
        return continues

    def _judge(self, end: GroupEnd, lost: int, only_lost: bool, short: set[str]) -> tuple[bool, str, FailureCounts]:
        """Decide whether another group starts, and count this group's failure.

        `lost` is the number of lost workers, excluding replacements that could not train. `only_lost` is True in
        survivor mode if no worker raised an error itself. `short` lists the nodes that ran out of memory. Returns the
        decision, a text that explains it, and the new counts.
        """
        same_line = in_user_code_alike(end.errors)
        alike = same_line or same_message(end.errors)
        counts = end.counts.since(end.progress.step if only_lost else end.progress.committed)
        repeated = alike == counts.error
        counts = replace(counts, error=alike)
        if alike and (repeated or (same_line and not any(error.taken for error in end.errors))):
            return False, f"; all ranks failed alike, and would fail again; {CHECK}", replace(counts, final=True)
        if short and self._one_machine and not end.progress.attempt:
            why = f"; it happened before the first step, and would happen again: {advise_memory(end.errors, True)}"
            return False, why, replace(counts, final=True)
        kinds = short or ({str(alike[:-1])} if alike else set())
        counts = replace(counts, loops=count_ends(counts.loops, kinds, self._clock()))
        times = max((counts.loops[kind][0] for kind in kinds), default=0)
        if times > max(self._max, 1):
            row = f"{plural(times, 'time')} in a row, each within {in_words(LOOP_S)} of the previous one"
            fix = advise_memory(end.errors, self._one_machine) if short else f"all ranks failed alike; {CHECK}"
            return False, f"; {row} (SUNSPOT_MAX_FAILURES={self._max}): {fix}", replace(counts, final=True)
        if end.hangs and waited_for_rows(end.hangs, end.hangs[0].world_size):
            counts = replace(counts, starved=counts.starved + 1)
            if counts.starved > MAX_STARVED:
                before = f"the {MAX_STARVED} groups before it got no rows either"
                return False, f". {BRING_ROWS}; {before}, and there is no new checkpoint", counts
            left = f"{MAX_STARVED - counts.starved} of {MAX_STARVED} restarts for this reason left"
            return True, f". {BRING_ROWS}; starting again, {left}, without charging SUNSPOT_MAX_FAILURES", counts
        stepless = bool(end.errors) and all(one.from_memory and not one.taken for one in end.errors)
        if stepless and not lost and counts.restores < RESTORES:
            counts = replace(counts, restores=counts.restores + 1)
            source = "once more from that copy" if counts.restores < RESTORES else "from storage"
            why = f"; it took no step from a copy in memory, so another group starts {source}"
            return True, f"{why}, without charging SUNSPOT_MAX_FAILURES", counts
        if only_lost and not lost:
            why = "; SUNSPOT_MAX_FAILURES is not charged for replacements that could not train, and new ones start"
            return True, why, counts
        counts = replace(counts, charged=counts.charged + 1)
        if only_lost:
            counts = replace(counts, lost=counts.lost + lost, workers=counts.workers or len(end.nodes))
        some_left = self._max > 0 and counts.lost < counts.workers
        if counts.charged > self._max and not (only_lost and some_left):
            since = f"since the previous failures (SUNSPOT_MAX_FAILURES={self._max})"
            return False, f"; no new {'step' if only_lost else 'checkpoint'} {since}", counts
        remaining = max(0, self._max - counts.charged)
        action = "a replacement starts" if only_lost and lost < len(end.nodes) else "starting again"
        return True, f"; {action}, {remaining} of {self._max} SUNSPOT_MAX_FAILURES left", counts

    def _leave_out_broken(self, suspects: Suspects, why: str) -> tuple[bool, str]:
        """Exclude the nodes with a broken GPU. Returns True if another group can start, and the text to print."""
        try:
            left_out = self._leave_out(suspects)
        except SunspotError as error:
            return False, f"; {error}"
        except Exception as error:  # other versions of Ray may raise anything
            return True, f"; could not check for broken GPUs: {shorten(error)}{why}"
        self._control.send(ControlChannel.add_left_out, left_out)
        return True, "".join(f"; {line}" for line in left_out) + why

    def _fetch_end(self, at_once: bool) -> GroupEnd:
        """Return how the group ended, once all ranks have reported their errors or OTHERS_S has passed.

        If `at_once` is True, do not wait, and return what is known so far.
        """
        until = time.monotonic() + OTHERS_S
        end = GroupEnd()
        while True:
            end = self._control.call_or_none(ControlChannel.group_end) or end
            complete = end.errors and len(end.errors) >= end.errors[0].world_size
            if at_once or end.fatal or complete or time.monotonic() > until:
                return end
            time.sleep(0.2)


def count_ends(loops: Mapping[str, tuple[int, float]], kinds: set[str], now: float) -> dict[str, tuple[int, float]]:
    """Return `loops` with one more failure of each kind in `kinds`.

    Kinds whose last failure was more than LOOP_S ago are removed first. `now` is in seconds since the epoch.
    """
    recent = {kind: (times, then) for kind, (times, then) in loops.items() if now - then <= LOOP_S}
    return {**recent, **{kind: (recent.get(kind, (0, now))[0] + 1, now) for kind in kinds}}


def find_suspects(end: GroupEnd, errors: dict[int, Exception]) -> Suspects:
    """Return the nodes with a CUDA error or a lost rank.

    A broken GPU often shows up only as a lost rank. NCCL ends a process whose GPU fails, often before the process can
    report the error, and some GPUs hang when they fail.
    """
    ranks = [rank for rank, error in errors.items() if isinstance(error, LOST) and rank in end.nodes]
    lost = end.lost_on or [end.nodes[rank] for rank in ranks]
    known = {error.node: error.cuda_error for error in end.errors if error.cuda_error is not None}
    return {**dict.fromkeys(lost), **known}


def in_user_code_alike(errors: list[RankError]) -> tuple[object, ...] | None:
    """Return the error's type, file, line and step if all ranks raised the same error in user code, otherwise None."""
    kind = find_only(errors, lambda one: (one.type, one.file, one.line, one.step))
    return kind if kind and kind[1] and not OURS.match(str(kind[1])) and not INSTALLED.search(str(kind[1])) else None


def same_message(errors: list[RankError]) -> tuple[object, ...] | None:
    """Return the error's type, message and step if these are the same on all ranks, otherwise None.

    Numbers in the messages are not compared. The place where the error was raised is not compared either, because the
    traceback of an error in the backward pass contains no user code, even if user code caused the error.
    """
    return find_only(errors, lambda one: (one.type, NUMBER.sub("#", one.message), one.step))


def find_only(errors: list[RankError], describe: Callable[[Failure], tuple[object, ...]]) -> tuple[object, ...] | None:
    """Return the description that all ranks' errors share, or None if the descriptions differ.

    Also returns None if a rank reported no error, or if an error came from outside the program or is a consequence of
    another error.
    """
    kinds = {describe(one.failure) for one in errors}
    if len(kinds) != 1 or len(errors) < errors[0].world_size:
        return None
    return None if any(one.from_outside or one.failure.is_consequence for one in errors) else kinds.pop()


def describe(end: GroupEnd, errors: dict[int, Exception]) -> str:
    """Describe in one line which ranks failed and why. An error that is only a consequence of another is omitted.

    If ranks have hung and their processes have exited, the line names the ranks that blocked the others, or all hung
    ranks if the culprits are unknown.
    """
    reported = [one.failure for one in end.errors]
    known = {failure.rank for failure in reported}
    lost = {rank: error for rank, error in errors.items() if isinstance(error, LOST) and rank not in known}
    lost = {} if end.hangs else lost  # the watchdogs have terminated these ranks
    step = max([end.progress.step, *(failure.step for failure in reported)])
    parts: dict[str, list[int]] = {}
    for failure in [failure for failure in reported if not failure.is_consequence] or ([] if lost else reported):
        parts.setdefault(describe_failure_in_line(failure), []).append(failure.rank or 0)
    for rank, error in lost.items():
        parts.setdefault(f"lost after step {step}: {reason(error).rstrip('.')}", []).append(rank)
    for rank, error in {} if known or end.hangs else errors.items():  # the rank ended before it could report its error
        if rank not in lost and not (lost and LOST_PEER.search(str(error))):
            parts.setdefault(reason(error), []).append(rank)
    lines = [f"rank {', '.join(map(str, sorted(ranks)))}: {text}" for text, ranks in parts.items()]
    if end.hangs:
        where = describe_suspects(end.hangs, end.hangs[0].world_size)
        step = max(step, *(hang.step for hang in end.hangs))
        lines.append(f"{where}, after step {step} (stacks: `sunspot events --stacks`)")
    return "; ".join(lines)


def describe_failure_in_line(failure: Failure) -> str:
    """Return a failure as one line, such as `NameError: name 'x' is not defined, in loss at buggy.py:6, after
    step 0`.
    """
    place = f", in {failure.function} at {failure.file}:{failure.line}" if failure.file else ""
    return f"{failure.summary[:MAX_ERROR]}{place}, after step {failure.step}"


def reason(error: Exception) -> str:
    """Return the line that states the reason in an error's text, because some of Ray's errors are a page long."""
    killed, figures = find_killed_for_memory(error)
    if killed:
        return figures
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if line.startswith("The actor")), lines[0])[:MAX_REASON]
