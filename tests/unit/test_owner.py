"""Tests of a run's owner if RayJobs with the same name train it in two clusters or namespaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sunspot.errors import SupersededError
from sunspot.run import Claimant, Run
from sunspot.run.attempts import (
    Attempt,
    claim_next,
    ensure_owner,
    fatal_error,
    new_nonce,
    next_number,
    read_attempts,
)
from sunspot.run.owner import Owner, new_owner, new_submission
from sunspot.run.status import RunState, Status, write_status
from tests.harness.constants import SetConstants
from tests.harness.runs import begin

Driver = Callable[..., Claimant]

RAYJOB = "digits-1a2b3c4d"

HERE = ("sunspot", "A")
OTHER_NAMESPACE = ("teamb", "A")
OTHER_CLUSTER = ("sunspot", "B")
"""A namespace, and the certificates of its cluster."""


@pytest.fixture
def driver(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants) -> Driver:
    """Return a function that starts a RayJob's driver in a namespace and cluster."""
    certificates = tmp_path / "ca.crt"
    set_constants("sunspot.run.owner", CERTIFICATES=certificates)
    begin(run)

    def start(place: tuple[str, str], job_id: str = RAYJOB) -> Claimant:
        monkeypatch.setenv("POD_NAMESPACE", place[0])
        certificates.write_text(place[1])
        number = len(run.storage.list(run.key("status"))) + 1
        claimant = Claimant(run, new_owner(job_id), f"{number:08x}")
        write_status(run, Status(RunState.STARTING, claimant.owner, driver=claimant.driver))
        return claimant

    return start


def claim(claimant: Claimant) -> Attempt:
    """Claim the run for a driver's worker group, like `elastic/claim.py`."""

    def make(attempts: list[Attempt]) -> Attempt:
        unclaimed = Attempt(next_number(attempts), claimant.owner, None, 0, nonce=new_nonce(), chosen=False)
        return replace(unclaimed, metadata=replace(unclaimed.metadata, driver=claimant.driver))

    return claim_next(claimant.run, make)[-1]


@pytest.mark.parametrize("other", [OTHER_NAMESPACE, OTHER_CLUSTER])
@pytest.mark.parametrize("submitted", [False, True])
def test_the_earlier_of_two_rayjobs_with_the_same_name_cannot_take_the_run_back(
    run: Run, driver: Driver, other: tuple[str, str], submitted: bool
) -> None:
    first_id, second_id = (new_submission(RAYJOB), new_submission(RAYJOB)) if submitted else (RAYJOB, RAYJOB)
    first = driver(HERE, first_id)
    trains = claim(first)
    ensure_owner(run, trains)
    second = driver(other, second_id)
    takes_over = claim(second)
    with pytest.raises(
        SupersededError, match=f"{RAYJOB} in namespace {other[0]} of cluster .* has owned the run since"
    ):
        ensure_owner(run, trains)  # as before each commit and deletion
    for _ in range(3):  # each time the operator retries the job
        again = driver(HERE, first_id)
        assert again.owner == first.owner
        assert isinstance(fatal_error(again), SupersededError)
        with pytest.raises(SupersededError) as refused:
            claim(again)
        assert refused.value.exit_code == 6
    ensure_owner(run, takes_over)
    retried = claim(driver(other, second_id))
    assert [attempt.owner for attempt in read_attempts(run)] == [first.owner, second.owner, second.owner]
    ensure_owner(run, retried)


def test_a_resubmitted_rayjob_supersedes_the_processes_of_earlier_submissions(run: Run, driver: Driver) -> None:
    first_id = new_submission(RAYJOB)
    zombie = claim(driver(HERE, first_id))
    claim(driver(OTHER_CLUSTER, new_submission(RAYJOB)))
    last = claim(driver(HERE, new_submission(RAYJOB)))
    ensure_owner(run, last)
    with pytest.raises(SupersededError):
        ensure_owner(run, zombie)
    assert isinstance(fatal_error(driver(HERE, first_id)), SupersededError)


def test_a_run_whose_owner_is_only_a_job_id_can_be_taken_over(run: Run, driver: Driver) -> None:
    old = claim(Claimant(run, RAYJOB, "0000beef"))
    now = claim(driver(HERE, new_submission(RAYJOB)))
    ensure_owner(run, now)
    with pytest.raises(SupersededError):
        ensure_owner(run, old)


def test_outside_kubernetes_the_owner_is_the_job_id(
    monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants, tmp_path: Path
) -> None:
    set_constants("sunspot.run.owner", CERTIFICATES=tmp_path / "none")
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    assert new_owner("job") == new_owner("job") == "job"
    assert new_owner("") != new_owner("")
    monkeypatch.setenv("POD_NAMESPACE", "notebooks")
    assert "notebooks" not in new_owner(""), "a process is not a RayJob"


@pytest.mark.parametrize(
    "owner",
    [
        Owner("job"),
        Owner("job", "1a2b3c4d"),
        Owner("job", "1a2b3c4d", "sunspot", "0123456789"),
        Owner("job", "", "sunspot"),
        Owner("job", "", "", "0123456789"),
    ],
)
def test_parsing_the_text_of_an_owner_gives_the_same_owner(owner: Owner) -> None:
    assert Owner.parse(str(owner)) == owner
