"""Tests with huge runs, in which oversized data is reported or cut without taking much memory or time."""

from __future__ import annotations

import io
import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from sunspot.checkpoint.files import unpack
from sunspot.errors import DamageError, TooLargeError
from sunspot.report import read_report, render
from sunspot.report.history import History, Series
from sunspot.report.html import table
from sunspot.report.search import render_stored
from sunspot.run import Run
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.audit import AuditWriter, read_audit
from sunspot.run.epochs import EpochLayout
from sunspot.run.history import Journal, iter_records, newest_record
from sunspot.run.logs import LogWriter, read_stream, read_tail
from sunspot.run.predictions import MAX_PARTS, Exhibit, Predictions, TaskExhibit, read_shown, write_shown
from sunspot.run.search import SearchResults, Trial, write_results
from sunspot.run.size_limits import (
    MAX_DAMAGED_LINES,
    MAX_EPOCHS,
    MAX_NAMES,
    MAX_PAGE_BYTES,
    MAX_SEGMENT_BYTES,
    MAX_TABLE_ROWS,
    budget,
    spend,
)
from sunspot.run.status import RunState
from sunspot.run.streams import SIZES, first_few, list_segments, new_stream
from sunspot.submitter.proof import count_rows, find_foreign_rows
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.runs import begin, report, seen_as, start
from tests.harness.trained import BEGUN, attempt_metadata, predictions_of, trained

NEWEST = "step-00000188-attempt-0002"


def write_lines(run: Run, kind: str, content: bytes, first: int = 0, last: int = 0) -> Path:
    key = run.key(kind, f"{new_stream(1)}-{first:010d}-{last:010d}.jsonl")
    run.storage.write(key, content)
    return Path(run.storage.locate(key))


def sparse(path: Path, size: int) -> None:
    """Make a sparse file of this size, which takes no disk space."""
    with open(path, "ab") as file:
        file.truncate(size)


def page_of(run: Run) -> str:
    began = time.monotonic()
    page = render(read_report(seen_as(run, RunState.SUCCEEDED))).decode()
    assert time.monotonic() - began < 60
    assert len(page) < 2 * MAX_PAGE_BYTES
    return page


# ------------------------------------------------------------------------------------------------------------- segments


def test_an_oversized_segment_counts_as_damaged_and_is_not_read(run: Run) -> None:
    trained(run)
    sparse(write_lines(run, "metrics", b""), MAX_SEGMENT_BYTES + 1)
    sparse(write_lines(run, "events", b""), 700 << 30)
    damaged: list[str] = []
    records = list(iter_records(run, "metrics", damaged=damaged))
    assert records
    assert "the limit is 32 MiB" in "".join(damaged)
    page = page_of(run)
    assert page.count("the limit is 32 MiB") == 2
    assert "Loss over steps" in page, "the rest is shown"


def test_merging_never_creates_an_oversized_segment(run: Run) -> None:
    journal = Journal(run, "events", 1)
    for number in range(40):
        for _ in range(20):
            journal.note("note", number, "x" * 20_000)
        journal.flush()
    sizes = [segment.entry.size for segment in list_segments(run.storage, run.key("events"))]
    assert SIZES[-1] <= max(sizes) < 2 * SIZES[-1] < MAX_SEGMENT_BYTES


def test_large_segments_are_not_read_all_at_once(run: Run) -> None:
    for size in (1, 20 << 20, 11 << 20, 2 << 20, 31 << 20):
        sparse(write_lines(run, "metrics", b""), size)
        time.sleep(0.002)  # so that their names sort in this order
    segments = list_segments(run.storage, run.key("metrics"))
    groups = []
    while segments:
        groups.append(len(first_few(segments)))
        segments = segments[groups[-1] :]
    assert groups == [3, 1, 1]


def test_an_oversized_output_segment_is_replaced_by_a_note(run: Run, sunspot: Command) -> None:
    begin(run)
    for stream in ("driver-20261125T000000000Z", "driver-20261126T000000000Z"):
        writer = LogWriter(run, stream)
        writer.append(b"first\n" + b"x" * (1 << 20))
        writer.flush()
        path = Path(run.storage.locate(run.key("logs", stream, "000000000000000.log")))
        path.with_name("000000002000000.log").touch()
        sparse(path.with_name("000000002000000.log"), 1 << 40)
        path.with_name(f"{(1 << 40) + 2_000_000:015d}.log").write_bytes(b"the last line\n")
    whole, tail = read_stream(run, stream), read_tail(run, stream, 1000)
    assert whole.startswith(b"first\n")
    for text in (whole, tail):
        assert len(text) < 2 << 20
        assert b"the limit is 32 MiB" in text
        assert text.endswith(b"the last line\n")
    assert sunspot("logs", run.name) == 0
    assert "the last line" in sunspot.out


def test_a_segment_is_abandoned_after_a_thousand_damaged_lines(run: Run) -> None:
    trained(run)
    path = write_lines(run, "metrics", b"\n" * (8 << 20))
    damaged: list[str] = []
    began = time.monotonic()
    assert list(iter_records(run, "metrics", damaged=damaged))
    assert time.monotonic() - began < 5
    assert damaged == [
        f"{path}: {MAX_DAMAGED_LINES + 1} of the first {MAX_DAMAGED_LINES + 1} lines cannot be used; "
        "the rest is not read"
    ]


def test_the_newest_record_is_found_by_reading_backwards(run: Run) -> None:
    attempt = start(begin(run), "job", at=BEGUN, **attempt_metadata())
    report(run, attempt, *({"step": step, "time": BEGUN + step, "loss": 1.0} for step in range(1, 200)))
    found = newest_record(run, lineage(read_attempts(run)))
    assert found
    assert found["step"] == 199


def test_reading_more_bytes_than_allowed_raises_an_error() -> None:
    with budget(10, "reading it"):
        spend(10)
        with pytest.raises(TooLargeError, match="reading it: the limit of"):
            spend(1)
    spend(1 << 40)


# -------------------------------------------------------------------------------------------------------------- metrics


def test_a_report_with_thousands_of_metrics_is_fast_and_counts_the_omitted_metrics(
    run: Run, sunspot: Command, tmp_path: Path
) -> None:
    trained(run)
    one = {"attempt": 1, "step": 5, "time": BEGUN + 20}
    write_lines(run, "metrics", (json.dumps({**one, **{f"{n}_loss": 1.0 for n in range(20_000)}}) + "\n").encode())
    lines = [json.dumps({**one, **{f"{n}_{m}_loss": 1.0 for m in range(50)}}) for n in range(600)]
    write_lines(run, "metrics", "\n".join([*lines, ""]).encode(), 1, 600)
    page = page_of(run)
    assert "more metrics are not shown, because a report has at most 1,000" in page
    assert "750 more metrics are not shown" in page, "in the table of numbers"
    assert page.count("<th") < 3000
    began = time.monotonic()
    assert sunspot("metrics", run.name, "--csv") == 0
    assert len(sunspot.out.splitlines()[0].split(",")) == MAX_NAMES
    assert "more columns are not shown; --json has all" in sunspot.err
    assert sunspot("metrics", run.name, "--parquet", str(tmp_path / "metrics.parquet")) == 0
    assert time.monotonic() - began < 60


def test_a_series_uses_no_memory_for_missing_values() -> None:
    series = Series()
    for number in range(2000):
        series.add({"step": float(number), **{f"{number}_{each}": 1.0 for each in range(20)}})
    sizes = [len(numbers) for numbers, _ in series._columns.values()]
    assert sum(sizes) == 2000 * 21
    assert series.column("7_0")[5:9] == [None, None, 1.0, None]
    assert series.values_at("step", [0, 1999]) == [0.0, 1999.0]
    assert series.values_at("7_0", [6, 7, 8]) == [None, 1.0, None]
    assert series.values_at("none", [0]) == [None]
    assert series.indexes_with(["7_0", "5_3", "none"]) == [5, 7]


def test_no_value_of_200_metrics_in_5000_epochs_is_dropped() -> None:
    history = History()
    for epoch in range(5000):
        values = {f"test_metric_{number}": float(number) for number in range(200)}
        history.add({"attempt": 1, "step": epoch * 10, "epoch": epoch, "rows": 100, **values}, "loss")
    assert len(history.results) == 200
    assert not history.left_out
    assert len(history.series) == 5000


# ---------------------------------------------------------------------------------------------------------------- audit


def test_a_checkpoint_with_an_impossible_step_is_reported_immediately(run: Run) -> None:
    data = EpochLayout(rows=10, steps_per_epoch=1, batch=10)
    rows = pa.table({"step": pa.array([1], pa.int32()), "rank": pa.array([0], pa.int32()), "row": [0]})
    with pytest.raises(DamageError, match="in epoch 1,000,000,000, but an audit checks at most 100,000"):
        list(count_rows([rows], data, 10**9))
    assert len(list(count_rows([rows], data, MAX_EPOCHS // 100))) == MAX_EPOCHS // 100


def test_rows_are_counted_by_epoch_in_one_pass() -> None:
    epochs, rows = 5000, 200
    steps = pa.array([step for step in range(1, epochs + 1) for _ in range(rows)], pa.int32())
    consumed = pa.table({"step": steps, "rank": pa.array([0] * len(steps), pa.int32()), "row": [*range(rows)] * epochs})
    began = time.monotonic()
    counted = list(count_rows([consumed], EpochLayout(rows, 1, rows), epochs))
    assert time.monotonic() - began < 30
    assert [epoch.epoch for epoch in counted] == list(range(1, epochs + 1))
    assert {(epoch.rows, epoch.missing, epoch.repeated) for epoch in counted} == {(rows, 0, 0)}


def test_the_audit_reports_and_counts_unknown_rows() -> None:
    step, row = pa.array([1] * 100_000, pa.int32()), pa.array(range(1000, 101_000), pa.int64())
    lines = find_foreign_rows([pa.table({"step": step, "row": row})], EpochLayout(10, 1, 10))
    assert lines[0] == "step 1: row 1000 is not one of 0..9"
    assert lines[5:] == ["and 99995 more like it"]


def test_an_audit_file_with_too_many_rows_counts_as_damaged(run: Run, set_constants: SetConstants) -> None:
    attempt = start(begin(run), "job")
    rows = 10_000
    same = {"step": pa.array([1] * rows, pa.int32()), "rank": pa.array([0] * rows, pa.int32()), "row": [0] * rows}
    AuditWriter(run, attempt.label).write(1, 1, pa.table(same))
    [found] = read_audit(run, lineage([attempt]))
    assert len(found) == rows
    set_constants("sunspot.run.audit", MAX_AUDIT_ROWS=rows - 1)
    with pytest.raises(DamageError, match="10,000 rows, but the limit is 9,999"):
        read_audit(run, lineage([attempt]))


# ---------------------------------------------------------------------------------------------------------------- pages


def rewrite(run: Run, file: str, **fields: Any) -> None:
    content = json.loads(run.storage.read(run.key(file)))
    run.storage.write(run.key(file), json.dumps({**content, **fields}).encode())


@pytest.mark.parametrize("classes", [300_000_000, 10**15])
def test_predictions_with_an_incomplete_confusion_matrix_count_as_damaged(run: Run, classes: int) -> None:
    trained(run)
    rewrite(run, "predictions.json", classes=classes, confusion=[])
    assert read_shown(run, Predictions) is None
    assert f"the confusion matrix does not have {classes} rows" in page_of(run)


def test_predictions_of_a_thousand_classes_are_shown(run: Run) -> None:
    trained(run)
    write_shown(run, predictions_of(NEWEST, 1000))
    page = page_of(run)
    assert "The pairs that are confused most often, 30 of 30; 1000 classes" in page


def test_a_confusion_matrix_of_3000_classes_is_not_read(run: Run) -> None:
    trained(run)
    rewrite(run, "predictions.json", classes=3000, confusion=[[7] * 3000] * 3000)
    assert "predictions.json cannot be used: it is larger than 16 MiB" in page_of(run)


def test_a_long_table_says_how_many_rows_are_omitted() -> None:
    rows = [[f"row {number}", number] for number in range(MAX_TABLE_ROWS + 3)]
    assert "3 more rows are not shown" in table("Rows", ["name", "number"], rows)
    assert "not shown" not in table("Rows", ["name", "number"], rows[:MAX_TABLE_ROWS])
    wide = table("Columns", [str(number) for number in range(400)], [[0] * 400] * 100)
    assert "100 more columns are not shown" in wide
    assert wide.count("<td") < 25_000


def test_a_report_shows_only_some_of_thousands_of_settings_and_results(run: Run) -> None:
    trained(run)
    write_shown(
        run, TaskExhibit(NEWEST, 188, [Exhibit(f"part {number}", "text") for number in range(MAX_PARTS + 5000)])
    )
    metadata = attempt_metadata()
    metadata["settings"] |= {f"SUNSPOT_X{number}": "v" * 500 for number in range(20_000)}
    start(run, "job", at=BEGUN + 300, **metadata)
    page = page_of(run)
    assert "5,000 more parts are not shown" in page
    assert "more rows are not shown" in page


def test_sections_that_do_not_fit_on_the_page_are_listed(run: Run) -> None:
    trained(run)
    images = [b"\x89PNG\r\n\x1a\n" + bytes(200_000)] * 40
    write_shown(run, TaskExhibit(NEWEST, 188, [Exhibit("pictures", images=images)]))
    page = page_of(run)
    assert "This section is not shown, because it has" in page
    assert "Settings of attempt" in page, "the sections after it are shown"


def test_a_search_report_shows_only_some_of_thousands_of_trials(run: Run) -> None:
    begin(run)
    trials = [Trial(f"run-{n}", {"lr": n}, RunState.SUCCEEDED, best=float(n)) for n in range(2000)]
    write_results(run, SearchResults("loss", "min", {"lr": "choice(1)"}, tuple(trials)))
    page = render_stored(run).decode()
    assert "1,500 more rows are not shown" in page
    assert "1,500 more trials are not shown in charts" in page
    assert len(page) < MAX_PAGE_BYTES


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoint_files_with_compressed_or_overlapping_members_are_rejected(tmp_path: Path) -> None:
    saved = io.BytesIO()
    torch.serialization.set_crc32_options(True)  # zipfile checks the checksums, and our files have none
    try:
        torch.save({"weight": torch.zeros(100_000)}, saved)
    finally:
        torch.serialization.set_crc32_options(False)
    assert unpack(io.BytesIO(saved.getvalue()))["weight"].shape == (100_000,)
    packed = io.BytesIO()
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    path = tmp_path / "model.pt"
    path.write_bytes(packed.getvalue())
    for file in (io.BytesIO(packed.getvalue()), str(path)):
        with pytest.raises(ValueError, match="compressed"):
            unpack(file)
    path.write_bytes(saved.getvalue())
    assert unpack(str(path))["weight"].shape == (100_000,), "it can also be unpacked from its path"
    names = zipfile.ZipFile(saved).namelist()
    twice = io.BytesIO(saved.getvalue())
    with zipfile.ZipFile(twice, "a") as archive:
        weights = max(archive.infolist(), key=lambda member: member.file_size)
        for number in range(3):
            again = zipfile.ZipInfo(f"{names[0].partition('/')[0]}/data/{number + 5}")
            again.header_offset, again.CRC = weights.header_offset, weights.CRC
            again.file_size = again.compress_size = weights.file_size
            archive.filelist.append(again)
            archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="compressed"):
        unpack(twice)
