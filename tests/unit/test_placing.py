"""Tests of `sunspot submit` with a profile that has places, in two clusters with fake API servers."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sunspot.errors import SettingsError
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt, Metadata
from sunspot.run.owner import Owner
from sunspot.run.requests import SubmissionRecord, newest_submission, record_submission
from sunspot.run.sightings import NODES_WITHIN_S, find_sightings, read_sightings
from sunspot.run.status import RunState, Status, write_status
from sunspot.submitter.manifest.profile import load_profile
from sunspot.submitter.manifest.render import JobRequest, render, settings_of
from tests.harness.commands import Command
from tests.harness.kubernetes import CORE, FakeCluster
from tests.harness.runs import commit, start

PLACES = [
    {"name": "east", "context": "east", "worker": {"price": 2.0}},
    {"name": "west", "context": "west", "worker": {"price": 3.0}, "labels": {"team": "west"}, "image": "west:1"},
]

NOW = 1_000_000.0


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"extends": "kind", "places": PLACES}))
    return str(path)


@pytest.fixture
def clusters(cluster: FakeCluster, tmp_path: Path) -> dict[str, FakeCluster]:
    """Two clusters, each with a context of its name."""
    (tmp_path / "west").mkdir()
    found = {"east": cluster, "west": FakeCluster(tmp_path / "west")}
    config = json.loads(cluster.kubeconfig.read_text())
    config["clusters"] = [
        {"name": name, "cluster": {"server": f"http://127.0.0.1:{each.port}"}} for name, each in found.items()
    ]
    config["contexts"] = [{"name": name, "context": {"cluster": name, "user": "me"}} for name in found]
    config["current-context"] = "east"
    cluster.kubeconfig.write_text(json.dumps(config))
    for name, each in found.items():
        each.objects.add("/version")
        each.documents[f"{CORE}/configmaps/kube-root-ca.crt"] = {"data": {"ca.crt": f"certificates of {name}"}}
    return found


@pytest.fixture
def sunspot(s3_bucket: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(open_run(f"s3://{s3_bucket}/runs", "run"), capsys)


def submit(sunspot: Command, profile: str, *words: str) -> int:
    return sunspot("submit", "--run", "run", "--profile", profile, *words)


def jobs(clusters: dict[str, FakeCluster]) -> dict[str, int]:
    return {name: len(cluster.jobs) for name, cluster in clusters.items()}


def fail_in(run: Run, place: str, ago_s: float = 0.0) -> None:
    """Record a submission of another run that got no nodes in a place until `ago_s` seconds ago."""
    time_ = time.time() - ago_s - NODES_WITHIN_S - 60
    other = Run(run.storage, "other")
    record_submission(other, SubmissionRecord("other-1", place=place, time=time_))
    record_submission(other, SubmissionRecord("other-2", place="", time=time.time() - ago_s))


# --------------------------------------------------------------------------------------------------------- the profile


def test_a_place_overrides_values_of_its_profile(profile: str) -> None:
    manifests = {name: render(JobRequest(profile, place=name)).manifest for name in ("east", "west")}

    assert "team" not in manifests["east"]["metadata"]["labels"]
    assert manifests["west"]["metadata"]["labels"]["team"] == "west"
    owners = {name: Owner.parse(settings_of(manifest)["SUNSPOT_JOB_ID"]) for name, manifest in manifests.items()}
    assert {name: owner.place for name, owner in owners.items()} == {"east": "east", "west": "west"}


def test_an_option_takes_precedence_over_the_place(profile: str) -> None:
    images = [load_profile(profile, given, "west").image for given in ({}, {"image": "mine:1"})]

    assert images == ["west:1", "mine:1"]


def test_render_names_the_place_that_sets_a_value(profile: str) -> None:
    origins = {
        place: {value.name: value.source for value in render(JobRequest(profile, place=place)).derived}["image"]
        for place in ("east", "west")
    }

    assert origins["west"] == "place west"
    assert origins["east"] != "place east"


def test_render_requires_a_place_if_the_profile_has_several_places(profile: str) -> None:
    with pytest.raises(SettingsError, match="choose one of east, west with --place"):
        render(JobRequest(profile))


def test_an_unknown_place_is_rejected(profile: str) -> None:
    with pytest.raises(SettingsError, match="has no place 'north'; choose one of east, west"):
        render(JobRequest(profile, place="north"))
    with pytest.raises(SettingsError, match="profile kind has no place 'north'; add it to the key places"):
        render(JobRequest("kind", place="north"))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([{"context": "a"}], "places.0.name is missing; set it to at most 32"),
        ([{"name": "a", "worker": {"prise": 2}}], "did you mean places.0.worker.price"),
        ([{"name": "a"}, {"name": "a"}], "places=.* is not valid"),
        ([{"name": "a", "extends": "kind"}], "set it to nothing, because a place extends its profile"),
        ([{"name": "a", "places": []}], "set it to nothing, because a place cannot contain places"),
        ([], "set it to a list of places"),
    ],
)
def test_an_invalid_place_is_rejected(places: list[Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"extends": "kind", "places": places}))

    with pytest.raises(SettingsError, match=message):
        load_profile(str(path), {})


# -------------------------------------------------------------------------------------------------------------- submit


def test_submit_chooses_the_cheapest_place_and_says_why(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert submit(sunspot, profile, "--json") == 0, sunspot.err

    assert jobs(clusters) == {"east": 1, "west": 0}
    assert "place: east, the cheapest place (4.00 an hour) that can provide 90% of the nodes; no run has" in sunspot.err
    assert sunspot.json["place"] == "east"
    record = newest_submission(sunspot.run)
    assert record
    assert record.place == "east"
    assert record.arguments[:4] == ("--profile", profile, "--run", "run")
    assert "--place" in record.arguments


def test_a_run_avoids_a_place_in_which_another_run_found_no_nodes(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    fail_in(sunspot.run, "east")

    assert submit(sunspot, profile) == 0, sunspot.err
    assert jobs(clusters) == {"east": 0, "west": 1}


def test_a_run_with_a_checkpoint_avoids_a_place_with_expensive_traffic(
    clusters: dict[str, FakeCluster], sunspot: Command, tmp_path: Path
) -> None:
    path = tmp_path / "far.yaml"
    places = [{**PLACES[0], "traffic_price": 1e9}, PLACES[1]]
    path.write_text(yaml.safe_dump({"extends": "kind", "places": places}))
    assert submit(sunspot, str(path), "--dry-run") == 0, sunspot.err
    assert "place: east, the cheapest place (4.00 an hour)" in sunspot.err
    commit(sunspot.run, start(sunspot.run, "me"), 5)
    write_status(sunspot.run, Status(RunState.STOPPED, "me", attempt=1))
    assert submit(sunspot, str(path)) == 0, sunspot.err

    assert jobs(clusters) == {"east": 0, "west": 1}


def test_the_user_can_choose_the_place_of_a_run(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert submit(sunspot, profile, "--place", "west") == 0, sunspot.err

    assert jobs(clusters) == {"east": 0, "west": 1}
    assert "--context west" in sunspot.out


def test_a_place_whose_cluster_does_not_answer_is_ignored(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    clusters["east"].down()

    assert submit(sunspot, profile) == 0, sunspot.err
    assert jobs(clusters) == {"east": 0, "west": 1}
    assert "place east is ignored" in sunspot.err

    clusters["west"].down()
    assert submit(sunspot, profile) == 4
    assert "no cluster answers in any of the places (east, west)" in sunspot.err or "west" in sunspot.err


def test_a_run_that_has_just_been_submitted_stays_in_its_place(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert submit(sunspot, profile, "--place", "west") == 0, sunspot.err
    assert submit(sunspot, profile, "--json") == 0, sunspot.err

    assert jobs(clusters) == {"east": 0, "west": 1}
    assert sunspot.json["action"] == "attached"
    assert "place: west, the run is already there" in sunspot.err


def test_a_live_run_stays_in_its_place(clusters: dict[str, FakeCluster], sunspot: Command, profile: str) -> None:
    assert submit(sunspot, profile, "--place", "west") == 0, sunspot.err
    [job] = clusters["west"].jobs.values()
    owner = Owner.parse(settings_of(job)["SUNSPOT_JOB_ID"])._replace(namespace="sunspot")
    write_status(sunspot.run, Status(RunState.RUNNING, str(owner), world_size=2))
    fail_in(sunspot.run, "west")

    assert submit(sunspot, profile, "--json") == 0, sunspot.err
    assert sunspot.json["action"] == "attached"
    assert submit(sunspot, profile, "--place", "east") == 6
    assert "is training it, at step 0" in sunspot.err
    assert "in west (namespace sunspot)" in sunspot.err
    assert jobs(clusters) == {"east": 0, "west": 1}

    assert sunspot("status", "run", "--context", "west") == 0
    assert "west (namespace sunspot)" in sunspot.out
    assert sunspot("list") == 0
    assert "west (namespace sunspot)" in sunspot.out


def test_a_run_that_got_no_nodes_in_time_leaves_its_place(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert submit(sunspot, profile) == 0, sunspot.err
    record = newest_submission(sunspot.run)
    assert record
    sunspot.run.storage.delete(sunspot.run.key("submissions", f"0001-{record.job}.json"))
    record_submission(sunspot.run, SubmissionRecord(record.job, place="east", time=time.time() - NODES_WITHIN_S - 60))

    assert submit(sunspot, profile) == 0, sunspot.err
    assert jobs(clusters) == {"east": 0, "west": 1}
    assert newest_submission(sunspot.run).place == "west"  # type: ignore[union-attr]


def test_submit_names_the_job_that_it_cannot_remove_from_the_old_place(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert submit(sunspot, profile, "--place", "east") == 0, sunspot.err
    [job] = clusters["east"].jobs
    clusters["east"].down()

    assert submit(sunspot, profile, "--place", "west") == 0, sunspot.err
    assert f"delete the run's RayJob {job} in place east, because it takes the run over if it starts" in sunspot.err
    assert jobs(clusters) == {"east": 1, "west": 1}


def test_a_dry_run_does_not_remove_the_job_in_another_place(
    clusters: dict[str, FakeCluster], sunspot: Command, profile: str
) -> None:
    assert submit(sunspot, profile, "--place", "east") == 0, sunspot.err
    assert submit(sunspot, profile, "--place", "west", "--dry-run") == 0, sunspot.err

    assert jobs(clusters) == {"east": 1, "west": 0}


# ----------------------------------------------------------------------------------------------------------- sightings


def attempt(place: str, workers: int, ago_s: float, job: str = "run-1") -> Attempt:
    metadata = Metadata(settings={"SUNSPOT_NUM_WORKERS": "2..8"}, world_size=workers)
    owner = Owner(job, "1", "sunspot", "0", place)
    return Attempt(1, str(owner), None, 0, time=NOW - ago_s, metadata=metadata)


def find(
    attempts: list[Attempt], submissions: list[SubmissionRecord], status: Status | None
) -> list[tuple[str, float, float]]:
    """Return the place, age and share of nodes of each sighting."""
    found = find_sightings(attempts, submissions, status, NOW)
    return [(each.place, NOW - each.time, each.share) for each in found]


def test_an_attempt_is_evidence_that_its_place_had_nodes() -> None:
    assert find([attempt("east", 4, 50), attempt("west", 8, 20)], [], None) == [("east", 50, 0.5), ("west", 20, 1.0)]
    assert find([attempt("", 4, 50)], [], None) == []


def test_a_live_run_is_evidence_that_its_place_still_has_nodes() -> None:
    owner = str(Owner("run-1", "1", "sunspot", "0", "east"))
    alive = Status(RunState.RUNNING, owner, attempt=1, world_size=2, time=NOW - 5)

    assert find([attempt("east", 8, 500)], [], alive)[-1] == ("east", 5, 0.25)


def test_a_silent_run_is_evidence_that_its_place_has_lost_its_nodes() -> None:
    owner = str(Owner("run-1", "1", "sunspot", "0", "east"))
    silent = Status(RunState.RUNNING, owner, attempt=1, world_size=8, time=NOW - 500)

    assert find([attempt("east", 8, 900)], [], silent)[-1] == ("east", 0, 0.0)
    gone = replace(silent, time=NOW - NODES_WITHIN_S - 4000)
    assert find([attempt("east", 8, 9000)], [], gone)[-1] == ("east", 4000, 0.0), "its RayJob may have been deleted"


def test_a_submission_that_waited_too_long_is_evidence_that_its_place_had_no_nodes() -> None:
    def record(ago_s: float) -> SubmissionRecord:
        return SubmissionRecord("run-1", place="east", time=NOW - ago_s)

    assert find([], [record(NODES_WITHIN_S + 1)], None) == [("east", 0, 0.0)]
    assert find([], [record(NODES_WITHIN_S - 1)], None) == []
    assert find([attempt("east", 8, 100)], [record(NODES_WITHIN_S + 1)], None) == [("east", 100, 1.0)]
    later = SubmissionRecord("run-2", place="west", time=NOW - 300)
    assert find([], [record(NODES_WITHIN_S + 301), later], None) == [("east", 300, 0.0)]


def test_the_sightings_from_all_recent_runs_are_read(sunspot: Command) -> None:
    fail_in(sunspot.run, "east")

    assert [each.place for each in read_sightings(sunspot.run.storage, time.time())] == ["east"]
