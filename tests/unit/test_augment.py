"""Tests that augmentation does not depend on the number of workers and differs in each epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sunspot.errors import SettingsError
from sunspot.settings import Settings
from sunspot.tasks import Task, load_task
from sunspot.train.randomness import augment
from sunspot.train.run import TrainingRun
from tests.harness.documentation import find_example
from tests.harness.loop import losses_of_ranks, make_worker, plan_without_evaluation

DRAW: Any = None


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the task of docs/tasks.md with a smaller model, and return its name."""
    block = find_example("python", "# my_augmentation.py")
    assert "sunspot.tasks.mnist" in block
    (tmp_path / "my_small_augmentation.py").write_text(block.replace("sunspot.tasks.mnist", "tests.tasks.tiny"))
    monkeypatch.syspath_prepend(tmp_path)
    return "my_small_augmentation"


def test_a_row_is_augmented_in_the_same_way_on_every_worker() -> None:
    module = SimpleNamespace(augment_row=lambda row: {"image": row["image"] + torch.rand(3) + np.random.rand()})
    task = Task(module, Settings())
    batch = {"row": torch.tensor([7, 3, 5]), "image": torch.zeros(3, 3), "label": torch.arange(3)}
    whole = augment(task, batch, (0, 1), DRAW)
    for place in range(3):
        alone = augment(task, {name: column[place : place + 1] for name, column in batch.items()}, (0, 1), DRAW)
        assert torch.equal(alone["image"][0], whole["image"][place])
    elsewhere = {**batch, "row": batch["row"].to("meta")}  # a device from which no value can be read
    assert torch.equal(augment(task, elsewhere, (0, 1), DRAW, batch["row"])["image"], whole["image"])
    assert len(set(whole["image"].flatten().tolist())) == 9
    assert torch.equal(whole["label"], batch["label"])
    for other in ((0, 2), (1, 1)):
        assert not torch.isclose(augment(task, batch, other, DRAW)["image"], whole["image"]).any()


def test_the_draw_method_and_torch_rand_return_different_numbers(group: dist.ProcessGroup) -> None:
    run = TrainingRun(make_worker(plan_without_evaluation(Settings(task="tests.tasks.tiny", seed=3)), group))
    batch = next(run.batches())  # this seeds the generators
    assert not torch.isclose(run.draw(2), torch.rand(len(batch["row"]), 2)).any()


def test_losses_do_not_depend_on_the_number_of_workers(example: str, tmp_path: Path) -> None:
    """This includes a step that has too few rows for all workers."""
    settings = {"global_batch_size": 5, "max_steps": 6}
    plain = losses_of_ranks(tmp_path / "plain", 1, task="tests.tasks.tiny", **settings)
    alone = losses_of_ranks(tmp_path / "1", 1, task=example, **settings)
    assert losses_of_ranks(tmp_path / "3", 3, task=example, **settings) == pytest.approx(alone, rel=1e-5)
    assert all(abs(one - other) > 1e-4 for one, other in zip(alone, plain, strict=True))


@pytest.mark.parametrize(("build", "why"), [("build_module", "LightningModule has hooks"), ("build_trees", "all rows")])
def test_hooks_that_would_never_be_called_are_rejected(
    build: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"hooked_{build}.py").write_text(f"def {build}(settings, source): ...\ndef augment_row(row): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match=f"augment_row would never be called: .*{why}"):
        load_task(Settings(task=f"hooked_{build}"))
