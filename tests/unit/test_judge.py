"""Tests of the decision whether another worker group follows a failed group, and of the messages for the user."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import ControllerError, TrainingFailedError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from urllib3 import HTTPConnectionPool
from urllib3.exceptions import ReadTimeoutError

from sunspot.elastic import failures
from sunspot.elastic.control import ControlChannel
from sunspot.elastic.failure_callback import ALWAYS_CONTINUE, FailureCallback, find_worker_error
from sunspot.elastic.failures import MAX_STARVED, FailureJudge, Suspects, describe_end
from sunspot.elastic.messages import FailureCounts, GroupEnd, Incident, RankError
from sunspot.elastic.out_of_memory import find_killed_for_memory
from sunspot.elastic.receipts import explain_error
from sunspot.errors import SettingsError, SunspotError
from sunspot.observe.progress import Lines, Progress
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.run.attempts import Attempt, Metadata
from sunspot.run.failures import Failure, Hang
from sunspot.run.incidents import Cause
from sunspot.train.group_outcome import GroupOutcome, TrainerStart, find_reason, next_start
from tests.harness.constants import SetConstants
from tests.harness.control import LocalControl, worker_group

BUG = Failure(1, 0, 0, "NameError", "name 'functional' is not defined", "", "/mine/buggy.py", 6, "loss")
LOST = RayActorError(error_msg="The actor died because its node has died.\nmore")


class Control(LocalControl):
    """Control channel that knows what ended the newest group."""

    def __init__(self) -> None:
        super().__init__()
        self.end = GroupEnd()

    def call(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        answer = super().call(method, *given, **named)
        return replace(self.end, counts=answer.counts) if method is ControlChannel.group_end else answer

    @property
    def said(self) -> list[str]:
        return self.heard("start_next_group")

    @property
    def gave_up_for(self) -> list[str]:
        return self.heard("give_up")


def start_again(control: Control, start: TrainerStart, max_failures: int, error: Any = None) -> TrainerStart | None:
    """Return how the next trainer starts in survivor mode after one that ended with `error`, or None."""
    reason = find_reason(error, restart=False, one_machine=False)
    outcome = GroupOutcome(reason, error, control.call(ControlChannel.group_end), control.call(ControlChannel.incident))
    return next_start(outcome, start, max_failures, survivor_mode=True)


@pytest.fixture
def control(set_constants: SetConstants) -> Control:
    set_constants(failures, OTHERS_S=0.0)
    return Control()


def failed(*ranks: int, world_size: int = 2, step: int = 0, taken: int = 0, **changed: Any) -> list[RankError]:
    of = {name: changed.pop(name, False) for name in ("from_outside", "from_memory")}
    kind = BUG.__dict__ | changed
    return [RankError(Failure(**kind | {"rank": rank, "step": step}), world_size, taken, **of) for rank in ranks]


def group_end(errors: list[RankError], committed: int = 0, hangs: list[Hang] | None = None) -> GroupEnd:
    return GroupEnd(errors, Progress(1, step=53, committed=committed), hangs or [])


def hung(rank: int, waiting: bool = False, loading: bool = False) -> Hang:
    detail = f"rank {rank}: no step for 300 s"
    return Hang(rank, detail, waiting, loading, world_size=2, attempt=1, step=53, time=100.0)


def test_the_same_bug_on_all_ranks_before_the_first_step_ends_the_run_at_once(control: Control) -> None:
    control.end = group_end(failed(0, 1))
    assert not FailureJudge(control, 3)({0: NameError()})
    assert not control.said
    assert control.channel.group_end().counts.final, "another cluster would not help"
    [reason] = control.gave_up_for
    assert reason.startswith("rank 0, 1: NameError: name 'functional' is not defined, in loss at /mine/buggy.py:6")


@pytest.mark.parametrize(
    "errors",
    [
        failed(0),
        failed(0) + failed(1, line=7),
        failed(0, 1, from_outside=True),
        failed(0, 1, type="RuntimeError", message="[gloo] Connection closed by peer"),
        failed(0, 1, file=failures.__file__),
        failed(0, 1, file="/venv/lib/python3.12/site-packages/torch/nn/functional.py"),
        failed(0, 1, step=50, taken=50),
    ],
    ids=["one rank", "other places", "from outside", "lost peers", "our code", "installed code", "after steps"],
)
def test_the_run_starts_again_after_an_error_that_might_not_recur(control: Control, errors: list[RankError]) -> None:
    judge = FailureJudge(control, 3)
    control.end = group_end(errors)
    assert judge({0: NameError()})
    [line] = control.said
    assert "NameError" in line or "RuntimeError" in line
    assert line.endswith("; starting again, 2 of 3 SUNSPOT_MAX_FAILURES left")


def test_the_run_ends_if_a_bug_repeats_at_the_same_step(control: Control) -> None:
    judge = FailureJudge(control, 3)
    control.end = group_end(failed(0, 1, step=50, taken=50))
    assert judge({0: NameError()})
    control.end = group_end(failed(0, 1, step=50, taken=10))
    assert not judge({0: NameError()})


BACKWARD = {"file": failures.__file__, "line": 68, "type": "RuntimeError", "message": "Mixed up. To fix it, do this"}
"""Error in the backward pass, whose traceback has no line of the user's code."""


@pytest.mark.parametrize("place", [failures.__file__, "/venv/lib/python3.12/site-packages/torch/optim/sgd.py", ""])
def test_the_same_message_on_all_ranks_ends_the_run_if_it_repeats(control: Control, place: str) -> None:
    def fail(rank: int) -> list[RankError]:
        message = f"rank {rank}: the tensor at 0x7f{rank} is wrong"
        return failed(rank, taken=0, **BACKWARD | {"file": place, "message": message})

    judge = FailureJudge(control, 3)
    control.end = group_end(fail(0) + fail(1))
    assert judge({0: RuntimeError()}), "an error from outside may not occur again"
    assert not judge({0: RuntimeError()})
    assert control.gave_up_for[0].endswith(
        "; all ranks failed alike, and would fail again; `sunspot check` tries the task in seconds"
    )


@pytest.mark.parametrize("error", [{}, BACKWARD], ids=["at a line of the task", "the same message"])
def test_the_run_ends_if_a_bug_recurs_on_all_ranks_after_the_same_number_of_steps(
    error: dict[str, Any], control: Control
) -> None:
    """The workers take new steps and checkpoints in between, such as with a bug in the 60th call of a function."""
    now = [1000.0]
    judge = FailureJudge(control, 3, clock=lambda: now[0])

    def fail(step: int, after_s: float) -> bool:
        now[0] += after_s
        control.end = GroupEnd(failed(0, 1, step=step, taken=60, **error), Progress(1, step=step, committed=step))
        return judge({0: RuntimeError()})

    assert all(fail(step, 3600) for step in range(60, 660, 60)), "occasional errors are not a loop"
    assert fail(660, 60)
    assert fail(720, 60)
    assert not fail(780, 60)
    assert control.gave_up_for[0].endswith(
        "; 4 times in a row, each within 10 min of the previous one (SUNSPOT_MAX_FAILURES=3): all ranks failed alike; "
        "`sunspot check` tries the task in seconds"
    )
    assert control.channel.group_end().counts.final


@pytest.mark.parametrize(
    "second",
    [
        {"message": "another one"},
        {"step": 7},
        {"from_outside": True},
        {"message": "Connection closed by peer"},
    ],
    ids=["another message", "a later step", "from outside", "a lost peer"],
)
def test_the_run_starts_again_if_the_second_error_differs_from_the_first(
    control: Control, second: dict[str, Any]
) -> None:
    judge = FailureJudge(control, 3)
    control.end = group_end(failed(0, 1, **BACKWARD))
    assert judge({0: RuntimeError()})
    control.end = group_end(failed(0, 1, **BACKWARD | second))
    assert judge({0: RuntimeError()})


def test_the_fix_at_the_end_of_a_long_message_is_shown(control: Control) -> None:
    fix = "use torch.autograd.set_detect_anomaly(True)"
    control.end = group_end(failed(0, 1, message=f"{'changed in place ' * 60}. Hint: {fix}"))
    assert not FailureJudge(control, 3)({0: RuntimeError()})
    assert fix in control.gave_up_for[0]


def test_the_next_trainer_remembers_the_bug_that_ended_the_previous_trainer(control: Control) -> None:
    """An error of the program ends Ray's trainer in survivor mode, together with its judge."""
    start, bug = TrainerStart(), TrainingFailedError("of the user")
    for begun in range(2):
        control.send(ControlChannel.set_counts, start.counts)
        control.end = group_end(failed(0, 1, step=50, taken=50))
        assert not FailureJudge(control, 3, survivor_mode=True)({0: NameError()}), "the trainer ends"
        start = start_again(control, start, 3, bug) or start
        assert len(control.gave_up_for) == begun, "the second time, it would happen again"


def test_earlier_losses_of_workers_are_forgotten_once_a_trainer_takes_a_step(control: Control) -> None:
    start: TrainerStart | None = TrainerStart()
    for _ in range(2):  # all workers are lost, twice
        assert start
        control.send(ControlChannel.set_counts, start.counts)
        control.end = group_end([])
        start = start_again(control, start, 2)
    assert start
    control.send(ControlChannel.set_counts, start.counts)
    assert start_again(control, start, 2) is None, "a third time, without a new checkpoint"
    assert FailureJudge(control, 2, survivor_mode=True)({1: LOST})
    assert control.heard("log")[-1].endswith("; starting again, 1 of 2 SUNSPOT_MAX_FAILURES left")


def test_the_next_trainer_remembers_that_all_workers_ran_out_of_memory(control: Control) -> None:
    """Each trainer makes a checkpoint before all of its workers are killed."""
    start: TrainerStart | None = TrainerStart()
    for step in (10, 20, 30):
        assert start
        control.send(ControlChannel.set_counts, start.counts)
        control.end = GroupEnd(progress=Progress(1, step=step, committed=step))
        goes_on = FailureJudge(control, 2, survivor_mode=True)({0: killed_for_memory()})
        start = start_again(control, start, 2)
    assert not goes_on


def test_lost_workers_count_as_failures_until_the_next_checkpoint(control: Control) -> None:
    """A run may lose more nodes in a month than in an hour."""
    judge = FailureJudge(control, 1)
    for committed in (0, 100, 200, 300):
        control.end = group_end([], committed)
        assert judge({1: LOST})
    assert not judge({1: LOST}), "no checkpoint has come since"
    what = "rank 1: lost after step 53: The actor died because its node has died"
    assert control.said == [f"{what}; starting again, 0 of 1 SUNSPOT_MAX_FAILURES left"] * 4
    assert "MAX_FAILURES=1" in control.gave_up_for[0]


def test_in_survivor_mode_lost_workers_count_as_failures_until_the_next_step(control: Control) -> None:
    judge = FailureJudge(control, 1, survivor_mode=True)
    for step in (10, 20, 30):
        control.end = GroupEnd([], Progress(1, step=step, committed=0))
        assert judge({1: LOST})
    assert not judge({1: LOST}), "no step has come since"
    assert "no new step" in control.gave_up_for[0]


def test_losing_the_nodes_of_a_zone_within_a_step_does_not_end_the_other_workers(control: Control) -> None:
    judge = FailureJudge(control, 3, survivor_mode=True)
    nodes = {rank: f"node-{rank}" for rank in range(16)}
    control.end = GroupEnd([], Progress(1, step=1000, committed=990), nodes=nodes)
    assert all(judge({rank: LOST}) for rank in range(12))
    assert control.heard("log")[-1].endswith("; a replacement starts, 0 of 3 SUNSPOT_MAX_FAILURES left")
    control.end = replace(control.end, nodes=dict.fromkeys(range(4), "other"))
    assert judge({12: LOST, 13: LOST, 14: LOST}), "a worker that took the step may still be alive"
    assert not judge({0: LOST}), "all workers were lost within one step"
    control.end = replace(control.end, progress=Progress(1, step=1001, committed=990))
    assert judge({0: LOST})


def test_replacements_that_could_not_train_do_not_count_as_lost_workers(control: Control) -> None:
    """While a member trains, in steps that take minutes, any number of replacements may fail."""
    judge, nodes = FailureJudge(control, 1, survivor_mode=True), {0: "a", 1: "b"}

    def lose(*ranks: int, replacements: int = 0) -> bool:
        for _ in range(replacements):
            control.channel.count_failed_replacement("b")
        told_so = control.channel.group_end().failed_replacements
        control.end = GroupEnd([], Progress(1, step=53), nodes=nodes, failed_replacements=told_so)
        return judge({rank: LOST for rank in ranks})

    assert lose(1)
    assert all(lose(1, replacements=1) for _ in range(5))
    assert control.heard("log")[-1].endswith("for replacements that could not train, and new ones start")
    assert control.channel.group_end().counts.charged == 1
    assert not lose(0, 1, replacements=1), "the other lost process was the last member"


def test_with_max_failures_0_the_first_lost_worker_ends_the_run(control: Control) -> None:
    control.end = GroupEnd([], Progress(1, step=1000, committed=990), nodes=dict.fromkeys(range(16), "node"))
    assert not FailureJudge(control, 0, survivor_mode=True)({1: LOST})


def test_a_hung_rank_is_distinguished_from_the_ranks_that_waited_for_it(control: Control) -> None:
    control.end = group_end([], hangs=[hung(0, waiting=True), hung(1)])
    assert FailureJudge(control, 3)({0: LOST, 1: LOST})
    assert control.said == [
        "rank 1: no step for 300 s, after step 53 (stacks: `sunspot events --stacks`); starting again, 2 of 3 "
        "SUNSPOT_MAX_FAILURES left"
    ]


def test_a_hung_rank_is_named_even_if_it_left_no_record(control: Control) -> None:
    control.end = group_end([], hangs=[hung(0, waiting=True)])
    assert FailureJudge(control, 3)({0: LOST, 1: LOST})
    assert control.said[0].startswith("rank 1: left no stacks: it was stopped, or lost with its node, after step 53")


def test_failures_caused_by_missing_rows_are_counted_separately(control: Control) -> None:
    """The pods that read for Ray Data may be preempted for longer than ranks may hang."""
    judge = FailureJudge(control, 0)
    for committed in (0, 100):  # a checkpoint lets them begin again
        control.end = group_end([], committed, [hung(0, waiting=True), hung(1, loading=True)])
        for left in reversed(range(MAX_STARVED)):
            assert judge({0: LOST, 1: LOST})
            assert control.said[-1].startswith("rank 1: no step for 300 s, after step 53")
            assert "Ray Data brought no rows" in control.said[-1]
            assert control.said[-1].endswith(
                f"{left} of {MAX_STARVED} restarts for this reason left, without charging SUNSPOT_MAX_FAILURES"
            )
    assert not judge({0: LOST, 1: LOST})
    assert "Ray Data brought no rows" in control.gave_up_for[0]
    control.end = group_end([], 200)
    assert not judge({1: LOST}), "another loss is charged, and SUNSPOT_MAX_FAILURES is 0"


def test_groups_that_start_from_a_copy_in_memory_and_take_no_step_are_not_counted_as_failures(control: Control) -> None:
    """The third group begins from storage, even if few failures are allowed."""
    judge = FailureJudge(control, 0)
    for again in ("once more from that copy", "from storage"):
        control.end = group_end(failed(0, from_memory=True))
        assert judge({0: RuntimeError()})
        assert control.said[-1].endswith(f"so another group starts {again}, without charging SUNSPOT_MAX_FAILURES")
    assert not judge({0: RuntimeError()}), "the group failed for another reason"


@pytest.mark.parametrize(
    ("errors", "lost"),
    [(failed(0, from_memory=True, taken=1), False), (failed(0), False), (failed(0, from_memory=True), True)],
    ids=["took a step", "from storage", "a rank was lost"],
)
def test_failures_not_caused_by_the_copy_in_memory_count_against_max_failures(
    control: Control, errors: list[RankError], lost: bool
) -> None:
    control.end = group_end(errors)
    assert not FailureJudge(control, 0)({0: RuntimeError()} | ({1: LOST} if lost else {}))


def test_the_errors_of_one_group_are_not_attributed_to_the_next_group() -> None:
    control = ControlChannel()
    control.add_rank_error(failed(0)[0])
    control.add_hang(hung(0, waiting=True), late=False)
    assert (len(control.group_end().errors), len(control.group_end().hangs)) == (1, 1)
    control.set_progress(Progress(1, 53, 0.5, time=1.0))
    control.start_next_group("rank 0: NameError")
    news = control.fetch_news()
    assert news.lines == [news.ended] == ["rank 0: NameError"]
    assert Lines(100, 50).describe(news.progress) == "step 53/100  starting again"
    control.add_hang(hung(1), late=True)
    assert control.group_end() == GroupEnd(progress=news.progress)
    incident = control.begin_group(worker_group(2, "a", "b"))
    assert (incident.cause, incident.detail) == (Cause.HUNG, "rank 1: no step for 300 s"), "for the receipt"
    assert not control.fetch_news().ended, "another group trains"


def test_a_save_requested_for_a_preempted_head_also_reaches_the_next_group() -> None:
    control = ControlChannel()
    control.request_save()
    control.begin_group(worker_group(2, "a"))
    assert control.command().save


def test_the_receipt_of_a_restart_can_name_missing_rows_as_the_cause() -> None:
    control = ControlChannel()
    control.add_hang(hung(0, waiting=True), late=False)
    control.add_hang(hung(1, loading=True), late=False)
    incident = control.begin_group(worker_group(2, "a", "b"))
    assert (incident.cause, incident.detail, incident.noticed) == (
        Cause.NO_ROWS,
        "rank 1: no step for 300 s",
        100.0,
    )


def test_errors_caused_by_the_failure_of_another_rank_are_not_shown(control: Control) -> None:
    control.end = group_end(failed(0, type="RuntimeError", message="[gloo] Connection closed by peer") + failed(1))
    assert FailureJudge(control, 3)({0: RuntimeError()})
    assert control.said[0].startswith("rank 1: NameError")


@pytest.mark.parametrize("told_it", [True, False])
def test_a_killed_rank_is_reported_instead_of_the_errors_that_its_loss_caused(control: Control, told_it: bool) -> None:
    """The killed ranks may be a step ahead of the last reported progress."""
    peer = {"type": "RuntimeError", "message": "[gloo/pair.cc:545] Connection reset by peer"}
    control.end = group_end(failed(0, step=55, **peer) if told_it else [])
    assert FailureJudge(control, 3)({0: RuntimeError(peer["message"]), 1: LOST})
    [line] = control.said
    assert line.startswith(f"rank 1: lost after step {55 if told_it else 53}: The actor died")
    assert "gloo" not in line


def test_the_run_ends_after_an_error_that_no_restart_can_fix(control: Control) -> None:
    control.end = GroupEnd(fatal=SettingsError("wrong"))
    assert not FailureJudge(control, 3)({0: RuntimeError()})
    assert not control.said
    assert not control.gave_up_for


@pytest.mark.parametrize(
    ("error", "from_outside"),
    [
        (NameError("x"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError(), True),
        (torch.OutOfMemoryError(), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("No CUDA GPUs are available"), True),
        (ClientError({"Error": {"Code": "SlowDown"}}, "GetObject"), True),
        (ReadTimeoutError(HTTPConnectionPool("hub"), "/model", "timed out"), True),
        (RuntimeError("DataLoader worker (pid 37) is killed by signal: Killed. "), True),
        (RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!"), False),
    ],
)
def test_errors_with_causes_outside_the_program_are_recognized(error: Exception, from_outside: bool) -> None:
    attempt = Attempt(1, "me", None, 40, metadata=Metadata(world_size=2, tier="memory"))
    end = describe_end(error, attempt, 1, 50)
    assert (end.from_outside, end.taken, end.world_size, end.failure.rank) == (from_outside, 10, 2, 1)
    assert end.from_memory
    wrapped = RuntimeError("cannot load")
    wrapped.__cause__ = error
    assert describe_end(wrapped, attempt, 1, 50).from_outside == from_outside


def cuda_error(code: int | None, cause: Exception | None = None) -> Exception:
    """Return torch's error, as its C++ code raises it."""
    error: Any = torch.AcceleratorError("CUDA error")
    if code is not None:
        error.error_code = code
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (cuda_error(719), 719),
        (cuda_error(None), 0),
        (cuda_error(2), None),
        (torch.OutOfMemoryError(), None),
        (cuda_error(719, torch.OutOfMemoryError()), None),
        (RuntimeError("CUDA error: unspecified launch failure"), None),
    ],
    ids=["a code", "none", "too little memory", "torch's own", "after too little memory", "words"],
)
def test_cuda_errors_are_classified_by_class_and_code(error: Exception, code: int | None) -> None:
    attempt = Attempt(1, "me", None, 40, metadata=Metadata(world_size=2))
    end = describe_end(error, attempt, 1, 50, "a node")
    assert (end.cuda_error, end.node) == (code, "a node")
    wrapped = RuntimeError("cannot load")
    wrapped.__context__ = error
    assert describe_end(wrapped, attempt, 1, 50).cuda_error == code


def killed_for_memory(node: str = "ab" * 28, used: str = "2.90") -> OutOfMemoryError:
    """Return Ray's error (2.60) for a worker that its memory monitor has killed, in a container with 3 GiB."""
    memory = f"Memory on the node (IP: 10.0.0.7, ID: {node}) was {used}GB used / 3.00GB limit (0.966910)"
    return OutOfMemoryError(
        f"1 worker(s) were killed due to the node running low on memory. {memory}\nOOM kill reason: Memory usage "
        "3113851289B exceeded threshold of 3060164198B (95.0% of 3221225472B limit)\nObject store memory usage: []\n"
        "Selected to kill: (Actor(04): job ID=01, pid=31835, actual memory used=2.70GB, worker ID=94)"
    )


FIGURES = f"out of memory: 2.90 of 3.00 GiB in use on node {'ab' * 6}, 2.70 GiB of them by this process"


@pytest.mark.parametrize("found_by", [lambda error: error, WorkerHealthCheckFailedError], ids=["itself", "a check"])
def test_an_out_of_memory_incident_gives_the_rank_and_the_memory_use(found_by: Any, control: Control) -> None:
    error = killed_for_memory()
    found = found_by(error) if found_by is not WorkerHealthCheckFailedError else found_by("failed", error)
    FailureCallback(control, FailureJudge(control, 3)).after_exception(None, {1: found})
    incident = control.channel.begin_group(worker_group(2, "a", "b"))
    assert (incident.cause, incident.detail) == (Cause.OUT_OF_MEMORY, f"rank 1: {FIGURES}")


def test_the_out_of_memory_message_of_an_older_ray_version_is_parsed() -> None:
    memory = (
        "(task ID: 41, name=f, pid=5, memory used=12.18GB) was running was 21.91GB / 33.28GB (0.658192), which exceeds"
    )
    error = OutOfMemoryError(
        f"Task was killed ...\nMemory on the node (IP: 172.17.0.2, ID: {'8c' * 28}) where the task {memory}"
    )
    node, figures = find_killed_for_memory(error)
    assert node == "8c" * 28
    assert figures.startswith("out of memory: 21.91 of 33.28 GiB in use on ")
    assert figures.endswith("12.18 GiB of them by this process")
    assert find_killed_for_memory(OutOfMemoryError("low"))[1] == "out of memory: low"
    assert find_killed_for_memory(LOST) == ("", "")


def test_in_survivor_mode_only_the_worker_that_ran_out_of_memory_is_replaced(control: Control) -> None:
    FailureCallback(control, FailureJudge(control, 3, survivor_mode=True), True).after_exception(
        None, {1: killed_for_memory()}
    )
    assert control.heard("log") == [f"1 worker lost: {FIGURES}; starting again, 2 of 3 SUNSPOT_MAX_FAILURES left"]


@pytest.mark.parametrize("survivor_mode", [False, True])
def test_repeated_out_of_memory_errors_end_the_run_despite_new_checkpoints(
    survivor_mode: bool, control: Control
) -> None:
    now = [1000.0]
    judge = FailureJudge(control, 3, survivor_mode=survivor_mode, clock=lambda: now[0])

    def lose(step: int, node: str = "a") -> bool:
        now[0] += 60
        control.end = GroupEnd(progress=Progress(1, step=step, committed=step))
        return judge({0: killed_for_memory(node)})

    assert all(lose(step) for step in (10, 20, 30))
    assert lose(31, "b"), "errors on different nodes are not a loop"
    assert not control.channel.group_end().counts.final
    assert not lose(40)
    assert control.channel.group_end().counts.final
    assert control.gave_up_for[0].endswith(
        "; 4 times in a row, each within 10 min of the previous one (SUNSPOT_MAX_FAILURES=3): give the workers more "
        "memory (worker.memory in the profile), or change the task so that it needs less"
    )


@pytest.mark.parametrize("attempt", [0, 1], ids=["before the first step", "later"])
@pytest.mark.parametrize("one_machine", [True, False])
def test_a_run_on_one_machine_ends_if_a_worker_runs_out_of_memory_before_the_first_step(
    one_machine: bool, attempt: int, control: Control
) -> None:
    control.end = GroupEnd(progress=Progress(attempt, step=9 * attempt))
    goes_on = FailureJudge(control, 3, survivor_mode=True, one_machine=one_machine)({0: killed_for_memory()})
    assert goes_on is not (one_machine and attempt == 0)
    if not goes_on:
        [said] = control.gave_up_for
        assert said == (
            f"1 worker lost: {FIGURES}; it happened before the first step, and would happen again: lower "
            "SUNSPOT_NUM_WORKERS, end other programs, or change the task so that it needs less"
        )
        assert control.channel.group_end().counts.final


@pytest.mark.parametrize("wrap", [ControllerError, lambda error: error], ids=["its workers", "the controller itself"])
@pytest.mark.parametrize(("one_machine", "starts"), [(True, 1), (False, 3)])
def test_a_controller_that_ran_out_of_memory_is_restarted_only_on_a_cluster(
    wrap: Callable[[Exception], Exception], one_machine: bool, starts: int
) -> None:
    error = wrap(killed_for_memory())
    outcome = GroupOutcome(find_reason(error, restart=False, one_machine=one_machine), error)
    begun = [TrainerStart()]
    while following := next_start(outcome, begun[-1], 3, survivor_mode=False):
        begun.append(following)
    assert len(begun) == starts
    for said in (str(outcome.failure), outcome.describe_error()):
        assert FIGURES in said
        assert "Object store" not in said


def test_the_control_channel_keeps_a_group_until_the_group_fails() -> None:
    control = ControlChannel()
    assert not control.has_group()
    control.begin_group(worker_group(1, "a"))
    control.restart_group(Incident(Cause.PREEMPTED), None)
    assert control.has_group(), "it saves"
    control.start_next_group("lost")
    assert not control.has_group()


def test_occasional_out_of_memory_errors_never_end_the_run(control: Control) -> None:
    now = [1000.0]
    judge = FailureJudge(control, 1, clock=lambda: now[0])
    for step in range(10, 100, 10):
        now[0] += 3600
        control.end = GroupEnd(progress=Progress(1, step=step, committed=step))
        assert judge({0: killed_for_memory()})


def test_the_run_ends_if_a_gpu_lacks_memory_on_every_start(control: Control) -> None:
    judge, attempt = FailureJudge(control, 2), Attempt(1, "me", None, 0, metadata=Metadata(world_size=1))
    for step in (10, 20, 30):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        end = describe_end(error, attempt, 0, step, "a")
        assert explain_error(end).cause is Cause.OUT_OF_MEMORY
        control.end = GroupEnd([end], Progress(1, step=step, committed=step))
        assert judge({0: error}) is (step < 30)
    assert "lower SUNSPOT_MICRO_BATCH_SIZE" in control.gave_up_for[0]


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError("Unable to allocate 14.2 GiB for an array with shape (61440, 61440)"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("DataLoader worker (pid 37) is killed by signal: Bus error. It is possible that"), True),
        (RuntimeError("DataLoader worker (pid(s) 37, 38) exited unexpectedly"), False),
        (KeyError("out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error: Exception, short: bool) -> None:
    attempt = Attempt(1, "me", None, 40, metadata=Metadata(world_size=2))
    assert describe_end(error, attempt, 1, 50).out_of_memory is short


def test_the_error_that_a_worker_raised_is_the_cause_of_the_restart() -> None:
    [bug], [peer] = failed(1, step=20), failed(0, type="RuntimeError", message="[gloo] Connection closed by peer")
    control = ControlChannel()
    for error in (peer, bug):
        control.add_incident_facts(explain_error(error))
    incident = control.begin_group(worker_group(2, "a", "b"))
    said = "rank 1: NameError: name 'functional' is not defined, in loss at /mine/buggy.py:6, after step 20"
    assert (incident.cause, incident.detail) == (Cause.WORKER_FAILED, said)


def test_nodes_with_broken_gpus_are_excluded_before_the_next_group_starts(control: Control) -> None:
    """The judge asks about nodes whose ranks had a CUDA error, and about nodes whose ranks were lost without an
    error.
    """
    seen: dict[str, Any] = {"type": "AcceleratorError", "message": "CUDA error", "from_outside": True}
    met, other = (replace(error, node=f"node {error.failure.rank}") for error in failed(1, 2, world_size=4, **seen))
    nodes = {rank: f"node {rank}" for rank in range(4)}
    control.end = replace(group_end([replace(met, cuda_error=719), other]), nodes=nodes)
    asked = Suspects()

    def leave_out(suspects: Suspects) -> list[str]:
        asked.update(suspects)
        return ["node a left out: GPU 3 cannot be used"]

    assert FailureJudge(control, 3, leave_out)({1: LOST, 2: RuntimeError(), 3: LOST})
    assert asked == {"node 1": 719, "node 3": None}
    assert control.heard("add_left_out") == [["node a left out: GPU 3 cannot be used"]]
    end = "; node a left out: GPU 3 cannot be used; starting again, 2 of 3 SUNSPOT_MAX_FAILURES left"
    assert control.said[0].endswith(end)


def test_in_survivor_mode_a_lost_worker_is_identified_by_its_node(control: Control) -> None:
    """Ray numbers the workers in the order in which it started them, and the workers number themselves as they
    connect.
    """
    control.end = replace(group_end([]), nodes={0: "a", 1: "b"}, lost_on=["a"])
    asked = list[Suspects]()

    def leave_out(suspects: Suspects) -> list[str]:
        asked.append(suspects)
        return []

    assert FailureJudge(control, 3, leave_out, survivor_mode=True)({1: LOST})
    assert asked == [{"a": None}]
    control.channel.add_loss("a", Incident(Cause.WORKER_LOST, "rank 0 on node a"), others_train=True)
    control.channel.set_counts(FailureCounts())
    assert not control.channel.group_end().lost_on, "it was asked about"


def test_the_run_ends_if_it_cannot_continue_without_a_broken_node(control: Control) -> None:
    def refuse(suspects: Suspects) -> list[str]:
        raise SunspotError("a GPU broke: a: GPU 3 cannot be used; the run cannot continue without its head node")

    assert not FailureJudge(control, 3, refuse)({1: LOST})
    reason = "; a GPU broke: a: GPU 3 cannot be used; the run cannot continue without its head node"
    assert control.gave_up_for[0].endswith(reason)


def test_an_unexpected_error_while_excluding_nodes_does_not_end_the_run(control: Control) -> None:
    def fail(suspects: Suspects) -> list[str]:
        raise AttributeError("drain_node")

    assert FailureJudge(control, 3, fail)({1: LOST})
    assert "; could not check for broken GPUs: drain_node; starting again" in control.said[0]


def test_a_restart_error_is_recognized_by_its_class_and_is_not_a_failure(control: Control) -> None:
    """Ray Train's controller gets this error from a worker. Errors that only look similar are ordinary failures."""
    raised = UserExceptionWithTraceback(GroupRestartError(), "a traceback")
    restart = WorkerStatus(running=False, error=pickle.loads(pickle.dumps(raised)))
    group = WorkerGroupPollStatus({0: restart})
    assert DefaultFailurePolicy(ALWAYS_CONTINUE).make_decision(group.get_worker_group_error()) is FailureDecision.RETRY

    callback = FailureCallback(control, FailureJudge(control, 0))
    control.channel.begin_group(worker_group(1))
    callback.after_exception(None, group.errors)
    assert control.told == [("end_group", ())], "no failure is counted"
    assert not control.channel.has_group(), "a stop request does not wait for a group that has ended"
    with pytest.raises(ControllerError) as raised:
        callback.after_exception(None, {1: ValueError(str(GroupRestartError()))})
    assert control.channel.begin_group(worker_group(1)).loss == "rank 1: the worker group is ending for a restart"
    policy = DefaultFailurePolicy(ALWAYS_CONTINUE)
    assert policy.make_decision(raised.value) is FailureDecision.RAISE
    ended = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(getattr(find_worker_error(ended), "worker_failures", {})[1], ValueError)


def test_in_survivor_mode_a_restart_ends_the_trainer(control: Control) -> None:
    judge = FailureJudge(control, 3, survivor_mode=True)
    with pytest.raises(ControllerError):
        FailureCallback(control, judge, survivor_mode=True).after_exception(None, {0: GroupRestartError()})
    assert not control.told, "no failure is counted"


def test_a_worker_that_does_not_answer_health_checks_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", "600")
    silent = WorkerStatus(running=False, error=WorkerHealthCheckTimeoutError("A worker health check has been hanging."))
    judged: dict[int, Exception] = {}

    def judge(errors: dict[int, Exception]) -> bool:
        judged.update(errors)
        return True

    status = WorkerGroupPollStatus({2: silent})
    FailureCallback(LocalControl(), judge, survivor_mode=True).after_exception(None, status.errors)
    decision = DefaultFailurePolicy(ALWAYS_CONTINUE).make_decision(status.get_worker_group_error())
    assert decision is FailureDecision.RETRY, "only it is replaced, and the others keep training"
    assert isinstance(judged[2], RayActorError)
