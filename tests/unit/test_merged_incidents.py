"""Several reports about the end of one worker group give one incident, with the strongest cause."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sunspot.elastic.merged_incidents import Incidents
from sunspot.elastic.messages import Incident
from sunspot.run.incidents import Cause

FIGURES = "out of memory: 2.90 of 3.00 GiB in use on node b"


def report(cause: Cause | None, noticed: float, loss: str = "") -> Incident:
    return Incident(cause, str(cause), noticed, loss)


@pytest.mark.parametrize(
    ("reported", "cause", "noticed"),
    [
        ([Cause.PREEMPTED, Cause.WORKER_LOST], Cause.PREEMPTED, 1.0),
        ([Cause.PREEMPTED, Cause.NODE_LOST], Cause.PREEMPTED, 1.0),
        ([Cause.PREEMPTED, Cause.OUT_OF_MEMORY], Cause.PREEMPTED, 1.0),
        ([Cause.WORKER_LOST, Cause.NODE_LOST], Cause.NODE_LOST, 1.0),
        ([Cause.WORKER_LOST, Cause.PREEMPTED], Cause.PREEMPTED, 1.0),
        ([Cause.WORKER_LOST, Cause.OUT_OF_MEMORY], Cause.OUT_OF_MEMORY, 1.0),
        ([Cause.WORKER_LOST, Cause.WORKER_FAILED], Cause.WORKER_FAILED, 1.0),
        ([Cause.WORKER_LOST, Cause.HUNG], Cause.HUNG, 1.0),
        ([Cause.NODE_LOST, Cause.HUNG], Cause.NODE_LOST, 1.0),
        ([Cause.HUNG, Cause.NO_ROWS], Cause.NO_ROWS, 1.0),
        ([Cause.JOINED, Cause.WORKER_LOST], Cause.WORKER_LOST, 2.0),
        ([Cause.WORKER_LOST, Cause.JOINED], Cause.WORKER_LOST, 1.0),
        ([Cause.SCALE_UP, Cause.WORKER_LOST], Cause.WORKER_LOST, 2.0),
        ([Cause.MOVED, Cause.PREEMPTED], Cause.PREEMPTED, 2.0),
        ([Cause.JOINED, Cause.SCALE_UP], Cause.JOINED, 1.0),
        ([Cause.JOINED, Cause.WORKER_LOST, Cause.NODE_LOST], Cause.NODE_LOST, 2.0),
        ([None, Cause.WORKER_FAILED], Cause.WORKER_FAILED, 1.0),
        ([Cause.NODE_LOST, Cause.BEGIN], Cause.BEGIN, 1.0),
        ([Cause.DRIVER_LOST, Cause.RESUMED], Cause.RESUMED, 1.0),
        ([Cause.DRIVER_LOST, Cause.NODE_LOST], Cause.DRIVER_LOST, 1.0),
    ],
)
def test_an_incident_has_the_strongest_cause_or_the_earliest_of_equally_strong_causes(
    reported: Sequence[Cause | None], cause: Cause, noticed: float
) -> None:
    incidents = Incidents()
    for at, each in enumerate(reported, 1):
        incidents.observe(report(each, float(at)))
    incident = incidents.begin_group()
    assert (incident.cause, incident.detail, incident.noticed) == (cause, str(cause), noticed)


def test_only_the_cause_of_an_incident_is_replaced_by_later_reports() -> None:
    incidents = Incidents()
    incidents.observe(report(Cause.WORKER_LOST, 1.0, "rank 1: died"))
    incidents.observe(Incident(Cause.NODE_LOST, "node b", 2.0, "rank 0: lost its peer", save_began=3.0))
    incidents.observe(Incident(save_began=4.0, committed=5.0))
    assert incidents.current() == Incident(Cause.NODE_LOST, "node b", 1.0, "rank 1: died", 3.0, 5.0)


def test_the_loss_of_a_group_that_took_no_step_is_added_to_the_previous_incident() -> None:
    incidents = Incidents()
    incidents.observe(report(Cause.PREEMPTED, 1.0))
    incidents.begin_group()
    incidents.observe(report(Cause.WORKER_LOST, 2.0, "rank 1: died"))
    again = incidents.begin_group()
    assert (again.cause, again.loss) == (Cause.PREEMPTED, "rank 1: died")
    assert incidents.take_step().cause is Cause.PREEMPTED
    assert incidents.begin_group() == Incident(), "one incident has one receipt"


def test_the_notes_of_an_incident_are_passed_to_only_one_group() -> None:
    incidents = Incidents()
    incidents.note("node left out", ["node a", "node b"])
    assert [note.detail for note in incidents.current().notes] == ["node a", "node b"]
    assert [note.detail for note in incidents.begin_group().notes] == ["node a", "node b"]
    assert not incidents.begin_group().notes


@pytest.mark.parametrize("known", ["before the next group begins", "before it takes a step", "later"])
def test_the_cause_of_a_loss_can_be_reported_later_than_the_loss_itself(known: str) -> None:
    incidents = Incidents()
    incidents.observe(Incident(Cause.WORKER_LOST, "rank 1 on b", 100.0))
    if known.startswith("before the next"):
        incidents.explain_loss(FIGURES)
    incidents.begin_group()
    if known == "before it takes a step":
        incidents.explain_loss(FIGURES)
    receipt = incidents.take_step()
    if known == "later":
        incidents.explain_loss(FIGURES)
        assert receipt.cause is Cause.WORKER_LOST
    else:
        assert (receipt.cause, receipt.detail, receipt.noticed) == (Cause.OUT_OF_MEMORY, FIGURES, 100.0)
    incidents.observe(Incident(Cause.JOINED, "1 worker more", 120.0))
    joined = incidents.begin_group()
    assert joined.cause is Cause.JOINED, "one loss has one receipt"
    noted = [] if known.startswith("before the next") else [("out of memory", FIGURES)]
    assert [(note.event, note.detail) for note in joined.notes] == noted
