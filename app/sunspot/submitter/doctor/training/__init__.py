"""Why a run that has begun is slow, stuck, climbing in memory or failed: from what it left in storage. Pure."""

from sunspot.submitter.doctor.training.case import Case
from sunspot.submitter.doctor.training.costs import figures, find_losses, find_memory_growth, find_slow
from sunspot.submitter.doctor.training.halted import find_end, find_hung, find_stall
from sunspot.submitter.doctor.training.saving import find_storage
from sunspot.submitter.findings import Finding

__all__ = ["Case", "diagnose", "figures"]


def diagnose(case: Case) -> list[Finding]:
    """Find what explains the state of a run that has begun, in no order; empty when nothing seems wrong."""
    checks = (find_end, find_hung, find_stall, find_slow, find_memory_growth, find_storage, find_losses)
    return [finding for check in checks for finding in check(case)]
