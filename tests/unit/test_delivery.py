"""Tests that drivers deliver a run's metrics in turn, so that no record is delivered twice while a run moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from sunspot.errors import SupersededError
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt
from sunspot.run.handover import MOVE
from sunspot.run.status import RunState, Status, StatusKind, write_status
from sunspot.tracking.delivery import Delivery, read_delivered
from sunspot.tracking.service import SERVICES, Point, Service
from tests.harness.constants import SetConstants
from tests.harness.runs import begin, commit, report, start

OLD, NEW = "1" * 8, "2" * 8


class MemoryService(Service):
    """A tracking service in this process."""

    steps: ClassVar[list[int]]
    "The steps of all records, in the order in which they were sent."
    closed: ClassVar[list[RunState | None]]
    after_request: ClassVar[Callable[[], object]]
    "Function to call after each request."

    def open(self, tracking_run: str) -> str:
        return "memory"

    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        pass

    def send(self, points: Sequence[Point]) -> None:
        self.steps.extend(point.step for point in points)
        type(self).after_request()

    def attach(self, file: Path, folder: str) -> None:
        pass

    def close(self, state: RunState | None) -> None:
        self.closed.append(state)


@pytest.fixture(params=[True, False], ids=["acknowledges at once", "acknowledges when closed"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[MemoryService]:
    MemoryService.steps, MemoryService.closed = [], []
    MemoryService.after_request = staticmethod(lambda: None)  # type: ignore[assignment]
    MemoryService.acknowledges = request.param
    monkeypatch.setitem(SERVICES, "mlflow", MemoryService)
    return MemoryService


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path), "run"))


@pytest.fixture
def first(run: Run) -> Attempt:
    """Return the old driver's attempt, which has saved its steps 5 and 10."""
    attempt = start(run, "old", driver=OLD)
    save(run, attempt, 5, 10)
    return attempt


def save(run: Run, attempt: Attempt, *steps: int) -> None:
    """Add steps to the metric history, and commit a checkpoint of the last one."""
    report(run, attempt, *({"step": step, "time": float(step), "loss": 1.0} for step in steps))
    commit(run, attempt, steps[-1])


def deliveries(run: Run) -> tuple[Delivery, Delivery]:
    """Return the deliveries of the old driver and of the new driver, both of which live."""
    return Delivery(run, "mlflow", "project", OLD), Delivery(run, "mlflow", "project", NEW)


def test_a_driver_that_has_not_claimed_the_run_delivers_nothing(
    run: Run, first: Attempt, service: type[MemoryService]
) -> None:
    _, new = deliveries(run)
    assert not new.deliver()
    new.finish()
    assert service.steps == []
    assert service.closed == []


def test_each_record_is_delivered_once_even_if_the_run_moves(
    run: Run, first: Attempt, service: type[MemoryService]
) -> None:
    old, new = deliveries(run)
    assert old.deliver()
    save(run, first, 15)
    stopped = Status(RunState.STOPPED, "old", f"stopped by {MOVE} to west", attempt=1, driver=OLD)
    write_status(run, stopped, StatusKind.ENDED)
    second = start(run, "new", "step-00000015-attempt-0001", driver=NEW)
    assert not new.deliver(), "the old driver's delivery may still send a record"
    with pytest.raises(SupersededError):
        old.finish()
    old.leave()
    assert new.deliver()
    save(run, second, 20)
    write_status(run, Status(RunState.SUCCEEDED, "new", attempt=2, driver=NEW), StatusKind.ENDED)
    new.finish()
    assert service.steps[:4] == [5, 10, 15, 20]
    assert service.closed == [None, RunState.SUCCEEDED], "the move does not end the tracking run"


def test_the_driver_of_a_moving_run_ends_its_delivery_before_the_next_driver_claims_the_run(
    run: Run, first: Attempt, service: type[MemoryService]
) -> None:
    old, new = deliveries(run)
    assert old.deliver()
    save(run, first, 15)
    stopped = Status(RunState.STOPPED, "old", f"stopped by {MOVE} to west", attempt=1, driver=OLD)
    write_status(run, stopped, StatusKind.ENDED)
    old.finish()
    assert (service.steps, service.closed) == ([5, 10], [None])
    start(run, "new", "step-00000015-attempt-0001", driver=NEW)
    assert new.deliver(), "the new driver need not wait"
    assert service.steps == [5, 10, 15]


def test_a_delivery_ends_if_another_driver_claims_the_run_between_two_requests(
    run: Run, first: Attempt, service: type[MemoryService], set_constants: SetConstants
) -> None:
    set_constants("sunspot.tracking.delivery", RECORDS_AT_ONCE=1)
    old, new = deliveries(run)

    def claim_once() -> None:
        service.after_request = staticmethod(lambda: None)  # type: ignore[assignment]
        start(run, "new", "step-00000010-attempt-0001", driver=NEW)

    service.after_request = staticmethod(claim_once)  # type: ignore[assignment]
    with pytest.raises(SupersededError):
        old.deliver()
    assert service.steps == [5]
    old.leave()
    assert new.deliver()
    assert service.steps == [5, 10]


def test_a_driver_does_not_wait_forever_for_a_lost_driver_to_finish_its_delivery(
    run: Run, first: Attempt, service: type[MemoryService], set_constants: SetConstants
) -> None:
    old, new = deliveries(run)
    assert old.deliver()
    save(run, first, 15)
    start(run, "new", "step-00000015-attempt-0001", driver=NEW)
    assert not new.deliver()
    set_constants("sunspot.tracking.delivery", TURN_AFTER_S=0.0)
    assert new.deliver()
    assert service.steps[-1] == 15
    stored = read_delivered(run, "mlflow")
    old.leave()  # it was only frozen
    assert read_delivered(run, "mlflow") == stored
    new.leave()
    assert (read_delivered(run, "mlflow").step, read_delivered(run, "mlflow").driver) == (15, "")


def test_delivering_by_hand_completes_the_delivery_that_a_lost_driver_began(
    run: Run, first: Attempt, service: type[MemoryService]
) -> None:
    old, _ = deliveries(run)
    assert old.deliver()
    write_status(run, Status(RunState.FAILED, "old", attempt=1, driver=OLD), StatusKind.ENDED)
    Delivery(run, "mlflow", "project").finish()
    sent = list(service.steps)
    Delivery(run, "mlflow", "project").finish()
    assert service.steps == sent, "a record was sent again"
    assert (read_delivered(run, "mlflow").step, read_delivered(run, "mlflow").driver) == (10, "")
