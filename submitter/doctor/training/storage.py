"""Checkpoints that fail, come late, are damaged, or take longer than a notice."""

from collections.abc import Iterator

from app.formatting import in_words, plural
from app.run.status import RunState
from submitter.doctor.training.case import Case, cut
from submitter.findings import Diagnosis, Finding, Severity

OLD_CHECKPOINTS = 3
"""Intervals after which a checkpoint is too old: a save may wait for the one before."""

OLD_CHECKPOINT_S = 60.0
"""Added to that, for the save and its report."""


def find_storage(case: Case) -> Iterator[Finding]:
    """Checkpoints that fail, come late, are damaged, or take longer than a notice."""
    view, status, newest = case.view, case.view.status, case.newest
    if view.passed_over:
        evidence = "passed over " + "; ".join(view.passed_over)
        advice = (
            "the run goes on from the one before; look after the storage, and `sunspot checkpoints verify` finds more"
        )
        yield Finding(Diagnosis.DAMAGED, Severity.WARNING, evidence, advice, {"checkpoints": list(view.passed_over)})
    if not newest or not status or case.state is not RunState.RUNNING:
        return
    committed = view.checkpoint.time if view.checkpoint else 0.0
    failed = [
        e
        for e in view.events
        if e["event"] == "commit failed" and e["attempt"] == newest.number and e["time"] > committed
    ]
    if failed:
        since_s = case.now - failed[0]["time"]
        evidence = f"no checkpoint could be committed for {in_words(since_s)}, {plural(len(failed), 'failure')}: "
        evidence += str(failed[-1].get("detail", ""))
        patience_s = case.number("storage_timeout_s")
        advice = f"mend the storage within {patience_s:.0f} s (STORAGE_TIMEOUT_S), or the run ends"
        yield Finding(Diagnosis.STORAGE, Severity.WARNING, cut(evidence), advice, {"tries": len(failed)}, cost=0.5)
    every_s = case.number("checkpoint_every_s")
    age_s = case.now - max(committed, newest.time)
    limit_s = OLD_CHECKPOINTS * max(every_s, status.save_s or 0.0) + OLD_CHECKPOINT_S
    if every_s and age_s > limit_s and not failed:
        evidence = f"no new checkpoint for {in_words(age_s)}, though one is due every {every_s:.0f} s"
        evidence += f" and took {status.save_s:.1f} s to save" if status.save_s else ""
        advice = "storage may be slow or away: `sunspot events`, and what the driver's log warns of"
        yield Finding(Diagnosis.OLD_CHECKPOINT, Severity.WARNING, evidence, advice, {"age_s": round(age_s)})
    if status.warning and status.save_s and status.notice_s:
        details = {"save_s": status.save_s, "notice_s": status.notice_s}
        advice = "faster storage, a smaller model or optimizer, or a longer notice (notice_s in the profile)"
        yield Finding(Diagnosis.LONG_SAVE, Severity.WARNING, status.warning, advice, details)
