"""Test of the complete `sunspot demo` with a task of short steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sunspot.run import open_run
from sunspot.run.attempts import read_attempts
from sunspot.submitter import demonstration
from tests.harness.commands import StorageCommand
from tests.harness.constants import SetConstants

ROWS = 3000


@pytest.mark.slow
def test_the_demo_trains_on_every_row_once_despite_a_killed_worker(
    tmp_path: Path,
    make_data: Callable[..., str],
    set_constants: SetConstants,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = {
        "EPOCHS": "1",
        "TASK": "tests.tasks.slow",
        "DATASET": make_data(ROWS, test_rows=50),
        "GLOBAL_BATCH_SIZE": "10",
    }
    set_constants(demonstration, SETTINGS={**demonstration.SETTINGS, **small})
    answer = StorageCommand(str(tmp_path / "runs"), capsys)("demo", "--json")
    assert answer.code == 0, answer.err
    told = answer.json
    assert told["epochs"] == [{"epoch": 1, "rows": ROWS, "missing": 0, "repeated": 0}]
    assert (told["rows_missing"], told["rows_repeated"]) == (0, 0)
    assert told["pause_s"] > 0
    assert told["steps_again"] == 0
    assert any("kill -9" in event["text"] for event in told["events"])
    assert 8 <= len(told["events"]) <= 12
    assert [event["after_s"] for event in told["events"]] == sorted(event["after_s"] for event in told["events"])
    assert Path(told["report"]).is_file()
    run = open_run(str(tmp_path / "runs"), "demo")
    assert [attempt.metadata.world_size for attempt in read_attempts(run)][:2] == [3, 2]
