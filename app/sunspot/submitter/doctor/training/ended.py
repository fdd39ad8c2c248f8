"""What ended a run, or an attempt of it."""

from collections import Counter
from collections.abc import Iterator

from sunspot.formatting import plural
from sunspot.run.failures import Failure
from sunspot.run.status import RunState
from sunspot.submitter.doctor.training.case import Case, advise_full, cut
from sunspot.submitter.findings import Diagnosis, Finding, Severity


def find_end(case: Case) -> Iterator[Finding]:
    """Find what ended the run or an attempt of it: the first error, once for all ranks that raised it."""
    began = case.view.status.began if case.view.status else 0.0
    recent = [failure for failure in case.failures if failure.time >= began and _counts(case, failure)]
    ended = case.state in (RunState.FAILED, RunState.LOST, RunState.RETRYING)
    if recent:
        yield _first_failure(case, recent, Severity.ERROR if ended else Severity.WARNING)
    elif case.state is RunState.FAILED:
        advice = f"`sunspot logs {case.view.run.name}` and, of a worker, `--rank 0` have all that they printed"
        if full := advise_full(case, case.reason):
            advice = f"{full}; then start the run again: it goes on from the last checkpoint"
        yield Finding(Diagnosis.FAILED, Severity.ERROR, cut(case.reason), advice, cost=1.0)
    if case.state is RunState.LOST:
        advice = "submit it again, or repeat the same command: it goes on from the last checkpoint"
        yield Finding(Diagnosis.LOST, Severity.ERROR, cut(case.reason), advice, cost=0.9)
    elif case.state is RunState.DELETING:
        advice = f"`sunspot delete {case.view.run.name}` goes on with that"
        yield Finding(Diagnosis.STOPPED, Severity.NOTE, cut(case.reason), advice)
    elif case.state is RunState.STOPPED:
        advice = f"`sunspot resume {case.view.run.name}` lets it go on"
        if case.view.status and case.view.status.reason:  # a signal to its process has one, `sunspot stop` has not
            advice = "repeat the command that started it: it goes on from the last checkpoint"
        yield Finding(Diagnosis.STOPPED, Severity.NOTE, cut(case.reason), advice)


def _counts(case: Case, failure: Failure) -> bool:
    """Whether it is not of a superseded process, which may have failed late, when it came back."""
    owner = case.newest.driver if case.newest else ""
    attempt = next((attempt for attempt in case.view.attempts if attempt.number == failure.attempt), None)
    return attempt is None or attempt.driver == owner


def _first_failure(case: Case, failures: list[Failure], severity: Severity) -> Finding:
    first = min(failures, key=lambda failure: (failure.consequence, failure.time))
    alike = [f for f in failures if (f.type, f.file, f.line) == (first.type, first.file, first.line)]
    others = Counter(f.type for f in failures if f not in alike)
    ranks = sorted({f.rank for f in alike if f.rank is not None})
    attempts = sorted({f.attempt for f in alike})
    who = f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}" if ranks else "the driver"
    place = f" in {first.function} at {first.file}:{first.line}" if first.file else ""
    again = f", in {plural(len(attempts), 'attempt')}" if len(attempts) > 1 else ""
    more = f"; then {', '.join(f'{times} {kind}' for kind, times in others.items())}" if others else ""
    evidence = f"{first.type}: {_first_line(first.message)}{place}; {who}{again}, after step {first.step}{more}"
    mend = advise_full(case, first.message) or "mend what it names"
    advice = f"{mend}; then start the run again: it goes on from the last checkpoint"
    if "OutOfMemory" in first.type or "out of memory" in first.message:
        advice = "lower MICRO_BATCH_SIZE, which leaves the result as it is, or give the workers more memory"
    elif severity is not Severity.ERROR:
        advice = f"its workers were started again; {mend}, as MAX_FAILURES is counted down"
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


def _first_line(text: str) -> str:
    return cut(next((line.strip() for line in text.splitlines() if line.strip()), ""))
