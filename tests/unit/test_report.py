"""Tests of the report: its content, its messages about missing parts, and its display in a browser."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.report import read_report, render
from sunspot.report.charts import BUCKETS, Point, downsample, linear_axis, log_axis
from sunspot.report.history import History
from sunspot.run import Run
from sunspot.run.checkpoints import MANIFEST
from sunspot.run.failures import Failure, record_failure
from sunspot.run.history import Journal
from sunspot.run.incidents import Cause
from sunspot.run.predictions import write_shown
from sunspot.run.seen import look
from sunspot.run.status import RunState, read_status, write_status_as_is
from sunspot.storage.local import LocalStorage
from tests.harness.browser import CONTRAST, Browser
from tests.harness.commands import Command
from tests.harness.runs import begin, commit, journal_keys, report, seen_as, start, write_receipt
from tests.harness.trained import BEGUN, attempt_metadata, png, predictions_of, record, trained

LIMIT = 2_000_000
"""Largest size of a report in bytes."""

VOID = ("meta", "img", "br", "path", "circle", "rect", "wbr")


class Page(HTMLParser):
    """A parsed report. The parser rejects elements that are closed in the wrong order."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.figures: dict[str, float] = {}
        self._open: list[str] = []
        self._figure = ""
        self._words: list[str] = []
        self.feed(page.decode())
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "dd":
            self._figure = attributes["id"].removeprefix("figure-")
        if tag == "data" and self._figure:
            self.figures.setdefault(self._figure, float(attributes["value"]))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag
        if tag == "dd":
            self._figure = ""

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self._words.append(data)

    @property
    def text(self) -> str:
        """All readable text in one line."""
        return " ".join(" ".join(self._words).split())

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Return the attributes of every element with this tag and these attributes."""
        return [a for name, a in self.elements if name == tag and attributes.items() <= a.items()]

    @property
    def charts(self) -> list[str]:
        """The text alternatives of the drawings."""
        return [str(attributes["aria-label"]) for attributes in self.all("svg", role="img")]


def made(run: Run, state: RunState = RunState.SUCCEEDED, reason: str = "") -> Page:
    """Return the parsed report of a run."""
    page = render(read_report(seen_as(run, state, reason)))
    assert len(page) <= LIMIT
    return Page(page)


def damage(run: Run, checkpoint: str, file: str = "model.pt") -> None:
    run.storage.write(run.key("checkpoints", checkpoint, file), b"other bytes")


# -------------------------------------------------------------------------------------------------------------- content


def test_the_report_shows_the_key_figures_of_the_run(run: Run) -> None:
    page = made(trained(run))
    figures = page.figures
    assert (figures["test_accuracy"], figures["accuracy"]) == (0.9805, 0.9917)
    assert (figures["test_loss"], figures["loss"]) == (0.0586, 0.0393)
    assert (figures["steps"], figures["time"], figures["throughput"]) == (188, 245, 256)
    # There are 2 workers for 245 s. The first 12 s are lost, and the time from step 94 to the first step after it.
    assert figures["goodput"] == pytest.approx(1 - (12 + 51) / 245)
    assert figures["incidents"] == 1
    for words in ("✓ Succeeded", "Held-out accuracy 98.05 %", "Steps 188 of 188", "Time 4 min 5 s", "Goodput 74 %"):
        assert words in page.text


def test_every_chart_over_steps_or_time_marks_a_restart(run: Run) -> None:
    charts = made(trained(run)).charts
    for name in (
        "Loss over steps",
        "Loss over wall clock",
        "Accuracy in % over steps",
        "Accuracy in % over wall clock",
    ):
        [chart] = [text for text in charts if text.startswith(name)]
        assert "1 new worker group." in chart
    [steps, clock] = [text for text in charts if text.startswith("Loss over")]
    assert "0.0393 at 188" in steps
    assert "0.0586 at 188" in steps
    assert "highest 1.8" in steps, "the 9 of a step that was lost and taken again is left out"
    assert "0.0393 at 4" in clock, "240 s are 4 minutes"


def test_a_window_of_one_step_causes_no_spike_in_the_chart(run: Run) -> None:
    """A checkpoint ends a window, and the next window can have one step of 128 rows."""
    first = start(begin(run), "job", at=BEGUN, **attempt_metadata())
    windows = [(80, 80, 0.9), (81, 1, 0.5), (82, 1, 0.4), (160, 78, 0.95), (170, 10, 1.0)]
    times = [{**record(step, BEGUN + step, accuracy=0.9), "steps": steps} for step, steps, _ in windows]
    rows = [{**one, "rows": 128 * steps, "accuracy": a} for one, (_, steps, a) in zip(times, windows, strict=True)]
    report(run, first, *rows)
    [steps] = [chart for chart in made(run).charts if chart.startswith("Accuracy in % over steps")]
    assert "lowest 90 at 80, highest 95 at 160" in steps


def test_a_short_window_is_drawn_if_several_short_windows_precede_it() -> None:
    history = History()
    for step, (rows, loss) in enumerate([(100.0, 1.0), *[(10.0, 0.5)] * 5]):
        history.add({"attempt": 1, "step": step, "rows": rows, "loss": loss}, "loss")
    assert history.drawn("loss")[-2:] == [0.5, 0.5]
    assert history.drawn("loss")[:2] == [1.0, None]


def test_curves_have_a_gap_between_two_attempts(run: Run) -> None:
    page = render(read_report(look(trained(run)))).decode()
    [chart] = re.findall(r'aria-label="Loss over wall clock.*?</svg>', page)
    lines = re.findall(r'class="line ([ab])" d="([^"]*)"', chart)
    assert {style: path.count("M") for style, path in lines} == {"a": 2, "b": 2}


def test_a_restart_is_marked_at_its_step_in_the_chart(run: Run) -> None:
    page = render(read_report(look(trained(run)))).decode()
    [chart] = re.findall(r'aria-label="Loss over steps.*?</svg>', page)
    [mark] = re.findall(r'class="mark" d="M([\d.]+) ', chart)
    lines = re.findall(r'class="line a" d="M([\d.]+) .*?L([\d.]+) [\d.]+"', chart)
    first, last = map(float, lines[0])
    assert float(mark) == pytest.approx(first + (last - first) * (94 - 10) / (188 - 10), abs=0.2)


def test_a_single_record_is_drawn_as_a_dot(run: Run) -> None:
    report(run, start(begin(run), "job"), {"step": 5, "loss": 0.5})
    page = made(run)
    assert len(page.all("circle", **{"class": "dot a"})) == 1


def test_wrong_predictions_are_shown_first_and_every_image_has_a_text_alternative(run: Run) -> None:
    page = made(trained(run))
    pictures = page.all("img")
    assert len(pictures) == 30 + 20 + 20
    assert pictures[0]["alt"] == "Held-out row 0: label 0, predicted 1"
    assert pictures[30]["alt"] == "Held-out row 100: label 0, predicted 0"
    assert pictures[50]["alt"] == "Training row 0: label 0"
    assert all(str(picture["src"]).startswith("data:image/png;base64,") for picture in pictures)
    assert "1,970 right and 30 wrong predictions: accuracy 98.50 %" in page.text
    assert "Confusion matrix" in page.text


def test_the_report_lists_the_most_confused_pairs_if_there_are_many_classes(run: Run) -> None:
    trained(run)
    write_shown(run, predictions_of("step-00000188-attempt-0002", classes=1000, wrong=600))
    page = made(run)
    assert "The pairs that are confused most often, 30 of 600; 1000 classes" in page.text
    assert "Mistakes, the most certain first, 48 of 600" in page.text


def test_the_report_shows_each_rank_and_the_spread_between_ranks(run: Run) -> None:
    page = made(trained(run, ranks=4))
    assert [chart for chart in page.charts if chart.startswith("Rows per second of one rank over wall clock")]
    [spread] = [chart for chart in page.charts if chart.startswith("Seconds of a step on one rank")]
    assert re.search(r"Lowest to highest rank: 0\.3\d* to 0\.3\d*\.", spread)
    assert "node-3" in page.text


def test_incidents_are_shown_with_their_receipts(run: Run) -> None:
    trained(run)
    third = start(run, "job", "step-00000188-attempt-0002", at=BEGUN + 300, **attempt_metadata(2, "memory"))
    failed = {"rank": 1, "step": 190, "type": "RuntimeError", "traceback": "", "file": "task.py", "line": 7}
    record_failure(run, Failure(attempt=3, message="no good", function="loss", **failed))
    journal = Journal(run, "events", third.number)
    journal.append({"event": "hung", "rank": 1, "step": 190, "time": BEGUN + 320, "detail": "in all_reduce"})
    journal.flush()
    text = made(run, RunState.FAILED, "training failed").text
    assert "✗ Failed" in text
    assert "training failed" in text
    assert "1 incident (1 node lost); 6 steps taken again." in text
    assert "incident: node lost (node-1 is gone)" in text
    assert "35 s" in text, "from the loss to the first step after it"
    assert "no receipt: it took no step" in text
    assert "RuntimeError: no good" in text
    assert "task.py:7, loss" in text
    assert "in all_reduce" in text


def test_a_missing_receipt_is_reported(run: Run) -> None:
    trained(run)
    for key in journal_keys(run, "events", 2):
        run.storage.delete(key)
    text = made(run).text
    assert "attempt 2 took steps, but has no receipt" in text.lower()
    assert "no receipt, though it took steps" in text


def test_checkpoints_are_shown_with_their_states(run: Run) -> None:
    trained(run)
    damage(run, "step-00000094-attempt-0001")
    run.storage.write(run.key("checkpoints", "step-00000189-attempt-0002", "model.pt"), b"begun")
    stale = "step-00000150-attempt-0001"
    commit(run, replace(start(run, "job", "step-00000188-attempt-0002"), number=1), 150)
    text = made(run).text
    assert "✓ verified newest and best" in text
    assert "✗ damaged: model.pt has 11 bytes instead of" in text
    assert "… incomplete: it has no manifest" in text
    assert stale not in text
    assert "Left out: 1 of superseded attempts." in text


def test_the_report_shows_a_checkpoint_with_a_changed_manifest_as_damaged(run: Run) -> None:
    trained(run)
    damage(run, "step-00000188-attempt-0002", MANIFEST)
    page = made(run)
    assert f"✗ damaged: {MANIFEST} cannot be used" in page.text
    assert "its newest checkpoint is step-00000094-attempt-0001" in page.text


def test_the_report_shows_changes_to_settings_and_versions(run: Run) -> None:
    text = made(trained(run)).text
    assert "CHECKPOINT_EVERY_S 30.0 60" in text
    assert "HANG_TIMEOUT_S 300.0 the same" in text
    assert "attempt 2: SUNSPOT_CHECKPOINT_EVERY_S: 60.0 -> 30.0" in text
    assert "torch 2.15.0" in text
    assert "Every attempt has had the same versions." in text
    assert "training rows 12000" in text


# ------------------------------------------------------------------------------------------------------ what is missing


def test_a_run_without_attempts_has_no_empty_sections(run: Run) -> None:
    page = made(run, RunState.PENDING, "its driver has not started")
    for words in ("Pending", "Steps 0", "its driver has not started", "Goodput not known", "No worker has begun yet"):
        assert words in page.text
    assert [link["href"] for link in page.all("a")] == ["#incidents"]


def test_the_report_of_a_live_run_counts_time_until_now(run: Run) -> None:
    first = start(begin(run), "job", at=BEGUN, **attempt_metadata())
    write_receipt(run, first, 0, Cause.BEGIN, left=BEGUN, first_step=BEGUN + 5)
    report(run, first, record(3, BEGUN + 10))
    page = made(run, RunState.RUNNING, "2 workers train")
    assert "Running" in page.text
    assert "2 workers train" in page.text
    assert "The model has not been evaluated on held-out rows yet." in page.text
    assert "total not known yet" in page.text
    assert page.figures["time"] > 1000, "its time ends now"


def test_a_report_accepts_records_without_times_or_results_or_ranks(run: Run) -> None:
    report(run, start(begin(run), "job"), {"step": 1}, {"step": 2, "loss": 0.5}, {"step": 3, "learning_rate": 0.1})
    page = made(run)
    assert [chart.partition(";")[0] for chart in page.charts] == ["Loss over steps"]
    assert "Loss over wall clock: nothing is recorded" in page.text
    report(Run(run.storage, "other"), start(begin(Run(run.storage, "other")), "job"), {"step": 1})
    assert "no loss, no accuracy, and nothing on held-out rows" in made(Run(run.storage, "other")).text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.7e308])
def test_an_infinite_loss_is_reported_but_not_drawn(run: Run, value: float) -> None:
    first = start(begin(run), "job", at=BEGUN, **attempt_metadata())
    broken = [record(step, BEGUN + step, loss=value) for step in (12, 13)]
    report(run, first, record(10, BEGUN + 10, loss=2.0), record(11, BEGUN + 11, loss=1.0), *broken)
    page = made(run)
    assert "loss could not be drawn in 2 records (NaN, infinite or huge), first at step 12." in page.text
    [steps] = [chart for chart in page.charts if chart.startswith("Loss over steps")]
    assert "1 at 11" in steps
    report(Run(run.storage, "all"), start(begin(Run(run.storage, "all")), "job"), *broken)
    assert "Loss: no number can be drawn." in made(Run(run.storage, "all")).text


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("metrics", "A part of the metric history cannot be read"),
        ("ranks", "A part of the numbers of each rank cannot be read"),
        ("events", "An event cannot be read"),
        ("predictions.json", "The predictions cannot be read"),
        ("attempts/0002.json", "The list of its attempts cannot be read"),
        ("run.json", "Run.json cannot be read"),
        ("status/attempt-0009-00000000.json", "Its status cannot be read"),
    ],
)
def test_an_unreadable_part_of_a_run_is_reported_and_the_other_parts_are_shown(
    run: Run, key: str, message: str
) -> None:
    trained(run)
    journals = ("metrics", "ranks", "events")
    broken = journal_keys(run, key, 2)[-1] if key in journals else run.key(key)
    run.storage.write(broken, b"{broken")
    text = Page(render(read_report(look(run)))).text
    assert message in text
    assert "✓ verified" in text or key.startswith("attempts"), "without attempts, no checkpoint counts"


# ------------------------------------------------------------------------------------------------------- hostile, large

HOSTILE = "</style></script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x00\x1b[31m\u202e"


def test_text_from_a_run_is_escaped(run: Run) -> None:
    trained(run)
    hostile = attempt_metadata(2, "storage", task_args={"name": HOSTILE})
    hostile |= {"nodes": {"0": HOSTILE}, "versions": {HOSTILE: HOSTILE}}
    third = start(run, HOSTILE, "step-00000188-attempt-0002", at=BEGUN + 300, **hostile)
    write_receipt(run, third, 2, Cause.HUNG, detail=HOSTILE, left=BEGUN + 290, first_step=BEGUN + 310)
    report(run, third, record(190, BEGUN + 320, **{f"{HOSTILE}loss": 1.0, f"test_{HOSTILE}": 2.0}))
    journal = Journal(run, "events", third.number)
    journal.append({"event": HOSTILE, "step": 1, "rank": 0, "time": 1.0, "detail": HOSTILE})
    journal.flush()
    record_failure(run, Failure(3, 0, 190, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 1, HOSTILE))
    page = made(run, RunState.FAILED, HOSTILE)
    assert "alert(1)" in page.text, "it is shown as text"
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object", "form", "base", "foreignobject", "animate"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert str(attributes.get("src", "data:")).startswith("data:")
        assert str(attributes.get("href", "#")).startswith("#")
    assert page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", page.text)


def test_predictions_with_the_largest_images_fit_in_a_report(run: Run) -> None:
    trained(run)
    noise = png(0) + os.urandom(14_000)
    write_shown(run, predictions_of("step-00000188-attempt-0002", classes=20, image=noise, wrong=400))
    page = made(run)
    shown = len(page.all("img"))
    assert 48 <= shown < 48 + 20 + 20, "mistakes come before other images"
    assert f"Omitted: {88 - shown} images" in page.text


def test_a_malformed_png_is_omitted_with_a_note(run: Run) -> None:
    trained(run)
    write_shown(run, predictions_of("step-00000188-attempt-0002", image=b"<svg onload=alert(1)>"))
    page = made(run)
    assert not page.all("img")
    assert "Omitted: 70 images (not in PNG format, or too large for this page)." in page.text


def test_a_report_of_a_hundred_thousand_records_keeps_their_extremes(run: Run) -> None:
    first = start(begin(run), "job", at=BEGUN, **attempt_metadata())
    steps = range(1, 100_001)
    peaks = {50_000: 9.0, 70_000: 0.001}
    journal = Journal(run, "metrics", first.number)
    for step in steps:
        loss = peaks.get(step, 1.0 + step % 7 / 10)
        journal.append({"step": step, "time": BEGUN + 10 * step, "loss": loss, "accuracy": 0.5})
    journal.flush()
    page = made(run)
    [steps_chart] = [chart for chart in page.charts if chart.startswith("Loss on a logarithmic axis over steps")]
    assert "lowest 0.001 at 7e+04, highest 9 at 5e+04" in steps_chart
    assert "Of 100,000 records, the lowest and the highest in each of 240 sections are drawn." in page.text
    assert "Results, 40 of 100,000" in page.text


def test_many_ranks_and_attempts_and_events_and_checkpoints_fit_in_a_report(run: Run) -> None:
    begin(run)
    origin = None
    for number in range(1, 151):
        attempt = start(run, "job", origin, at=BEGUN + 100 * number, **attempt_metadata(500))
        write_receipt(run, attempt, number - 1, detail="x" * 5000)
        origin = commit(run, attempt, 5 * number, loss=1 / number).name
    records = [record(n, BEGUN + 20_000 + n, ranks=500) for n in range(751, 760)]
    for each in records:
        each["ranks"][7]["step_time_median_s"], each["ranks"][490]["step_time_median_s"] = 3.0, 0.1
    report(run, attempt, *records)
    journal = Journal(run, "events", attempt.number)
    for number in range(500):
        journal.append({"event": "hung", "step": 751, "time": float(number), "detail": "y" * 5000})
    journal.flush()
    page = made(run)
    assert "Each rank over the whole run, the 64 slowest of 500" in page.text
    nodes = re.findall(r"\bnode-\d+\b", page.text)
    assert "node-7" in nodes
    assert "node-490" not in nodes, "it is the fastest"
    assert "with its receipt, the newest 100 of 150" in page.text
    assert "Other events, the newest 100 of 500" in page.text
    assert "Left out: 100 older." in page.text


@given(st.integers(1, 2000), st.integers(0, 2**32), st.booleans())
def test_downsampling_limits_the_points_and_keeps_the_extremes(number: int, seed: int, evenly: bool) -> None:
    draw = random.Random(seed)
    places = range(number) if evenly else sorted(draw.uniform(0, 1e6) for _ in range(number))
    given_points = [Point(float(place), draw.gauss(0, 1)) for place in places]
    few = downsample(given_points)
    assert len(few) <= 2 * BUCKETS
    assert [point for point in given_points if point in set(few)] == few, "they stay in order"
    assert min(p.y for p in few) == min(p.y for p in given_points)
    assert max(p.y for p in few) == max(p.y for p in given_points)


@given(st.lists(st.floats(-9e99, 9e99), min_size=1), st.booleans())
def test_an_axis_has_room_for_all_values(values: list[float], from_zero: bool) -> None:
    for axis in (linear_axis(values, from_zero), linear_axis(values, from_zero, tight=True)):
        assert all(-1e-6 <= axis.position(value) <= 1 + 1e-6 for value in [*values, *(tick for tick, _ in axis.ticks)])
        assert 1 <= len(axis.ticks) <= 12


def test_tick_labels_on_an_axis_differ() -> None:
    assert [text for _, text in linear_axis([98.01, 98.09]).ticks] == ["98", "98.02", "98.04", "98.06", "98.08", "98.1"]
    assert [text for _, text in linear_axis([0, 2400]).ticks] == ["0", "500", "1k", "1.5k", "2k", "2.5k"]
    assert [text for _, text in log_axis([0.013, 4]).ticks] == ["0.01", "0.1", "1", "10"]


@given(st.lists(st.floats(1e-100, 9e99), min_size=1))
def test_a_logarithmic_axis_has_room_for_all_values(values: list[float]) -> None:
    axis = log_axis(values)
    assert all(-1e-6 <= axis.position(value) <= 1 + 1e-6 for value in [*values, *(tick for tick, _ in axis.ticks)])
    assert len(axis.ticks) <= 14


# -------------------------------------------------------------------------------------------------------------- command


def test_the_report_command_writes_a_file(
    run: Run, sunspot: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(run)
    monkeypatch.chdir(tmp_path)
    assert sunspot("report", "run") == 0
    default = tmp_path / "run-report.html"
    assert str(default) in sunspot.out
    assert Page(default.read_bytes()).figures["test_accuracy"] == 0.9805
    own = run.storage.locate(run.key("report.html"))
    assert own not in sunspot.out
    run.storage.write(run.key("report.html"), b"")
    assert sunspot("report", "run") == 0
    assert f"{own} is the report that the run itself wrote when it ended" in sunspot.out
    wanted = tmp_path / "elsewhere.html"
    assert sunspot("report", "run", "--output", str(wanted), "--json") == 0
    assert sunspot.json == {"run": "run", "path": str(wanted), "bytes": wanted.stat().st_size}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_report_command_fails_without_a_run_or_writable_folder(run: Run, sunspot: Command, tmp_path: Path) -> None:
    assert sunspot("report", "run") == 3
    trained(run)
    assert sunspot("report", "run", "--output", str(tmp_path / "no" / "such" / "folder.html")) == 4
    assert "cannot be written: No such file or directory" in sunspot.err


def test_a_report_can_be_written_for_a_run_that_was_only_submitted(run: Run, sunspot: Command, tmp_path: Path) -> None:
    run.storage.write(run.key("submissions", "0001-run-1234.json"), b"{}")
    assert sunspot("report", "run", "--output", str(tmp_path / "r.html")) == 0
    assert b"its driver has not started" in (tmp_path / "r.html").read_bytes()


# -------------------------------------------------------------------------------------------------------------- browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a report with content in every section."""
    folder = tmp_path_factory.mktemp("report")
    run = trained(Run(LocalStorage(str(folder)), "run"), ranks=8)
    damage(run, "step-00000094-attempt-0001")
    run.storage.write(run.key("checkpoints", "step-00000189-attempt-0002", "model.pt"), b"begun")
    status = read_status(run)
    assert status
    write_status_as_is(
        run, replace(status, state=RunState.FAILED, reason="a reason " + "without_a_place_to_break" * 20)
    )
    path = folder / "report.html"
    path.write_bytes(render(read_report(look(run))))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_a_browser_shows_the_report(browser: Browser, page: Path, width: int, scheme: str) -> None:
    browser.show(page, width, scheme)
    assert browser.messages() == []
    browser.run("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert browser.run("return document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert browser.run("return [...document.images].every(image => image.alt && image.naturalWidth)")
    assert browser.run(CONTRAST) == []
    figure = "return document.querySelector('#figure-{} data').value"
    figures = {name: float(browser.run(figure.format(name))) for name in ("test_accuracy", "test_loss", "steps")}
    assert figures == {"test_accuracy": 0.9805, "test_loss": 0.0586, "steps": 188}
    assert (
        browser.run("return getComputedStyle(document.body).backgroundColor")
        == {
            "light": "rgb(253, 252, 250)",
            "dark": "rgb(22, 23, 26)",
        }[scheme]
    )
    loaded = (
        "return performance.getEntriesByType('resource').map(entry => entry.name).filter(n => !n.startsWith('data:'))"
    )
    assert browser.run(loaded) == []


def test_tables_fit_in_a_small_window_or_show_that_they_scroll(browser: Browser, page: Path) -> None:
    over = "return [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    browser.show(page, 900, "light")
    assert browser.run(over) == 0
    browser.show(page, 400, "light")
    assert browser.run(over) > 0
    shade = "return getComputedStyle(document.querySelector('.scroll')).backgroundAttachment"
    assert "scroll" in browser.run(shade)
    matrix = "const box = document.querySelector('.confusion').parentElement; return box.scrollWidth - box.clientWidth"
    assert browser.run(matrix) <= 0


def test_screen_readers_can_read_every_table_and_chart(browser: Browser, page: Path) -> None:
    browser.show(page, 1280, "light")
    assert browser.run(
        "return [...document.querySelectorAll('table')].every(t => t.caption && t.querySelector('th[scope]'))"
    )
    unnamed = "return [...document.querySelectorAll('svg:not([aria-hidden])')].filter(s => !s.ariaLabel).length"
    assert browser.run(unnamed) == 0
    assert browser.run("return document.documentElement.lang") == "en"
    headings = browser.run("return [...document.querySelectorAll('h1,h2,h3')].map(h => Number(h.tagName[1]))")
    assert headings[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))
    anchors = (
        "return [...document.querySelectorAll('nav a')].every(a => document.querySelector(a.getAttribute('href')))"
    )
    assert browser.run(anchors)


def test_the_security_policy_blocks_scripts_and_remote_images(browser: Browser, page: Path, tmp_path: Path) -> None:
    """The policy protects even if some text is not escaped."""
    broken = tmp_path / "broken.html"
    hostile = b"<script>document.title = 'run'</script><img alt='x' src='https://example.invalid/x.png'></body>"
    broken.write_bytes(page.read_bytes().replace(b"</body>", hostile))
    browser.show(broken, 1280, "light")
    assert len([message for message in browser.messages() if "Content Security Policy" in message]) == 2
    assert browser.run("return document.title") == "run: failed"


def test_a_task_metric_with_the_name_few_does_not_affect_the_charts() -> None:
    """The history's own mark for means over few rows is also called `few`, and is independent of the metric."""
    history = History()
    for step in (1, 2):
        history.add(
            {"attempt": 1, "step": step, "time": step, "rows": 100, "few": 0.5, "test_few": 0.25, "loss": 1.0}, "loss"
        )
    history.add({"attempt": 1, "step": 3, "time": 3, "rows": 10, "few": 0.5, "loss": 9.0}, "loss")
    assert history.drawn("loss") == [1.0, 1.0, None]
    assert history.drawn("few") == [0.5, 0.5, None]
