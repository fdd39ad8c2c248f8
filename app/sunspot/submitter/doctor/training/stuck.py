"""Why a run that should train takes no steps."""

from collections.abc import Iterator

from sunspot.formatting import in_words
from sunspot.run.hangs import BRING_ROWS, NO_STACKS, read_hangs, starved, suspects
from sunspot.run.status import RunState
from sunspot.submitter.doctor.training.case import Case, cut
from sunspot.submitter.findings import Diagnosis, Finding, Severity

NO_STEP_S, FIRST_STEP_S, SLOW_STEPS = 60.0, 300.0, 10
"""Seconds without a step or an evaluation before it is reported, and at least SLOW_STEPS step times; longer for the
first step, which waits for compilation and for Ray Data's first rows."""


def find_hung(case: Case) -> Iterator[Finding]:
    """Find ranks of the newest attempt with any that hung, or got no rows, until their watchdogs ended them."""
    hung = read_hangs(case.view.events)
    if not hung:
        return
    number = max(hang.attempt for hang in hung)
    its = sorted((hang for hang in hung if hang.attempt == number), key=lambda hang: hang.rank)
    starting = any(hang.starting for hang in its)  # of the group after that attempt, whose hosts are not known
    claimed = next((a.metadata.world_size for a in case.view.attempts if a.number == number), 0)
    of, world = (0, its[0].world_size) if starting else (number, claimed)
    blamed = suspects(its, world)
    words = {hang.rank: hang.detail.partition(": ")[2] for hang in its}
    said = [f"{case.name(of, rank)}: {words.get(rank, NO_STACKS)}" for rank in blamed or words]
    waiting = [rank for rank in words if rank not in blamed] if blamed else []
    others = f"; rank{'s' * (len(waiting) != 1)} {', '.join(map(str, waiting))} waited for it" if waiting else ""
    again = any(receipt.attempt > number for receipt in case.view.receipts)
    kind = Diagnosis.NO_ROWS if starved(its, world) else Diagnosis.HUNG
    advice = "look at that call: a read without a time limit, a lock, or a collective that not all ranks enter"
    if kind is Diagnosis.NO_ROWS:
        advice = BRING_ROWS
    advice += "; its workers were started again" if again else ""
    details = {
        "attempt": number,
        "step": its[0].step,
        "ranks": blamed or list(words),
        "places": [case.place(of, rank) for rank in blamed or words],
        "calls": {str(rank): text for rank, text in words.items()},
    }
    traces = tuple(f"rank {hang.rank}: {hang.detail}\n{hang.stacks}" for hang in its)
    severity = Severity.WARNING if again or case.state is RunState.SUCCEEDED else Severity.ERROR
    when = f"as the group after attempt {number} began" if starting else f"after step {its[0].step}"
    evidence = f"{when}, {'; '.join(said)}{others}"
    yield Finding(kind, severity, evidence, advice, details, cost=0.9, traces=traces)


def find_stall(case: Case) -> Iterator[Finding]:
    """Find out why a run that should train is silent or takes no step."""
    status, newest = case.view.status, case.newest
    if not status or case.state not in (RunState.RUNNING, RunState.STARTING, RunState.SILENT):
        return
    if case.state is RunState.SILENT:
        silent_s = case.now - status.seen
        evidence = cut(case.reason)
        advice = (
            "its node may be frozen or cut off, or storage out of its reach: kubectl get pods, and `sunspot logs`. If "
            "it stays so, delete its RayJob or end its process, and submit again: it goes on from the last checkpoint, "
            "and what comes back late changes nothing"
        )
        yield Finding(Diagnosis.SILENT, Severity.ERROR, evidence, advice, {"silent_s": round(silent_s)}, cost=0.8)
        return
    if case.state is RunState.STARTING:
        waited_s = case.now - max(status.heartbeat or 0.0, status.began or status.time)  # they may have trained before
        advice = "wait: Ray places the workers, and these import and read"
        severity = Severity.NOTE
        if waited_s > FIRST_STEP_S:
            severity, advice = Severity.WARNING, "Ray finds no room for the workers: compare NUM_WORKERS with the pods"
        evidence = f"{case.reason}, for {in_words(waited_s)}"
        yield Finding(Diagnosis.STARTING, severity, evidence, advice, {"waited_s": round(waited_s)})
        return
    if newest is None or status.attempt != newest.number:
        return
    heartbeat = status.heartbeat
    still_s = case.now - status.seen + status.time - (heartbeat or newest.time)  # two clocks, each with itself
    limit_s = max(NO_STEP_S, SLOW_STEPS * (status.step_time_s or 0.0)) if heartbeat else FIRST_STEP_S
    if still_s > limit_s:
        timeout_s = case.number("hang_timeout_s")
        usual = f"; a step took {status.step_time_s:.3g} s" if status.step_time_s else ""
        evidence = f"no step for {in_words(still_s)}, after step {status.step} or a little later{usual}"
        rows = ", or for Ray Data, whose reading pods are gone or pending" if case.setting("loader") == "ray" else ""
        advice = f"it may wait for storage{rows}; otherwise a rank hangs: "
        advice += (
            f"when none goes on for {timeout_s:.0f} s, all leave their stacks and are started again (HANG_TIMEOUT_S)"
            if timeout_s
            else "HANG_TIMEOUT_S is 0, so nothing ends that; stop the run, and set it"
        )
        details = {"still_s": round(still_s), "step": status.step, "hang_timeout_s": timeout_s}
        yield Finding(Diagnosis.NO_STEP, Severity.ERROR, evidence, advice, details, cost=0.8)
