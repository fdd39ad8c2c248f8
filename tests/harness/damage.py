"""A run with every kind of object, damaged in every way that disks, other programs and other versions might."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from sunspot.cli import main as sunspot
from sunspot.errors import SunspotError
from sunspot.run import Run, open_run, to_json
from sunspot.run.attempts import fatal_error, lineage, read_attempts, record_error
from sunspot.run.audit import read_audit
from sunspot.run.checkpoints import find_newest_good, list_checkpoints
from sunspot.run.claimant import Claimant
from sunspot.run.failures import Failure, record_failure
from sunspot.run.history import Journal
from sunspot.run.identity import read_identity
from sunspot.run.incidents import Cause
from sunspot.run.logs import LogWriter
from sunspot.run.outcome import recorded_outcome
from sunspot.run.predictions import Example, Predictions, read_predictions, write_predictions
from sunspot.run.requests import mark_deletion, request_stop
from sunspot.run.search import Results, Trial, best_of, read_trial, write_results
from sunspot.run.status import RunState
from sunspot.run.submissions import record_submission
from sunspot.storage.local import LocalStorage
from sunspot.tracking.delivery import Delivery, read_delivered, read_tracking_run
from sunspot.train.driver import report_result
from tests.harness.fuzz import damaged, ends_well
from tests.harness.runs import begin, commit, consumed, record_audit, report, set_status, start, write_receipt

LONGEST_S = 10
"""A verb that takes longer hangs."""

KINDS = {
    "run.json": "run/run.json",
    "status": "run/status/",
    "stop": "run/stop.json",
    "deletion": "run/delete.json",
    "attempts": "run/attempts/",
    "manifests": "run/checkpoints/",
    "metrics": "run/metrics/",
    "ranks": "run/ranks/",
    "events": "run/events/",
    "failures": "run/failures/",
    "logs": "run/logs/",
    "audit": "run/audit/",
    "predictions": "run/predictions.json",
    "search": "search/search.json",
    "tracking": "run/tracking/",
    "submissions": "run/submissions/",
}
"""Where the objects of each kind lie."""

VERBS = [
    *("status run", "status run --json", "list", "list --json", "logs run", "logs run --rank 0", "logs run --previous"),
    *("checkpoints ls run", "checkpoints ls run --json", "checkpoints verify run", "checkpoints gc run"),
    *("checkpoints get run --output {scratch}/newest", "checkpoints get run best --output {scratch}/best"),
    *(
        "events run",
        "events run --stacks",
        "events run --json",
        "metrics run",
        "metrics run --json",
        "metrics run --csv",
    ),
    *("metrics run --parquet {scratch}/metrics.parquet", "report run --output {scratch}/run.html"),
    *("report search --output {scratch}/search.html", "audit run --json", "doctor run --stacks", "doctor run --json"),
    *("wait run --timeout 0", "stop run --no-wait", "resume run", "delete search", "delete run --yes"),
]

DRIVER = "0a1b2c3d"

MANIFEST = """\
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: run-1a2b3c4d, labels: {sunspot/run: run}}
spec: {entrypoint: python -m sunspot.train, rayClusterSpec: {headGroupSpec: {}}}
"""


def build(storage_path: str) -> Run:
    """Write a run with two restarts, and a search of which it is a trial."""
    run, now = begin(open_run(storage_path, "run")), time.time() - 300
    settings = {"SUNSPOT_CHECKPOINTS_TO_KEEP": "3", "SUNSPOT_CHECKPOINT_METRIC": "loss", "SUNSPOT_SEED": "0"}
    about: dict[str, Any] = {"world_size": 2, "nodes": {"0": "a", "1": "b"}, "settings": settings}
    about |= {"versions": {"ray": "2.60.0"}, "host": "a"}
    origin, done = None, 0
    for number, upto in enumerate((3, 6, 8), 1):
        attempt = start(run, "job", origin, at=now + number, tier="storage" if origin else "beginning", **about)
        report(run, attempt, *(metrics(step, now + number + step / 10) for step in range(done + 1, upto + 1)))
        record_audit(run, attempt, consumed(done + 1, upto))
        checkpoint = commit(run, attempt, upto, loss=1 / upto, accuracy=0.5)
        write_receipt(run, attempt, number - 1, Cause.BEGIN if number == 1 else Cause.NODE_LOST)
        origin, done = checkpoint.name, upto
    events = Journal(run, "events", 2)
    hung = {"event": "hung", "rank": 1, "waiting": False, "detail": "rank 1: at loop.py:3", "stacks": "File loop.py"}
    events.append({"step": 5, "time": now + 2, **hung})
    events.append({"step": 5, "time": now + 2, "event": "commit failed", "detail": "storage is away"})
    events.flush()
    record_error(run, 3, SunspotError("it failed"))
    record_failure(run, Failure(1, 0, 3, "ValueError", "no", "Traceback", "train.py", 3, "step", now))
    record_failure(run, Failure(0, None, 3, "ValueError", "no", "Traceback", time=now))
    for stream in ("driver-20261121T141013679Z", "driver-20261121T151013679Z", "attempt-0001-rank-0000"):
        log = LogWriter(run, stream)
        log.append(b"step 1\nstep 2\n")
        log.flush()
    example = Example(1, 0, 1, 0.9, b"\x89PNG\r\n\x1a\n")
    write_predictions(
        run, Predictions(origin or "", done, 4, 0.5, 2, [[1, 1], [1, 1]], [example], [example], [example])
    )
    run.storage.write(run.key("tracking", "mlflow.json"), to_json({"id": "abc"}))
    run.storage.write(run.key("tracking", "mlflow-delivered.json"), to_json({"step": 3, "attempt": 1, "records": 3}))
    record_submission(run, "run-1a2b3c4d", MANIFEST)
    stands = {"driver": DRIVER, "attempt": 3, "step": done, "total_steps": 100, "checkpoint": origin, "loss": 0.1}
    set_status(run, RunState.FAILED, owner="job", **stands)
    search = begin(Run(run.storage, "search"))
    trial = Trial("run", {"LEARNING_RATE": 0.1}, RunState.SUCCEEDED, "", done, 100, 0.125, origin)
    write_results(search, Results("loss", "min", {"LEARNING_RATE": "loguniform(0.01,1)"}, (trial,), "run"))
    set_status(search, RunState.SUCCEEDED, owner="search")
    return run


def metrics(step: int, at: float) -> dict[str, Any]:
    """A record as two workers write it."""
    names = ("seconds", "steps_s", "forward_s", "data_wait_s", "step_time_median_s", "step_time_p95_s", "memory_mib")
    names += ("gpu_memory_mib", "resident_mib", "memory_left_mib", "throttled_s", "throttled_share")
    rank = {"rows": 3, **dict.fromkeys(names, 0.5)}
    return {
        **{"step": step, "epoch": 1, "steps": 1, "rows": 6, "loss": 1 / step, "test_loss": 0.3, "time": at},
        **{"learning_rate": 0.1, "seconds": 0.5, "rows_per_s": 12.0, "world_size": 2, "ranks": [rank, rank]},
    }


# ------------------------------------------------------------------------------------------------------------- damaging

ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2**63, 10**30, 10**400, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", "1", "\x1b[31m", "../../etc/passwd", "a\nb", "\ud800", "x" * 100_000, [], {}, [[]], {"": {}}),
    *("step-00000009-attempt-0003", "step-99999999-attempt-0001", [None] * 3, {"a": None}),
    *(json.loads("[" * depth + "]" * depth) for depth in (50, 150, 900)),
]

WHOLE = [
    *(b"", b"null", b"[]", b"{}", b'"x"', b"0", b"NaN", b"true", b"\xff\xfe\x00", b"\x1f\x8b\x08", b"\x00" * 1000),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"1e999", b'"\\ud800"', b"PAR1", b"PAR1" * 4),
    *(b"!!python/object/apply:os.system [exit 3]", b"&a [*a]", b"- - - -", b"\xef\xbb\xbf{}"),
    b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n" + b"".join(b"d%d: [*c,*c,*c]\n" % n for n in range(1000)),
]


def spoiled(content: bytes, others: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """`content` with some damage, or another object in its place."""
    ways = [damaged([content]), damaged([content]), st.sampled_from(WHOLE), st.sampled_from(others)]
    if content.startswith(b"{"):
        ways += [_changed_json(content), _changed_json(content), _changed_json(content)]
    if content.startswith(b"PAR1"):
        ways += [_changed_parquet(content)]
    return st.one_of(ways)


@st.composite
def _changed_json(draw: st.DrawFn, content: bytes) -> bytes:
    """One value of one line, or of the whole, becomes another one, is left out, or gets another name."""
    lines = content.splitlines() if b"}\n{" in content else [content]
    place = draw(st.integers(0, len(lines) - 1))
    record = json.loads(lines[place])
    parent = draw(st.sampled_from([node for node in _nodes(record) if node]))
    key = draw(st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent))))
    what = draw(st.sampled_from(["replace", "count", "rename", "remove"]))
    if what == "remove":
        del parent[key]
    elif what == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from(["", "later", "\x1b[2J", "x" * 10_000]))] = parent.pop(key)
    elif what == "count" and isinstance(parent[key], int | float):
        parent[key] += draw(st.sampled_from([-1, 1, 10, 0.5]))
    else:
        parent[key] = draw(st.sampled_from(ODD))
    lines[place] = json.dumps(record).encode()
    return b"\n".join(lines)


def _nodes(value: Any) -> Iterator[Any]:
    """Every object and list in a JSON value."""
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _nodes(item)


@st.composite
def _changed_parquet(draw: st.DrawFn, content: bytes) -> bytes:
    """A Parquet file with other rows, or columns."""
    table = pq.read_table(io.BytesIO(content))
    name = draw(st.sampled_from(table.column_names))
    rows = table.to_pylist()
    row = draw(st.sampled_from(rows))
    row[name] = draw(st.sampled_from([row[name] + 1, 0, -1, 10**9, None]))
    changed = pa.table({key: [each[key] for each in rows] for key in table.column_names}, schema=table.schema)
    table = draw(st.sampled_from([changed, changed.slice(1), table.drop_columns([name]), table.slice(0, 0)]))
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


# -------------------------------------------------------------------------------------------------------------- judging


@dataclass
class Bench:
    """A run on disk, of which one object at a time is damaged."""

    folder: Path
    whole: dict[str, bytes] = field(default_factory=dict, repr=False)
    "Every object, by key."

    def __post_init__(self) -> None:
        self.run = build(str(self.folder / "runs"))
        request_stop(self.run, "me")
        mark_deletion(self.run, "me")
        storage = self.run.storage
        self.whole = {entry.key: storage.read(entry.key) for entry in storage.list("")}
        self.marks = [self.run.key("stop.json"), self.run.key("delete.json")]
        for mark in self.marks:
            storage.delete(mark)
        self.facts = read_facts(self.run)

    def keys(self, kind: str) -> list[str]:
        """The keys of the objects of a kind."""
        keys = [key for key in self.whole if key.startswith(KINDS[kind])]
        return [key for key in keys if kind != "manifests" or key.endswith("manifest.json")]

    def damage(self, kind: str, draw: st.DrawFn) -> tuple[str, bytes]:
        """Damage an object of a kind, all others being whole; returns its key and what it is now."""
        key = draw(st.sampled_from(self.keys(kind)))
        content = draw(spoiled(self.whole[key], list(self.whole.values())))
        self.restore()
        self.run.storage.write(key, content)
        return key, content

    def restore(self) -> None:
        """Make every object whole, and remove all others."""
        storage = self.run.storage
        assert isinstance(storage, LocalStorage)
        for entry in storage.list(""):
            if entry.key not in self.whole or entry.key in self.marks:
                storage.delete(entry.key)
        for key, content in self.whole.items():
            path = storage.root / key
            if key not in self.marks and not (path.is_file() and path.read_bytes() == content):
                storage.write(key, content)

    def examine(self, kind: str, key: str, verbs: Sequence[str] = VERBS) -> None:
        """Read the damaged object `key`: nothing is wrongly accepted, and every reader and verb ends well."""
        if key not in self.marks and self.run.storage.read(key) != self.whole[key]:
            self._examine_facts()
        for read in READERS:
            quietly(lambda read=read: read(self.run))
        for verb in verbs:
            words = verb.format(scratch=tempfile.mkdtemp(dir=self.folder)).split()
            told = quietly(lambda words=words: self._use(words))
            assert "Traceback" not in told, f"sunspot {verb}: {told}"

    def _examine_facts(self) -> None:
        for name, found in read_facts(self.run).items():
            true = self.facts[name]
            if name == "checkpoints":  # it may be the damaged one that is missing
                assert all(checkpoint in true for checkpoint in found or [])
            else:
                assert found in (None, true), f"{name}: wrongly accepted"

    def _use(self, words: list[str]) -> None:
        with contextlib.suppress(SystemExit):
            sunspot([*words, "--storage", str(self.folder / "runs")])


def read_facts(run: Run) -> dict[str, Any]:
    """The truth about a run, as its readers tell it; None where they refuse."""

    def audit() -> list[Any]:
        return [table.to_pylist() for table in read_audit(run, lineage(read_attempts(run)))]

    readers: dict[str, Callable[[], Any]] = {
        "attempts": lambda: read_attempts(run),
        "checkpoints": lambda: [c for c in list_checkpoints(run) if not c.damage],
        "audit": audit,
        "identity": lambda: read_identity(run),
    }
    return {name: ends_well(read, LONGEST_S) for name, read in readers.items()}


def quietly(act: Callable[[], Any]) -> str:
    """Let `act` end well, and return what it says on stderr."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        ends_well(act, LONGEST_S)
    return errors.getvalue()


def begin_again(run: Run) -> None:
    """What a driver reads and writes before and after it trains; a damaged status must not keep it from that."""
    with contextlib.suppress(SunspotError):
        fatal_error(Claimant(run, "job"))
        newest, _ = find_newest_good(run, read_attempts(run))
        with recorded_outcome(Claimant(run, "job", DRIVER), newest, 20):
            pass
    with report_result(run, DRIVER):
        pass


def deliver(run: Run) -> None:
    """What the delivery to a tracking service reads."""
    read_tracking_run(run, "mlflow")
    read_delivered(run, "mlflow")
    Delivery(run, "mlflow", "project").missing()


READERS: list[Callable[[Run], Any]] = [
    begin_again,
    deliver,
    read_predictions,
    lambda run: read_trial(run, {}, "loss", "min"),
    lambda run: best_of(run, "loss", "min"),
]
