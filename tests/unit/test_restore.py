"""Which state a worker group starts from, among storage and the nodes' memory, and what its restart cost."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import app.elastic
from app.checkpoint.memory import MemorySnapshot
from app.elastic.claim import Machine, Start, begin_attempt, choose_snapshot
from app.elastic.receipts import first_incident, make_receipt
from app.elastic.restore import State
from app.run import Run, open_run
from app.run.attempts import Attempt, checkpoint_name, read_attempts
from app.run.incidents import HUNG, Cause, Receipt
from app.run.status import RunState, Status
from app.settings import Settings
from app.storage.base import retry_storage
from app.train.reporter import warn_of_notice
from tests.harness.runs import begin, commit, start


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path), "run"))


def copy(attempt: int, step: int, evaluated: bool = True, crc32: int = 1) -> MemorySnapshot:
    return MemorySnapshot(attempt, step, evaluated, 0.0, 100, crc32, "file")


def machines(*copies: MemorySnapshot | None) -> list[Machine]:
    return [Machine(f"host-{rank}", f"node-{rank}", copy, []) for rank, copy in enumerate(copies)]


def begun(run: Run, *copies: MemorySnapshot | None) -> Start:
    found = begin_attempt(run, "me", Settings(), machines(*copies))
    assert found
    return found


def test_the_newest_of_storage_and_memory_is_taken(run: Run) -> None:
    first = start(run, "me")
    commit(run, first, 5)
    found = begun(run, None, copy(1, 7), copy(1, 9))
    assert (found.attempt.step, found.attempt.starts_from, found.snapshot_rank) == (9, checkpoint_name(9, 1), 2)
    assert found.attempt.metadata["tier"] == "memory"
    assert found.checkpoint is None
    # What the second attempt did before it had a copy of its own is lost; the copy that it came from still leads on.
    found = begun(run, copy(1, 9), None)
    assert (found.attempt.number, found.attempt.step, found.snapshot_rank) == (3, 9, 0)
    found = begun(run, None)
    assert (found.attempt.step, found.attempt.metadata["tier"]) == (5, "storage")
    # From here on, step 9 of the first attempt is outside the lineage.
    found = begun(run, copy(1, 9))
    assert (found.attempt.step, found.snapshot) == (5, None)


def test_a_copy_of_a_superseded_attempt_is_left(run: Run) -> None:
    first = start(run, "other")
    commit(run, first, 5)
    start(run, "me", checkpoint_name(5, 1))
    assert choose_snapshot(read_attempts(run), [copy(1, 8), None]) == (0, None)
    assert choose_snapshot(read_attempts(run), [copy(1, 8), copy(2, 6)]) == (1, copy(2, 6))


def test_what_is_damaged_in_storage_does_not_beat_memory(run: Run) -> None:
    first = start(run, "me")
    commit(run, first, 5)
    name = commit(run, first, 10).name
    Path(run.storage.locate(run.key("checkpoints", name, "model.pt"))).write_bytes(b"")
    found = begun(run, copy(1, 8))
    assert (found.attempt.step, found.attempt.metadata["tier"]) == (8, "memory")
    assert name in found.attempt.skipped[0]


def test_storage_wins_at_the_same_step_when_only_it_is_evaluated(run: Run) -> None:
    commit(run, start(run, "me"), 5)
    assert begun(run, copy(1, 5, evaluated=False)).snapshot is None
    assert begun(run, copy(1, 5, evaluated=True)).snapshot


def at(number: int, time: float, world_size: int = 2, step: int = 0) -> Attempt:
    return Attempt(number, "me", None, step, time=time, metadata={"world_size": world_size})


def a_start(attempt: Attempt, *before: Attempt, events: list[dict[str, Any]] | None = None) -> Start:
    return Start(attempt, list(before), None, None, 0, {}, [(1, 14, 99.0)], events or [], None)


def test_a_receipt_says_what_a_restart_cost() -> None:
    begin_receipt = Receipt(1, 0, Cause.BEGIN, "", None, None, None, 10, 12, 10, 0, 0, "beginning", 0, 2)
    now = a_start(at(2, 105, 1, step=12), at(1, 10), events=[{**begin_receipt.record(), "attempt": 1}])
    incident = {
        "cause": "reclaim",
        "detail": "node x",
        "noticed": 100.0,
        "committed": 101.0,
        "last_state": {"step": 13},
    }
    receipt = make_receipt(now, State(taken=98.0, tier="memory"), incident, first_step=110.0)
    assert (receipt.since, receipt.cause, receipt.replayed) == (1, Cause.PREEMPTED, 2)
    assert receipt.recovery_s == 10
    assert receipt.worker_seconds_lost == pytest.approx(2 * 7 + 1 * 5)


def test_a_pause_is_not_lost() -> None:
    before = Status(RunState.FAILED, "me", time=50.0, step=14)
    incident = first_incident([at(1, 10)], before)
    assert incident["cause"] is Cause.RESUMED
    receipt = make_receipt(a_start(at(2, 1000, step=14), at(1, 10)), State(taken=40.0), incident, 1010.0)
    assert receipt.paused_s == 950
    assert receipt.worker_seconds_lost == pytest.approx(2 * 10 + 2 * 10)
    running = Status(RunState.RUNNING, "me", time=50.0, step=14)
    assert first_incident([at(1, 10)], running)["cause"] is Cause.DRIVER_LOST
    assert first_incident([], None)["cause"] is Cause.BEGIN


def test_a_loss_while_workers_make_way_is_a_loss() -> None:
    now = a_start(at(2, 105), at(1, 10))
    growth = {"cause": Cause.SCALE_UP, "detail": "2 -> 3 workers", "noticed": 100.0}
    assert make_receipt(now, State(taken=98.0), growth, 110.0).cause is Cause.SCALE_UP
    receipt = make_receipt(now, State(taken=98.0), {**growth, "loss": "rank 1: died"}, 110.0)
    assert (receipt.cause, receipt.detail) == (Cause.WORKER_LOST, "rank 1: died")


def test_the_rank_that_hung_is_blamed_not_those_that_waited() -> None:
    def hung(rank: int, waiting: bool) -> dict[str, Any]:
        return {"event": HUNG, "attempt": 1, "rank": rank, "waiting": waiting, "detail": f"rank {rank} stands"}

    events = [hung(0, True), hung(1, False)]
    now = a_start(at(2, 105), at(1, 10), events=events)
    receipt = make_receipt(now, State(taken=98.0), {"cause": Cause.HUNG}, 110.0)
    assert receipt.detail == "rank 1 stands"
    now = a_start(at(2, 105), at(1, 10), events=events[:1])
    assert make_receipt(now, State(taken=98.0), {"cause": Cause.HUNG}, 110.0).detail == "rank 1: left no word"


def test_a_save_that_does_not_fit_the_notice_is_told_of() -> None:
    assert "takes 30 s to commit, and a notice leaves 27 s" in warn_of_notice(30.0, 27)
    assert warn_of_notice(25.0, 27), "the notice has to travel first"
    for save_s, notice_s in [(10.0, 27), (None, 27), (30.0, 0)]:
        assert not warn_of_notice(save_s, notice_s)


def test_retries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    import app.storage.base
    from app.errors import StorageError

    monkeypatch.setattr(app.storage.base, "BACKOFF_S", (0.01,))
    warned: list[str] = []
    answers = iter([StorageError("503"), StorageError("503"), "here"])

    def act() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert retry_storage(act, 5, "reading", warned.append) == "here"
    assert len(warned) == 2

    def refuse() -> str:
        raise StorageError("403 AccessDenied")

    with pytest.raises(StorageError, match=r"reading: storage has refused for .* \(SUNSPOT_STORAGE_TIMEOUT_S=0\.05\)"):
        retry_storage(refuse, 0.05, "reading", warned.append)


def test_the_timeline_of_a_preemption_names_functions_that_exist() -> None:
    names = re.findall(r"^ ?\d+\. (\w+(?:\.\w+)+)", app.elastic.__doc__ or "", re.MULTILINE)
    assert len(names) == 10
    for name in names:
        package = "app.elastic" if importlib.util.find_spec(f"app.elastic.{name.partition('.')[0]}") else "app"
        assert callable(pkgutil.resolve_name(f"{package}.{name}")), name
