"""Tests of `sunspot move` between two clusters with fake API servers, and of the handover between two drivers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from sunspot.background import start_thread
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource
from sunspot.errors import ConflictError, StorageError
from sunspot.plan import Plan
from sunspot.run import Claimant, Run, open_run, to_json
from sunspot.run.attempts import Attempt, read_attempts
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.handover import HANDOVER, Handover, clear_handover, read_handover, take_over_from
from sunspot.run.objects import with_checksum
from sunspot.run.outcome import recorded_outcome
from sunspot.run.owner import Owner
from sunspot.run.requests import StopRequest, newest_submission, request_stop, withdraw_submission
from sunspot.run.status import RunState, Status, StatusKind, read_status, write_status
from sunspot.settings import Settings
from sunspot.submitter.manifest.render import settings_of
from sunspot.train.driver import Origin, train
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import FakeCluster, answer
from tests.harness.runs import commit, start
from tests.harness.waiting import wait_until
from tests.unit.test_placing import PLACES, clusters, jobs, profile, submit, sunspot

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
def test_the_new_driver_does_not_wait_for_a_driver_that_is_not_training(
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


@pytest.mark.parametrize("given_up", [True, False])
def test_a_driver_resumes_training_if_its_move_is_cancelled_while_it_saves_a_checkpoint(
    given_up: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, stop = start(run, OLD), StopRequest()
    groups: list[str] = []

    def end_group(plan: Plan, claimant: Claimant, stop_request: StopRequest, note_end: object) -> Checkpoint:
        """Stop at the new driver's request, and then because of `sunspot stop`."""
        groups.append(stop_request.moves_to)
        if given_up and len(groups) == 1:
            clear_handover(run)
        else:
            request_stop(run, "me")
        stop_request.marked = True
        return commit(run, attempt, 2)

    monkeypatch.setattr("sunspot.train.trainer.fit", end_group)
    monkeypatch.setattr("sunspot.ray_session.ray_session", nullcontext)
    run.storage.write(run.key(HANDOVER), to_json(asdict(Handover(OLD, NEW))))
    with recorded_outcome(Claimant(run, OLD, "0000000a"), None, 10, stop) as outcome:
        wait_until(lambda: stop.marked, seconds=20)
        plan = Plan(Settings(), EmptySource((2,), 8), None, Steps(8, 2), 4)
        ended = train(plan, Claimant(run, OLD, "0000000a"), Origin(None, ()), outcome, stop)

    moves = "stopped by its move to run-2 in west (namespace sunspot of cluster 1)"
    assert ended == (RunState.STOPPED, "" if given_up else moves)
    assert groups == ([NEW, ""] if given_up else [NEW])


@pytest.mark.parametrize(
    ("reason", "fails"), [("stopped by its move to west", True), ("", False)], ids=["a move", "`sunspot stop`"]
)
def test_a_driver_that_cannot_record_its_move_fails_so_that_it_is_started_again(
    reason: str, fails: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(run: Run, status: Status, kind: StatusKind) -> None:
        raise StorageError("no answer")

    def drive() -> None:
        with recorded_outcome(Claimant(run, OLD, "0000000a"), None, 10) as outcome:
            outcome.expect(RunState.STOPPED, reason)
            monkeypatch.setattr("sunspot.run.outcome.write_status", write)

    with pytest.raises(StorageError) if fails else nullcontext():
        drive()


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


def move_until(fail: Callable[[], None], clusters: dict[str, FakeCluster], sunspot: Command, profile: str) -> int:
    """Move the run, call `fail` once the new RayJob exists, and return the exit code."""

    def wait_and_fail() -> None:
        wait_until(lambda: jobs(clusters)["west"] == 1, seconds=20)
        fail()

    failing = start_thread(wait_and_fail, "failing job")
    code = move(sunspot, profile)
    failing.result(20)
    return code


def fail_in_west(clusters: dict[str, FakeCluster]) -> None:
    """Let the new RayJob fail."""
    [name] = clusters["west"].jobs
    clusters["west"].set_status(name, "Failed", "FAILED", message="no such image")


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
def test_a_run_that_gets_no_nodes_in_the_new_place_stays_in_its_old_place(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert move(sunspot, profile, "--timeout", "0.1") == 5

    assert "run got no nodes in west within 0 s; it stays where it was; `sunspot doctor run" in sunspot.err
    assert jobs(clusters) == {"east": 1, "west": 0}
    assert read_status(sunspot.run).state is RunState.RUNNING  # type: ignore[union-attr]


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_stays_in_its_old_place_if_its_new_job_fails(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert move_until(lambda: fail_in_west(clusters), clusters, sunspot, profile) == 5

    assert "because its RayJob" in sunspot.err
    assert "has ended: no such image; it stays where it was" in sunspot.err
    assert jobs(clusters) == {"east": 1, "west": 0}


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_restarts_in_its_old_place_if_its_new_job_fails_after_the_handover(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    old = owner_of(clusters["east"])

    def fail() -> None:
        end_for_move(sunspot.run, old)
        [name] = clusters["east"].jobs
        clusters["east"].set_status(name, "Complete", "SUCCEEDED")
        [name] = clusters["west"].jobs
        clusters["west"].set_status(name, "Failed", "FAILED", message="no such image")

    assert move_until(fail, clusters, sunspot, profile) == 5

    assert jobs(clusters) == {"east": 1, "west": 0}
    assert owner_of(clusters["east"]) != old, "the ended RayJob was not replaced"


@pytest.mark.usefixtures("trains_in_east")
@pytest.mark.parametrize("chosen", [True, False])
def test_a_run_restarts_in_its_old_place_if_it_was_claimed_while_its_move_was_undone(
    chosen: bool, clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    """The new workers read the submissions before the move was withdrawn, and claim the run after that."""
    run, old = sunspot.run, owner_of(clusters["east"])

    def claim_and_answer(handler: Any) -> None:
        new = owner_of(clusters["west"])
        attempt = Attempt(2, new, None, 0, chosen=chosen)
        assert run.storage.create(run.key("attempts", "0002.json"), with_checksum(asdict(attempt)))
        write_status(run, Status(RunState.STARTING, new, attempt=2, driver="0000000b"))
        handler.answer()

    clusters["west"].on("DELETE", "rayjobs", claim_and_answer, times=1)
    assert move_until(lambda: fail_in_west(clusters), clusters, sunspot, profile) == 5

    assert jobs(clusters) == {"east": 1, "west": 0}
    assert owner_of(clusters["east"]) != old, "the superseded RayJob was not replaced"


@pytest.mark.usefixtures("trains_in_east")
def test_a_job_is_not_withdrawn_if_it_claimed_the_run_just_before_the_move_was_undone(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = commit(sunspot.run, read_attempts(sunspot.run)[-1], 12)

    def claim_and_withdraw(*submission: Any, **options: Any) -> None:
        if len(read_attempts(sunspot.run)) == 1:
            start(sunspot.run, owner_of(clusters["west"]), saved.name)
        withdraw_submission(*submission, **options)

    monkeypatch.setattr("sunspot.submitter.cluster.moving.withdraw_submission", claim_and_withdraw)
    assert move(sunspot, profile, "--timeout", "0.1") == 0, sunspot.err
    assert jobs(clusters) == {"east": 0, "west": 1}
    assert newest_submission(sunspot.run).place == "west"  # type: ignore[union-attr]


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_that_cannot_restart_in_its_old_place_is_reported(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    old = owner_of(clusters["east"])

    def fail() -> None:
        end_for_move(sunspot.run, old)
        clusters["east"].on("GET", "rayjobs", answer(403, "who are you?"))
        fail_in_west(clusters)

    assert move_until(fail, clusters, sunspot, profile) == 4

    assert "run was stopped for the move, but could not be started again in east: " in sunspot.err
    assert "`sunspot resume run --storage" in sunspot.err


@pytest.fixture
def one_namespace(tmp_path: Path) -> str:
    """A profile whose places are both in the cluster in the east."""
    profile = tmp_path / "one.yaml"
    profile.write_text(yaml.safe_dump({"extends": "kind", "places": [{**each, "context": "east"} for each in PLACES]}))
    return str(profile)


@pytest.mark.parametrize("live", [True, False])
def test_the_old_job_restarts_even_if_the_new_job_in_its_namespace_cannot_be_deleted(
    live: bool, clusters: dict[str, FakeCluster], sunspot: Command, one_namespace: str
) -> None:
    cluster = clusters["east"]
    assert submit(sunspot, one_namespace, "--place", "east") == 0, sunspot.err
    [old] = cluster.jobs
    owner = owner_of(cluster)
    start(sunspot.run, owner)
    write_status(sunspot.run, Status(RunState.RUNNING, owner, attempt=1, step=10, world_size=2))

    def fail() -> None:
        wait_until(lambda: len(cluster.jobs) == 2, seconds=20)
        [new] = cluster.jobs.keys() - {old}
        end_for_move(sunspot.run, owner)
        cluster.on("DELETE", new, answer(403, "no"), times=1)
        if not live:
            cluster.set_status(new, "Failed", "FAILED", message="no such image")

    failing = start_thread(fail, "failing job")
    assert move(sunspot, one_namespace, "--timeout", "3") == 5, sunspot.err
    failing.result(20)

    assert len(cluster.jobs) == (2 if live else 1)
    restarted = settings_of(cluster.jobs[old])["SUNSPOT_JOB_ID"]
    assert Owner.parse(restarted).submission != Owner.parse(owner).submission
    assert newest_submission(sunspot.run).job == old  # type: ignore[union-attr]
    if live:
        cluster.delete_job(old)
        assert sunspot("resume", "run") == 3, "the withdrawn RayJob counts as the run's"
        assert f"{old} is no longer in namespace" in sunspot.err


@pytest.mark.usefixtures("trains_in_east")
def test_an_old_job_that_cannot_be_applied_again_is_kept_if_the_move_fails(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    old = owner_of(clusters["east"])

    def fail() -> None:
        [job] = clusters["east"].jobs.values()
        job["metadata"]["annotations"]["sunspot/applied"] = "{}"
        end_for_move(sunspot.run, old)
        fail_in_west(clusters)

    assert move_until(fail, clusters, sunspot, profile) == 4
    assert "run was stopped for the move, but could not be started again in east: RayJob run-" in sunspot.err
    assert jobs(clusters) == {"east": 1, "west": 0}


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_whose_old_job_is_gone_after_a_failed_move_is_reported(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    old = owner_of(clusters["east"])

    def fail() -> None:
        [name] = clusters["east"].jobs
        clusters["east"].delete_job(name)
        end_for_move(sunspot.run, old)
        fail_in_west(clusters)

    assert move_until(fail, clusters, sunspot, profile) == 4
    assert "run was stopped for the move, but could not be started again in east: run-" in sunspot.err
    assert "`sunspot resume run --storage" in sunspot.err


def test_a_failed_job_of_an_earlier_move_is_replaced(
    clusters: dict[str, FakeCluster], sunspot: Command, one_namespace: str
) -> None:
    """Both places are in one namespace."""
    cluster = clusters["east"]
    assert submit(sunspot, one_namespace, "--place", "east") == 0, sunspot.err
    [old] = cluster.jobs
    owner = owner_of(cluster)
    start(sunspot.run, owner)

    def fail() -> None:
        wait_until(lambda: len(cluster.jobs) == 2, seconds=20)
        [new] = cluster.jobs.keys() - {old}
        cluster.on("DELETE", new, answer(403, "no"), times=1)
        cluster.set_status(new, "Failed", "FAILED", message="no such image")

    write_status(sunspot.run, Status(RunState.RUNNING, owner, attempt=1, step=10, world_size=2))
    failing = start_thread(fail, "failing job")
    assert move(sunspot, one_namespace) == 5
    failing.result(20)
    assert len(cluster.jobs) == 2, "the cluster refused to delete it"

    write_status(sunspot.run, Status(RunState.RUNNING, owner, attempt=1, step=10, world_size=2))
    assert move(sunspot, one_namespace, "--timeout", "0.1") == 5
    assert "run got no nodes in west within 0 s" in sunspot.err
    assert [*cluster.jobs] == [old]


@pytest.mark.usefixtures("trains_in_east")
def test_a_run_that_is_already_in_the_chosen_place_does_not_move(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert sunspot("move", "run", "--to", "east", "--profile", profile) == 0, sunspot.err

    assert "attached" in sunspot.out
    assert jobs(clusters) == {"east": 1, "west": 0}


def test_a_run_that_is_not_training_is_moved_by_submitting_it_in_the_new_place(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert submit(sunspot, profile, "--place", "east") == 0, sunspot.err

    assert move(sunspot, profile) == 0, sunspot.err
    assert jobs(clusters) == {"east": 0, "west": 1}


@pytest.mark.usefixtures("trains_in_east")
def test_moving_a_search_is_rejected(clusters: dict[str, FakeCluster], sunspot: Command, profile: str) -> None:
    assert move(sunspot, profile, "--set", "LEARNING_RATE=loguniform(1e-3,1e-2)") == 2

    assert "run is a search, whose trials cannot be moved together; stop it, and submit it" in sunspot.err
    assert jobs(clusters) == {"east": 1, "west": 0}


def test_a_run_that_is_training_outside_the_profiles_places_does_not_move(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    write_status(sunspot.run, Status(RunState.RUNNING, "run-1#a@sunspot/0", attempt=1))

    assert move(sunspot, profile) == 6
    assert "which is not in any of the profile's places; stop the run, and submit it with --place west" in sunspot.err
    assert jobs(clusters) == {"east": 0, "west": 0}
