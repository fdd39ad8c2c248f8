"""Tests of `sunspot scale`: what it asks of a run, the pods that it gives back, and what it refuses."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sunspot.elastic import supervisor, wanted_workers
from sunspot.elastic.wanted_workers import WantedWorkers
from sunspot.errors import StorageError
from sunspot.run import Run
from sunspot.run.requests import SCALE, ScaleRequest, StopRequest, narrowed, read_scale, request_scale
from sunspot.run.status import RunState
from sunspot.settings import WorkerRange
from sunspot.submitter.manifest.pods import set_variable
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.control import LocalControl, worker_group
from tests.harness.kubernetes import FakeCluster, answer, pod, rayjob
from tests.harness.runs import begin, set_status, start

JOB, CLUSTER = "run-1", "run-1-x"
PODS = ["worker-a", "worker-b", "worker-c", "worker-d"]
GIVEN = WorkerRange(1, 4)


def train(run: Run, owner: str = JOB, scalable: str = "1..4", hosts: tuple[str, ...] = tuple(PODS)) -> None:
    """Let a run start training with one worker on each host."""
    nodes = {str(rank): host for rank, host in enumerate(hosts)}
    settings = {"SUNSPOT_NUM_WORKERS": scalable or "2"}
    start(run, owner, world_size=len(hosts), nodes=nodes, settings=settings)
    set_status(run, RunState.RUNNING, owner=owner, scalable=scalable, world_size=len(hosts))


class ElasticCluster:
    """A RayCluster with four pods, which is changed by JSON patches."""

    def __init__(self, fake: FakeCluster) -> None:
        self.patches: list[list[dict[str, Any]]] = []
        self.changed = 0
        "Number of patches before which someone else changes the RayCluster."
        group = {"groupName": "workers", "replicas": 4, "minReplicas": 1, "maxReplicas": 4, "scaleStrategy": {}}
        group["resources"] = {"CPU": "1", "training-worker": "1"}
        self.document = {"metadata": {"resourceVersion": "7"}, "spec": {"workerGroupSpecs": [group]}}
        fake.documents[f"/apis/ray.io/v1/namespaces/sunspot/rayclusters/{CLUSTER}"] = self.document
        fake.put_job(rayjob(JOB))
        fake.set_status(JOB, "Running", "RUNNING", rayClusterName=CLUSTER)
        fake.pods = [pod("head", CLUSTER, head=True), *(pod(name, CLUSTER) for name in PODS)]
        fake.on("PATCH", "/rayclusters/", self.patch)
        self.on_request: Any = lambda: None

    def patch(self, handler: Any) -> None:
        """Apply the operations that are needed here, unless the request is a dry run."""
        operations = json.loads(handler.body)
        if self.changed:
            self.changed -= 1
            answer(422, "the test operation failed")(handler)
            return
        assert operations[0] == {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
        if handler.query.get("dryRun") != "All":
            self.patches.append(operations[1:])
            for operation in operations[1:]:
                name = operation["path"].removeprefix("/spec/workerGroupSpecs/0/")
                self.document["spec"]["workerGroupSpecs"][0][name] = operation["value"]
        self.on_request()
        handler.reply(200, self.document)

    @property
    def group(self) -> dict[str, Any]:
        return self.document["spec"]["workerGroupSpecs"][0]


@pytest.fixture
def ray(cluster: FakeCluster, run: Run, set_constants: SetConstants) -> ElasticCluster:
    set_constants("sunspot.submitter.cluster.scaling", POLL_EVERY_S=0.02)
    begin(run)
    return ElasticCluster(cluster)


def test_scale_releases_the_pods_of_workers_that_have_left(run: Run, sunspot: Command, ray: ElasticCluster) -> None:
    """Ray's autoscaler must not replace the pods, although Ray Train still reserves resources for their workers."""
    train(run)
    ray.on_request = lambda: ray.patches or train(run, hosts=("worker-c", "worker-a"))
    assert sunspot("scale", "run", "1..2", "--json") == 0, sunspot.err
    given_back = {"pods": ["worker-b", "worker-d"]}
    assert sunspot.json == {"run": "run", "workers": "1..2", "num_workers": "1..4", "training": 2, **given_back}
    request = read_scale(run)
    assert request
    assert (request.workers, request.num_workers) == ("1..2", "1..4")
    assert (ray.group["maxReplicas"], ray.group["replicas"]) == (2, 2)
    assert ray.group["scaleStrategy"] == {"workersToDelete": ["worker-b", "worker-d"]}


def test_a_run_can_be_scaled_while_its_next_place_is_warmed_up(
    cluster: FakeCluster, run: Run, sunspot: Command, ray: ElasticCluster
) -> None:
    train(run, hosts=("worker-a", "worker-c"))
    coming = rayjob("run-2", created=time.time() + 1)
    set_variable(coming, "SUNSPOT_MOVES_FROM", JOB)
    cluster.put_job(coming)
    assert sunspot("scale", "run", "1..2") == 0, sunspot.err
    assert ray.group["maxReplicas"] == 2


def test_requesting_the_full_range_of_workers_undoes_an_earlier_scale_request(
    run: Run, sunspot: Command, ray: ElasticCluster
) -> None:
    train(run, hosts=("worker-a", "worker-c"))
    request_scale(run, ScaleRequest("1..2", "1..4"))
    ray.group.update(maxReplicas=2, replicas=2)
    assert sunspot("scale", "run", "1..4") == 0, sunspot.err
    assert sunspot.out == (
        "run: 1..4 workers wanted, 2 training\n  more workers join as soon as there are nodes for them\n"
    )
    assert read_scale(run) is None
    assert ray.patches[0] == [{"op": "replace", "path": "/spec/workerGroupSpecs/0/maxReplicas", "value": 4}]
    assert ray.group["replicas"] == 2, "the autoscaler adds pods itself"


def test_scale_tries_again_if_the_ray_cluster_changes_at_the_same_time(
    run: Run, sunspot: Command, ray: ElasticCluster
) -> None:
    train(run, hosts=("worker-a",))
    ray.changed = 2
    assert sunspot("scale", "run", "1") == 0, sunspot.err
    assert ray.group["maxReplicas"] == 1
    ray.changed = 100
    assert sunspot("scale", "run", "1") == 4
    assert "kept changing, so 5 updates failed; try again" in sunspot.err


def test_scale_stores_no_request_if_the_user_is_not_allowed_to_release_pods(
    run: Run, sunspot: Command, ray: ElasticCluster, cluster: FakeCluster
) -> None:
    train(run)
    cluster.faults.clear()
    cluster.on("PATCH", "/rayclusters/", answer(403, 'rayclusters.ray.io is forbidden: User "me" cannot patch it'))
    assert sunspot("scale", "run", "2") == 4
    assert "ask for the Role sunspot-submitter" in sunspot.err
    assert read_scale(run) is None


def test_scale_gives_up_if_workers_do_not_leave_within_the_timeout(
    run: Run, sunspot: Command, ray: ElasticCluster
) -> None:
    train(run)
    assert sunspot("scale", "run", "2", "--timeout", "0.1") == 5
    assert "after 0 s, 4 workers are still training, but the requested number is 2; the surplus" in sunspot.err
    assert read_scale(run), "the request stays"
    assert not ray.patches


@pytest.mark.parametrize(
    ("scalable", "state", "wanted", "code", "said"),
    [
        ("", RunState.RUNNING, "1", 6, "its number of workers is fixed (SUNSPOT_NUM_WORKERS=2). `sunspot stop run"),
        ("1..4", RunState.RUNNING, "2..5", 6, "cannot have 2..5 workers, because SUNSPOT_NUM_WORKERS=1..4"),
        ("1..4", RunState.STOPPED, "2", 6, "run is stopped"),
        ("1..4", RunState.STARTING, "2", 6, "run is starting"),
        ("1..4", RunState.RUNNING, "4..2", 2, "4..2: must be a number of workers >= 1, or a range, such as 2..4"),
        ("1..4", RunState.RUNNING, "0", 2, "0: must be a number of workers >= 1, or a range"),
    ],
)
def test_scale_rejects_an_invalid_number_or_a_run_that_cannot_be_scaled(
    scalable: str, state: RunState, wanted: str, code: int, said: str, run: Run, sunspot: Command
) -> None:
    begin(run)
    train(run, "host-1-abc", scalable)
    set_status(run, state, owner="host-1-abc", scalable=scalable)
    assert sunspot("scale", "run", wanted) == code
    assert said in sunspot.err
    assert read_scale(run) is None


def test_scale_refuses_a_number_of_workers_that_would_split_a_replica(run: Run, sunspot: Command) -> None:
    begin(run)
    settings = {"SUNSPOT_NUM_WORKERS": "2..8", "SUNSPOT_PARALLEL": "hsdp", "SUNSPOT_SHARD_DEGREE": "2"}
    start(run, "host-1-abc", world_size=4, settings=settings)
    set_status(run, RunState.RUNNING, owner="host-1-abc", scalable="2..8", world_size=4)
    assert sunspot("scale", "run", "3..7") == 6
    assert "each replica of its model needs 2; use multiples of 2, such as 4..6" in sunspot.err
    assert read_scale(run) is None
    assert sunspot("scale", "run", "4..6") == 0, sunspot.err
    assert read_scale(run)


def test_scale_refuses_a_run_in_restart_mode(run: Run, sunspot: Command) -> None:
    begin(run)
    start(run, "host-1-abc", world_size=2, settings={"SUNSPOT_NUM_WORKERS": "1..4"})
    set_status(run, RunState.RUNNING, owner="host-1-abc", world_size=2)
    assert sunspot("scale", "run", "2") == 6
    assert "its workers cannot leave or join while others train" in sunspot.err


def test_scale_reports_that_an_unknown_run_is_not_found(sunspot: Command) -> None:
    assert sunspot("scale", "absent", "2") == 3


def test_status_compares_the_number_of_workers_with_the_scale_request(
    run: Run, sunspot: Command, ray: ElasticCluster, cluster: FakeCluster
) -> None:
    """No worker is reported as missing if as many workers train as the request allows."""
    job = cluster.jobs[JOB]
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"][0]["value"] = "1..4"
    train(run, hosts=("worker-a", "worker-b"))
    request_scale(run, ScaleRequest("1..2", "1..4"))
    assert sunspot("status", "run", "--json") == 0, sunspot.err
    assert (sunspot.json["workers_running"], sunspot.json["workers_wanted"]) == (2, "1..2")
    assert sunspot("status", "run") == 0, sunspot.err
    assert "2 workers training" in sunspot.out
    assert "of 1..2 workers" not in sunspot.out


# ------------------------------------------------------------------------------------------------ what the driver reads


@pytest.mark.parametrize(
    ("request_", "workers"),
    [
        (None, GIVEN),
        (ScaleRequest("2..3", "1..4"), WorkerRange(2, 3)),
        (ScaleRequest("2..3", "1..8"), GIVEN),
        (ScaleRequest("2..9", "1..4"), GIVEN),
        (ScaleRequest("many", "1..4"), GIVEN),
    ],
)
def test_only_a_valid_scale_request_for_the_current_range_of_workers_has_an_effect(
    request_: ScaleRequest | None, workers: WorkerRange
) -> None:
    assert narrowed(GIVEN, request_) == workers


def test_a_scale_request_never_splits_a_replica() -> None:
    given = WorkerRange(2, 8, multiple=2)
    assert narrowed(given, ScaleRequest("3..5", "2..8")) == WorkerRange(4, 4, multiple=2)
    assert narrowed(given, ScaleRequest("3", "2..8")) == WorkerRange(2, 2, multiple=2)


def test_the_last_known_scale_request_stays_in_force_while_storage_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = WantedWorkers(run, GIVEN)
    assert (wanted.range, wanted.narrowed) == (GIVEN, False)
    request_scale(run, ScaleRequest("1..2", "1..4", "me@laptop"))
    wanted.read()
    assert wanted.range == WorkerRange(1, 2)
    assert wanted.describe() == "because me@laptop asked for 1..2 (`sunspot scale`)"

    def fail(_: Run) -> None:
        raise StorageError("storage does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(wanted_workers, "read_scale", fail)
        with pytest.raises(StorageError):
            wanted.read()
    assert wanted.range == WorkerRange(1, 2)
    run.storage.write(run.key(SCALE), b"damaged")
    wanted.read()
    assert wanted.range == GIVEN
    assert wanted.describe() == "because SUNSPOT_NUM_WORKERS=1..4"


def test_the_driver_passes_on_each_change_of_the_scale_request_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    control = LocalControl()
    wanted = WantedWorkers(run, GIVEN)
    now = [0.0]
    membership = Mock(snapshot=lambda: SimpleNamespace(size=4), leave_sick_node=lambda *_: None)
    monitor = Mock(per_worker={"CPU": 1.0}, check=Mock(return_value=None), asked={})
    asked: list[int] = []
    monkeypatch.setattr(supervisor, "ask_for_nodes", lambda per_worker, workers: asked.append(workers))
    monkeypatch.setattr(supervisor, "draining_nodes", dict)
    context = SimpleNamespace(get_node_id=lambda: "head")
    nodes = [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": True}]
    monkeypatch.setattr(supervisor, "ray", SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: context))
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    watching = supervisor.Supervisor(control, StopRequest(), monitor, membership, wanted)
    control.channel.begin_group(worker_group(1, "a", "b"))

    def sizes_after(seconds: float) -> int:
        now[0] += seconds
        watching.tick()
        return int(monitor.check.call_args.args[0].world_size)

    assert sizes_after(0) == 4
    assert sizes_after(1) == 4
    request_scale(run, ScaleRequest("1..3", "1..4", "me@laptop"))
    wanted.read()
    assert sizes_after(1) == 4, "Ray replaces lost workers, so that a restart would gain nothing"
    assert sizes_after(supervisor.SHORT_S / 2) == 4
    assert sizes_after(supervisor.SHORT_S) == 2, "Ray does not replace them while it waits for others"
    assert asked == [4, 3]
    assert [call.args[0] for call in membership.limit.call_args_list] == [4, 3]
    assert control.heard("log") == ["workers wanted: 1..3, because me@laptop asked for 1..3 (`sunspot scale`)"]
    membership.snapshot = lambda: SimpleNamespace(size=2)
    sizes_after(supervisor.ASK_AGAIN_S / 2)
    sizes_after(supervisor.ASK_AGAIN_S / 2)
    sizes_after(1)
    sizes_after(supervisor.ASK_AGAIN_S)
    assert asked == [4, 3, 3, 3], "Ray has started only two workers, and replaces each request"
