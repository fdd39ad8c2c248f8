"""Checkpoints that fail, come late, are damaged or gone, or take longer than a notice."""

from collections.abc import Iterator

from sunspot.formatting import in_words, plural
from sunspot.run.checkpoints import Unusable
from sunspot.run.status import RunState
from sunspot.submitter.doctor.training.case import Case, advise_full, cut
from sunspot.submitter.findings import Diagnosis, Finding, Severity

OLD_CHECKPOINTS = 3
"""Intervals after which a checkpoint is too old: a save may wait for the one before."""

OLD_CHECKPOINT_S = 60.0
"""Added to that, for the save and its report."""


def find_storage(case: Case) -> Iterator[Finding]:
    """Find checkpoints that fail, come late, are damaged or gone, or take longer than a notice."""
    view, status, newest = case.view, case.view.status, case.newest
    yield from _find_unusable(case)
    if not newest or not status or case.state is not RunState.RUNNING:
        return
    committed = view.checkpoint.time if view.checkpoint else 0.0
    failed = [e for e in view.events if e["event"] == "commit failed" and e["attempt"] == newest.number]
    failed = [e for e in failed if e["time"] > committed]
    if failed:
        since_s = case.now - failed[0]["time"]
        evidence = f"no checkpoint could be committed for {in_words(since_s)}, {plural(len(failed), 'failure')}: "
        evidence += str(failed[-1].get("detail", ""))
        patience_s = case.number("storage_timeout_s")
        advice = advise_full(case, evidence) or "mend the storage"
        advice += f", within {patience_s:.0f} s (SUNSPOT_STORAGE_TIMEOUT_S), or the run ends"
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


def _find_unusable(case: Case) -> Iterator[Finding]:
    """Find unusable checkpoints newer than the one in use: what was lost with them explains more than other costs."""
    ended = case.state.terminal
    severity = Severity.ERROR if case.state is RunState.SUCCEEDED else Severity.WARNING
    advice = _advise_ended(case) if ended else "the run goes on from the one before"
    gone, damaged, left = (
        [each for each in case.view.passed_over if each.kind is kind]
        for kind in (Unusable.GONE, Unusable.DAMAGED, Unusable.INCOMPLETE)
    )
    if gone:
        evidence = f"{gone[0].name}, with which the run ended, is gone: the run itself keeps its newest"
        after = "; see what deletes below the storage path: a lifecycle rule, or somebody"
        details = {"checkpoints": [each.name for each in gone]}
        yield Finding(Diagnosis.GONE, severity, evidence, advice + after, details, cost=1.0)
    if damaged:
        texts = [str(each) for each in damaged]
        evidence = "passed over " + "; ".join(texts)
        after = f"; look after the storage, and `sunspot checkpoints verify {case.view.run.name}` finds more"
        yield Finding(Diagnosis.DAMAGED, severity, evidence, advice + after, {"checkpoints": texts}, cost=1.0)
    if left and ended:  # of a live run, one is being committed
        names = [each.name for each in left]
        evidence = f"{plural(len(names), 'checkpoint')} without a manifest, left by killed commits: {', '.join(names)}"
        gc = f"`sunspot checkpoints gc {case.view.run.name}`"
        advice = f"{gc} shows what is of no use, and with --yes frees its space"
        yield Finding(Diagnosis.LEFTOVERS, Severity.NOTE, evidence, advice, {"checkpoints": names})


def _advise_ended(case: Case) -> str:
    """Say what to do about a run that has ended, and whose newest checkpoint is of no use."""
    view = case.view
    generation = case.state is RunState.SUCCEEDED and not case.local
    again = "start it again" + (" (a RayJob with another --generation)" if generation else "")
    if not view.checkpoint:
        return f"put back the files of one; or {again}: it begins anew, or names the SUNSPOT_ACCEPT with which it does"
    lost = f", and takes the steps {view.checkpoint.step + 1} to {view.step} again" * (view.step > view.checkpoint.step)
    return f"{again}: it starts from step {view.checkpoint.step}{lost}"
