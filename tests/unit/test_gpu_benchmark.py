"""Tests of `make bench-gpu` with tiny sizes on the CPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from scripts.bench.gpu.session import Session, in_turns
from tests.harness import REPOSITORY

WITHOUT_COMPILER = {"TORCH_COMPILE_DISABLE": "1"}


def test_the_benchmark_measures_without_ray_and_stores_what_it_prints(tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, (REPOSITORY / "app", REPOSITORY)))
    run = subprocess.run(
        [sys.executable, "-m", "scripts.bench.gpu", "--device", "cpu", "digits", "gpt2", "checkpoints"],
        env={**os.environ, **WITHOUT_COMPILER, "OUT": str(tmp_path), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    table = (tmp_path / "table.md").read_text()
    assert run.stdout == table
    for name in ("plain again", "Sunspot, `SURVIVORS=off`", "plain, mean, compiled", "`dcp.async_save`"):
        assert f"| {name}" in table
    assert "left out" not in table
    turns = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert {line["subject"] for line in turns} == {"digits", "gpt2", "checkpoints"}


def test_a_measurement_does_not_begin_if_it_would_not_end_in_time(tmp_path: Path) -> None:
    seconds = [0.0]
    session = Session(torch.device("cpu"), 100, tmp_path, clock=lambda: seconds[0])

    def slow() -> Iterator[None]:
        while True:
            seconds[0] += 2
            yield

    session.begin("test", 9)
    assert len(in_turns(session, {"slow": slow()}, steps=1, turns=50)["slow"]) == 2  # after two turns to warm up
    assert "only 2 of 50 turns fit into the time" in (tmp_path / "table.md").read_text()
    seconds[0] = 95
    session.begin("test", 9)
    assert session.left_s == 5
    assert in_turns(session, {"slow": slow(), "other": slow(), "third": slow()}, steps=1, turns=50) == {}
    assert "third: left out for lack of time" in (tmp_path / "table.md").read_text()


def test_a_variant_that_fails_is_omitted_and_its_error_is_reported(tmp_path: Path) -> None:
    def fail() -> Iterator[None]:
        yield
        raise torch.OutOfMemoryError("no room")

    session = Session(torch.device("cpu"), 100, tmp_path)
    session.begin("test", 100)
    figures = in_turns(session, {"fails": fail(), "works": itertools.repeat(None)}, steps=1, turns=2)
    assert {name: len(turns) for name, turns in figures.items()} == {"works": 2}
    assert "fails: left out, OutOfMemoryError: no room" in (tmp_path / "table.md").read_text()
