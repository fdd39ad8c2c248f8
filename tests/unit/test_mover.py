"""Tests of the moves that `sunspot wait --profile` makes by itself, between two clusters with fake API servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from sunspot.errors import ClusterError, SupersededError
from sunspot.run import Run
from sunspot.run.attempts import Attempt, checkpoint_name, read_attempts, refuse_if_left
from sunspot.run.overview import RunSummary
from sunspot.run.owner import Owner
from sunspot.run.requests import SubmissionRecord, newest_submission, record_submission, withdraw_submission
from sunspot.run.seen import RunSeen
from sunspot.run.status import RunState, Status, StatusKind, write_status
from sunspot.submitter.cluster.api import connect
from sunspot.submitter.cluster.applied import REQUEST, read_request
from sunspot.submitter.cluster.mover import Mover, may_consider
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot
from sunspot.submitter.cluster.state import HEAD_GIVEN_UP, ClusterSeen
from sunspot.submitter.cluster.views import job_view
from sunspot.submitter.cluster.waiting import Reconciler
from sunspot.submitter.manifest.render import settings_of
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import FakeCluster, kept, rayjob
from tests.harness.runs import commit, start
from tests.harness.waiting import wait_until
from tests.unit.test_moving import owner_of
from tests.unit.test_placing import NOW, clusters, jobs, profile, submit, sunspot

__all__ = ["clusters", "profile", "sunspot"]

GIVEN_UP = {"deployment": "Failed", "ray": "RUNNING", "reason": HEAD_GIVEN_UP}


@pytest.fixture(autouse=True)
def quick(set_constants: SetConstants) -> None:
    set_constants("sunspot.submitter.cluster.mover", CONSIDER_EVERY_S=0.05, SETTLED_AFTER_S=0.1)
    set_constants("sunspot.submitter.cluster.moving", POLL_EVERY_S=0.02, NOTICED_WITHIN_S=0.1)


@pytest.fixture
def trains_in_east(clusters: dict[str, FakeCluster], sunspot: Command, profile: str) -> str:
    """Start a run that has lost one of its two workers, and return its owner."""
    assert submit(sunspot, profile, "--place", "east", "--set", "EPOCHS=7") == 0, sunspot.err
    [name] = clusters["east"].jobs
    clusters["east"].set_status(name, "Running", "RUNNING")
    owner = owner_of(clusters["east"])
    attempt = start(sunspot.run, owner, settings={"SUNSPOT_NUM_WORKERS": "2"}, world_size=1)
    commit(sunspot.run, attempt, 12)
    write_status(sunspot.run, Status(RunState.RUNNING, owner, attempt=1, step=10, world_size=1), StatusKind.WORKERS)
    return owner


@contextmanager
def in_thread(act: Callable[[], None]) -> Iterator[None]:
    """Context manager in which `act` runs in another thread. Raises its error at the end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(30)
    assert not errors, errors


def drive_in_west(clusters: dict[str, FakeCluster], run: Run, old: str) -> None:
    """Act like the two drivers: hand the run over as soon as it has a RayJob in the west, and end it there."""
    wait_until(lambda: jobs(clusters)["west"] == 1, seconds=60)
    stopped = Status(RunState.STOPPED, old, "stopped by its move to run-2 in west", attempt=1, step=12)
    write_status(run, stopped, StatusKind.ENDED)
    [name] = clusters["east"].jobs
    clusters["east"].set_status(name, "Complete", "SUCCEEDED")
    requests = len(clusters["east"].requests)
    wait_until(lambda: len(clusters["east"].requests) > requests + 5, seconds=60)
    new = owner_of(clusters["west"])
    attempt = start(run, new, checkpoint_name(12, 1, read_attempts(run)[-1].nonce))
    write_status(run, Status(RunState.RUNNING, new, attempt=2, step=13, driver=attempt.driver), StatusKind.WORKERS)
    wait_until(lambda: jobs(clusters)["east"] == 0, seconds=60)
    write_status(run, Status(RunState.SUCCEEDED, new, attempt=2, step=20, driver=attempt.driver), StatusKind.ENDED)
    [name] = clusters["west"].jobs
    clusters["west"].set_status(name, "Complete", "SUCCEEDED")


# ---------------------------------------------------------------------------------------------------------------- wait


def test_wait_moves_a_run_that_lost_workers_and_follows_it_to_its_end(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str, trains_in_east: str
) -> None:
    with in_thread(lambda: drive_in_west(clusters, sunspot.run, trains_in_east)):
        assert sunspot("wait", "run", "--profile", profile, "--timeout", "100") == 0, sunspot.err

    assert jobs(clusters) == {"east": 0, "west": 1}
    [job] = clusters["west"].jobs.values()
    assert settings_of(job)["SUNSPOT_EPOCHS"] == "7", "it was not rendered from the request in the RayJob"
    assert "run: moving to west, the cheapest place (6.00 an hour) that can provide 90% of the nodes" in sunspot.err


def test_wait_finds_the_cluster_of_a_run(clusters: dict[str, FakeCluster], sunspot: Command, profile: str) -> None:
    access, mover = RunAccess(sunspot.run, connect()), Mover(profile)
    found = [mover.find(access).cluster]
    record_submission(sunspot.run, SubmissionRecord("run-1", place="west"))
    found.append(mover.find(access).cluster)
    write_status(sunspot.run, Status(RunState.RUNNING, "run-1#a@sunspot/0/east", attempt=1))
    found.append(mover.find(access).cluster)

    assert [cluster.context for cluster in found if cluster] == [None, "west", "east"]
    assert jobs(clusters) == {"east": 0, "west": 0}


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_does_not_try_to_move_to_the_same_place_again_after_a_failed_move(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reconciler = Reconciler(connect("east"), sunspot.run.storage.locate(""), lambda *words: None, Mover(profile))
    said: list[str] = []

    def reconcile_until_it_stays() -> bool:
        reconciler.reconcile()
        for name, job in list(clusters["west"].jobs.items()):
            if "status" not in job:
                clusters["west"].set_status(name, "Failed", "FAILED", message="no such image")
        said.append(capsys.readouterr().err)
        return "has ended: no such image; it stays where it was" in "".join(said)

    wait_until(reconcile_until_it_stays, seconds=60)
    for _ in range(4):
        time.sleep(0.1)  # longer than CONSIDER_EVERY_S
        reconciler.reconcile()
    said.append(capsys.readouterr().err)

    assert "".join(said).count("moving to west") == 1, said
    assert jobs(clusters) == {"east": 1, "west": 0}
    assert newest_submission(sunspot.run).place == "east"  # type: ignore[union-attr]


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_whose_head_stopped_answering_starts_again_in_a_better_place(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str, set_constants: SetConstants
) -> None:
    set_constants("sunspot.run.status", SILENT_AFTER_S=0.0)
    set_constants("sunspot.submitter.cluster.mover", CONSIDER_EVERY_S=1e9, SETTLED_AFTER_S=1e9)
    [name] = clusters["east"].jobs
    clusters["east"].set_status(name, **GIVEN_UP)
    reconciler = Reconciler(connect("east"), sunspot.run.storage.locate(""), lambda *words: None, Mover(profile))
    reconciler.reconcile()

    wait_until(lambda: jobs(clusters) == {"east": 0, "west": 1}, seconds=60)


def test_a_run_in_a_cluster_that_no_longer_answers_is_moved(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str, trains_in_east: str, set_constants: SetConstants
) -> None:
    set_constants("sunspot.submitter.cluster.mover", LOST_AFTER_S=0.0)
    reconciler = Reconciler(connect("east"), sunspot.run.storage.locate(""), lambda *words: None, Mover(profile))
    reconciler.reconcile()
    clusters["east"].down()
    set_constants("sunspot.run.status", SILENT_AFTER_S=0.0)

    def reconcile_until_moved() -> bool:
        reconciler.reconcile()
        record = newest_submission(sunspot.run)
        return record is not None and record.place == "west"

    wait_until(reconcile_until_moved, seconds=60)
    assert jobs(clusters)["west"] == 1
    start(sunspot.run, owner_of(clusters["west"]))
    with pytest.raises(SupersededError, match="west"):
        start(sunspot.run, trains_in_east)


def test_a_profile_without_places_is_refused(sunspot: Command, clusters: dict[str, FakeCluster]) -> None:
    assert sunspot("wait", "run", "--profile", "kind") == 2
    assert "profile kind has no places to which a run can move" in sunspot.err
    assert jobs(clusters) == {"east": 0, "west": 0}


# ------------------------------------------------------------------------------------------------------------ decisions


def snapshot(job: dict[str, Any] | None, status: Status | None, **seen: Any) -> RunSnapshot:
    jobs = (job_view(job),) if job else ()
    return RunSnapshot(ClusterSeen(jobs, time=NOW), RunSeen(Run(None, "run"), status=status, **seen))  # type: ignore[arg-type]


def status_of(owner: str, ago_s: float, state: RunState = RunState.RUNNING) -> Status:
    return Status(state, owner, attempt=1, time=NOW - ago_s, stored=NOW - ago_s)


JOB = {**rayjob("run-1", created=NOW - 3600), "status": {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}}

WAITING = {**rayjob("run-1", created=NOW - 300), "status": {"jobDeploymentStatus": "Initializing"}}

LONG_WAITING = {**rayjob("run-1", created=NOW - 700), "status": {"jobDeploymentStatus": "Initializing"}}

ENDED = {**rayjob("run-1", created=NOW - 3600), "status": {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}}

FAILED = {
    **rayjob("run-1", created=NOW - 3600),
    "status": {"jobDeploymentStatus": "Failed", "jobStatus": "RUNNING", "reason": HEAD_GIVEN_UP},
}


@pytest.mark.parametrize(
    ("job", "status", "expected"),
    [
        (JOB, status_of("run-1", 5), True),
        (JOB, status_of("run-2#x@sunspot/1/west", 5), False),
        (JOB, status_of("run-1", 60), False),
        (JOB, status_of("run-1", 1000), True),
        (JOB, status_of("run-1", 5, RunState.SUCCEEDED), False),
        (WAITING, None, False),
        (LONG_WAITING, None, True),
        (ENDED, replace(status_of("run-1", 60, RunState.STOPPED), reason="stopped by its move to run-2"), False),
        (ENDED, replace(status_of("run-1", 300, RunState.STOPPED), reason="stopped by its move to run-2"), True),
        (ENDED, status_of("run-1", 300, RunState.STOPPED), False),
        (FAILED, status_of("run-1", 300), True),
        (FAILED, status_of("run-1", 300, RunState.FAILED), False),
        (None, status_of("run-1", 5), False),
    ],
    ids=[
        "alive",
        "alive elsewhere",
        "silent for a minute",
        "silent for long",
        "done",
        "waiting",
        "waiting for long",
        "moving",
        "stranded by a move",
        "stopped",
        "its head is given up",
        "failed by itself",
        "its RayJob is gone",
    ],
)
def test_only_a_run_that_is_training_or_stranded_is_considered_for_a_move(
    job: dict[str, Any] | None, status: Status | None, expected: bool
) -> None:
    assert may_consider(snapshot(job, status), NOW) is expected


def test_a_run_does_not_move_after_a_stop_request_or_while_storage_fails() -> None:
    alive = status_of("run-1", 5)

    assert not may_consider(snapshot(JOB, alive, summary=RunSummary(stop_requested=True)), NOW)
    assert not may_consider(snapshot(JOB, alive, trouble="no answer"), NOW)


def with_request(text: str | None) -> dict[str, Any]:
    job = rayjob("run-1")
    return {**job, "metadata": {**job["metadata"], "annotations": {} if text is None else {REQUEST: text}}}


def test_the_request_in_a_rayjob_cannot_choose_a_profile_or_a_place_or_a_namespace() -> None:
    options = {"image": "mine:1", "queue": None, "generation": 2, "code": None, "settings": {"SUNSPOT_EPOCHS": "7"}}
    text = json.dumps({**options, "profile": "other", "place": "east", "namespace": "kube-system", "cluster": "x"})
    request = read_request(job_view(with_request(text)), "mine.yaml")

    assert request
    assert (request.profile, request.place, request.namespace, request.cluster) == ("mine.yaml", None, None, None)
    assert (request.image, request.generation, request.settings) == ("mine:1", 2, {"SUNSPOT_EPOCHS": "7"})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"image": 1, "queue": null, "generation": 1, "code": null}'])
def test_a_damaged_request_in_a_rayjob_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="does not contain a usable request in its annotation sunspot/request"):
        read_request(job_view(with_request(text)), "mine.yaml")


def test_a_rayjob_that_has_no_request_or_comes_from_a_gitops_tool_is_not_moved() -> None:
    assert read_request(job_view(with_request(None)), "mine.yaml") is None
    assert read_request(job_view(kept(with_request("{}"))), "mine.yaml") is None


# ------------------------------------------------------------------------------- a RayJob that starts too late


EAST, WEST = Owner("run-1", "a", "sunspot", "0", "east"), Owner("run-1", "b", "sunspot", "1", "west")


def claimed_by(owner: Owner) -> list[Attempt]:
    return [Attempt(1, str(owner), None, 0)]


@pytest.fixture
def left_east(run: Run) -> Run:
    """A run that was submitted in the east, and later in the west."""
    for place in ("east", "west"):
        record_submission(run, SubmissionRecord("run-1", place=place, time=time.time()))
    return run


def test_a_rayjob_is_superseded_if_the_run_moved_away_before_the_rayjob_started(left_east: Run) -> None:
    with pytest.raises(SupersededError, match="run-1 in west"):
        refuse_if_left(left_east, claimed_by(WEST), str(EAST))
    refuse_if_left(left_east, claimed_by(EAST), str(WEST))
    refuse_if_left(left_east, [], str(EAST))
    refuse_if_left(left_east, claimed_by(WEST), "run-1")


def test_a_rayjob_that_is_submitted_again_is_not_superseded(left_east: Run) -> None:
    record_submission(left_east, SubmissionRecord("run-1", place="east", time=time.time()))

    refuse_if_left(left_east, claimed_by(WEST), str(EAST))


def test_a_withdrawn_rayjob_is_superseded_until_it_is_submitted_again(left_east: Run) -> None:
    withdraw_submission(left_east, "run-1", "west")

    assert newest_submission(left_east).place == "east"  # type: ignore[union-attr]
    with pytest.raises(SupersededError, match="was withdrawn, because the run stays in its old place"):
        refuse_if_left(left_east, claimed_by(EAST), str(WEST))
    record_submission(left_east, SubmissionRecord("run-1", place="west", time=time.time()))
    refuse_if_left(left_east, claimed_by(EAST), str(WEST))
