"""Tests of what `sunspot delete` shows, removes and keeps, and what an interrupt leaves behind."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from sunspot.errors import SupersededError
from sunspot.run import Run, node_memory_directory, open_run
from sunspot.run.attempts import Attempt, claim, ensure_owner, read_attempts
from sunspot.run.objects import with_checksum
from sunspot.run.requests import DELETION, SubmissionRecord, deletion_begun, mark_deletion, record_submission
from sunspot.run.search import SearchResults, Trial, write_results
from sunspot.run.status import RunState, Status, write_status
from sunspot.storage.local import LocalStorage
from sunspot.submitter.cluster.deletion import deletion_order
from tests.harness import s3
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import FakeCluster, answer, pod, rayjob
from tests.harness.runs import begin, commit, consumed, record_audit, report, start
from tests.harness.s3 import FaultProxy

JOB, CLUSTER = "run-1", "run-1-x"


def fill(run: Run, state: RunState = RunState.SUCCEEDED) -> Attempt:
    """Write every kind of object that a run can have."""
    attempt = start(begin(run), JOB)
    commit(run, attempt, 5)
    commit(run, attempt, 10)
    report(run, attempt, {"step": 5, "attempt": 1, "loss": 1.0})
    record_audit(run, attempt, consumed(1, 5))
    record_submission(run, SubmissionRecord(JOB))
    run.storage.write(run.key("logs", "driver-1", "000000.log"), b"hello")
    write_status(run, Status(state, JOB, "at step 10", step=10, attempt=1))
    return attempt


def files_of(run: Run) -> set[str]:
    return {entry.key for entry in run.storage.list(run.name)}


def end_job(cluster: FakeCluster, **spec: Any) -> None:
    cluster.put_job(rayjob(JOB, **spec))
    cluster.set_status(JOB, "Complete", "SUCCEEDED", rayClusterName=CLUSTER)
    cluster.pods = [pod(f"{CLUSTER}-head", CLUSTER, head=True), pod(f"{CLUSTER}-worker-1", CLUSTER)]


@pytest.fixture
def bucket_run(s3_bucket: str) -> Run:
    return open_run(f"s3://{s3_bucket}/runs", "run")


@pytest.fixture
def in_bucket(bucket_run: Run, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(bucket_run, capsys)


# ---------------------------------------------------------------------------------------------------- what it asks for


def test_deleting_without_confirmation_removes_nothing_and_exits_with_code_2(
    sunspot: Command, run: Run, cluster: FakeCluster
) -> None:
    fill(run)
    end_job(cluster)
    before = files_of(run)
    assert sunspot("delete", "run") == 2
    assert "RayJob" in sunspot.out
    assert f"{CLUSTER}-worker-1" in sunspot.out
    assert f"in namespace sunspot of http://127.0.0.1:{cluster.port}, and in {run.location}" in sunspot.out
    lines = {line.split()[0]: line for line in sunspot.out.splitlines()}
    assert "2, in 6 files" in lines["checkpoints"]
    assert set(lines) >= {"attempts", "audit", "logs", "metrics", "records", "submissions"}
    contents = f"1 RayJob with 2 pods; {len(before)} files, "
    told = f"error: nothing was removed, because there is no terminal to ask at; add --yes to remove {contents}"
    assert told in sunspot.err
    assert sunspot("delete", "run", "--json") == 2
    assert "nothing was removed, because --json never asks" in sunspot.err
    assert (sunspot.json["removed"], sunspot.json["files"]) == (False, len(before))
    assert sunspot.json["bytes"] == sum(entry.size for entry in run.storage.list("run"))
    assert sunspot.json["left"]["files"] == len(before)
    assert files_of(run) == before
    assert JOB in cluster.jobs


@pytest.mark.parametrize(("typed", "removed"), [("y", True), ("run", True), ("n", False), ("", False), ("ru", False)])
def test_delete_asks_for_confirmation_in_a_terminal(
    sunspot: Command, run: Run, monkeypatch: pytest.MonkeyPatch, typed: str, removed: bool
) -> None:
    fill(run)
    terminal = io.StringIO(typed + "\n" if typed else "")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert sunspot("delete", "run") == 0
    assert "y or run: " in sunspot.err
    assert bool(files_of(run)) is not removed
    assert ("nothing was removed" in sunspot.out) is not removed


def test_an_unknown_run_cannot_be_deleted(sunspot: Command, run: Run, cluster: FakeCluster) -> None:
    assert sunspot("delete", "run", "--yes") == 3
    assert "no run run in" in sunspot.err
    run.storage.write("run/train/part.parquet", b"a dataset")
    assert sunspot("delete", "run", "--yes") == 3, "a folder without a run belongs to somebody else"
    assert files_of(run)


# ----------------------------------------------------------------------------------------------------- what it removes


def test_delete_removes_the_whole_run_and_nothing_else(
    in_bucket: Command, bucket_run: Run, cluster: FakeCluster
) -> None:
    run = bucket_run
    fill(run)
    end_job(cluster)
    others = [open_run(run.storage.locate("").rstrip("/"), name) for name in ("ru", "run-2", "runs", "r")]
    for other in others:
        fill(other)
    cluster.put_job(rayjob("run-2-1", run="run-2"))
    kept = {other.name: files_of(other) for other in others}
    client, bucket = s3.plain_client(), run.storage.bucket
    client.put_object(Bucket=bucket, Key="runs/run/", Body=b"")  # as bucket browsers create a folder
    client.put_object(Bucket=bucket, Key="runs/run/checkpoints/", Body=b"")
    for key in ("runs/run/checkpoints/x/model.pt", "runs/run-2/checkpoints/x/model.pt"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    wanted = len(files_of(run))

    assert in_bucket("delete", "run", "--yes", "--json") == 0
    assert in_bucket.json["removed"] is True
    assert in_bucket.json["files"] == wanted
    assert in_bucket.json["left"] is None
    assert {(o["kind"], o["name"]) for o in in_bucket.json["objects"]} == {
        ("RayJob", JOB),
        ("RayCluster", CLUSTER),
        ("Pod", f"{CLUSTER}-head"),
        ("Pod", f"{CLUSTER}-worker-1"),
    }
    kinds = {kind["kind"]: kind for kind in in_bucket.json["kinds"]}
    assert kinds["checkpoints"]["checkpoints"] == 2
    assert kinds["unfinished uploads"]["files"] == 1
    listed = client.list_objects_v2(Bucket=bucket, Prefix="runs/run/")
    assert listed["KeyCount"] == 0, [item["Key"] for item in listed.get("Contents", ())]
    assert s3.leftover_uploads(bucket) == ["runs/run-2/checkpoints/x/model.pt"]
    assert {other.name: files_of(other) for other in others} == kept
    assert set(cluster.jobs) == {"run-2-1"}
    assert not cluster.pods
    assert in_bucket("delete", "run", "--yes") == 3


def test_a_deleted_local_run_leaves_no_folder(sunspot: Command, run: Run) -> None:
    fill(run)
    fill(open_run(run.storage.locate(""), "run-2"))
    assert isinstance(run.storage, LocalStorage)
    root = run.storage.root
    (root / "run" / "checkpoints" / "empty").mkdir()
    (root / "run" / f".run.json.{'0' * 32}.tmp").write_text("killed while writing")
    copy = node_memory_directory(run.location) / "0" / "slot-0.data"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"x" * 1000)
    assert sunspot("delete", "run", "--yes") == 0
    assert "cluster" not in sunspot.err, "no cluster was asked"
    assert os.listdir(root) == ["run-2"]
    assert not node_memory_directory(run.location).exists(), "the next run of this name would resume from it"
    assert "copies in this machine's memory" in sunspot.out


def test_a_dataset_in_the_folder_of_a_run_is_kept(sunspot: Command, run: Run, tmp_path: Path) -> None:
    def settle(dataset: str) -> None:
        fill(run)
        record = json.loads(run.storage.read(run.key("run.json")))
        record["settings"]["SUNSPOT_DATASET"] = dataset
        del record["sha256"]
        run.storage.write(run.key("run.json"), with_checksum(record))

    data = tmp_path / "digits"
    data.mkdir()
    settle(str(data))
    assert sunspot("delete", "run", "--yes") == 0
    assert f"the dataset {data} is not touched" in sunspot.out
    assert data.is_dir()
    settle(f"{run.location}/data")
    run.storage.write(run.key("data", "part.parquet"), b"rows")
    assert sunspot("delete", "run", "--yes") == 0
    assert f"the dataset {run.location}/data is not touched" in sunspot.out
    assert f"left in {run.location}, because they do not belong to the run: data: 1 file" in sunspot.err
    assert files_of(run) == {"run/data/part.parquet"}
    settle("sample")
    assert sunspot("delete", "run", "--yes") == 0
    assert "the dataset" not in sunspot.out


def test_deleting_a_search_keeps_and_lists_its_trials(sunspot: Command, run: Run) -> None:
    fill(run)
    trials = [Run(run.storage, f"run-0{number}") for number in (1, 2)]
    for trial in trials:
        fill(trial)
    ended = tuple(Trial(trial.name, {}, RunState.SUCCEEDED) for trial in trials)
    write_results(run, SearchResults("loss", "min", {}, ended))
    assert sunspot("delete", "run", "--yes") == 0
    assert "its 2 trials, run-01 to run-02, are separate runs and stay" in sunspot.out
    assert not files_of(run)
    assert all(map(files_of, trials))


def test_the_rayjob_of_a_run_with_the_same_name_in_another_bucket_is_kept(
    sunspot: Command, run: Run, cluster: FakeCluster
) -> None:
    fill(run)
    job = rayjob(JOB)
    environment = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    environment.append({"name": "SUNSPOT_STORAGE_PATH", "value": "s3://elsewhere/runs"})
    cluster.put_job(job)
    cluster.set_status(JOB, "Running", "RUNNING", rayClusterName=CLUSTER)
    assert sunspot("delete", "run", "--yes", "--json") == 0
    assert sunspot.json["objects"] == []
    assert JOB in cluster.jobs
    assert not files_of(run)


def test_delete_keeps_a_cluster_that_the_run_shares_with_other_jobs(
    sunspot: Command, run: Run, cluster: FakeCluster
) -> None:
    fill(run)
    cluster.put_job(rayjob(JOB, clusterSelector={"ray.io/cluster": "shared"}))
    cluster.set_status(JOB, "Complete", "SUCCEEDED", rayClusterName="shared")
    cluster.pods = [pod("shared-head", "shared", head=True)]
    assert sunspot("delete", "run", "--yes", "--json") == 0
    assert [o["name"] for o in sunspot.json["objects"]] == [JOB]
    assert cluster.pods


def test_delete_warns_if_gitops_could_recreate_the_rayjob(sunspot: Command, run: Run, cluster: FakeCluster) -> None:
    fill(run)
    end_job(cluster)
    assert sunspot("delete", "run") == 2
    assert "GitOps" not in sunspot.err
    cluster.put_job(rayjob("run-2"))
    cluster.set_status("run-2", "Complete", "SUCCEEDED")
    assert sunspot("delete", "run", "--yes") == 0
    assert "`sunspot submit` did not create the RayJob run-2; if it is defined in a GitOps repository" in sunspot.err


def test_delete_warns_if_the_bucket_keeps_old_versions(in_bucket: Command, bucket_run: Run) -> None:
    fill(bucket_run)
    bucket = bucket_run.storage.bucket
    s3.plain_client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    assert in_bucket("delete", "run", "--yes") == 0
    assert "the bucket keeps versions" in in_bucket.err
    assert not files_of(bucket_run)


def test_objects_are_deleted_one_by_one_if_the_server_rejects_batches(
    s3_proxy: FaultProxy, bucket_run: Run, in_bucket: Command
) -> None:
    fill(bucket_run)
    assert in_bucket("delete", "run", "--yes") == 0
    posts = [request for request in s3_proxy.requests if "delete" in request.query]
    assert len(posts) == 2, "manifests, the rest"
    one_by_one = [request for request in s3_proxy.requests if request.method == "DELETE"]
    assert all(request.headers["if-match"] for request in one_by_one), "names that the next run reuses"
    tops = {request.path.split("/")[4] for request in one_by_one}
    assert tops == {"attempts", "delete.json", "run.json", "status", "submissions"}
    fill(bucket_run)
    s3_proxy.on(lambda request: "delete" in request.query, s3.answer(400, "MissingContentMD5"))
    s3_proxy.on(
        lambda request: request.method == "DELETE" and "if-match" in request.headers, s3.answer(501, "NotImplemented")
    )
    assert in_bucket("delete", "run", "--yes") == 0
    assert not files_of(bucket_run)


# ------------------------------------------------------------------------------------------------------ rejected runs


@pytest.mark.parametrize("deployment", ["", "Initializing", "Running", "Suspended"])
def test_delete_refuses_a_live_run(sunspot: Command, run: Run, cluster: FakeCluster, deployment: str) -> None:
    fill(run, RunState.RUNNING)
    cluster.put_job(rayjob(JOB))
    cluster.set_status(JOB, deployment, "RUNNING" if deployment == "Running" else "")
    before = files_of(run)
    assert sunspot("delete", "run", "--yes") == 6
    assert "run is still live (" in sunspot.err
    assert "so nothing was removed" in sunspot.err
    assert "`sunspot stop run --storage" in sunspot.err
    assert files_of(run) == before
    assert JOB in cluster.jobs


def test_a_run_that_is_training_without_a_cluster_is_not_deleted(sunspot: Command, run: Run) -> None:
    attempt = start(begin(run), JOB)
    write_status(run, Status(RunState.RUNNING, JOB, attempt=1))
    assert sunspot("delete", "run", "--yes") == 6
    assert "run is still live" in sunspot.err
    assert read_attempts(run) == [attempt]


def test_a_run_is_not_deleted_while_an_older_rayjob_is_live(sunspot: Command, run: Run, cluster: FakeCluster) -> None:
    fill(run)
    end_job(cluster)
    cluster.put_job(rayjob("run-0", created=time.time() - 1000))
    cluster.set_status("run-0", "Running", "RUNNING")
    assert sunspot("delete", "run", "--yes") == 6
    assert set(cluster.jobs) == {"run-0", JOB}


def test_a_run_is_not_deleted_while_its_cluster_is_unreachable(
    sunspot: Command, run: Run, cluster: FakeCluster
) -> None:
    fill(run)
    before = files_of(run)
    cluster.down()
    assert sunspot("delete", "run", "--yes") == 4
    assert "The run may therefore still be training" in sunspot.err
    assert files_of(run) == before


def test_a_folder_without_a_run_is_not_deleted_even_if_a_rayjob_has_its_name(
    sunspot: Command, run: Run, cluster: FakeCluster
) -> None:
    end_job(cluster)
    names = ("taxes", "photos/2026.jpg", "logs/app.log", "code/main.py", "checkpoints/model.pt", "attempts/one.json")
    for name in names:
        run.storage.write(run.key(name), b"a user's")
    assert sunspot("delete", "run", "--yes") == 6
    assert f"{run.location} contains 6 files, but none that identifies a run" in sunspot.err
    assert f"`kubectl delete rayjob {JOB}` removes the RayJobs from the cluster" in sunspot.err
    assert files_of(run) == {run.key(name) for name in names}
    assert JOB in cluster.jobs


def test_foreign_files_are_kept_and_reported(sunspot: Command, run: Run, tmp_path: Path) -> None:
    fill(run)
    for name in ("notes.txt", "photos/a/b.jpg", "photos/c.jpg", "run.json.bak", "tax/2026", "zoo"):
        run.storage.write(run.key(name), b"a user's")
    folder = Path(run.location)
    (folder / "photos" / "empty").mkdir()
    (folder / "photos" / "link").symlink_to(tmp_path)
    kept = {key for key in files_of(run) if key.split("/")[1] in ("notes.txt", "photos", "run.json.bak", "tax", "zoo")}
    assert sunspot("delete", "run") == 2
    assert (
        "not touched, because they do not belong to the run: notes.txt, photos, run.json.bak and 2 more: 6 files"
        in sunspot.out
    )
    assert sunspot("delete", "run", "--yes") == 0
    names = "notes.txt, photos, run.json.bak and 2 more: 6 files"
    assert f"left in {run.location}, because they do not belong to the run: {names}" in sunspot.err
    assert files_of(run) == kept
    assert {path.name for path in folder.iterdir()} == {"notes.txt", "photos", "run.json.bak", "tax", "zoo"}
    assert (folder / "photos" / "link").is_symlink()
    assert (folder / "photos" / "empty").is_dir()
    assert sunspot("delete", "run", "--yes") == 3
    assert files_of(run) == kept


@pytest.mark.parametrize(
    "left",
    [
        ("logs/driver-20261121T141013679Z/000000000000000.log",),
        ("failures/driver-20261121T141013679Z.json",),
        ("attempts/0001.json", "checkpoints/x/model.pt"),
        ("checkpoints/step-00000005-attempt-0001-9f3c21ab/model.pt",),
        ("status/attempt-0001-9f3c21ab.json", "metrics/x"),
        ("submissions/0001-run-1.json",),
        ("delete.json", "metrics/x"),
        ("run.json",),
    ],
    ids=str,
)
def test_a_damaged_run_can_be_deleted(sunspot: Command, run: Run, cluster: FakeCluster, left: tuple[str, ...]) -> None:
    end_job(cluster)
    for name in left:
        run.storage.write(run.key(name), b"{}")
    assert sunspot("delete", "run", "--yes") == 0, sunspot.err
    assert not files_of(run)
    assert not Path(run.location).exists()
    assert not cluster.jobs


# ------------------------------------------------------------------------------------------------------ interruptions


def test_delete_removes_attempts_and_manifests_first_and_the_records_of_the_run_last(run: Run) -> None:
    fill(run)
    groups = deletion_order(run, sorted(files_of(run)))
    tops = [{key.split("/")[1] for key in group} for group in groups]
    assert tops[0] == {"attempts"}
    assert {key.rpartition("/")[2] for key in groups[1]} == {"manifest.json"}
    assert tops[3] == {"run.json", "status", "submissions"}
    assert {key for group in groups for key in group} == files_of(run)


def test_a_failed_deletion_lists_what_remains_and_can_be_repeated(
    s3_proxy: FaultProxy, bucket_run: Run, in_bucket: Command, cluster: FakeCluster
) -> None:
    fill(bucket_run)
    end_job(cluster)
    model = "/checkpoints/step-00000005-attempt-0001/model.pt"
    s3_proxy.on(
        lambda request: "delete" in request.query and model.encode() in request.body, s3.answer(403, "AccessDenied")
    )
    s3_proxy.on(lambda r: r.method == "DELETE" and model in r.path, s3.answer(403, "AccessDenied"))
    assert in_bucket("delete", "run", "--yes", "--json") == 4
    assert "cannot delete" in in_bucket.err
    assert "run was only partly deleted. Remaining: " in in_bucket.err
    assert "`sunspot delete run --storage" in in_bucket.err
    assert in_bucket.json["removed"] is False
    assert in_bucket.json["left"]["files"] == len(files_of(bucket_run)) > 0
    assert in_bucket.json["left"]["objects"] == []
    assert not any(key.endswith("manifest.json") for key in files_of(bucket_run))
    assert bucket_run.key("run.json") in files_of(bucket_run)

    assert in_bucket("status", "run", "--json") == 0
    assert in_bucket.json["state"] == "deleting"
    assert "`sunspot delete` completes it" in in_bucket.json["reason"]
    assert in_bucket("list", "--json") == 0
    assert [row["state"] for row in in_bucket.json] == ["deleting"]
    assert in_bucket("wait", "run") == 6
    assert in_bucket("stop", "run") == 6
    assert in_bucket("resume", "run") == 6
    assert in_bucket("submit", "--run", "run", "--image", "sunspot:1") == 6
    assert "run is deleting" in in_bucket.err
    assert not cluster.jobs

    s3_proxy.clear()
    assert in_bucket("delete", "run", "--yes") == 0
    assert not files_of(bucket_run)
    assert in_bucket("list", "--json") == 0
    assert in_bucket.json == []


def test_a_run_with_only_the_deletion_marker_left_can_be_deleted(sunspot: Command, run: Run) -> None:
    mark_deletion(run, "me")
    assert sunspot("list", "--json") == 0
    assert [row["state"] for row in sunspot.json] == ["deleting"]
    assert sunspot("delete", "run", "--yes") == 0
    assert not files_of(run)


def test_nothing_is_removed_from_storage_while_pods_exist(
    sunspot: Command, run: Run, cluster: FakeCluster, set_constants: SetConstants
) -> None:
    set_constants("sunspot.submitter.cluster.deletion", GONE_WITHIN_S=0.1)
    fill(run)
    end_job(cluster)
    stuck = pod("stuck", CLUSTER)
    cluster.pods.append(stuck)
    before = files_of(run)
    assert sunspot("delete", "run", "--yes") == 5
    assert "nothing was removed from storage" in sunspot.err
    assert files_of(run) == before | {run.key(DELETION)}


def test_nothing_is_removed_from_storage_if_the_rayjob_cannot_be_deleted(
    sunspot: Command, run: Run, cluster: FakeCluster
) -> None:
    fill(run)
    end_job(cluster)
    cluster.on("DELETE", "rayjobs", answer(403, 'User "me" cannot delete rayjobs'))
    before = files_of(run)
    assert sunspot("delete", "run", "--yes") == 4
    assert 'User "me" cannot delete rayjobs' in sunspot.err
    assert "only partly deleted. Remaining: 1 RayJob with 2 pods" in sunspot.err
    assert files_of(run) == before | {run.key(DELETION)}


def test_a_process_cannot_commit_to_a_deleted_run(run: Run) -> None:
    attempt = fill(run)
    ensure_owner(run, attempt)
    mark_deletion(run, "me")
    with pytest.raises(SupersededError, match="is being deleted"):
        claim(run, [attempt], Attempt(2, JOB, None, 0))
    for key in files_of(run):
        run.storage.delete(key)
    assert not deletion_begun(run)
    with pytest.raises(SupersededError, match="was deleted while attempt 1 trained"):
        ensure_owner(run, attempt)


def test_objects_written_during_the_deletion_are_deleted_or_reported(
    sunspot: Command, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(run)
    late = iter(range(1))
    delete_many = LocalStorage.delete_many

    def with_straggler(self: LocalStorage, keys: list[str]) -> None:
        delete_many(self, keys)
        if any("/logs/" in key for key in keys):
            for number in late:
                self.write(run.key("logs", "rank", f"{number}.log"), b"late")

    monkeypatch.setattr(LocalStorage, "delete_many", with_straggler)
    assert sunspot("delete", "run", "--yes") == 0
    assert not files_of(run)

    fill(run)
    late = iter(range(1))

    def always(self: LocalStorage, keys: list[str]) -> None:
        delete_many(self, keys)
        self.write(run.key("logs", "rank", "0.log"), b"late")

    monkeypatch.setattr(LocalStorage, "delete_many", always)
    assert sunspot("delete", "run", "--yes") == 6
    assert "objects keep appearing (logs/rank/0.log)" in sunspot.err
    assert sunspot("status", "run", "--json") == 0
    assert sunspot.json["state"] == "deleting"


def test_an_interrupted_deletion_is_reported(sunspot: Command, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(run)

    def interrupt(self: LocalStorage, keys: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "delete_many", interrupt)
    assert sunspot("delete", "run", "--yes") == 130
    assert "run was only partly deleted. Remaining: " in sunspot.err


def test_the_name_of_a_deleted_run_can_be_used_again(sunspot: Command, run: Run) -> None:
    fill(run)
    assert sunspot("delete", "run", "--yes") == 0
    attempt = start(begin(run), "another")
    assert attempt.number == 1
    ensure_owner(run, attempt)


# ---------------------------------------------------------------------------------------------------------------- links


def test_a_run_that_is_a_symbolic_link_is_not_deleted(
    sunspot: Command, run: Run, tmp_path: Path, cluster: FakeCluster
) -> None:
    fill(run)
    before = files_of(run)
    folder, place = Path(run.location), tmp_path / "elsewhere" / "run"
    place.parent.mkdir()
    folder.rename(place)
    folder.symlink_to(place)
    assert sunspot("delete", "run", "--yes") == 6
    assert f"{folder} is a symbolic link to {place}, so nothing was removed" in sunspot.err
    assert files_of(open_run(str(place.parent), "run")) == before
    assert sunspot("status", "run") == 4
    assert (
        f"{folder}/status resolves through a symbolic link to {place}/status, which is outside the storage path"
        in sunspot.err
    )


def test_links_in_a_run_are_deleted_but_their_targets_are_kept(
    sunspot: Command, run: Run, tmp_path: Path, cluster: FakeCluster
) -> None:
    fill(run)
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("a user's")
    folder = Path(run.location)
    (folder / "checkpoints" / "step-00000020-attempt-0001").symlink_to(other)
    (folder / "audit" / "link").symlink_to(other / "file")
    (folder / "broken").symlink_to(tmp_path / "nothing")
    (folder / "logs" / "empty").mkdir()
    os.mkfifo(folder / "logs" / "fifo")
    assert sunspot("delete", "run", "--yes") == 0
    assert not folder.exists()
    assert (other / "file").read_text() == "a user's"
