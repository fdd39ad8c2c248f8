"""Finds deadlines that will be missed, and budgets that are too small."""

from collections.abc import Iterator

from sunspot.formatting import in_words, money
from sunspot.run.forecast import forecast
from sunspot.submitter.doctor.training.case import Case
from sunspot.submitter.findings import Diagnosis, Finding, Severity


def find_missed_goals(case: Case) -> Iterator[Finding]:
    """Yield a finding if the run will miss its DEADLINE, and another if its BUDGET is too small."""
    expected = forecast(case.seen)
    if expected.late_s:
        advice = "use more workers or faster nodes (a larger SUNSPOT_NUM_WORKERS, another place), or a later deadline"
        details = {"deadline": expected.deadline, "expected_end": expected.done_at}
        evidence = f"the deadline will be missed by {in_words(expected.late_s)}: {expected.describe_deadline()}"
        yield Finding(Diagnosis.LATE, Severity.WARNING, evidence, advice, details)
    if expected.excess:
        advice = "use cheaper nodes or a larger SUNSPOT_BUDGET; otherwise the run stops with a checkpoint"
        details = {"budget": expected.budget, "expected_cost": expected.total}
        evidence = f"the budget is {money(expected.excess)} too small: {expected.describe_budget()}"
        yield Finding(Diagnosis.OVER_BUDGET, Severity.WARNING, evidence, advice, details)
