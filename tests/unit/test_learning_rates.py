"""Tests that each step has the learning rates of a plain PyTorch loop, no matter where a run resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from sunspot.data.order import Steps
from sunspot.data.source import read_rows
from sunspot.errors import SettingsError
from sunspot.plan import Plan
from sunspot.run import open_run
from sunspot.run.attempts import read_attempts
from sunspot.settings import Settings
from sunspot.tasks import load_task
from sunspot.tasks.defaults import PlainTask
from sunspot.tasks.signatures import refuse_other_arguments
from sunspot.train import build
from sunspot.train.learning_rates import MAKERS_OF_RATES, LearningRates, can_jump, jump, set_options
from sunspot.train.start_report import describe_new_length
from tests.harness.loop import plan_without_evaluation, train_group
from tests.harness.training import weights
from tests.tasks import scheduled

STEPS = 40

NO_SOURCE: Any = None


def plan_of(settings: Settings, total_steps: int = STEPS) -> Plan:
    """Return a plan of two epochs without data."""
    return Plan(settings, NO_SOURCE, None, Steps(total_steps // 2, 1), total_steps)


def rates_of(module: Any, settings: Settings, total_steps: int = STEPS) -> LearningRates:
    """Return the learning rates of a task with a single-layer model."""
    task = PlainTask(module, settings)
    optimizer, _ = build.build_optimizer(settings, task, nn.Linear(2, 2))
    return LearningRates(plan_of(settings, total_steps), task, optimizer)


def play_plain_loop(module: Any, settings: Settings) -> list[list[dict[str, Any]]]:
    """Return the groups of an optimizer at each step of a plain loop, without their parameters."""
    optimizer = module.build_optimizer(nn.Linear(2, 2), settings)
    scheduler, seen = module.build_scheduler(optimizer, settings, STEPS), []
    for _ in range(STEPS):
        seen.append([{**group, "lr": float(group["lr"]), "params": None} for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def module_of(**functions: Any) -> ModuleType:
    """Return a task module with these functions, and with an optimizer if they do not include one."""
    module = ModuleType("mine")
    vars(module).update({"build_optimizer": scheduled.build_optimizer, **functions})
    return module


@pytest.mark.parametrize("kind", scheduled.SCHEDULERS)
@pytest.mark.parametrize("makes", ["SGD", "AdamW of tensors"])
def test_each_parameter_group_has_the_same_options_as_in_a_plain_loop(kind: str, makes: str) -> None:
    """This holds for any step from which a run resumes, and for any rates in its checkpoint."""

    def build_adam(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        groups = [{"params": [model.weight], "lr": torch.tensor(0.02)}, {"params": [model.bias]}]
        return torch.optim.AdamW(groups, torch.tensor(0.05), (0.8, 0.99), foreach=False)

    module = module_of(build_scheduler=scheduled.build_scheduler)
    if makes != "SGD":
        module.build_optimizer = build_adam
    settings = Settings(task_args={"scheduler": kind}, learning_rate=7.0)
    expected = play_plain_loop(module, settings)
    assert expected[3] != expected[4]

    task = PlainTask(module, settings)
    rel = 1e-10 if makes == "SGD" else 1e-5  # a rate that is a tensor is a float32
    for order in (range(STEPS), range(17, STEPS), [30, 30, 5, 39, 0]):
        optimizer, _ = build.build_optimizer(settings, task, nn.Linear(2, 2))
        rates = LearningRates(plan_of(settings), task, optimizer)
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group |= {"momentum": 0.1} if makes == "SGD" else {"betas": (0.1, 0.99)}
        optimizer.load_state_dict(saved)
        for step in order:
            set_options(optimizer, rates.at(step, STEPS))
            for group, there in zip(optimizer.param_groups, expected[step], strict=True):
                assert isinstance(group["lr"], torch.Tensor) is (makes != "SGD")
                assert float(group["lr"]) == pytest.approx(there["lr"], rel=rel, abs=1e-12), step
                if kind in ("OneCycleLR", "CyclicLR", "cycle after a warm-up"):
                    name = "momentum" if makes == "SGD" else "betas"
                    assert group[name] == pytest.approx(there[name], rel=1e-12), step
                assert "max_lr" not in group, "options that only the scheduler needs stay in the stand-in"


@pytest.mark.parametrize("kind", ["OneCycleLR", "CosineAnnealingWarmRestarts"])
def test_a_killed_and_resumed_run_with_a_scheduler_matches_a_plain_loop(kind: str, tmp_path: Path) -> None:
    settings = Settings(
        **{"storage_path": str(tmp_path), "run_name": "run", "task": "tests.tasks.scheduled", "seed": 3},
        **{"task_args": {"scheduler": kind, "width": 2}, "global_batch_size": 50, "max_steps": 12},
        **{"checkpoint_every_s": 0, "checkpoint_every_steps": 3},
    )
    plan = plan_without_evaluation(settings)
    train_group(plan, 2, killed_at=8)
    train_group(plan, 1)
    run = open_run(str(tmp_path), "run")
    assert [attempt.step for attempt in read_attempts(run)] == [0, 6]

    torch.manual_seed(settings.seed)
    model = scheduled.build_model(settings, plan.source)
    optimizer = scheduled.build_optimizer(model, settings)
    scheduler = scheduled.build_scheduler(optimizer, settings, plan.total_steps)
    for step in range(plan.total_steps):
        rows = read_rows(plan.source, *plan.steps.bounds(step))
        losses, _ = scheduled.loss(model, {name: torch.from_numpy(column) for name, column in rows.items()})
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        scheduler.step()
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=1e-5)


def test_several_optimizers_each_follow_their_own_scheduler() -> None:
    def build_optimizer(model: Any, settings: Settings) -> Any:
        return {
            "generator": torch.optim.Adam([model.weight], 0.01, betas=(0.5, 0.9)),
            "discriminator": torch.optim.SGD([model.bias], 0.1),
        }

    def build_scheduler(optimizer: Any, settings: Settings, total_steps: int) -> Any:
        return {
            "generator": OneCycleLR(optimizer["generator"], 0.02, total_steps),
            "discriminator": StepLR(optimizer["discriminator"], 10, 0.1),
        }

    rates = rates_of(module_of(build_optimizer=build_optimizer, build_scheduler=build_scheduler), Settings())
    optimizers = build_optimizer(nn.Linear(2, 2), Settings())
    schedulers = build_scheduler(optimizers, Settings(), STEPS)
    for step in range(STEPS):
        of_generator, of_discriminator = rates.at(step, STEPS)
        for name in ("lr", "betas"):
            assert of_generator[name] == pytest.approx(optimizers["generator"].param_groups[0][name], rel=1e-12)
        assert of_discriminator == {"lr": pytest.approx(optimizers["discriminator"].param_groups[0]["lr"])}
        for name in optimizers:
            optimizers[name].step()
            schedulers[name].step()
    assert rates.describe(STEPS) == [
        "learning rate of generator: 8.0e-04 at first, 2.0e-02 at most, 8.0e-08 at last",
        "learning rate of discriminator: 1.0e-01 at first, 1.0e-01 at most, 1.0e-04 at last",
    ]


def test_a_scheduler_can_get_the_number_of_steps_per_epoch() -> None:
    def build_scheduler(optimizer: Any, settings: Settings, total_steps: int, steps_per_epoch: int) -> Any:
        return MultiStepLR(optimizer, [steps_per_epoch], 0.1)

    refuse_other_arguments("mine", module_of(build_scheduler=build_scheduler))

    rates = rates_of(module_of(build_scheduler=build_scheduler), Settings())
    assert [rates.at(step, STEPS)[1]["lr"] for step in (19, 20)] == pytest.approx([0.05, 0.005])


MAKERS: list[Callable[[Any, int, float], Any]] = [
    lambda optimizer, steps, share: ConstantLR(optimizer, share, steps),
    lambda optimizer, steps, share: CosineAnnealingLR(optimizer, steps, 0.01 * share),
    lambda optimizer, steps, share: CyclicLR(optimizer, 0.01 * share, 0.05, steps),
    lambda optimizer, steps, share: CyclicLR(optimizer, 0.01 * share, 0.05, steps, mode="triangular2"),
    lambda optimizer, steps, share: ExponentialLR(optimizer, share),
    lambda optimizer, steps, share: LambdaLR(optimizer, lambda step: share + 1 / (1 + step)),
    lambda optimizer, steps, share: LinearLR(optimizer, share, 0.9, steps),
    lambda optimizer, steps, share: MultiStepLR(optimizer, [steps, steps + 2, 2 * steps], share),
    lambda optimizer, steps, share: OneCycleLR(optimizer, 0.05, 100, pct_start=0.9 * share),
    lambda optimizer, steps, share: PolynomialLR(optimizer, steps, 3 * share),
    lambda optimizer, steps, share: StepLR(optimizer, steps, share),
]


@given(
    st.lists(st.tuples(st.sampled_from(MAKERS), st.integers(1, 15), st.floats(0.1, 1)), min_size=1, max_size=3),
    st.integers(0, 50),
)
def test_jumping_to_a_step_gives_the_same_rate_as_taking_all_steps(made: Any, step: int) -> None:
    def build(optimizer: Any, *_: Any) -> Any:
        parts = [make(optimizer, steps, share) for make, steps, share in made]
        return SequentialLR(optimizer, parts, [9 * n for n in range(1, len(parts))]) if len(parts) > 1 else parts[0]

    played, asked = (torch.optim.AdamW([nn.Parameter(torch.zeros(1))], 0.05) for _ in range(2))
    scheduler = build(played)
    for _ in range(step):
        played.step()
        scheduler.step()
    asked_scheduler = build(asked)
    if not can_jump(asked_scheduler):  # then its steps are taken one by one
        assert any(isinstance(part, MAKERS_OF_RATES) for part in asked_scheduler._schedulers)
        return
    jump(asked_scheduler, step)
    assert asked.param_groups[0]["lr"] == pytest.approx(played.param_groups[0]["lr"], rel=1e-9, abs=1e-12)


def test_a_run_that_resumes_at_a_late_step_does_not_compute_all_earlier_learning_rates() -> None:
    asked: list[int] = []
    module = module_of(build_scheduler=lambda optimizer, *_: LambdaLR(optimizer, lambda n: asked.append(n) or 0.5))
    assert rates_of(module, Settings()).at(50_000, 10**6)[0]["lr"] == 0.01
    assert len(asked) < 5


def test_a_scheduler_starts_from_the_rate_set_by_its_constructor() -> None:
    class Begun(ExponentialLR):
        def __init__(self, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.5
            super().__init__(optimizer, 0.9)

        def get_lr(self) -> Any:
            return [base * 0.9**self.last_epoch for base in self.base_lrs]

    module = module_of(build_scheduler=lambda optimizer, *_: Begun(optimizer))
    expected = play_plain_loop(module, Settings())
    rates = rates_of(module, Settings())
    assert rates.at(7, STEPS)[1]["lr"] == pytest.approx(expected[7][1]["lr"]) == pytest.approx(0.5 * 0.9**7)


def test_a_scheduler_continues_from_the_step_to_which_the_task_advanced_it() -> None:
    def build_scheduler(optimizer: Any, settings: Settings, total_steps: int) -> Any:
        scheduler = ExponentialLR(optimizer, 0.9)
        optimizer.step()
        scheduler.step()
        return scheduler

    rates = rates_of(module_of(build_scheduler=build_scheduler), Settings())
    assert rates.at(3, STEPS)[1]["lr"] == pytest.approx(0.05 * 0.9**4)


def build_for_another(optimizer: Any) -> Any:
    return ConstantLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (ReduceLROnPlateau, "a ReduceLROnPlateau, which follows a metric, .* choose another scheduler"),
        (lambda optimizer: None, r"a NoneType; return a scheduler from torch\.optim, or a dict of several schedulers"),
        (lambda optimizer: {"first": 1.0}, "a float; return a scheduler"),
        (build_for_another, "a ConstantLR for a different optimizer; create it with the optimizer that"),
    ],
)
def test_a_scheduler_that_cannot_set_the_rates_is_rejected(build: Callable[[Any], Any], says: str) -> None:
    rates = rates_of(module_of(build_scheduler=lambda optimizer, *_: build(optimizer)), Settings(task="mine"))
    with pytest.raises(SettingsError, match=f"TASK=mine: its build_scheduler returned {says}"):
        rates.at(0, STEPS)


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        ({"build_scheduler": lambda o, *_: OneCycleLR(o, 0.1, 30)}, "step 32 of 40 cannot .*Tried to step 31 times"),
        ({"schedule": lambda step, total: [1.0, 0.5, 0.25][step]}, "step 4 of 40 cannot be computed: IndexError"),
    ],
)
def test_a_step_without_a_valid_learning_rate_is_reported_before_training(functions: dict[str, Any], says: str) -> None:
    rates = rates_of(module_of(**functions), Settings(task="mine"))
    with pytest.raises(SettingsError, match=f"TASK=mine: the learning rate of {says}"):
        rates.describe(STEPS)


def test_the_learning_rates_of_each_parameter_group_are_described() -> None:
    module = module_of(schedule=lambda step, total: 1 - step / 50)
    assert rates_of(module, Settings()).describe(STEPS) == [
        "learning rate of group 1: 2.0e-02 at first, 2.0e-02 at most, 4.4e-03 at last",
        "learning rate of group 2: 5.0e-02 at first, 5.0e-02 at most, 1.1e-02 at last",
    ]
    del module.build_optimizer
    assert rates_of(module, Settings(learning_rate=1e-3)).describe(STEPS) == [
        "learning rate: 1.0e-03 at first, 1.0e-03 at most, 2.2e-04 at last"
    ]


def test_the_learning_rates_of_many_parameter_groups_are_described_in_a_few_lines() -> None:
    def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5 ** min(n, 30)} for n in range(40)]
        return torch.optim.SGD(groups)

    lines = rates_of(module_of(build_optimizer=build_optimizer), Settings()).describe(STEPS)
    assert len(lines) == 7
    assert lines[-1] == "learning rate: other rates in 34 more groups"


def test_the_learning_rates_of_a_long_run_are_described_from_a_sample_of_its_steps() -> None:
    asked: list[int] = []
    module = module_of(schedule=lambda step, total: asked.append(step) or float(step == 12) + 0.1)
    [line, _] = rates_of(module, Settings(), 10**9).describe(10**9)
    assert len(asked) < 25_000
    assert (asked[0], asked[-1]) == (0, 10**9 - 1)
    assert "2.2e-02 at most" in line


def test_a_jump_of_the_learning_rate_after_a_changed_run_length_is_reported() -> None:
    def describe(module: Any, before: int) -> str:
        rates = rates_of(module, Settings(), 120)
        learner: Any = SimpleNamespace(rates=rates, task=rates._task, plan=plan_of(Settings(), 120))
        return describe_new_length(learner, step=80, before=before)

    cycle = module_of(build_scheduler=lambda optimizer, _, total: PolynomialLR(optimizer, total))
    assert describe(cycle, 81) == (
        "SUNSPOT_EPOCHS and SUNSPOT_MAX_STEPS now give 120 steps instead of 81: "
        "the learning rate continues at 0.00667 instead of 0.000247"
    )
    assert not describe(cycle, 120)
    assert not describe(cycle, 0)
    assert not describe(module_of(schedule=lambda *_: 1.0), 80)


def test_an_optimizer_that_already_has_a_scheduler_is_rejected() -> None:
    def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        MultiplicativeLR(optimizer, lambda _: 0.5)
        return optimizer

    settings = Settings(task="mine")
    task = PlainTask(module_of(build_optimizer=build_optimizer), settings)
    with pytest.raises(SettingsError, match=r"TASK=mine: build_optimizer creates a scheduler.* build_scheduler"):
        task.build_optimizer(nn.Linear(2, 2), settings)


@pytest.mark.parametrize(
    ("library", "why"),
    [("build_keras", "Keras model has"), ("build_trainer", "its Trainer"), ("build_trees", "trees")],
)
def test_a_build_scheduler_function_is_rejected_if_the_library_has_its_own_scheduler(
    library: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"mine_{library}.py").write_text(f"def {library}(*_): ...\ndef build_scheduler(*_): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match=f"build_scheduler would never be called: .*{why}"):
        load_task(Settings(task=f"mine_{library}"))


def test_the_learning_rate_follows_the_schedule_of_the_task() -> None:
    settings = Settings(task="tests.tasks.tiny", learning_rate=0.5)
    task = load_task(settings)
    optimizer, _ = build.build_optimizer(settings, task, nn.Linear(2, 2))
    rates = LearningRates(plan_of(settings), task, optimizer)
    assert [rates.at(step, STEPS) for step in (0, 30)] == [[{"lr": 0.5 * task.schedule(s, STEPS)}] for s in (0, 30)]
