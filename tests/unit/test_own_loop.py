"""Tests that a task's own loop takes the same steps as the default loop, and that invalid loops are rejected."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from sunspot.data.source import EmptySource
from sunspot.errors import SettingsError
from sunspot.parallel.sharding import shard_model
from sunspot.plan import make_plan
from sunspot.settings import Settings
from sunspot.tasks import gan, load_task
from sunspot.tasks.defaults import Optimizers, PlainTask
from sunspot.train.loop import train
from sunspot.train.worker import GroupStart, Worker
from tests.harness import REPOSITORY
from tests.harness.constants import SetConstants
from tests.harness.loop import losses_of_ranks, make_worker, plan_without_evaluation, train_ranks

BATCH = {"global_batch_size": 25, "max_steps": 12}
"""Settings of steps whose rows are unevenly divided between two workers, and among three."""


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tasks of docs/own-loop.md importable."""
    text = (REPOSITORY / "docs/own-loop.md").read_text()
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", text, re.S | re.M)
    for name, text in blocks:
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)  # of another test
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("task", ["my_loop", "my_parts", "tests.tasks.nano", "sunspot.tasks.gan"])
def test_losses_do_not_depend_on_the_number_of_workers(task: str, examples: None, tmp_path: Path) -> None:
    settings = {**BATCH, "task": task, "micro_batch_size": 4, "learning_rate": 2e-4}
    alone = losses_of_ranks(tmp_path / "1", 1, **settings)
    assert len(alone) == 12
    assert alone[-1] < alone[0]
    for workers in (2, 3):
        assert losses_of_ranks(tmp_path / str(workers), workers, **settings) == pytest.approx(alone, rel=1e-5)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that writes a task with the model of the small task and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        name = f"own_{abs(hash(text))}"
        parts = "build_model, build_optimizer, schedule"
        (tmp_path / f"{name}.py").write_text(f"from tests.tasks.tiny import {parts}\n{text}\n")
        return name

    return write


PLAIN = """
from sunspot.tasks.images import loss as measure

def train(run):
    for batch in run.batches():
        losses, metrics = measure(run.model, batch)
        (losses.sum() * run.weight).backward()
        run.log({"loss": losses, **metrics})
        run.clip()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.step()
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_custom_loop_takes_the_same_steps_as_the_default_loop(
    parallel: str, tmp_path: Path, own: Callable[..., str]
) -> None:
    """This includes a step that has too few rows for all workers."""
    settings: dict[str, Any] = {"global_batch_size": 5, "max_steps": 4, "parallel": parallel, "clip_norm": 0.5}
    ours = train_ranks(tmp_path / "ours", 3, task="tests.tasks.tiny", **settings)
    theirs = train_ranks(tmp_path / "theirs", 3, task=own(PLAIN), **settings)
    for name, weights in ours.items():
        np.testing.assert_array_equal(theirs[name], weights)


@pytest.mark.parametrize(("parallel", "micro"), [("ddp", 2), ("fsdp", 0)])
def test_an_infinite_loss_for_a_padding_row_does_not_affect_training(
    parallel: str, micro: int, tmp_path: Path, own: Callable[..., str]
) -> None:
    """Idle ranks get the first row twice. Its loss can be infinite, and 0 times infinity is not 0."""
    infinite = own("""
import torch
from sunspot.tasks.images import loss as measure

def loss(model, batch):
    losses, metrics = measure(model, batch)
    return -torch.log(torch.exp(-losses) * (len(batch["row"]) != 2 or bool(batch["row"].any()))), metrics
""")
    settings: dict[str, Any] = {"global_batch_size": 5, "max_steps": 4, "parallel": parallel, "micro_batch_size": micro}
    ours = train_ranks(tmp_path / "ours", 3, task="tests.tasks.tiny", **settings)
    theirs = train_ranks(tmp_path / "theirs", 3, task=infinite, **settings)
    for name, weights in ours.items():
        np.testing.assert_allclose(theirs[name], weights, rtol=0, atol=1e-5)


def test_no_parameter_changes_before_its_copy_is_complete(group: dist.ProcessGroup, own: Callable[..., str]) -> None:
    worker = make_worker(plan_without_evaluation(Settings(task=own(PLAIN), **BATCH)), group)
    weight: torch.Tensor = worker.learner.model[0].weight.detach()
    after, waited = [weight.clone()], list[torch.Tensor]()
    worker.checkpoints.took_step = lambda *_: after.append(weight.clone())
    worker.checkpoints.wait_for_copy = lambda: waited.append(weight.clone())
    train(worker)
    assert len(waited) == 12
    assert all(torch.equal(before, then) for before, then in zip(after, waited, strict=False))


def test_losing_a_worker_while_ddp_starts_leaves_no_hooks_in_the_optimizers(
    group: dist.ProcessGroup, own: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next group uses the same optimizers."""

    def lose(*given: Any, **named: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    worker = make_worker(plan_without_evaluation(Settings(task=own(PLAIN), **BATCH)), group)
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "averages", True)
        patched.setattr("sunspot.train.run.prepare", lose)
        with pytest.raises(RuntimeError, match="closed by peer"):
            train(worker)
    train(worker)


OWN_RATES = """
import torch
rates = []

def train(run):
    optimizer = run.optimizer
    {before}
    for batch in run.batches():
        run.model[0].bias.sum().backward()
        {in_step}
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        {after}
        run.log({{"loss": run.model[0].bias.sum()}})
        run.step()
"""
CHANGES = "optimizer.param_groups[0]['lr'] = 0.5 ** run.position"


@pytest.mark.parametrize(
    ("where", "what", "says"),
    [
        ("before", "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)", "a scheduler was created with"),
        ("in_step", "torch.optim.lr_scheduler.StepLR(optimizer, 9)", "a scheduler was created with"),
        ("before", CHANGES, "the learning rate was changed from 0.001 to 1 between two steps"),
        ("after", CHANGES, "the learning rate was changed from .* to 1 between two steps"),
    ],
)
def test_a_loop_cannot_set_learning_rates_that_would_be_overwritten(
    where: str, what: str, says: str, group: dist.ProcessGroup, own: Callable[..., str]
) -> None:
    task = own(OWN_RATES.format(**{"before": "", "in_step": "", "after": "", where: what}))
    with pytest.raises(SettingsError, match=f"TASK={task}: {says}.*return a scheduler from build_scheduler"):
        train(make_worker(plan_without_evaluation(Settings(task=task, **BATCH)), group))
    assert len(importlib.import_module(task).rates) == (where != "before")


def test_learning_rates_that_a_loop_sets_before_the_optimizer_step_are_kept(
    group: dist.ProcessGroup, own: Callable[..., str]
) -> None:
    task = own(OWN_RATES.format(before="", in_step=CHANGES, after=""))
    train(make_worker(plan_without_evaluation(Settings(task=task, **BATCH)), group))
    assert importlib.import_module(task).rates == [0.5**step for step in range(BATCH["max_steps"])]


def test_a_custom_loop_gets_the_random_numbers_and_the_epoch_of_each_step(
    group: dist.ProcessGroup, own: Callable[..., str]
) -> None:
    """A resumed run draws the same numbers. After the last step, the epoch is still the last one."""
    task = own("""
import torch
drawn = {}

def train(run):
    for batch in run.batches():
        drawn[run.position] = float(torch.rand(1)), run.epoch
        run.log({"loss": run.model[0].bias.sum()})
        run.step()
    drawn["end"] = run.epoch
""")
    plan = plan_without_evaluation(Settings(task=task, global_batch_size=6000, epochs=2))
    train(make_worker(plan, group))
    drawn = dict(importlib.import_module(task).drawn)
    assert [drawn[step][1] for step in range(4)] == [1, 1, 2, 2]
    assert drawn.pop("end") == 2
    assert len({number for number, _ in drawn.values()}) == 4
    worker = make_worker(plan, group)
    worker.group_start = GroupStart(2, True, {})
    importlib.import_module(task).drawn.clear()
    train(worker)
    assert importlib.import_module(task).drawn[3] == drawn[3]


def test_modules_that_a_task_puts_into_evaluation_mode_stay_in_evaluation_mode(
    own: Callable[..., str], group: dist.ProcessGroup
) -> None:
    """A model that is completely in evaluation mode was loaded that way, so it is put into training mode."""
    task = own("""
import tests.tasks.tiny
from sunspot.tasks.images import loss

def build_model(settings, source):
    model = tests.tasks.tiny.build_model(settings, source)
    (model if settings.task_args["whole"] else model[0]).eval()
    return model
""")
    for whole, modes in [(True, [True] * 5), (False, [False, *[True] * 4])]:
        settings = Settings(task=task, task_args={"whole": whole}, **BATCH)
        worker = make_worker(plan_without_evaluation(settings), group)
        train(worker)
        assert [module.training for module in worker.learner.model] == modes


def test_several_optimizers_are_saved_and_restored_like_a_single_optimizer() -> None:
    """The run resumes as if uninterrupted, and the saved state is that of one optimizer with all groups."""

    def trained(steps: int, saved: Any = None) -> tuple[nn.Module, Optimizers]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 1)})
        adam, sgd = torch.optim.Adam(model["a"].parameters(), 0.1), torch.optim.SGD(model["b"].parameters(), 0.1, 0.9)
        both = Optimizers({"adam": adam, "sgd": sgd})
        if saved:
            model.load_state_dict(saved[0])
            both.load_state_dict(saved[1])
        for group in both.param_groups:
            group["lr"] *= 0.5
        for _ in range(steps):
            model["b"](model["a"](torch.ones(4, 3)).tanh()).square().mean().backward()
            both["adam"].step()
            both["sgd"].step()
            both.zero_grad()
        return model, both

    model, both = trained(2)
    assert both.param_groups[0] is both["adam"].param_groups[0]
    state = both.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2, 3]]
    assert [sorted(state["state"][number]) for number in (0, 2)] == [
        ["exp_avg", "exp_avg_sq", "step"],
        ["momentum_buffer"],
    ]
    for group in state["param_groups"]:
        group["lr"] *= 2
    resumed, _ = trained(2, saved=copy.deepcopy((model.state_dict(), state)))
    uninterrupted, _ = trained(4)
    for name, weights in uninterrupted.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weights), name


def test_the_default_loop_takes_a_step_with_each_of_several_optimizers(own: Callable[..., str], tmp_path: Path) -> None:
    two = own("""
import torch
from sunspot.tasks.images import loss

def build_optimizer(model, settings):
    parts = {"first": model[0], "last": model[4]}
    return {n: torch.optim.SGD(p.parameters(), settings.learning_rate, 0.9) for n, p in parts.items()}
""")
    ours = train_ranks(tmp_path / "ours", 2, task="tests.tasks.tiny", clip_norm=0.5, **BATCH)
    theirs = train_ranks(tmp_path / "theirs", 2, task=two, clip_norm=0.5, **BATCH)
    for name, weights in ours.items():
        np.testing.assert_array_equal(theirs[name], weights)


def test_the_docs_show_the_loop_of_the_gan_task() -> None:
    text = (REPOSITORY / "docs/own-loop.md").read_text()
    [shown] = re.findall(r"^```python\n(generator, .*?)^```$", text, re.S | re.M)
    lines = [line.strip() for line in Path(gan.__file__).read_text().splitlines()]
    for line in shown.splitlines():
        assert line.strip() in ["...", *(each.partition("  #")[0] for each in lines)]


def test_invalid_models_and_optimizers_are_rejected() -> None:
    settings = Settings(task="sunspot.tasks.gan", parallel="fsdp")
    with pytest.raises(
        SettingsError, match=r"PARALLEL=fsdp does not support several models, but sunspot.tasks.gan has a ModuleDict"
    ):
        shard_model(gan.build_model(settings, EmptySource((1, 8, 8), 3)), settings, torch.device("cpu"))
    module, model = ModuleType("mine"), nn.Linear(1, 1)
    module.build_optimizer = lambda model, _: {n: torch.optim.SGD(model.parameters(), 1) for n in "ab"}
    with pytest.raises(SettingsError, match=r"build_optimizer: .*more than one parameter group"):
        PlainTask(module, settings).build_optimizer(model, settings)


BEGIN = "def train(run):\n    for batch in run.batches():\n        "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BEGIN + "pass", "took a batch, but did not call run.step"),
        (BEGIN + "run.step()", "logged nothing for a batch"),
        (BEGIN + "run.log({'loss': run.model.state_dict()['0.bias']})", r"logged loss of shape \[8\]; .* 25 rows"),
        (BEGIN + "run.log({'loss': run.model[0].bias.sum()}); run.step(); run.step()", "called run.step.. twice"),
        (BEGIN + "run.log({'loss': run.model[0].bias.sum()}); run.step(); break", "returned at step 1 of 12"),
    ],
)
def test_an_invalid_loop_is_rejected(
    text: str, message: str, own: Callable[..., str], group: dist.ProcessGroup
) -> None:
    worker = make_worker(plan_without_evaluation(Settings(task=own(text), **BATCH)), group)
    with pytest.raises(SettingsError, match=message):
        train(worker)


def test_held_out_rows_are_evaluated_only_if_the_task_defines_a_loss(examples: None) -> None:
    settings = Settings(task="my_loop")
    plan = make_plan(settings, load_task(settings))
    assert plan.test is None
    assert "; no loss, so no evaluation" in plan.reasons[0]


def test_the_original_script_of_the_example_task_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    """The script also resumes from its checkpoint, and its learning rates equal those of the task."""
    from tests.tasks import nano, nano_script

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    set_constants(nano_script, SAVE_EVERY=2)
    (tmp_path / "text").write_bytes(bytes(range(97, 123)) * 40)
    first = nano_script.train(str(tmp_path / "text"), str(tmp_path), 2)
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == 2
    assert nano_script.train(str(tmp_path / "text"), str(tmp_path), 12) < first
    assert [nano.rate(step) for step in range(200)] == [nano_script.rate(step) for step in range(200)]
