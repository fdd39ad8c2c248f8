"""Reports what a worker group finds at its start: skipped checkpoints, changed versions, and learning rates."""

import logging
import math

import torch

from sunspot.elastic.claim import StartPoint
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.restore import TrainingState
from sunspot.log import warn_once
from sunspot.run import Run
from sunspot.run.history import Journal, Journals
from sunspot.settings import differences
from sunspot.train.evaluate import EVALUATION_TRIES
from sunspot.train.learner import Learner

log = logging.getLogger(__name__)


def open_journals(run: Run, start: StartPoint) -> Journals:
    """Open the attempt's metric history and events. Record events for skipped checkpoints and changed versions."""
    attempt = start.attempt
    journals = Journals(run, attempt.number)
    for text in attempt.skipped:
        journals.events.note("checkpoint skipped", attempt.step, text)
        log.warning(f"skipped {text}")
    before = start.before[-1].metadata.versions if start.before else {}
    now = attempt.metadata.versions
    changed = differences(before, {name: now[name] for name in before if name in now})
    if changed:
        journals.events.note("versions changed", attempt.step, ", ".join(changed))
        log.warning(f"versions changed since attempt {start.before[-1].number}: {', '.join(changed)}")
    return journals


def report_rates(learner: Learner, start: StartPoint, state: TrainingState, control: ControlClient) -> None:
    """Report the learning rates of a new job, and warn of changed rates and of slow arithmetic. Rank 0 calls this."""
    for text in (describe_new_length(learner, start.attempt.step, state.total_steps), describe_unused_tf32(learner)):
        if text:
            warn_once(log, text)
    if not start.before or start.before[-1].driver != start.attempt.driver:  # the job has not shown them yet
        for line in describe_rates(learner):
            control.send(ControlChannel.log, f"  {line}")


def describe_new_length(learner: Learner, step: int, before: int) -> str:
    """Return a warning if a new run length makes the learning rate jump. `before` is the old length (0 if unknown)."""
    now = learner.plan.total_steps
    if before in (0, now) or learner.task.library_loop:  # a library's schedulers are objects
        return ""
    old, new = (learner.rates.at(min(step, total - 1), total) for total in (before, now))
    for was, will in zip(old, new, strict=True):
        if not math.isclose(was["lr"], will["lr"]):
            return (
                f"SUNSPOT_EPOCHS and SUNSPOT_MAX_STEPS now give {now} steps instead of {before}: "
                f"the learning rate continues at {will['lr']:.3g} instead of {was['lr']:.3g}"
            )
    return ""


def describe_unused_tf32(learner: Learner) -> str:
    """Return a warning if matrices are multiplied in fp32 on a GPU that supports TF32, or an empty string."""
    fp32 = learner.plan.settings.precision == "fp32" and not learner.task.library_loop
    if not fp32 or learner.place.device.type != "cuda" or not torch.cuda.is_tf32_supported():
        return ""
    return (
        "SUNSPOT_PRECISION=fp32: this GPU multiplies matrices several times faster in TF32, which rounds their factors "
        "to 10 bits; set it to tf32 or bf16"
    )


def describe_rates(learner: Learner) -> list[str]:
    """Return lines about the learning rates of the whole run. Raises `SettingsError` if a step has no learning rate."""
    task = learner.task
    if task.library_loop:
        return []
    lines = learner.rates.describe(learner.plan.total_steps)
    return [f"{line}, unless its train(run) sets another rate" for line in lines] if task.has_own_loop else lines


def record_left_out(step: int, events: Journal) -> None:
    """Record that the evaluation of the epoch that ends at `step` was skipped."""
    detail = (
        f"the epoch that ends at step {step} is not evaluated: {EVALUATION_TRIES} groups of workers in a row ended "
        "before its evaluation did, and training continues"
    )
    events.note("evaluation left out", step, detail)
    log.warning(detail)
