"""Finds failed, late, damaged or missing checkpoints, and saves that take longer than a preemption notice."""

from collections.abc import Iterator

from sunspot.formatting import in_words, plural
from sunspot.run.checkpoints import Unusable
from sunspot.run.status import RunState
from sunspot.submitter.doctor.training.case import Case, abridge, advise_on_full_disk
from sunspot.submitter.findings import Diagnosis, Finding, Severity

OLD_CHECKPOINTS = 3
"""Number of intervals after which a checkpoint is too old. A save can wait for the previous save."""

OLD_CHECKPOINT_S = 60.0
"""Seconds added to OLD_CHECKPOINTS intervals for the save and its report."""


def find_storage(case: Case) -> Iterator[Finding]:
    """Find failed, late, damaged or missing checkpoints, and saves that take longer than a preemption notice."""
    seen = case.seen
    status = seen.status
    newest = case.newest
    yield from _find_unusable(case)
    if not newest or not status or case.state is not RunState.RUNNING:
        return
    committed = seen.checkpoint.time if seen.checkpoint else 0.0
    failed = [e for e in seen.events if e["event"] == "commit failed" and e["attempt"] == newest.number]
    failed = [e for e in failed if e["time"] > committed]
    if failed:
        since_s = case.now - failed[0]["time"]
        evidence = f"no checkpoint could be committed for {in_words(since_s)}, {plural(len(failed), 'failure')}: "
        evidence += str(failed[-1].get("detail", ""))
        patience_s = case.number("storage_timeout_s")
        advice = advise_on_full_disk(case, evidence) or "repair the storage"
        advice += f", within {patience_s:.0f} s (SUNSPOT_STORAGE_TIMEOUT_S), or the run ends"
        yield Finding(Diagnosis.STORAGE, Severity.WARNING, abridge(evidence), advice, {"tries": len(failed)}, cost=0.5)
    every_s = case.number("checkpoint_every_s")
    age_s = case.now - max(committed, newest.time)
    limit_s = OLD_CHECKPOINTS * max(every_s, status.save_s or 0.0) + OLD_CHECKPOINT_S
    if every_s and age_s > limit_s and not failed:
        evidence = f"no new checkpoint for {in_words(age_s)}, although one is due every {every_s:.0f} s"
        evidence += f" and took {status.save_s:.1f} s to save" if status.save_s else ""
        advice = "storage might be slow or unreachable; look at `sunspot events` and the warnings in the driver's log"
        yield Finding(Diagnosis.OLD_CHECKPOINT, Severity.WARNING, evidence, advice, {"age_s": round(age_s)})
    if status.warning and status.save_s and status.notice_s:
        details = {"save_s": status.save_s, "notice_s": status.notice_s}
        advice = "use faster storage, a smaller model or optimizer, or a longer notice (notice_s in the profile)"
        yield Finding(Diagnosis.LONG_SAVE, Severity.WARNING, status.warning, advice, details)


def _find_unusable(case: Case) -> Iterator[Finding]:
    """Find unusable checkpoints that are newer than the one in use.

    Findings about missing or damaged checkpoints get the highest cost, so they precede equally severe findings.
    """
    ended = case.state.terminal
    severity = Severity.ERROR if case.state is RunState.SUCCEEDED else Severity.WARNING
    advice = _advise_ended(case) if ended else "the run continues from the previous checkpoint"
    gone, damaged, left = (
        [each for each in case.seen.passed_over if each.kind is kind]
        for kind in (Unusable.GONE, Unusable.DAMAGED, Unusable.INCOMPLETE)
    )
    if gone:
        evidence = (
            f"the run ended with {gone[0].name}, which no longer exists, but a run never deletes its newest checkpoint"
        )
        after = "; find out what deletes objects below the storage path, such as a lifecycle rule or a person"
        details = {"checkpoints": [each.name for each in gone]}
        yield Finding(Diagnosis.GONE, severity, evidence, advice + after, details, cost=1.0)
    if damaged:
        texts = [str(each) for each in damaged]
        evidence = "skipped " + "; ".join(texts)
        after = f"; check the storage; `sunspot checkpoints verify {case.seen.run.name}` finds more damage"
        yield Finding(Diagnosis.DAMAGED, severity, evidence, advice + after, {"checkpoints": texts}, cost=1.0)
    if left and ended:  # a live run can still be committing one
        names = [each.name for each in left]
        evidence = f"{plural(len(names), 'checkpoint')} without a manifest, left by killed commits: {', '.join(names)}"
        gc = f"`sunspot checkpoints gc {case.seen.run.name}`"
        advice = f"{gc} lists files that can be deleted; add --yes to delete them"
        yield Finding(Diagnosis.LEFTOVERS, Severity.NOTE, evidence, advice, {"checkpoints": names})


def _advise_ended(case: Case) -> str:
    """Return advice on a run that has ended and whose newest checkpoint is unusable."""
    seen = case.seen
    generation = case.state is RunState.SUCCEEDED and not case.local
    again = "start it again" + (" (a RayJob with another --generation)" if generation else "")
    if not seen.checkpoint:
        begins = "it starts from the beginning, or prints the value of SUNSPOT_ACCEPT that makes it do so"
        return f"restore the files of a checkpoint; or {again}: {begins}"
    lost = f", and repeats steps {seen.checkpoint.step + 1} to {seen.step}" * (seen.step > seen.checkpoint.step)
    return f"{again}: it starts from step {seen.checkpoint.step}{lost}"
