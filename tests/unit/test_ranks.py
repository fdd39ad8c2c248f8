"""Tests of the numbers of each rank, which have a separate journal and are combined when they are old."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sunspot.background import TokenBucket
from sunspot.observe import ranks
from sunspot.observe.ranks import FLUSH_BURST, FLUSH_EVERY_S, RankHistory, combine, downsample
from sunspot.run import Run, open_run
from sunspot.run.attempts import lineage
from sunspot.run.history import iter_rank_records, newest_rank_records, to_rows
from tests.harness.constants import SetConstants
from tests.harness.runs import begin, start

NAMES = ("rows", "seconds", "step_time_median_s", "step_time_p95_s", "memory_mib", "resident_mib", "throttled_share")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path), "run"))


def record(number: int, **more: list[Any]) -> dict[str, Any]:
    """Return a record with the numbers of two ranks."""
    values: dict[str, list[Any]] = {name: [number + 0.5, 2.0 * number] for name in NAMES}
    values |= {"rows": [number, 2 * number], **more}
    return {"attempt": 1, "step": 10 * number, "time": float(number), "steps": 10, "seconds": 5.0, "ranks": values}


def test_a_combined_rank_record_keeps_totals_and_extremes() -> None:
    first, second = record(1), record(3, memory_mib=[0.5, None], throttled_share=[None, None])
    second["steps"] = 30
    both = combine([combine([first, second]), record(2)])
    assert {name: both[name] for name in ("step", "time", "steps", "seconds", "records")} == {
        **{"step": 20, "time": 2.0, "steps": 50, "seconds": 15.0, "records": 3}
    }
    assert both["ranks"]["rows"] == [6, 12]
    assert both["ranks"]["seconds"] == [7.5, 12.0]
    assert both["ranks"]["step_time_p95_s"] == [3.5, 6.0]
    assert both["ranks"]["memory_mib"] == [2.5, 4.0]
    assert both["ranks"]["resident_mib"] == [2.5, 4.0], "the last value is kept"
    assert both["ranks"]["step_time_median_s"] == [pytest.approx((1.5 + 3 * 3.5 + 2.5) / 5), 4.8], (
        "the mean is weighted by steps"
    )
    assert combine([record(1, rows=[1, 1], memory_mib=[None, None]), record(2, memory_mib=[None, 1.0])])["ranks"][
        "memory_mib"
    ] == [None, 1.0]


def test_old_rank_records_are_combined_but_new_records_are_kept(run: Run, set_constants: SetConstants) -> None:
    """A long attempt keeps a limited number of records, but their totals cover every step."""
    set_constants(ranks, MIN_RECORDS=8, MIN_BYTES=2000)
    set_constants("sunspot.run.streams", SIZES=(1000, 4000, 8000))
    attempt, sizes = start(run, "job"), []
    history = RankHistory(run, attempt.number)
    history.end()
    for number in range(1, 1001):
        history.append(record(number), {name: np.array(each) for name, each in record(number)["ranks"].items()})
        if number % 5 == 0:
            history.flush()
            sizes.append(sum(entry.size for entry in run.storage.list(run.key("ranks"))))
    assert max(sizes) < 2 * 8000 + 2000
    found = list(iter_rank_records(run, lineage([attempt])))
    newest = [each for each in found if "records" not in each]
    assert [each["step"] for each in newest] == [10 * n for n in range(1001 - len(newest), 1001)]
    assert len(newest) >= 8
    combined = [each["records"] for each in found if "records" in each]
    assert sum(combined) + len(newest) == 1000
    assert 4 <= len(combined) < 40
    assert len({count for count in combined[:-3]}) == 1, "combined records cover equally many"
    assert sum(each["steps"] for each in found) == 10_000
    assert sum(each["ranks"]["rows"][1] for each in found) == sum(2 * n for n in range(1, 1001))
    assert newest_rank_records(run, lineage([attempt])) == found


def test_a_small_number_of_rank_records_is_not_combined() -> None:
    text = b"".join(json.dumps(record(number)).encode() + b"\n" for number in range(64))
    assert downsample(text) == text


def test_the_rank_records_of_a_long_run_are_written_once_a_minute(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("sunspot.observe.ranks.TokenBucket", partial(TokenBucket, clock=lambda: now))
    history, spans = RankHistory(run, 1), lineage([start(run, "job")])
    for number in range(1, 2 * FLUSH_BURST + 1):
        now = 10.0 * number
        history.append(record(number), {"rows": np.array([number])})
        history.flush()
        read = len(list(iter_rank_records(run, spans)))
        assert read == number or number > FLUSH_BURST
        assert read >= number - FLUSH_EVERY_S / 10
    history.append(record(1000), {"rows": np.array([1.0, 2.0]), "memory_left_mib": np.array([np.nan, 0.12345678])})
    history.end()
    history.flush()
    *_, last = iter_rank_records(run, spans)
    rows = [{"rows": 1, "memory_left_mib": None}, {"rows": 2, "memory_left_mib": 0.123457}]
    assert (last["step"], to_rows(last["ranks"])) == (10_000, rows)
