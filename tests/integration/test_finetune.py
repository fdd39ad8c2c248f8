"""Tests of LoRA in worker groups under ddp and fsdp on changing numbers of ranks: losses, checkpoints, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sunspot.checkpoint.parts import load_model
from sunspot.predict.__main__ import main as predict
from sunspot.run import open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.checkpoints import Checkpoint
from sunspot.tasks.pretrained import open_base
from tests.harness.finetune_ranks import KILLED_AT, STEPS
from tests.harness.hugging_face import ADAPTERS
from tests.harness.language_models import write_base
from tests.harness.training import newest_whole


@pytest.fixture(scope="module")
def adapters(hugging_face_runs: Path) -> Path:
    return hugging_face_runs / ADAPTERS


def last_of(adapters: Path, name: str) -> Checkpoint:
    return newest_whole(open_run(str(adapters), name), STEPS)


def losses_of(adapters: Path, name: str) -> list[float]:
    return list(json.loads((adapters / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", ["two", "three", "killed", "fsdp"])
def test_losses_do_not_depend_on_the_number_of_workers(adapters: Path, name: str) -> None:
    one = losses_of(adapters, "one")
    assert len(one) == STEPS
    assert one[-1] < one[0]
    found = losses_of(adapters, name)
    assert found
    assert found == pytest.approx(one[-len(found) :], rel=1e-5)


def test_a_model_learns_in_bf16_with_fsdp(adapters: Path) -> None:
    found = losses_of(adapters, "bf16")
    assert found == pytest.approx(losses_of(adapters, "one"), rel=0.02)
    assert found[-1] < found[0]


@pytest.mark.parametrize("name", ["killed", "fsdp"])
def test_the_adapter_of_a_killed_run_equals_that_of_an_uninterrupted_run(adapters: Path, name: str) -> None:
    assert [attempt.step for attempt in read_attempts(open_run(str(adapters), name))] == [0, KILLED_AT - 1]
    expected = load_model(open_run(str(adapters), "one"), last_of(adapters, "one"))
    found = load_model(open_run(str(adapters), name), last_of(adapters, name))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["two", "fsdp"])
def test_a_checkpoint_holds_only_the_adapter(adapters: Path, tmp_path: Path, name: str) -> None:
    """Check that peft loads the adapter, and that the base is unchanged."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    checkpoint, base = last_of(adapters, name), adapters / "base"
    folder = adapters / name / "checkpoints" / checkpoint.name
    whole = 16 * sum(value.numel() for value in AutoModelForCausalLM.from_pretrained(base).state_dict().values())
    files = {file: entry["size"] for file, entry in checkpoint.files.items()}
    assert files["adapter_model.safetensors"] < whole / 10
    plain: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    state = load_model(open_run(str(adapters), name), checkpoint)
    trained = {key: value for key, value in plain.state_dict().items() if "lora" in key}
    assert trained
    assert all(torch.equal(value, state[f"model.{key}"]) for key, value in trained.items())
    named = json.loads((folder / "base.json").read_text())
    assert named["sha256"] == open_base(str(base)).sha256 == open_base(write_base(tmp_path / "again")).sha256


@pytest.mark.parametrize("name", ["two", "fsdp"])
def test_the_model_in_a_checkpoint_generates_text(
    adapters: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{name} --storage {adapters} --prompt The --prompt if --tokens 4".split()
    assert predict([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], [each["prompt"] for each in found["answers"]]) == (STEPS, ["The", "if"])
    assert all(each["answer"] for each in found["answers"])
    assert predict(words) == 0
    assert capsys.readouterr().out.startswith(f"The: {found['answers'][0]['answer'][:1]}")
