"""Tests of tasks with a transformers Trainer on changing numbers of ranks, and of rejected trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sunspot.checkpoint.parts import load_model
from sunspot.run import open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.checkpoints import Checkpoint
from tests.harness.hugging_face import TRAINERS
from tests.harness.trainer_ranks import KILLED_AT, STEPS
from tests.harness.training import consumed, newest, newest_whole


@pytest.fixture(scope="module")
def trained(hugging_face_runs: Path) -> Path:
    return hugging_face_runs / TRAINERS


def read(trained: Path, name: str) -> Any:
    return json.loads((trained / f"{name}.json").read_text())


def last_of(trained: Path, name: str) -> Checkpoint:
    return newest_whole(open_run(str(trained), name), STEPS)


@pytest.mark.parametrize(("name", "killed"), [("one", "killed"), ("adapted", "adapted-killed")])
def test_a_run_killed_and_resumed_at_a_different_world_size_matches_an_uninterrupted_run(
    trained: Path, name: str, killed: str
) -> None:
    whole, rest = read(trained, name), read(trained, killed)
    assert len(whole) == STEPS
    assert whole[-1] < whole[0]
    assert rest == pytest.approx(whole[KILLED_AT - 1 :], rel=1e-5)
    runs = [open_run(str(trained), each) for each in (name, killed)]
    assert [attempt.step for attempt in read_attempts(runs[1])] == [0, KILLED_AT - 1]
    one, other = (load_model(run, last_of(trained, run.name)) for run in runs)
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-5, msg=key)
    taken = {step: sorted(rows) for step, rows in consumed(runs[1]).items()}
    assert taken == {step + 1: [10 * (step % 4) + row for row in range(10)] for step in range(STEPS)}


def test_a_checkpoint_is_a_transformers_model_directory(trained: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = open_run(str(trained), "one")
    folder = trained / "one" / "checkpoints" / last_of(trained, "one").name
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    state = load_model(run, newest(run))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder)("if").input_ids

    checkpoint = last_of(trained, "adapted")
    adapter: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(trained / "model"),
        str(trained / "adapted" / "checkpoints" / checkpoint.name),
    )
    held = load_model(open_run(str(trained), "adapted"), checkpoint)
    trains = {f"model.{name}" for name, _ in adapter.named_parameters() if "lora" in name}
    assert held.keys() == trains | {"_extra_state"}, "the checkpoint contains no weights of the base"
    weights = adapter.state_dict()
    assert all(torch.equal(weights[name.removeprefix("model.")], held[name]) for name in trains)


def test_held_out_rows_are_evaluated_with_the_metrics_of_the_trainer(trained: Path) -> None:
    checked = read(trained, "checked")
    assert checked["test_loss"] > 0
    assert checked["margins_mean"] == checked["test_margins_mean"] == 2.5
    assert checked["grad_norm"] > 0


def test_an_unsupported_transformers_trainer_is_rejected(trained: Path) -> None:
    messages = {
        "auto_find_batch_size": "the Trainer's arguments contain auto_find_batch_size=True; remove this argument",
        "enable_jit_checkpoint": "the Trainer's arguments contain enable_jit_checkpoint=True; remove this argument",
        "optim": "optim='lomo' changes weights in the backward pass; choose another optimizer",
        "left_out": "the RowTrainer's train_dataset has 39 rows, but build_dataset returned 40",
    }
    for name, said in read(trained, "refused").items():
        assert said.startswith(f"SUNSPOT_TASK=tests.tasks.adapting_trainer: {messages[name]}"), name
