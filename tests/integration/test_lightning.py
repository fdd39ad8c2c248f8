"""Tests of LightningModules as tasks: complete runs on real Ray workers, and rejected modules."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.errors import SettingsError
from sunspot.observe.metrics import Sums
from sunspot.predict.classifier import Classifier
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.checkpoints import list_checkpoints
from sunspot.run.failures import read_failures
from sunspot.run.history import read_journal
from sunspot.run.incidents import Cause
from sunspot.run.requests import request_stop
from sunspot.settings import Settings, load_settings
from sunspot.tasks import load_task
from tests.harness.constants import SetConstants
from tests.harness.nodes import start_node
from tests.harness.program import WORKER_NODE, Program
from tests.harness.training import (
    assert_audit_clean,
    consumed,
    kill_all,
    newest,
    the_run,
    wait_for_receipts,
    wait_for_step,
    weights,
    worker_processes,
)

MakeData = Callable[..., str]

NUMBERS = {"loss", "accuracy", "learning_rate", "test_loss", "test_accuracy"}


def history(program: Program, name: str) -> list[dict[str, Any]]:
    run = the_run(program, name)
    return read_journal(run, "metrics", lineage(read_attempts(run)))


@pytest.mark.slow
def test_a_run_with_lightning_takes_the_same_steps_as_a_run_without_lightning(
    program: Program, make_data: MakeData
) -> None:
    # 123 rows in batches of 20: the seventh step of an epoch has 3 rows, enough for one worker only.
    settings = {"DATASET": make_data(123, test_rows=31), "GLOBAL_BATCH_SIZE": 20, "MAX_STEPS": 12}
    settings |= {"CHECKPOINT_EVERY_STEPS": 1, "CHECKPOINTS_TO_KEEP": 99}
    with_lightning = {"TASK": "tests.tasks.lightning", "RUN_NAME": "lightning"}

    def assert_the_same() -> None:
        for one, other in zip(history(program, "plain"), history(program, "lightning"), strict=True):
            assert (one["step"], one["epoch"], one["rows"]) == (other["step"], other["epoch"], other["rows"])
            for number in NUMBERS & one.keys():
                assert other[number] == pytest.approx(one[number], rel=1e-5), (one["step"], number)
        for name, tensor in weights(the_run(program, "plain")).items():
            other = weights(the_run(program, "lightning"))[f"network.{name}"]
            assert torch.allclose(tensor, other, rtol=1e-4, atol=1e-6), name

    program.run(**settings, RUN_NAME="plain", NUM_WORKERS=1)
    program.run(**settings, **with_lightning, MICRO_BATCH_SIZE=4)
    assert_the_same()
    # Return to the middle of the first epoch, and continue there with another number of workers.
    run = the_run(program, "lightning")
    for checkpoint in list_checkpoints(run):
        if checkpoint.step > 5:
            run.storage.delete(run.key("checkpoints", checkpoint.name, "manifest.json"))
    program.run(**settings, **with_lightning, NUM_WORKERS=1)
    assert read_attempts(run)[-1].step == 5
    assert_the_same()


@pytest.mark.slow
def test_a_killed_lightning_run_resumes_at_a_different_world_size(program: Program, make_data: MakeData) -> None:
    settings = {"TASK": "sunspot.tasks.lightning_mnist", "DATASET": make_data(16_000, row_group=1000, test_rows=50)}
    settings |= {"GLOBAL_BATCH_SIZE": 20, "EPOCHS": 1, "CHECKPOINT_EVERY_STEPS": 20, "LEARNING_RATE": 0.003}
    run = the_run(program)
    process = program.start(**settings)
    wait_for_step(run, 60, process)
    worker_processes()[-1].kill()
    lost = wait_for_receipts(run, 2, process)[-1]
    assert (lost.cause, lost.tier, lost.world_after) == (Cause.WORKER_LOST, "memory", 2)
    wait_for_step(run, newest(run).step + 40, process)
    kill_all(process)
    program.run(**settings, NUM_WORKERS=1)
    assert newest(run).step == 800
    assert [attempt.metadata.world_size for attempt in read_attempts(run)] == [2, 2, 1]
    assert sorted(consumed(run)) == list(range(1, 801))
    assert_audit_clean(program)
    assert newest(run).metrics["test_accuracy"] > 0.9
    model = Classifier("run", storage=program.settings["STORAGE_PATH"], use_gpu="false")
    assert model.predict(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))[1].shape == (2, 3)


@pytest.mark.slow
def test_a_lightning_run_restarts_after_a_preemption_notice_and_can_be_stopped(
    program: Program, make_data: MakeData, ray_address: str
) -> None:
    settings = {
        "TASK": "tests.tasks.lightning",
        "TASK_ARGS": '{"sleep": 0.01}',
        "DATASET": make_data(60_000, row_group=1000),
        "GLOBAL_BATCH_SIZE": 20,
        "EPOCHS": 1,
        "NUM_WORKERS": "1..2",
        "RESOURCES_PER_WORKER": '{"CPU": 1, "training-worker": 1}',
    }
    run = the_run(program)
    with start_node(ray_address, **WORKER_NODE) as going:
        process = program.start(**settings)
        wait_for_receipts(run, 1, process)
        time.sleep(3)
        going.reclaim()
        receipt = wait_for_receipts(run, 2, process)[-1]
        assert (receipt.cause, receipt.replayed, receipt.world_after) == (Cause.PREEMPTED, 0, 1)
        request_stop(run, "a test")
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert "stopped by `sunspot stop` at step" in output
    assert 0 < newest(run).step < 3000
    assert read_failures(run) == [], "workers that end for a restart have not failed"
    assert_audit_clean(program)


@pytest.fixture
def source() -> EmptySource:
    return EmptySource((1, 8, 8), 3, row_groups=(100,))


@pytest.mark.parametrize("step", [0, 1, 7, 19])
def test_schedules_resume_at_the_step_of_the_checkpoint(step: int, source: EmptySource) -> None:
    settings = load_settings({"TASK": "sunspot.tasks.lightning_mnist", "GLOBAL_BATCH_SIZE": "10"})
    groups = []
    for begins_at in (0, step):
        task: Any = load_task(settings)
        model = task.build_model(settings, source)
        optimizer = task.build_optimizer(model, settings)
        optimizer.param_groups[0].update(lr=7.0, betas=(0.5, 0.5))  # as if loaded from a checkpoint
        task.begin_schedule(model, optimizer, begins_at)
        for taken in range(begins_at + 1, step + 1):
            task.advance_schedule(model, taken)
        groups.append({name: value for name, value in optimizer.param_groups[0].items() if name != "params"})
    assert groups[0] == groups[1]
    assert groups[0]["betas"][0] != 0.5, "OneCycleLR changes this option, too"


def test_learning_rates_equal_those_of_the_lightning_trainer() -> None:
    """A run can resume at any step. An epoch's ten steps are not a multiple of a scheduler's frequency."""
    import lightning

    from sunspot.adapters.lightning import LightningTask
    from tests.tasks.spoiled_lightning import EveryFourthStep

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=3, **quiet)
    module = EveryFourthStep()
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(10, 1)))
    assert len(set(module.rates)) == 9

    tasks = ModuleType("my_task")
    tasks.build_module = lambda settings, source: EveryFourthStep()
    settings = load_settings({"TASK": "my_task", "GLOBAL_BATCH_SIZE": "10", "EPOCHS": "3"})
    task, found = LightningTask(tasks, settings), list[float]()
    for step in range(30):
        model = task.build_model(settings, EmptySource((1,), 0, row_groups=(100,)))
        optimizer = task.build_optimizer(model, settings)
        task.begin_schedule(model, optimizer, step)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(module.rates, rel=1e-12)


def test_starting_a_schedule_does_not_reset_the_counters_in_parameter_groups(source: EmptySource) -> None:
    """Prodigy and schedule-free optimizers have such counters."""
    from sunspot.adapters.lightning import LightningTask
    from tests.tasks import spoiled_lightning

    class Counting(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.defaults["counted"] = self.param_groups[0]["counted"] = 0

    module = spoiled_lightning.Whole()
    module.configure_optimizers = lambda: Counting(module.parameters())  # type: ignore[method-assign]
    tasks = ModuleType("my_task")
    tasks.build_module = lambda settings, source: module
    settings = load_settings({"TASK": "my_task"})
    task = LightningTask(tasks, settings)
    optimizer = task.build_optimizer(task.build_model(settings, source), settings)
    optimizer.param_groups[0].update(counted=5, lr=7.0)  # as if loaded from a checkpoint
    task.begin_schedule(module, optimizer, 5)
    assert (optimizer.param_groups[0]["counted"], optimizer.param_groups[0]["lr"]) == (5, 0.1)


@pytest.mark.parametrize(
    ("task", "package", "extra"), [("lightning_mnist", "lightning", "lightning"), ("finetune", "huggingface_hub", "hf")]
)
def test_a_missing_extra_is_reported_by_name(
    task: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (task, "pretrained"):
        monkeypatch.delitem(sys.modules, f"sunspot.tasks.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingsError, match=rf"{task} cannot be imported.*; add EXTRAS={extra} to"):
        load_task(load_settings({"TASK": f"sunspot.tasks.{task}"}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoModule", "build_module returned a NoModule; return a lightning.LightningModule"),
        ("NoStep", "NoStep does not define training_step, configure_optimizers"),
        ("Manual", "manual optimization"),
        ("Late", "configure_model"),
        ("NoOptimizer", "did not return an optimizer for the module's parameters"),
        ("TwoOptimizers", "configure_optimizers.*multiple optimizers"),
        ("Plateau", "ReduceLROnPlateau"),
        ("Whole", "loss is a NoneType; return the batch's mean loss"),
        ("ManyLosses", r"loss is a Tensor of shape \[2, 1\]; return the batch's mean loss"),
        ("LogsRows", "every record of the metric history has its own rows"),
        ("LogsMany", "log one number per batch"),
    ],
)
def test_a_module_that_cannot_be_trained_is_reported(name: str, message: str, source: EmptySource) -> None:
    # Imported by the tests that use it, because Lightning takes seconds, and collecting tests imports every file.
    from sunspot.adapters.lightning import LightningTask
    from tests.tasks import spoiled_lightning

    module = ModuleType("my_task")
    module.build_module = lambda settings, source: getattr(spoiled_lightning, name)()
    settings = load_settings({"TASK": "my_task"})
    task = LightningTask(module, settings)

    def use() -> None:
        model = task.build_model(settings, source)
        task.build_optimizer(model, settings)
        task.loss(model, {"row": torch.arange(2)})

    with pytest.raises(SettingsError, match=message):
        use()


@pytest.fixture
def log_value(set_constants: SetConstants) -> Callable[..., Any]:
    """Return the `self.log` of a LightningModule."""
    from sunspot.adapters.lightning import LogCapture
    from sunspot.log import WARNED

    set_constants("sunspot.log", WARNED=set(WARNED))
    return LogCapture()


def test_the_log_method_of_a_lightning_module_rejects_a_reserved_name(log_value: Callable[..., Any]) -> None:
    for name in ("train_step", "rows", "val_time", "learning_rate", ""):
        with pytest.raises(SettingsError, match=rf"self.log\('{name}'\) records a metric with the name"):
            log_value(name, 1.0)
    log_value("train_loss", 1.0)


def test_an_x_axis_that_a_lightning_module_logs_is_ignored_with_a_warning(
    log_value: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Check `step` and `epoch`, which modules log to set the x axis of Lightning's own loggers."""
    for _ in range(2):
        log_value("step", 3.0)
        log_value("epoch", torch.tensor(7.0), on_epoch=True)
        log_value("accuracy", 0.5)
    assert log_value.take() == {"accuracy": torch.tensor(0.5)}  # type: ignore[attr-defined]
    told = [record.message for record in caplog.records]
    assert told == [
        f"self.log('{name}') is ignored: every record of the metric history has the run's {name}"
        for name in ("step", "epoch")
    ]


def test_two_logged_values_that_get_the_same_metric_name_cause_a_warning(
    log_value: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        log_value("train_hits", 1.0)
        log_value("hits", 2.0)
        log_value.take()  # type: ignore[attr-defined]
    assert [record.message for record in caplog.records] == [
        "self.log('hits') and self.log('train_hits') are both recorded as hits; the later value counts"
    ]


def test_unsupported_lightning_features_are_rejected(source: EmptySource) -> None:
    settings = load_settings({"TASK": "sunspot.tasks.lightning_mnist"})
    with pytest.raises(SettingsError, match=r"SUNSPOT_PARALLEL=fsdp: .*never sharded; set it to ddp"):
        load_task(settings.model_copy(update={"parallel": "fsdp"}))
    with pytest.raises(SettingsError, match=r"has no schedule function; .*`python -m sunspot\.train`"):
        load_task(settings).schedule(0, 1)
    with pytest.raises(SettingsError, match=r"does not define build_model.* build_module"):
        load_task(load_settings({"TASK": "json"}))


@pytest.mark.parametrize(("clip_norm", "given"), [(0.0, None), (1.5, 1.5)])
def test_the_trainer_clips_gradients(clip_norm: float, given: float | None) -> None:
    from sunspot.adapters.lightning import make_trainer

    assert make_trainer(Settings(clip_norm=clip_norm), Steps(100, 10), accelerator="cpu").gradient_clip_val == given


def test_a_value_logged_only_in_some_steps_is_averaged_over_the_rows_of_those_steps() -> None:
    sums = Sums()
    sums.add({"loss": torch.ones(4)})
    sums.add({"loss": torch.ones(2), "norm": torch.full((2,), 5.0)})
    assert sums.rows == 6
    assert sums.totals() == {"loss": (6.0, 6), "norm": (10.0, 2)}
