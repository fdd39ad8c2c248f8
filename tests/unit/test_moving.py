"""Tests of `sunspot move` between two clusters with fake API servers, and of the handover between two drivers."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from sunspot.background import start_thread
from sunspot.errors import ConflictError
from sunspot.run import Claimant, Run, open_run, to_json
from sunspot.run.attempts import read_attempts
from sunspot.run.handover import HANDOVER, Handover, read_handover, take_over_from
from sunspot.run.outcome import recorded_outcome
from sunspot.run.owner import Owner
from sunspot.run.requests import StopRequest
from sunspot.run.status import RunState, Status, StatusKind, read_status, write_status
from sunspot.submitter.manifest.render import settings_of
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import FakeCluster
from tests.harness.runs import commit, start
from tests.harness.waiting import wait_until
from tests.unit.test_placing import clusters, jobs, profile, submit, sunspot

__all__ = ["clusters", "profile", "sunspot"]

OLD, NEW = "run-1#a@sunspot/0/east", "run-2#b@sunspot/1/west"


@pytest.fixture(autouse=True)
def quick(set_constants: SetConstants) -> None:
    set_constants("sunspot.run.handover", LOOK_EVERY_S=0.02)
    set_constants("sunspot.run.outcome", DRIVER_CHECK_EVERY_S=0.02)
    set_constants("sunspot.submitter.cluster.moving", POLL_EVERY_S=0.02, NOTICED_WITHIN_S=2.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(str(tmp_path / "runs"), "run")


def owner_of(cluster: FakeCluster) -> str:
    [job] = cluster.jobs.values()
    return str(Owner.parse(settings_of(job)["SUNSPOT_JOB_ID"])._replace(namespace="sunspot"))


# --------------------------------------------------------------------------------------------------------- the drivers


def test_the_new_driver_waits_until_the_old_driver_has_saved_and_exited(run: Run) -> None:
    stop = StopRequest()
    with recorded_outcome(Claimant(run, OLD, "0000000a"), None, 10, stop) as outcome:
        outcome.replace(state=RunState.RUNNING, attempt=0)
        new = threading.Thread(target=take_over_from, args=(run, OLD, NEW))
        new.start()
        wait_until(lambda: stop.marked, seconds=20)
        assert read_handover(run) == Handover(OLD, NEW, read_handover(run).time)  # type: ignore[union-attr]
        assert new.is_alive(), "it claims the run while the old driver saves"
        outcome.expect(RunState.STOPPED)
    new.join(20)
    assert not new.is_alive()
    assert read_handover(run) is None


@pytest.mark.parametrize(
    ("state", "owner", "silent_s"),
    [(RunState.STOPPED, OLD, 0), (RunState.RUNNING, NEW, 0), (RunState.RUNNING, OLD, 100)],
    ids=["an ended", "another", "a silent"],
)
def test_the_new_driver_does_not_wait_for_a_driver_that_does_not_train(
    state: RunState,
    owner: str,
    silent_s: float,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = Status(state, owner, stored=time.time() - silent_s)
    monkeypatch.setattr("sunspot.run.handover.read_status", lambda _: seen)
    take_over_from(run, OLD, NEW)

    assert read_handover(run) is None
    assert "waiting" not in capsys.readouterr().out


def test_a_driver_ignores_a_handover_request_to_another_driver(run: Run) -> None:
    stop = StopRequest()
    with recorded_outcome(Claimant(run, NEW, "0000000b"), None, 10, stop):
        run.storage.write(run.key(HANDOVER), to_json(asdict(Handover(OLD, NEW))))
    # The context reads all requests once more when it ends.
    assert not stop.marked


def test_the_new_driver_gives_up_if_the_old_driver_does_not_exit(run: Run, set_constants: SetConstants) -> None:
    set_constants("sunspot.run.handover", HANDED_OVER_WITHIN_S=0.1)
    write_status(run, Status(RunState.RUNNING, OLD, attempt=1))
    with pytest.raises(ConflictError, match=r"run-1 in east .* did not save a checkpoint and stop within 0 s"):
        take_over_from(run, OLD, NEW)

    assert read_handover(run) is None, "the old driver would stop later"


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def trains_in_east(clusters: dict[str, FakeCluster], sunspot: Command, profile: str) -> None:
    assert submit(sunspot, profile, "--place", "east") == 0, sunspot.err
    start(sunspot.run, owner_of(clusters["east"]))
    write_status(sunspot.run, Status(RunState.RUNNING, owner_of(clusters["east"]), attempt=1, step=10, world_size=2))


def end_for_move(run: Run, owner: str) -> None:
    """Write the status of an old driver that has saved at step 12 and ended for the move to the west."""
    stopped = Status(RunState.STOPPED, owner, "stopped by its move to run-2 in west", attempt=1, step=12)
    write_status(run, stopped, StatusKind.ENDED)


def move(sunspot: Command, profile: str, *words: str) -> int:
    return sunspot("move", "run", "--to", "west", "--profile", profile, *words)


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_moves_and_its_old_job_is_deleted(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    old = owner_of(clusters["east"])

    def drive() -> None:
        """Act like the driver in the new place."""
        wait_until(lambda: jobs(clusters)["west"] == 1, seconds=20)
        assert jobs(clusters)["east"] == 1, "the old RayJob was deleted before the new one trained"
        [job] = clusters["west"].jobs.values()
        assert settings_of(job)["SUNSPOT_MOVES_FROM"] == old
        end_for_move(sunspot.run, old)
        saved = commit(sunspot.run, read_attempts(sunspot.run)[-1], 12)
        start(sunspot.run, owner_of(clusters["west"]), saved.name)

    driver = start_thread(drive, "new driver")
    assert move(sunspot, profile, "--json", "--timeout", "60") == 0, sunspot.err
    driver.result(20)

    assert jobs(clusters) == {"east": 0, "west": 1}
    assert (sunspot.json["action"], sunspot.json["reason"]) == ("moved", "from east at step 12")
    assert sunspot.json["place"] == "west"


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_that_gets_no_nodes_in_the_new_place_stays_where_it_was(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert move(sunspot, profile, "--timeout", "0.1") == 5

    assert "run got no nodes in west within 0 s; it stays where it was; `sunspot doctor run" in sunspot.err
    assert jobs(clusters) == {"east": 1, "west": 0}
    assert read_status(sunspot.run).state is RunState.RUNNING  # type: ignore[union-attr]


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_whose_new_job_fails_stays_where_it_was(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    def fail() -> None:
        wait_until(lambda: jobs(clusters)["west"] == 1, seconds=20)
        [name] = clusters["west"].jobs
        clusters["west"].set_status(name, "Failed", "FAILED", message="no such image")

    failing = start_thread(fail, "failing job")
    assert move(sunspot, profile) == 5
    failing.result(20)

    assert "because its RayJob" in sunspot.err
    assert "has ended: no such image; it stays where it was" in sunspot.err
    assert jobs(clusters) == {"east": 1, "west": 0}


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_whose_new_job_fails_after_the_handover_restarts_in_its_old_place(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    old = owner_of(clusters["east"])

    def fail() -> None:
        wait_until(lambda: jobs(clusters)["west"] == 1, seconds=20)
        end_for_move(sunspot.run, old)
        [name] = clusters["east"].jobs
        clusters["east"].set_status(name, "Complete", "SUCCEEDED")
        [name] = clusters["west"].jobs
        clusters["west"].set_status(name, "Failed", "FAILED", message="no such image")

    failing = start_thread(fail, "failing job")
    assert move(sunspot, profile) == 5
    failing.result(20)

    assert jobs(clusters) == {"east": 1, "west": 0}
    assert owner_of(clusters["east"]) != old, "the ended RayJob was not replaced"


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_that_is_already_in_the_chosen_place_does_not_move(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert sunspot("move", "run", "--to", "east", "--profile", profile) == 0, sunspot.err

    assert "attached" in sunspot.out
    assert jobs(clusters) == {"east": 1, "west": 0}


def test_moving_a_run_that_does_not_train_submits_it_in_the_new_place(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert submit(sunspot, profile, "--place", "east") == 0, sunspot.err

    assert move(sunspot, profile) == 0, sunspot.err
    assert jobs(clusters) == {"east": 0, "west": 1}


@pytest.mark.usefixtures("trains_in_east")
def test_a_search_does_not_move(clusters: dict[str, FakeCluster], sunspot: Command, profile: str) -> None:
    assert move(sunspot, profile, "--set", "LEARNING_RATE=loguniform(1e-3,1e-2)") == 2

    assert "run is a search, whose trials cannot be moved together; stop it, and submit it" in sunspot.err
    assert jobs(clusters) == {"east": 1, "west": 0}


def test_a_run_that_trains_outside_the_places_of_the_profile_does_not_move(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    write_status(sunspot.run, Status(RunState.RUNNING, "run-1#a@sunspot/0", attempt=1))

    assert move(sunspot, profile) == 6
    assert "which is not a place of the profile; stop it, and submit it with --place west" in sunspot.err
    assert jobs(clusters) == {"east": 0, "west": 0}
