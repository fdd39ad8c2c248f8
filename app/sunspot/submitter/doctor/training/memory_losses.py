"""Finds workers that were killed because their node or container ran out of memory."""

import re
from collections.abc import Iterator

from sunspot.formatting import plural
from sunspot.run.incidents import Cause
from sunspot.run.status import RunState
from sunspot.submitter.doctor.training.case import Case, abridge
from sunspot.submitter.findings import Diagnosis, Finding, Severity

FIGURES = re.compile(r"(?P<used>[\d.]+) of (?P<limit>[\d.]+) GiB in use")
"""Pattern of the figures in a run's record of a worker that ran out of memory (sunspot/elastic/out_of_memory.py)."""

SAVE_MEMORY = (
    "save memory: a lower SUNSPOT_MICRO_BATCH_SIZE, fewer processes that load data, or SUNSPOT_SNAPSHOT_COST=0 (no "
    "copies)"
)


def find_out_of_memory(case: Case) -> Iterator[Finding]:
    """Yield a finding if workers of the newest driver were killed for lack of memory.

    Searches the run's events and its last error for such workers.
    """
    driver = case.newest.driver if case.newest else ""
    own = {attempt.number for attempt in case.seen.attempts if attempt.driver == driver}
    events = [e for e in case.seen.events if e["event"] == Cause.OUT_OF_MEMORY and e["attempt"] in own]
    texts = [str(event.get("detail", "")) for event in events]
    ended = case.state in (RunState.FAILED, RunState.LOST) and f"{Cause.OUT_OF_MEMORY}: " in case.reason
    if ended:
        texts.append(case.reason.partition("\n")[0])
    if not texts:
        return
    figures = FIGURES.search(texts[-1])
    above = f" above the present {figures['limit']} GiB" if figures else ""
    evidence = f"{abridge(texts[-1])}; {plural(len(texts), 'worker')} ended for this reason"
    more = f"raise worker.memory in the profile{above}, or start fewer workers on a machine"
    advice = f"{'start fewer workers (SUNSPOT_NUM_WORKERS)' if case.local else more}; or {SAVE_MEMORY}"
    details = {name: float(text) for name, text in figures.groupdict().items()} if figures else {}
    severity = Severity.ERROR if ended else Severity.WARNING
    yield Finding(
        Diagnosis.OUT_OF_MEMORY, severity, evidence, advice, {"times": len(texts), "gib": details or None}, cost=1.0
    )
