"""Tests that damaged objects lead to a result or a single clear error, but never to a traceback or a hang."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from sunspot.cli import main as sunspot
from sunspot.errors import SunspotError
from sunspot.run import Claimant, Run, open_run, to_json
from sunspot.run.attempts import fatal_error, lineage, read_attempts, record_error
from sunspot.run.audit import read_audit
from sunspot.run.checkpoints import find_newest_good, list_checkpoints
from sunspot.run.failures import Failure, record_failure
from sunspot.run.identity import read_identity
from sunspot.run.logs import LogWriter
from sunspot.run.outcome import recorded_outcome
from sunspot.run.predictions import Predictions, read_shown
from sunspot.run.requests import SubmissionRecord, mark_deletion, record_submission, request_stop
from sunspot.run.search import SearchResults, Trial, find_best_checkpoint, read_trial, write_results
from sunspot.run.status import RunState, new_driver
from sunspot.tracking.delivery import Delivery, read_delivered, read_tracking_run
from tests.harness.fuzz import damaged, ends_well
from tests.harness.runs import begin, consumed, record_audit
from tests.harness.trained import trained

THOROUGH = settings().max_examples > 100

KINDS = [
    *("run.json", "status/", "stop.json", "delete.json", "attempts/", "checkpoints/", "metrics/", "ranks/", "events/"),
    *("failures/", "logs/", "audit/", "predictions.json", "tracking/", "submissions/", "search.json"),
]
"""The folder or name of each kind of object in a run. In checkpoints, only manifests are damaged."""

SUNSPOT_COMMANDS = [
    *("status run", "status run --json", "list", "logs run --rank 0", "checkpoints ls run --json", "audit run --json"),
    *(
        "checkpoints verify run",
        "checkpoints gc run",
        "checkpoints get run best --output {0}/best",
        "events run --json",
    ),
    *(
        "events run --stacks",
        "metrics run --csv",
        "metrics run --parquet {0}/m.parquet",
        "report run --output {0}/r.html",
    ),
    *("report search --output {0}/s.html", "doctor run --stacks", "wait run --timeout 0", "stop run --no-wait"),
    *("resume run", "delete search", "delete run --yes"),
]

ODD = [None, -1, 10**400, float("nan"), "", "\x1b[31m", "../../etc/passwd", "\ud800", "x" * 100_000, [], {"": {}}]
WHOLE = [b"", b"null", b"[]", b"{}", b"0", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 10_000, b"1e999", b"PAR1" * 4]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return storage that contains a run with every kind of object, and a search with this run as a trial."""
    folder = tmp_path_factory.mktemp("damage")
    run = trained(open_run(str(folder / "whole"), "run"))
    attempt = read_attempts(run)[-1]
    record_audit(run, attempt, consumed(1, 5))
    record_error(run, attempt.number, SunspotError("it failed"))
    record_failure(run, Failure(1, 0, 3, "ValueError", "no", "Traceback", "train.py", 3, "step", 9.0))
    for stream in ("driver-20261121T141013679Z", "attempt-0001-rank-0000"):
        log = LogWriter(run, stream)
        log.append(b"step 1\nstep 2\n")
        log.flush()
    run.storage.write(run.key("tracking", "mlflow.json"), to_json({"id": "abc"}))
    run.storage.write(run.key("tracking", "mlflow-delivered.json"), to_json({"step": 3, "attempt": 1, "records": 3}))
    record_submission(run, SubmissionRecord("run-1a2b3c4d"))
    trial = Trial("run", {"LEARNING_RATE": 0.1}, RunState.SUCCEEDED, "", 5, 100, 0.125)
    write_results(
        begin(Run(run.storage, "search")), SearchResults("loss", "min", {"LEARNING_RATE": "x"}, (trial,), "run")
    )
    return folder


def nodes(value: Any) -> Iterator[Any]:
    """Yield every object and array in a JSON value."""
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from nodes(item)


@st.composite
def changed_json(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the content with a value in one of its lines replaced or removed."""
    lines = content.splitlines() if b"}\n{" in content else [content]
    place = draw(st.integers(0, len(lines) - 1))
    record = json.loads(lines[place])
    parent = draw(st.sampled_from([node for node in nodes(record) if node]))
    key = draw(st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent))))
    if draw(st.booleans()):
        del parent[key]
    else:
        parent[key] = draw(st.sampled_from([*ODD, 1]))
    lines[place] = json.dumps(record).encode()
    return b"\n".join(lines)


def read_facts(run: Run) -> dict[str, Any]:
    """Return everything that can be read about a run, with None for each reader that raises an error."""
    readers: dict[str, Callable[[], Any]] = {
        "attempts": lambda: read_attempts(run),
        "checkpoints": lambda: [checkpoint for checkpoint in list_checkpoints(run) if not checkpoint.damage],
        "audit": lambda: [table.to_pylist() for table in read_audit(run, lineage(read_attempts(run)))],
        "identity": lambda: read_identity(run),
    }
    return {name: ends_well(read) for name, read in readers.items()}


def start_again(run: Run) -> None:
    """Perform a driver's reads and writes before and after training."""
    driver = new_driver()
    fatal_error(Claimant(run, "job"))
    with recorded_outcome(Claimant(run, "job", driver), find_newest_good(run, read_attempts(run))[0], 20):
        pass


READERS: list[Callable[[Run], Any]] = [
    start_again,
    lambda run: read_shown(run, Predictions),
    lambda run: (read_tracking_run(run, "mlflow"), read_delivered(run, "mlflow")),
    lambda run: Delivery(run, "mlflow", "project").missing(),
    lambda run: read_trial(run, {}, "loss", "min"),
    lambda run: find_best_checkpoint(run, "loss", "min"),
]


MARKERS = {"stop.json": request_stop, "delete.json": mark_deletion}

first_markers: dict[str, bytes] = {}
"""The content of each marker in the first example."""


@pytest.mark.timeout(3600)
@settings(max_examples=500 if THOROUGH else 25, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_reading_a_damaged_file_gives_a_result_or_a_single_clear_error(
    whole: Path, kind: str, data: st.DataObject
) -> None:
    shutil.rmtree(whole / "now", ignore_errors=True)
    shutil.copytree(whole / "whole", whole / "now")
    run = open_run(str(whole / "now"), "run")
    if kind in MARKERS:
        MARKERS[kind](run, "me")
        marker = run.storage.read(run.key(kind))
        # The length of the time must not differ between examples, or hypothesis reports a flaky test.
        run.storage.write(run.key(kind), first_markers.setdefault(kind, marker))
    true = read_facts(run)
    assert None not in true.values()
    keys = [entry.key for entry in run.storage.list("") if entry.key.partition("/")[2].startswith(kind)]
    key = data.draw(st.sampled_from([key for key in keys if kind != "checkpoints/" or key.endswith("manifest.json")]))
    content = run.storage.read(key)
    ways = [damaged([content]), st.sampled_from(WHOLE), *([changed_json(content)] * 2 if content[:1] == b"{" else [])]
    changed = data.draw(st.one_of(ways))
    note(f"{key} is {changed[:1000]!r}")
    run.storage.write(key, changed)

    for name, found in read_facts(run).items() if changed != content else ():
        if name == "checkpoints":  # the damaged checkpoint may be missing
            assert all(checkpoint in true[name] for checkpoint in found or [])
        else:
            assert found in (None, true[name]), f"{name}: wrongly accepted"
    verbs = data.draw(
        st.lists(st.sampled_from(SUNSPOT_COMMANDS), min_size=3, max_size=len(SUNSPOT_COMMANDS) if THOROUGH else 3)
    )
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        for read in READERS:
            ends_well(lambda read=read: read(run))
        for verb in sorted(verbs, key=SUNSPOT_COMMANDS.index):
            words = [*verb.format(whole / "now").split(), "--storage", str(whole / "now")]
            with contextlib.suppress(SystemExit):
                ends_well(lambda words=words: sunspot(words), 10)
    assert "Traceback" not in errors.getvalue()
