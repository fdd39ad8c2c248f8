"""Finds out what ended a run or one of its attempts, or why a run that should train takes no steps."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sunspot.formatting import in_words, plural
from sunspot.run.failures import BRING_ROWS, NO_STACKS, Failure, find_suspects, read_hangs, waited_for_rows
from sunspot.run.overview import START_AGAIN
from sunspot.run.owner import Owner
from sunspot.run.requests import SPENT_BUDGET
from sunspot.run.status import RunState, Status
from sunspot.submitter.doctor.training.case import Case, abridge, advise_on_full_disk
from sunspot.submitter.findings import Diagnosis, Finding, Severity

NO_STEP_S = 60.0
"""Seconds without a step or an evaluation before a stall is reported."""

SLOW_STEPS = 10
"""Number of step durations without a step before a stall is reported."""

END_S = 600.0
"""Seconds after the last step in which a run is expected to evaluate, to save and to end."""

FIRST_STEP_S = 300.0
"""Seconds without a first step before a stall is reported. The first step waits for compilation and for Ray Data's
first rows."""


def find_end(case: Case) -> Iterator[Finding]:
    """Find out what ended the run or an attempt. The first error is reported once for all ranks that raised it."""
    began = case.seen.status.began if case.seen.status else 0.0
    recent = [failure for failure in case.failures if failure.time >= began and _counts(case, failure)]
    ended = case.state in (RunState.FAILED, RunState.LOST, RunState.RETRYING)
    if recent:
        yield _first_failure(case, recent, Severity.ERROR if ended else Severity.WARNING)
    elif case.state is RunState.FAILED:
        advice = (
            f"`sunspot logs {case.seen.run.name}` prints the driver's output, or with `--rank 0`, a worker's output"
        )
        if not case.seen.attempts and not case.seen.status:
            advice = "it wrote nothing to storage; fix the problem that the message describes, and submit again"
        free_space = advise_on_full_disk(case, case.reason)
        if free_space:
            advice = f"{free_space}; then start the run again{_where_it_resumes(case)}"
        evidence = abridge(case.reason.partition("\n")[0])  # later lines are for a user on the driver's machine
        yield Finding(Diagnosis.FAILED, Severity.ERROR, evidence, advice, cost=1.0)
    if case.state is RunState.LOST:
        again = "repeat the command that started it" if case.local else "submit it again, or repeat the same command"
        evidence = case.reason.partition(f"; {START_AGAIN}")[0]  # the advice contains the rest
        advice = f"{again}{_where_it_resumes(case)}"
        yield Finding(Diagnosis.LOST, Severity.ERROR, abridge(evidence), advice, cost=0.9)
    elif case.state is RunState.DELETING:
        advice = f"`sunspot delete {case.seen.run.name}` completes the deletion"
        yield Finding(Diagnosis.STOPPED, Severity.NOTE, abridge(case.reason), advice)
    elif case.state is RunState.STOPPED:
        advice = f"`sunspot resume {case.seen.run.name}` continues it"
        reason = case.seen.status.reason if case.seen.status else ""
        if SPENT_BUDGET in reason:
            advice = "submit it again with a larger SUNSPOT_BUDGET, and it continues from its last checkpoint"
        elif reason:  # a signal leaves a reason, but `sunspot stop` does not
            advice = f"repeat the command that started it{_where_it_resumes(case)}"
        yield Finding(Diagnosis.STOPPED, Severity.NOTE, abridge(case.reason), advice)


def _where_it_resumes(case: Case) -> str:
    """Return a clause that says where the run resumes if it is started again, or "" if it has no checkpoint."""
    return ": it continues from the last checkpoint" if case.seen.checkpoint else ""


def _counts(case: Case, failure: Failure) -> bool:
    """Return False if a failure is from a superseded driver, whose processes may have reported it late."""
    owner = case.newest.driver if case.newest else ""
    attempt = next((attempt for attempt in case.seen.attempts if attempt.number == failure.attempt), None)
    return attempt is None or attempt.driver == owner


def _first_failure(case: Case, failures: list[Failure], severity: Severity) -> Finding:
    first = min(failures, key=lambda failure: (failure.is_consequence, failure.time))
    alike = [f for f in failures if (f.type, f.file, f.line) == (first.type, first.file, first.line)]
    others = Counter(f.type for f in failures if f not in alike)
    ranks = sorted({f.rank for f in alike if f.rank is not None})
    attempts = sorted({f.attempt for f in alike})
    who = _name_ranks(ranks) if ranks else "the driver"
    place = f" in {first.function} at {first.file}:{first.line}" if first.file else ""
    again = f", in {plural(len(attempts), 'attempt')}" if len(attempts) > 1 else ""
    more = f"; then {', '.join(f'{times} {kind}' for kind, times in others.items())}" if others else ""
    evidence = f"{abridge(first.summary)}{place}; {who}{again}, after step {first.step}{more}"
    fix = advise_on_full_disk(case, first.message) or "fix the problem that the message describes"
    advice = f"{fix}; then start the run again{_where_it_resumes(case)}"
    if "OutOfMemory" in first.type or "out of memory" in first.message:
        advice = "lower SUNSPOT_MICRO_BATCH_SIZE, which does not change the result, or give the workers more memory"
    elif severity is not Severity.ERROR:
        advice = f"its workers were restarted; {fix}, because each failure counts toward SUNSPOT_MAX_FAILURES"
    details = {
        "type": first.type,
        "message": first.message,
        "file": first.file or None,
        "line": first.line or None,
        "function": first.function or None,
        "ranks": ranks,
        "attempts": attempts,
        "step": first.step,
    }
    return Finding(Diagnosis.FAILED, severity, evidence, advice, details, cost=1.0, traces=(first.traceback,))


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def find_hung(case: Case) -> Iterator[Finding]:
    """Find ranks that were stopped by their watchdogs because they hung or got no rows.

    Only the newest attempt with such ranks is examined.
    """
    hung = read_hangs(case.seen.events)
    if not hung:
        return
    number = max(hang.attempt for hang in hung)
    its = sorted((hang for hang in hung if hang.attempt == number), key=lambda hang: hang.rank)
    starting = any(hang.starting for hang in its)  # they hung in the next group, whose hosts are unknown
    claimed = next((a.metadata.world_size for a in case.seen.attempts if a.number == number), 0)
    of, world = (0, its[0].world_size) if starting else (number, claimed)
    blamed = find_suspects(its, world)
    words = {hang.rank: hang.detail.partition(": ")[2] for hang in its}
    calls = [f"{case.describe_rank(of, rank)}: {words.get(rank, NO_STACKS)}" for rank in blamed or words]
    waiting = [rank for rank in words if rank not in blamed] if blamed else []
    others = f"; {_name_ranks(waiting)} waited for it" if waiting else ""
    again = any(receipt.attempt > number for receipt in case.seen.receipts)
    kind = Diagnosis.NO_ROWS if waited_for_rows(its, world) else Diagnosis.HUNG
    look = "look at that call: it can be a read without a time limit, a lock, or a collective that not all ranks enter"
    advice = BRING_ROWS if kind is Diagnosis.NO_ROWS else look
    advice += "; its workers were restarted" if again else ""
    details = {
        "attempt": number,
        "step": its[0].step,
        "ranks": blamed or list(words),
        "places": [case.locate_rank(of, rank) for rank in blamed or words],
        "calls": {str(rank): text for rank, text in words.items()},
    }
    traces = tuple(f"rank {hang.rank}: {hang.detail}\n{hang.stacks}" for hang in its)
    severity = Severity.WARNING if again or case.state is RunState.SUCCEEDED else Severity.ERROR
    when = f"when the group after attempt {number} began" if starting else f"after step {its[0].step}"
    evidence = f"{when}, {'; '.join(calls)}{others}"
    yield Finding(kind, severity, evidence, advice, details, cost=0.9, traces=traces)


def find_late_end(case: Case) -> Iterator[Finding]:
    """Yield a finding if a run has not ended although all its steps were taken long ago."""
    status = case.seen.status
    if not status or not status.heartbeat or case.state is not RunState.FINISHING:
        return
    waited_s = _time_since(case, status, status.heartbeat)
    if waited_s > END_S:
        saved = case.seen.checkpoint and case.seen.checkpoint.step >= status.total_steps
        safe = (
            "The last step is saved, so stopping the run loses nothing" if saved else "The last step is not saved yet"
        )
        where = "this machine" if case.local else "the head pod"
        advice = (
            "a long evaluation or a large checkpoint can explain this. Otherwise, check whether "
            f"{where} has too little memory, so that Ray cannot end the run. {safe}"
        )
        evidence = f"all steps were taken {in_words(waited_s)} ago, but the run has not ended"
        yield Finding(Diagnosis.NOT_ENDED, Severity.WARNING, evidence, advice, {"waited_s": round(waited_s)}, cost=0.5)


def _advise_silent(case: Case, owner: Owner) -> str:
    """Return advice on a run that sends no heartbeats."""
    resumes = "it continues from the last checkpoint. A process that comes back later can no longer change the run"
    if case.local:
        process = f"its process {owner.job} (machine and process id)"
        causes = f"{process} might be suspended or gone, or cannot reach storage: check `ps` there, and `sunspot logs`"
        return f"{causes}. If this lasts, end the process, and repeat the command that started it: {resumes}"
    causes = "its node might be frozen or cut off, or cannot reach storage: check kubectl get pods, and `sunspot logs`"
    job = f"its RayJob ({owner.describe()})" if owner.namespace else "its RayJob"
    return f"{causes}. If this lasts, delete {job}, and submit again: {resumes}"


def _time_since(case: Case, status: Status, recorded: float) -> float:
    """Return the seconds since a time that the run recorded.

    The run's clock can differ from this machine's clock, so each subtraction uses two times from the same clock.
    """
    return (case.now - status.seen) + (status.time - recorded)


def find_stall(case: Case) -> Iterator[Finding]:
    """Find out why a run that should train is silent or takes no steps."""
    status = case.seen.status
    newest = case.newest
    if not status or case.state not in (RunState.RUNNING, RunState.STARTING, RunState.SILENT):
        return
    if case.state is RunState.SILENT:
        advice = _advise_silent(case, Owner.parse(status.owner))
        details: dict[str, Any] = {"silent_s": round(case.now - status.seen)}
        yield Finding(Diagnosis.SILENT, Severity.ERROR, abridge(case.reason), advice, details, cost=0.8)
        return
    if case.state is RunState.STARTING:
        # The workers can have trained before.
        waited_s = case.now - max(status.heartbeat or 0.0, status.began or status.time)
        severity, advice = Severity.NOTE, "wait: Ray places the workers, which then import the task and read the data"
        if waited_s > FIRST_STEP_S:
            severity = Severity.WARNING
            room = "this machine's cores and GPUs" if case.local else "the pods"
            advice = f"Ray finds no room for the workers: compare SUNSPOT_NUM_WORKERS with {room}"
        evidence = f"{case.reason}, for {in_words(waited_s)}"
        yield Finding(Diagnosis.STARTING, severity, evidence, advice, {"waited_s": round(waited_s)})
        return
    if newest is None or status.attempt != newest.number:
        return
    still_s = _time_since(case, status, status.heartbeat or newest.time)
    limit_s = max(NO_STEP_S, SLOW_STEPS * (status.step_time_s or 0.0)) if status.heartbeat else FIRST_STEP_S
    if still_s > limit_s:
        timeout_s = case.number("hang_timeout_s")
        usual = f"; a step took {status.step_time_s:.3g} s" if status.step_time_s else ""
        evidence = f"no step for {in_words(still_s)}, after step {status.step} or a little later{usual}"
        readers = "find no free core" if case.local else "are gone or pending"
        rows = f", or for Ray Data, whose readers {readers}" if case.setting("loader") == "ray" else ""
        then = "SUNSPOT_HANG_TIMEOUT_S is 0, so nothing ends a hung rank; stop the run, and set a timeout"
        if timeout_s:
            then = f"after {timeout_s:.0f} s without a step, all ranks record their stacks, and hung ranks are replaced"
            then += " (SUNSPOT_HANG_TIMEOUT_S)"
        advice = f"it might be waiting for storage{rows}; otherwise, a rank hangs: {then}"
        details = {"still_s": round(still_s), "step": status.step, "hang_timeout_s": timeout_s}
        yield Finding(Diagnosis.NO_STEP, Severity.ERROR, evidence, advice, details, cost=0.8)
