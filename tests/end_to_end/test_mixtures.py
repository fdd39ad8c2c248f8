"""Tests of runs on a mixture that are killed and resumed on other numbers of workers, on real Ray workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sunspot.cli import main as sunspot
from sunspot.errors import ConflictError
from sunspot.run.attempts import read_attempts
from tests.harness.program import Program
from tests.harness.training import MakeData, consumed, kill_all, newest, the_run, wait_for_step, weights

SIZES = {"first": 3000, "second": 1400, "third": 60}


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["torch", "ray"])
def test_a_killed_run_on_a_mixture_resumes_at_the_next_row_of_each_source(
    loader: str, program: Program, make_data: MakeData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {name: make_data(rows, name, row_group=100) for name, rows in SIZES.items()}
    dataset = ",".join(f"{path}:{weight}" for path, weight in zip(sources.values(), (0.6, 0.3, 0.1), strict=True))
    settings = {"DATASET": dataset, "LOADER": loader, "GLOBAL_BATCH_SIZE": 20, "EPOCHS": 2}
    settings |= {"CHECKPOINT_EVERY_STEPS": 20, "SNAPSHOT_COST": 0}
    run = the_run(program)
    for workers, step in ((2, 60), (3, 240)):
        process = program.start(**settings, NUM_WORKERS=workers)
        wait_for_step(run, step, process)
        kill_all(process)
    with pytest.raises(ConflictError, match="or with different data, mixture weights"):
        program.run(**{**settings, "DATASET": dataset.replace("0.6", "0.5")}, NUM_WORKERS=1)
    program.run(**settings, NUM_WORKERS=1)
    assert tuple(attempt.metadata.world_size for attempt in read_attempts(run)) == (2, 3, 1)
    assert newest(run).step == 446

    program.run(**settings, NUM_WORKERS=2, RUN_NAME="whole")
    whole = the_run(program, "whole")
    assert {step: sorted(rows) for step, rows in consumed(run).items()} == {
        step: sorted(rows) for step, rows in consumed(whole).items()
    }
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=0, atol=1e-5)

    capsys.readouterr()
    storage = program.settings["STORAGE_PATH"]
    with pytest.raises(SystemExit) as ended:
        sunspot(["audit", "run", "--json", "--storage", storage])
    assert not ended.value.code
    audit = json.loads(capsys.readouterr().out)
    assert {each["missing"] + each["repeated"] for each in audit} == {0}
    counted = [sum(each["rows"] for each in audit if each["source"] == path) for path in sources.values()]
    assert counted == [5352, 2676, 892]
    with pytest.raises(SystemExit):
        sunspot(["status", "run", "--json", "--storage", storage])
    shown = json.loads(capsys.readouterr().out)["sources"]
    assert [round(each["epochs"], 2) for each in shown] == [1.78, 1.91, 14.87]
