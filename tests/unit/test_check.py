"""Tests of `sunspot check`: the problems that it finds in a task, and the lines that it reports."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from sunspot.errors import SettingsError, SunspotError
from sunspot.settings import load_settings
from sunspot.submitter.commands import check as command
from sunspot.train.task_check import TaskCheck, check

TASK = """
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(784, 8), nn.Linear(8, 10)

    def forward(self, images):
        return self.head(self.first(images.flatten(1) / 255))

def build_model(settings, source):
    return Net()

def loss(model, batch):
    scores = model(batch["image"])
    losses = functional.cross_entropy(scores, batch["label"], reduction="none")
    return losses, {"hits": scores.argmax(1) == batch["label"]}

def predict(model, images):
    return model(images)
"""

OWN_LOOP = """
def train(run):
    for batch in run.batches():
        losses, metrics = run.losses(batch)
        (losses.sum() * run.weight).backward()
        run.log({"loss": losses, **metrics})
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.step()
"""

KEEPS = "self.seen = (0.5 if self.training else 1) * getattr(self, 'seen', 1.0); images = images * self.seen"
"Line of code that keeps state outside of the state_dict."

BROKEN = [
    (
        "from torch.nn import functional\n",
        "",
        SunspotError,
        r"NameError: name 'functional'.*in loss at .*\.py:18: losses",
    ),
    ("def loss(model, batch):", "def loss(model, batch)", SettingsError, r"expected ':'.*fix .*\.py:17"),
    ("import torch\n", "import torch\nimport nowhere\n", SettingsError, r"'nowhere'; fix .*\.py:3"),
    ("def loss(", "def losses(", SettingsError, r"does not define loss"),
    (
        "Linear(784, 8)",
        "Linear(748, 8)",
        SunspotError,
        r"784 and 748.*in forward at .*\.py:12.*uint8 \[64, 1, 28, 28\]",
    ),
    (
        ', reduction="none"',
        "",
        SettingsError,
        r"its loss, defined at .*\.py:17, returned the losses of type Tensor and shape \[\]; return",
    ),
    (
        "def loss(model, batch):",
        "def loss(batch):",
        SettingsError,
        r"loss\(batch\), defined at .*\.py:17, is called as loss\(model, batch\); define it with these",
    ),
    (
        'scores = model(batch["image"])',
        'scores = model(batch["image"]).detach()',
        SettingsError,
        r"its loss, defined at .*\.py:17, returned values without a gradient; .* without detach\(\)",
    ),
    ("Linear(8, 10)", "Linear(8, 7)", SunspotError, r"Target \d is out of bounds.*label int64 \[64\] 0\.\.9"),
    (
        "/ 255",
        "/ 0",
        SunspotError,
        r"the loss is not finite for 64 of 64 rows; for example, it is nan for .*parquet, row 0",
    ),
    ("return self.head(", f"{KEEPS}; return self.head(", SunspotError, r"restored .* state_dict does not contain"),
    (
        "nn.Linear(784, 8)",
        "nn.LazyLinear(8)",
        SettingsError,
        r"2 tensors with no shape yet, such as first.weight; run a forward pass in build_model",
    ),
    (
        "return self.head(self.first(images.flatten(1) / 255))",
        "from torch.utils.checkpoint import checkpoint as again; x = self.first(images.flatten(1) / 255); "
        "return sum(again(self.head, each, use_reentrant=True) for each in (x, 2 * x))",
        SunspotError,
        r"first step and save: RuntimeError: .* ready only once",
    ),
    (
        "return self.head(",
        "images = images.view(64, -1); return self.head(",
        SunspotError,
        r"^\S+ last step and eval.*view",
    ),
    (
        "    return model(images)",
        "    return model(images).argmax(1)",
        SettingsError,
        r"predict returned scores of shape \[64\]; return",
    ),
    ("return Net()", "return {}", SettingsError, r"its build_model returned a dict"),
    ("return self.head(", "assert self.training; return self.head(", SunspotError, r"evaluation mode: AssertionError"),
]


def check_task(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, **settings: str) -> TaskCheck:
    name = f"task_{abs(hash((text, str(folder))))}"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return check(load_settings({"TASK": name, **settings}))


@pytest.mark.parametrize("loop", ["", OWN_LOOP], ids=["loss", "own loop"])
def test_a_task_without_errors_passes_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    of_batch = TASK.replace("predict(model, images)", "predict(model, batch)").replace(
        "model(images)", 'model(batch["image"])'
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = {"AUDIT": "true", "EMA": "0.9", "USE_GPU": "true"}
    checked = check_task(tmp_path, (of_batch if loop else TASK) + loop, monkeypatch, **given)
    assert {"loss at first", "hits", "test_loss", "test_hits"} <= checked.metrics.keys()
    assert checked.checkpoint_bytes > 10_000
    assert checked.not_checked == ["SUNSPOT_USE_GPU=true, because torch sees no GPU here"], (
        "AUDIT has no effect in a check"
    )
    shown = [re.sub(" [0-9.]+", "", line) for line in checked.describe()]
    assert shown[1:4] == [
        "  rows of the first step: hits  loss",
        "  rows of the last step: hits  loss",
        "  held-out rows: test_hits  test_loss",
    ]


def test_weights_that_change_before_the_optimizer_step_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clamps = "self.first.weight.data.clamp_(-1, 1); self.head.weight.detach().clamp_(-1, 1); return self.head("
    check_task(tmp_path, TASK.replace("return self.head(", clamps), monkeypatch)
    assert "1 parameter changed outside of the optimizer's step, such as head.weight: " in caplog.text


def test_unread_task_arguments_and_misspelled_functions_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reads = TASK.replace("return Net()", 'settings.task_args.get("hidden"); return Net()')
    misspelled = "def checkpoint_file(model, state): return {}\n"
    check_task(tmp_path, reads + misspelled, monkeypatch, TASK_ARGS='{"hiden": 32}')
    assert "SUNSPOT_TASK_ARGS: the task has not read hiden; did you mean hidden?" in caplog.text
    assert "did you mean checkpoint_files?" in caplog.text


def test_a_check_calls_compute_metrics_on_the_held_out_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = f"{TASK}\ndef compute_metrics(scores, rows): return {{'sevens': (rows['label'] == 7).sum()}}\n"
    checked = check_task(tmp_path, counts, monkeypatch, CHECKPOINT_METRIC="sevens")
    assert checked.metrics["test_sevens"] > 0
    assert "it trains, evaluates, saves and restores" in [*checked.describe()][-1]
    assert "CHECKPOINT_METRIC" not in caplog.text
    check_task(tmp_path, counts, monkeypatch, CHECKPOINT_METRIC="eights")
    absent = "SUNSPOT_CHECKPOINT_METRIC=eights: the task has no such metric; set it to one of hits, loss, test_hits"
    assert absent in caplog.text, "other rows may have further metrics"
    broken = counts.replace("return {'sevens'", "raise ValueError({'sevens'").replace(".sum()}", ".sum()})")
    with pytest.raises(SunspotError, match=r"(?s)last step and eval.*: ValueError: .*in compute_metrics at .*\.py:"):
        check_task(tmp_path, broken, monkeypatch)


def test_a_checkpoint_metric_that_the_task_lacks_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "^SUNSPOT_CHECKPOINT_METRIC=hit: .* no such metric; set it to one of hits, loss, test_hits, test_loss$"
    with pytest.raises(SettingsError, match=says):
        check_task(tmp_path, TASK, monkeypatch, CHECKPOINT_METRIC="hit")


@pytest.mark.parametrize(("share", "done"), [("0", "evaluates nothing"), ("0.5", "trains, evaluates")])
def test_a_check_says_whether_it_has_evaluated_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str, done: str
) -> None:
    rows = "[{'image': torch.full((1, 28, 28), n), 'label': n % 10} for n in range(40)]"
    dataset = f"{TASK}\ndef build_dataset(settings): return {rows}\n"
    checked = check_task(tmp_path, dataset.replace("def predict", "def scores"), monkeypatch, TEST_SHARE=share)
    assert done in [*checked.describe()][-1]


def test_parameters_without_a_gradient_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unused = TASK.replace(", nn.Linear(8, 10)", ", nn.Linear(8, 10); self.more = nn.Linear(1, 1)")
    check_task(tmp_path, unused, monkeypatch)
    assert "2 parameters got no gradient in the first step, such as more.bias: " in caplog.text


@pytest.mark.parametrize(("what", "instead", "kind", "says"), BROKEN, ids=[each[3][:30] for each in BROKEN])
def test_a_broken_task_is_reported_with_the_failing_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, instead: str, kind: type[SunspotError], says: str
) -> None:
    assert what in TASK
    with pytest.raises(SunspotError) as caught:
        check_task(tmp_path, TASK.replace(what, instead, 1), monkeypatch)
    assert isinstance(caught.value, kind)
    assert re.search(says, str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("def build_optimizer(model, settings): return torch.optim.lr_scheduler", r"build_optimizer returned a module"),
        (
            "def build_scheduler(o, s, t): return torch.optim.lr_scheduler.ReduceLROnPlateau(o)",
            r"build_scheduler returned a ReduceLROnPlateau",
        ),
        (OWN_LOOP.replace("        run.step()\n", ""), r"did not call run.step\(\)"),
        (OWN_LOOP.replace('run.log({"loss": losses, **metrics})', "pass"), r"logged nothing"),
        ("def checkpoint_files(model, state): return 1 / 0", r"ZeroDivisionError.*in checkpoint_files at .*\.py:\d+"),
    ],
)
def test_a_broken_function_of_a_task_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, says: str
) -> None:
    with pytest.raises(SunspotError, match=re.compile(says, re.DOTALL)):
        check_task(tmp_path, f"{TASK}\n{more}\n", monkeypatch)


def test_an_error_in_a_task_describes_the_rows_that_it_received() -> None:
    tokens = torch.tensor([[3, 40_000]]).to(torch.uint16)
    checked = TaskCheck("task", [], batch={"text": tokens, "right": torch.tensor([True])})
    told = r"with the rows text uint16 \[1, 2\] 3\.\.40000, right bool \[1\] 1\.\.1"
    with pytest.raises(SunspotError, match=told), checked.part("first step"):
        raise ValueError("bad")


def test_an_error_does_not_describe_rows_before_any_row_is_read() -> None:
    with pytest.raises(SunspotError) as caught, TaskCheck("task", []).part("model and optimizer"):
        raise ValueError("bad")
    assert "with the rows" not in str(caught.value)


def test_a_missing_dataset_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SunspotError, match="nowhere"):
        check_task(tmp_path, TASK, monkeypatch, DATASET=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(("what", "passes"), [("", True), (', reduction="none"', False)])
def test_the_check_command_prints_a_single_json_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str, passes: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / f"lies_here_{passes}.py").write_text("print('heard')\n" + (TASK.replace(what, "") if what else TASK))
    arguments = argparse.Namespace(settings=[f"TASK=lies_here_{passes}"], storage=None, json=True)
    if passes:
        command.run(arguments)
    else:
        with pytest.raises(SettingsError, match="its loss"):
            command.run(arguments)
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] is passes
    assert said["metrics"]["test_loss"] > 0 if passes else "its loss" in said["error"]


def test_a_missing_training_package_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sunspot.train.task_check", None)
    with pytest.raises(SettingsError, match=r"a task needs .*, which is not installed; .* installs it"):
        command.run(argparse.Namespace(settings=[], storage=None, json=False))
