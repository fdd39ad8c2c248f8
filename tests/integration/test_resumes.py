"""Tests that a run resumes under any layout of the model from a checkpoint of any other layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sunspot.checkpoint.parts import load_model
from sunspot.run import open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.checkpoints import list_checkpoints
from sunspot.settings import Settings
from tests.harness.loop import plan_without_evaluation, train_group

SAVED_AT, MORE_STEPS = 3, 10


class Layout(NamedTuple):
    """The number of workers, and the settings that distribute the model over them."""

    workers: int
    settings: dict[str, Any]


LAYOUTS = {
    "ddp 2": Layout(2, {"parallel": "ddp"}),
    "fsdp 3": Layout(3, {"parallel": "fsdp"}),
    "hsdp 2x2": Layout(4, {"parallel": "hsdp", "shard_degree": 2}),
    "hsdp 1x4": Layout(4, {"parallel": "hsdp", "shard_degree": 4}),
}

SETTINGS: dict[str, Any] = {
    "task": "tests.tasks.double",
    # An odd width gives shards of different sizes. This one also gives blocks of more than `MIN_BLOCK_PARAMETERS`.
    "task_args": {"layers": 2, "width": 51, "heads": 3, "context": 16},
    "global_batch_size": 13,
    "max_steps": SAVED_AT + MORE_STEPS,
    "checkpoint_every_steps": SAVED_AT,
    "checkpoint_every_s": 0,
    "checkpoints_to_keep": 9,
    "learning_rate": 0.01,
    "clip_norm": 0.5,
    "ema": 0.9,
}


def train(folder: Path, layout: Layout, killed_at: int = 0) -> None:
    settings = Settings(**SETTINGS, **layout.settings, storage_path=str(folder), run_name="run")
    train_group(plan_without_evaluation(settings), layout.workers, killed_at)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    run = open_run(str(folder), "run")
    [final] = [each for each in list_checkpoints(run) if each.step == SAVED_AT + MORE_STEPS]
    return load_model(run, final)


@pytest.mark.slow  # test_fsdp.py covers some pairs
def test_a_checkpoint_of_any_parallel_layout_can_be_resumed_with_any_other_layout(tmp_path: Path) -> None:
    train(tmp_path / "undisturbed", LAYOUTS["ddp 2"])
    expected = final_weights(tmp_path / "undisturbed")
    differences = {}
    for before, saved in LAYOUTS.items():
        kept = tmp_path / before
        train(kept, saved, killed_at=SAVED_AT + 1)
        for after, resumed in LAYOUTS.items():
            folder = shutil.copytree(kept, tmp_path / "resumed", dirs_exist_ok=False)
            train(folder, resumed)
            attempts = read_attempts(open_run(str(folder), "run"))
            assert [attempt.step for attempt in attempts] == [0, SAVED_AT]
            found = final_weights(folder)
            assert found.keys() == expected.keys()
            difference = max(float((found[name] - weights).abs().max()) for name, weights in expected.items())
            print(f"{before} -> {after}: {difference:.1e}")
            differences[f"{before} -> {after}"] = difference
            shutil.rmtree(folder)
    assert max(differences.values()) < 1e-12, differences
