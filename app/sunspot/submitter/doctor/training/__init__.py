"""Why a run that has begun is slow, stuck, climbing in memory or failed: from what it left in storage. Pure."""

from typing import Any

from sunspot.submitter.doctor.training.case import Case
from sunspot.submitter.doctor.training.ended import find_end
from sunspot.submitter.doctor.training.memory_growth import find_memory_growth
from sunspot.submitter.doctor.training.saving import find_storage
from sunspot.submitter.doctor.training.slow import find_losses, find_slow, in_ms, measure_throughput
from sunspot.submitter.doctor.training.stuck import find_hung, find_stall
from sunspot.submitter.findings import Finding

__all__ = ["Case", "diagnose", "figures"]


def diagnose(case: Case) -> list[Finding]:
    """Find what explains the state of a run that has begun, in no order; empty when nothing seems wrong."""
    checks = (find_end, find_hung, find_stall, find_slow, find_memory_growth, find_storage, find_losses)
    return [finding for check in checks for finding in check(case)]


def figures(case: Case) -> tuple[str, dict[str, Any]]:
    """Return the figures that were examined, as a sentence and for programs."""
    view = case.view
    speed = measure_throughput(case.windows)
    words = [f"step {view.step}" + (f" of {view.total_steps}" if view.total_steps else "")]
    details: dict[str, Any] = {"step": view.step, "total_steps": view.total_steps or None}
    if speed.windows:
        words.append(f"{in_ms(speed.step_s)} a step, {speed.data_share:.0%} of it waiting for rows")
        details |= {"step_s": speed.step_s, "data_share": speed.data_share}
        if len(speed.own) > 1:
            rank = speed.own.index(max(speed.own))
            words.append(f"the slowest rank {rank}, {in_ms(speed.lag(rank))} behind the others")
            details |= {"slowest_rank": rank, "lag_s": speed.lag(rank)}
        resident = speed.windows[-1]["ranks"]["resident_mib"]
        if None not in resident:
            words.append(f"{max(resident):.0f} MiB of memory at most")
            details["resident_mib"] = max(resident)
    else:
        words.append("no window of the metric history after the first, so nothing of its speed and memory")
    if view.checkpoint:
        words.append(f"a checkpoint of step {view.checkpoint.step}")
        details["checkpoint"] = view.checkpoint.name
    if view.goodput is not None:
        words.append(f"goodput {view.goodput:.0%}")
        details["goodput"] = view.goodput
    return ", ".join(words), details
