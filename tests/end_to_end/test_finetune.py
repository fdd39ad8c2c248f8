"""Test of a complete LoRA run that is killed, resumed on more workers, and loaded by peft."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sunspot.errors import ConflictError
from sunspot.run.attempts import read_attempts
from sunspot.tasks.pretrained import open_base
from tests.harness.language_models import write_base, write_texts
from tests.harness.program import Program
from tests.harness.training import (
    assert_audit_clean,
    consumed,
    kill_all,
    losses,
    newest,
    the_run,
    wait_for_step,
)

PEFT = importlib.util.find_spec("peft")  # importing it would take seconds in each collection

STEPS = 40

WITHOUT_THIS_PROGRAM = """
import importlib.util, sys
sys.path.append(sys.argv[1])
assert not importlib.util.find_spec("sunspot")
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
plain = AutoModelForCausalLM.from_pretrained(sys.argv[2])
tokens = torch.arange(2, 22)[None]
before = plain(tokens).logits
adapted = PeftModel.from_pretrained(plain, sys.argv[3])
assert not torch.equal(adapted(tokens).logits, before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not PEFT, reason="needs the extra hf")
def test_a_killed_lora_run_continues_at_a_different_world_size(program: Program, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    untouched = {file.name: file.read_bytes() for file in Path(base).iterdir()}
    program.settings |= {
        "TASK": "sunspot.tasks.finetune",
        "TASK_ARGS": json.dumps({"base": base, "rank": 4, "context": 32}),
        "DATASET": write_texts(tmp_path / "texts", letters=600),
        "GLOBAL_BATCH_SIZE": "10",
        "LEARNING_RATE": "0.001",
        "EPOCHS": "20",
        "MAX_STEPS": str(STEPS),
        "CHECKPOINT_EVERY_STEPS": "5",
        "REPORT_EVERY_S": "600",
        "SNAPSHOT_COST": "0",
    }
    run = the_run(program)
    process = program.start(NUM_WORKERS=2)
    wait_for_step(run, 10, process)
    kill_all(process)
    resumed_at = newest(run).step
    assert {file.name: file.read_bytes() for file in Path(base).iterdir()} == untouched

    write_base(tmp_path / "base", seed=1)
    open_base.cache_clear()
    with pytest.raises(ConflictError, match="use the same base"):
        program.run(NUM_WORKERS=3)
    assert newest(run).step == resumed_at
    write_base(tmp_path / "base")
    open_base.cache_clear()

    program.run(NUM_WORKERS=3)
    assert read_attempts(run)[-1].metadata.world_size == 3
    assert read_attempts(run)[-1].step == resumed_at < newest(run).step == STEPS
    assert sorted(consumed(run)) == list(range(1, STEPS + 1))
    assert_audit_clean(program)
    program.run(NUM_WORKERS=1, RUN_NAME="uninterrupted")
    assert losses(run) == pytest.approx(losses(the_run(program, "uninterrupted")), rel=1e-4)
    assert {file.name: file.read_bytes() for file in Path(base).iterdir()} == untouched

    folder = run.storage.locate(run.key("checkpoints", newest(run).name))
    assert PEFT.origin
    packages = str(Path(PEFT.origin).parents[1])
    # -I and -S give an environment with these packages, but without this program's installed sources.
    subprocess.run([sys.executable, "-I", "-S", "-c", WITHOUT_THIS_PROGRAM, packages, base, folder], check=True)
