"""Tests of NaN or infinite losses and weights: their detection, the checkpoints kept, and the run's end."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sunspot.errors import DivergedError
from sunspot.observe.metrics import RecentMeans
from sunspot.run import Run, open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.checkpoints import (
    NAN_SINCE,
    NAN_WEIGHTS,
    Checkpoint,
    Unusable,
    best_first,
    expired,
    find_newest_good,
    list_checkpoints,
)
from sunspot.settings import Settings
from sunspot.train.loop import train
from sunspot.train.nan_watch import NanWatch, has_finite_weights
from sunspot.train.worker import GroupStart, Worker
from tests.harness.loop import QuietWorker, join_run, keep_run, make_worker, plan_without_evaluation
from tests.harness.process_group import in_processes
from tests.harness.runs import begin, commit, start

NAN, INF = math.nan, math.inf


def watched(
    group: dist.ProcessGroup,
    model: nn.Module | None = None,
    before: dict[str, Any] | None = None,
    limit: int = 3,
    weights_checked: bool = True,
) -> NanWatch:
    return NanWatch(Settings(max_nan_windows=limit), group, before or {}, model or nn.Linear(2, 2), weights_checked)


def look(watch: NanWatch, step: int, loss: float, newest: float | None = None, saves: bool = False) -> bool:
    """Close a window of ten steps, and return whether the run ends."""
    last = torch.tensor([loss if newest is None else newest, 1.0])
    watch.look({"step": step, "steps": 10, "loss": loss}, [{"loss": last}], saves)
    return watch.verdict(last=False) is not None


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_a_run_ends_after_consecutive_windows_with_a_loss_that_is_not_finite(
    loss: float, group: dist.ProcessGroup
) -> None:
    watch = watched(group)
    assert not look(watch, 10, 1.0)
    assert not look(watch, 20, loss)
    assert watch.state == {"nan_since": 11, "nan_windows": 1, "nan_weights": 0}
    assert not look(watch, 30, 1.0)
    assert watch.state == {}
    assert [look(watch, step, loss) for step in (40, 50, 60)] == [False, False, True]
    assert str(watch.verdict(last=False)).startswith(
        "the loss has not been finite since step 31, for 3 windows of metrics in a row (SUNSPOT_MAX_NAN_WINDOWS=3): "
    )


def test_nan_rows_and_steps_skipped_by_a_loss_scaler_do_not_end_a_run(group: dist.ProcessGroup) -> None:
    """The mean of each window is NaN, but its newest step is not."""
    watch = watched(group, limit=1)
    assert not any(look(watch, step, NAN, newest=0.5) for step in range(10, 100, 10))
    assert watch.state == {}


def test_metrics_whose_names_end_with_loss_are_checked_if_no_metric_is_named_loss(group: dist.ProcessGroup) -> None:
    record = {"step": 10, "steps": 10, "generator_loss": NAN, "ratio": NAN}
    newest = {"generator_loss": torch.tensor([NAN]), "ratio": torch.tensor([NAN])}
    for more, windows in (({}, 1), ({"loss": 1.0}, 0)):
        watch = watched(group)
        watch.look({**record, **more}, [newest], saves=False)
        assert watch.state.get("nan_windows", 0) == windows


def test_the_count_of_nan_windows_continues_after_a_restart(group: dist.ProcessGroup) -> None:
    before: dict[str, Any] = {}
    ended = []
    for step in (10, 20, 30):
        watch = watched(group, before=before)
        ended.append(look(watch, step, NAN))
        before = {"loss": NAN, **watch.state}
    assert ended == [False, False, True]
    assert before[NAN_SINCE] == 1


def test_a_run_without_a_nan_limit_only_warns(group: dist.ProcessGroup) -> None:
    model = nn.Linear(2, 2)
    watch = watched(group, model, limit=0)
    nn.init.constant_(model.weight, NAN)
    assert not any(look(watch, step, NAN, saves=True) for step in range(10, 100, 10))
    assert watch.verdict(last=True) is None
    assert (watch.state["nan_since"], watch.state["nan_windows"], watch.state["nan_weights"]) == (1, 9, 0)


def test_infinite_weights_after_the_newest_step_are_detected_when_a_checkpoint_is_saved(
    group: dist.ProcessGroup,
) -> None:
    """The loss reveals such weights only in the next step."""
    model = nn.Linear(2, 2)
    watch = watched(group, model)
    with torch.no_grad():
        model.bias[1] = INF
    assert not look(watch, 10, 1.0)
    assert watch.state == {}, "weights are not read if nothing is saved"
    assert not look(watch, 20, 1.0, saves=True)
    assert watch.state == {"nan_since": 20, "nan_windows": 0, "nan_weights": 1}
    look(watch, 30, NAN)
    assert watch.state == {"nan_since": 20, "nan_windows": 1, "nan_weights": 1}
    assert "since step 20, up to the last step" in str(watch.verdict(last=True))


def test_weights_that_are_infinite_from_the_beginning_are_accepted(group: dist.ProcessGroup) -> None:
    """Such weights can be a mask that is stored as a parameter. Frozen parameters and buffers are never checked."""
    model = nn.Linear(2, 2)
    nn.init.constant_(model.bias, -INF)
    watch = watched(group, model)
    for _ in range(2):
        look(watch, 10, 1.0, saves=True)
        assert watch.state == {"nan_accepted": 1}
        look(watch, 20, NAN)
        assert watch.state == {"nan_accepted": 1, "nan_since": 11, "nan_windows": 1, "nan_weights": 0}
        look(watch, 30, 1.0)
        watch = watched(
            group, model, watch.state, weights_checked=False
        )  # the state of a group that continues in place
    assert not watched(group, before=watch.state).state, "the checkpoint's weights are finite by now"
    model.bias.requires_grad_(False)
    model.register_buffer("mask", torch.full((2,), -INF))
    assert has_finite_weights(model)


def test_the_next_group_detects_nan_weights_in_a_state_that_was_not_checked(group: dist.ProcessGroup) -> None:
    """The weights of a live state or a copy in memory were not checked before the next group continues from it."""
    model = nn.Linear(2, 2)
    nn.init.constant_(model.bias, NAN)
    watch = watched(group, model, {"loss": 1.0}, weights_checked=False)
    look(watch, 10, NAN, saves=True)
    assert watch.state == {"nan_since": 1, "nan_windows": 1, "nan_weights": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_large_weights_of_any_type_count_as_finite(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((70_000,), 30_000.0, dtype=dtype))
    assert has_finite_weights(model), "the sum does not fit into a float16"
    with torch.no_grad():
        model.weight[1] = NAN
    assert not has_finite_weights(model)


class Foreign(nn.Module):
    """A model of another library, such as Keras, with weights only in its extra state."""

    def get_extra_state(self) -> Any:
        return {"model": [torch.tensor([1.0, NAN])], "rounds": 3}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


def test_the_state_of_a_model_without_parameters_is_checked() -> None:
    assert not has_finite_weights(Foreign())
    assert has_finite_weights(nn.Identity())


def test_all_ranks_agree_on_a_nan_loss(tmp_path: Path) -> None:
    """A rank without rows in the newest step decides like the others."""

    def act(group: dist.ProcessGroup) -> tuple[dict[str, float], bool]:
        watch = watched(group, limit=1)
        newest = [[{"loss": torch.tensor([NAN])}], []][group.rank()]
        watch.look({"step": 10, "steps": 10, "loss": NAN}, newest, saves=False)
        return watch.state, watch.verdict(last=False) is not None

    states = in_processes(tmp_path, 2, act)
    assert states == [({"nan_since": 1, "nan_windows": 1, "nan_weights": 0}, True)] * 2


def test_a_mean_that_is_not_finite_does_not_affect_later_means() -> None:
    recent = RecentMeans(1000, {})
    recent.add(100, {"loss": 1.0})
    recent.add(100, {"loss": NAN})
    assert math.isnan(recent.newest["loss"])
    recent.add(100, {"loss": 2.0})
    assert recent.newest == {"recent_rows": 300, "loss": 1.5}


# ---------------------------------------------------------------------------------------------------------- checkpoints


def checkpoint(step: int, **metrics: float) -> Checkpoint:
    return Checkpoint(str(step), step, 1, 100, 100, 1, metrics)


@pytest.mark.parametrize("order", ["min", "max"])
def test_checkpoints_with_metrics_or_weights_that_are_not_finite_are_ranked_last(order: str) -> None:
    given = [
        *(checkpoint(1, loss=0.5), checkpoint(2, loss=INF), checkpoint(3, loss=-INF), checkpoint(4, loss=NAN)),
        *(checkpoint(5, loss=0.1, nan_weights=1), checkpoint(6, loss=9.9, nan_weights=1), checkpoint(7, loss=0.5)),
    ]
    steps = [each.step for each in best_first(given, "loss", order)]
    assert steps[:5] == [7, 1, 4, 3, 2]


def test_the_newest_checkpoint_with_finite_weights_is_kept() -> None:
    accurate = {"accuracy": 0.1, "nan_weights": 1}
    given = [
        checkpoint(1, accuracy=0.9),
        checkpoint(2, accuracy=0.3),
        checkpoint(3, **accurate),
        checkpoint(4, **accurate),
    ]
    assert [each.step for each in expired(given, 1, "accuracy", "max")] == [3]


def test_a_run_resumes_from_the_newest_checkpoint_with_finite_weights(tmp_path: Path) -> None:
    run = begin(open_run(str(tmp_path), "run"))
    attempt = start(run, "job")
    good = [commit(run, attempt, step) for step in (3, 6)]
    bad = [commit(run, attempt, step, nan_weights=1) for step in (9, 12)]
    found, passed = find_newest_good(run, read_attempts(run))
    assert found == good[1]
    assert [(each.name, each.kind) for each in passed] == [(each.name, Unusable.NOT_FINITE) for each in reversed(bad)]


def test_a_run_resumes_from_a_checkpoint_with_nan_weights_if_no_other_checkpoint_exists(tmp_path: Path) -> None:
    run = begin(open_run(str(tmp_path), "run"))
    attempt = start(run, "job")
    newest = [commit(run, attempt, step, nan_weights=1) for step in (3, 6)][-1]
    assert find_newest_good(run, read_attempts(run)) == (newest, ())


# ----------------------------------------------------------------------------------------------------------- whole runs

DIVERGES = """
import torch
from sunspot.tasks.images import loss as measure
from tests.tasks.tiny import build_model, build_optimizer, schedule
from tests.unit.test_nan_watch import STEP

def loss(model, batch):
    STEP[0] += 1
    losses, metrics = measure(model, batch)
    return losses * (float("nan") if STEP[0] >= STEP[1] else 1), metrics
"""

STEP = [0, 0]
"""Number of steps taken in this process, and the first step whose loss is not finite."""


@pytest.fixture
def diverging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the settings of a run of twelve one-step windows. The loss is NaN from the sixth step on."""
    (tmp_path / "diverges.py").write_text(DIVERGES)
    monkeypatch.syspath_prepend(tmp_path)
    STEP[:] = [0, 6]
    plain = {"task": "diverges", "num_workers": "1", "global_batch_size": 25, "max_steps": 12}
    return {**plain, "checkpoint_every_steps": 1, "storage_path": str(tmp_path / "runs"), "run_name": "run"}


def join(group: dist.ProcessGroup, owner: str, **settings: Any) -> tuple[Run, Worker]:
    plan = plan_without_evaluation(Settings(**settings))
    run = keep_run(plan)
    return run, join_run(plan, run, owner, group)


def test_a_run_that_diverged_restarts_from_a_finite_checkpoint(
    diverging: dict[str, Any], group: dist.ProcessGroup
) -> None:
    run, worker = join(group, "one", **diverging, max_nan_windows=2)
    with pytest.raises(
        DivergedError, match=r"^the loss has not been finite since step 6, for 2 windows of metrics in a row"
    ):
        train(worker)
    assert worker.step == 7, "and takes no further step"
    kept = list_checkpoints(run)
    assert [each.step for each in kept if each.finite][-1] == 5
    assert [each.step for each in kept if not each.finite] == [6], "the state that ended the run is not saved"
    assert kept[-1].metrics[NAN_WEIGHTS] == 1

    STEP[:] = [0, 100]  # the loss stays finite from now on
    _, worker = join(group, "two", **diverging)
    assert worker.group_start.step == 5
    train(worker)
    worker.checkpoints.close(finished=True)
    found, _ = find_newest_good(run, read_attempts(run))
    assert found
    assert (found.step, found.finite) == (12, True)


def test_a_group_that_continues_without_a_restart_keeps_checking_the_weights(group: dist.ProcessGroup) -> None:
    built = make_worker(plan_without_evaluation(Settings(task="tests.tasks.tiny", num_workers="1")), group)
    for parameter in built.learner.model.parameters():
        nn.init.constant_(parameter, INF)

    def state_of_group(step: int) -> dict[str, Any]:
        group_start = GroupStart(step, True, {}, in_place=True, weights_checked=False)
        idle: Any = None
        return QuietWorker(built.learner, group_start, idle, idle, idle, idle, None, ExitStack())._nan_watch.state

    assert state_of_group(5) == {}
    assert state_of_group(0) == {"nan_accepted": 1}, "the task began with infinite weights"


@pytest.mark.parametrize(("limit", "ends"), [(100, True), (0, False)])
def test_a_run_that_ends_with_a_nan_loss_has_failed(
    limit: int, ends: bool, diverging: dict[str, Any], group: dist.ProcessGroup
) -> None:
    worker = make_worker(plan_without_evaluation(Settings(**diverging, max_nan_windows=limit)), group)
    if ends:
        with pytest.raises(DivergedError, match=r"since step 6, up to the last step \(SUNSPOT_MAX_NAN_WINDOWS=0"):
            train(worker)
    else:
        train(worker)
    assert worker.step == 12
