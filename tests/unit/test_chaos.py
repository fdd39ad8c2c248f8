"""Tests of `sunspot chaos`: the pods that it deletes, its waiting, and its output."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from sunspot.run import Run
from sunspot.run.attempts import Attempt, read_attempts
from sunspot.run.incidents import Cause
from sunspot.run.status import RunState
from sunspot.submitter.cluster.faults import KILL_GRACE_S, FaultInjector, FaultKind, make_plan
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import CORE, FakeCluster, answer, hang_up, pod, rayjob
from tests.harness.runs import begin, commit, consumed, damage, record_audit, set_status, start, write_receipt

JOB, CLUSTER = "run-1", "run-1-x"
HEAD, WORKERS = "run-1-x-head", ["run-1-x-worker-1", "run-1-x-worker-2", "run-1-x-worker-3"]


class Training:
    """A run that writes to storage like a real one. Each lost pod costs a restart from memory."""

    def __init__(self, cluster: FakeCluster, run: Run) -> None:
        self.cluster, self.run = cluster, run
        self.recovers, self.commits = True, True
        self.replaced = True
        self._lost = False
        self.then: Callable[[], Any] = lambda: None
        "Called after a restart."
        begin(run)
        cluster.put_job(rayjob(JOB))
        cluster.set_status(JOB, "Running", "RUNNING", rayClusterName=CLUSTER)
        cluster.pods = [pod(HEAD, CLUSTER, head=True), *(pod(name, CLUSTER) for name in WORKERS)]
        self.attempt = self._train(start(run, JOB, tier="beginning", world_size=3), 0, Cause.BEGIN)
        cluster.on_delete = self.lose

    def lose(self, name: str) -> None:
        """Lose a pod, which is replaced immediately."""
        if self.replaced:
            self.cluster.pods.append(pod(f"{name}-new", CLUSTER, head=name.startswith(HEAD)))
        if self.recovers:
            self._lost = True

    def go_on(self) -> None:
        """Recover from a loss. This happens after the fault was compared with the attempt before the loss."""
        if self._lost:
            self._lost, before = False, self.attempt
            name = f"step-{before.number:08d}-attempt-{before.number:04d}"
            attempt = start(self.run, JOB, name, tier="memory", world_size=3)
            self.attempt = self._train(attempt, before.number, Cause.NODE_LOST)
            self.then()

    def _train(self, attempt: Attempt, since: int, cause: Cause) -> Attempt:
        """Take one step, and commit a checkpoint."""
        step = attempt.number
        write_receipt(self.run, attempt, since, cause, noticed=attempt.time - 4.1)
        record_audit(self.run, attempt, consumed(step, step))
        if self.commits:
            commit(self.run, attempt, step)
        set_status(self.run, RunState.RUNNING, owner=JOB, step=step, attempt=step)
        return attempt

    def end(self) -> None:
        """End the run successfully."""
        set_status(self.run, RunState.SUCCEEDED, owner=JOB, step=self.attempt.number)
        self.cluster.set_status(JOB, "Complete", "SUCCEEDED")


@pytest.fixture
def training(cluster: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants) -> Training:
    set_constants("sunspot.submitter.cluster.faults", POLL_EVERY_S=0.02)
    training, say = Training(cluster, run), FaultInjector.say

    def go_on_when_told(injector: FaultInjector, record: dict[str, Any], text: str) -> None:
        say(injector, record, text)
        if record["event"] == "fault":
            training.go_on()

    monkeypatch.setattr(FaultInjector, "say", go_on_when_told)
    return training


# ------------------------------------------------------------------------------------------------------------- the plan


def test_the_seed_determines_the_order_of_the_faults() -> None:
    plans = [make_plan(["reclaim,kill", "head"], 60, 9, seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1]
    assert plans[0].kinds != plans[2].kinds
    for plan in plans:
        assert Counter(plan.kinds) == {kind: 3 for kind in FaultKind}
    assert len({make_plan(["kill"], 60, 1, None).seed for _ in range(5)}) > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "kill"], "this would kill 1 training worker of the run run in sunspot, but nothing was done"),
        (
            ["--kind", "reclaim,head", "--count", "3", "--every", "2m"],
            "this would reclaim 2 training workers and kill 1 head, 120 s apart, of the run run in sunspot, but "
            "nothing was done; add --yes to do it",
        ),
        (["--kind", "kil", "--yes"], "--kind kil is unknown; choose from reclaim, kill, head"),
        ([], "the following arguments are required: --kind"),
        (["--kind", "kill", "--every", "0"], "--every: 0: must be a time > 0, such as 90, 90s or 2m"),
        (["--kind", "kill", "--every", "soon"], "soon: must be a time > 0"),
        (["--kind", "kill", "--count", "0"], "0: must be an integer >= 1"),
    ],
)
def test_chaos_deletes_pods_only_with_confirmation_and_valid_arguments(
    cluster: FakeCluster,
    sunspot: Command,
    training: Training,
    words: list[str],
    said: str,
) -> None:
    assert sunspot("chaos", "run", *words) == 2
    assert said in sunspot.err
    assert cluster.deleted == []


# ----------------------------------------------------------------------------------------------------------- the faults


@pytest.mark.parametrize(
    ("kind", "victims", "grace_s"),
    [("reclaim", WORKERS, None), ("kill", WORKERS, KILL_GRACE_S), ("head", [HEAD], KILL_GRACE_S)],
)
def test_each_kind_of_fault_hits_exactly_one_suitable_pod(
    cluster: FakeCluster,
    sunspot: Command,
    training: Training,
    kind: str,
    victims: list[str],
    grace_s: int | None,
) -> None:
    cluster.put_job(rayjob("run-0", created=time.time() - 100))
    cluster.set_status("run-0", "Running", "RUNNING", rayClusterName="run-0-x")
    cluster.put_job(rayjob("other-1", run="other"))
    cluster.set_status("other-1", "Running", "RUNNING", rayClusterName="other-1-x")
    data = pod("run-1-x-data", CLUSTER)
    data["metadata"]["labels"]["ray.io/group"] = "data"
    going = pod("run-1-x-going", CLUSTER)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    strangers = [
        pod(f"{name}-{what}", name, head=what == "head") for name in ("run-0-x", "other-1-x") for what in ("head", "w")
    ]
    cluster.pods += [data, going, pod("run-1-x-pending", CLUSTER, phase="Pending"), *strangers]

    assert sunspot("chaos", "run", "--kind", kind, "--yes") == 0, sunspot.err
    [(name, grace)] = cluster.deleted
    assert name in victims
    assert grace == grace_s


def test_the_json_output_of_chaos_contains_each_fault_with_its_receipt_and_the_audit(
    cluster: FakeCluster,
    sunspot: Command,
    training: Training,
) -> None:
    words = ["--kind", "reclaim,kill,head", "--every", "1s", "--count", "4", "--seed", "7", "--yes"]
    assert sunspot("chaos", "run", *words, "--json") == 0, sunspot.err
    lines = sunspot.lines
    kinds = list(make_plan(["reclaim,kill,head"], 1, 4, 7).kinds)
    assert lines[0] == {"time": lines[0]["time"], "event": "begin", "seed": 7, "kinds": kinds}
    faults = [line for line in lines if line["event"] == "fault"]
    assert [(fault["fault"], fault["kind"]) for fault in faults] == list(enumerate(kinds, 1))
    assert [(fault["pod"], fault["node"]) for fault in faults] == [
        (name, f"node-of-{name}") for name, _ in cluster.deleted
    ]
    assert [fault["step"] for fault in faults] == [1, 2, 3, 4]
    assert all(after["time"] - before["time"] >= 1 for before, after in pairwise(faults))
    recovered = [line for line in lines if line["event"] == "recovered"]
    assert [(line["faults"], line["attempt"], line["cause"]) for line in recovered] == [
        ([number], number + 1, "node lost") for number in (1, 2, 3, 4)
    ]
    assert [(round(line["recovery_s"], 1), line["replayed"]) for line in recovered] == [(9.1, 0)] * 4
    assert lines[-1] == {
        "time": lines[-1]["time"],
        "event": "audit",
        "epochs": [{"epoch": 1, "rows": 22, "missing": 0, "repeated": 0}],
        "faults": [],
    }


def test_the_text_output_of_chaos_contains_each_fault_with_its_receipt_and_the_audit(
    cluster: FakeCluster, sunspot: Command, training: Training
) -> None:
    assert sunspot("chaos", "run", "--kind", "kill", "--seed", "1", "--yes") == 0
    seed, fault, recovered, heads, row = sunspot.out.splitlines()
    [(name, _)] = cluster.deleted
    assert seed.endswith("  seed 1: kill")
    assert fault.endswith(f"  fault 1: kill, {name} on node-of-{name}, at step 1")
    assert "  recovered from fault 1: node lost: first step 9.1 s after the loss, 0 steps replayed, " in recovered
    assert heads.split() == ["epoch", "rows", "missing", "repeated"]
    assert row.split() == ["1", "10", "unfinished", "0"]


def test_a_retried_deletion_spares_the_replacement_pod(
    cluster: FakeCluster, sunspot: Command, training: Training
) -> None:
    """The response to the first attempt is lost. By the second attempt, a new pod has the same name."""

    def replace(name: str) -> None:
        successor = pod(name, CLUSTER, head=True)
        successor["metadata"]["uid"] = "another"
        cluster.pods.append(successor)
        training.replaced = False
        training.lose(name)

    cluster.on_delete = replace
    cluster.on("DELETE", "pods/", hang_up, times=1)
    assert sunspot("chaos", "run", "--kind", "head", "--yes") == 0, sunspot.err
    assert cluster.deleted == [(HEAD, KILL_GRACE_S)]
    assert sum(method == "DELETE" for method, _ in cluster.requests) == 2


def test_one_receipt_can_belong_to_several_faults(
    cluster: FakeCluster,
    sunspot: Command,
    training: Training,
) -> None:
    def lose(name: str) -> None:
        training.recovers = len(cluster.deleted) == 2
        training.lose(name)

    cluster.on_delete = lose
    assert sunspot("chaos", "run", "--kind", "kill", "--count", "2", "--every", "0.2", "--yes", "--json") == 0
    assert [line["faults"] for line in sunspot.lines if line["event"] == "recovered"] == [[1, 2]]


def test_chaos_waits_for_a_ready_pod(
    cluster: FakeCluster,
    sunspot: Command,
    training: Training,
) -> None:
    ready, cluster.pods = cluster.pods, [pod(HEAD, CLUSTER, head=True, phase="Pending")]

    def become_ready(handler: Any) -> None:
        handler.answer()
        if sum(f"{CORE}/pods" in path for _, path in cluster.requests) == 4:
            cluster.pods = ready

    cluster.on("GET", "/pods", become_ready)
    assert sunspot("chaos", "run", "--kind", "head", "--yes") == 0
    assert sunspot.err.count("waiting for a ready head\n") == 1
    assert [name for name, _ in cluster.deleted] == [HEAD]


def test_chaos_stops_waiting_after_the_time_limit(
    cluster: FakeCluster,
    sunspot: Command,
    training: Training,
    set_constants: SetConstants,
) -> None:
    set_constants("sunspot.submitter.cluster.faults", READY_WITHIN_S=0.1)
    for seconds, recovers, missing in ((0.1, False, "the receipt of fault 1"), (3, True, "a checkpoint after fault 1")):
        set_constants("sunspot.submitter.cluster.faults", RECOVERED_WITHIN_S=seconds)
        training.recovers, training.commits = recovers, False
        assert sunspot("chaos", "run", "--kind", "kill", "--yes") == 5
        assert f"waiting for {missing}\n" in sunspot.err
        assert f"for {missing}, " in sunspot.err
        assert "so it has not recovered; it keeps training, and `sunspot audit run" in sunspot.err
    cluster.pods = []
    assert sunspot("chaos", "run", "--kind", "kill", "--yes") == 5
    assert "run: waited 0 s for a ready training worker, so fault 1 was not injected" in sunspot.err


def test_chaos_ends_early_if_the_run_ends(cluster: FakeCluster, sunspot: Command, training: Training) -> None:
    training.then = training.end
    assert sunspot("chaos", "run", "--kind", "kill", "--count", "9", "--every", "9", "--yes", "--json") == 0
    assert len(cluster.deleted) == 1
    ended = next(line for line in sunspot.lines if line["event"] == "ended")
    assert ended["faults"] == 1
    assert ended["reason"].startswith("succeeded")
    assert sunspot.lines[-1]["event"] == "audit"


def test_chaos_waits_for_an_unreachable_api_server(
    cluster: FakeCluster,
    sunspot: Command,
    training: Training,
) -> None:
    cluster.on("DELETE", "pods/", answer(503, "starting"), times=4)
    assert sunspot("chaos", "run", "--kind", "kill", "--yes") == 0
    assert "503 starting" in sunspot.err
    assert len(cluster.deleted) == 1


def test_the_error_for_missing_pod_permissions_names_the_role(
    cluster: FakeCluster, sunspot: Command, training: Training
) -> None:
    cluster.on("DELETE", "pods/", answer(403, 'User "me" cannot delete pods'))
    assert sunspot("chaos", "run", "--kind", "kill", "--yes") == 4
    assert 'User "me" cannot delete pods; ask for the Role sunspot-chaos of k8s/base' in sunspot.err


# ------------------------------------------------------------------------------------------------------- rejected runs


def borrow(training: Training) -> None:
    job = json.loads(json.dumps(training.cluster.jobs[JOB]))
    job["spec"]["clusterSelector"] = {"ray.io/cluster": "shared"}
    training.cluster.put_job(job)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (Training.end, 3, "faults need a live run, but the state of run is succeeded"),
        (lambda training: training.cluster.delete_job(JOB), 3, "faults need a live run, but the state of run is"),
        (borrow, 2, "run-1 shares its cluster with other jobs"),
        (lambda training: training.cluster.down(), 4, "cannot be reached"),
    ],
    ids=["ended", "gone", "borrowed", "unreachable"],
)
def test_chaos_rejects_runs_that_have_ended_or_share_their_cluster_with_other_jobs(
    cluster: FakeCluster,
    sunspot: Command,
    training: Training,
    change: Callable[[Training], Any],
    code: int,
    said: str,
) -> None:
    change(training)
    assert sunspot("chaos", "run", "--kind", "kill", "--yes") == code
    assert said in sunspot.err
    assert cluster.deleted == []


def test_chaos_exits_with_code_3_for_an_unknown_run(cluster: FakeCluster, sunspot: Command) -> None:
    for consent in ((), ("--yes",)):
        assert sunspot("chaos", "run", "--kind", "kill", *consent) == 3
        assert "no run run in" in sunspot.err


# ------------------------------------------------------------------------------------------------------------- the end


def test_chaos_exits_with_the_exit_code_of_the_audit(
    cluster: FakeCluster, run: Run, sunspot: Command, training: Training
) -> None:
    damage(run, commit(run, read_attempts(run)[0], 1))
    assert sunspot("chaos", "run", "--kind", "kill", "--yes", "--json") == 7
    assert sunspot.lines[-1]["faults"][0].startswith("step-00000001-attempt-0001: damaged")
    assert "1 checkpoint damaged" in sunspot.err


def test_chaos_says_that_rows_cannot_be_checked_if_no_audit_was_recorded(
    cluster: FakeCluster,
    run: Run,
    sunspot: Command,
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.unit.test_chaos.record_audit", lambda *record: None)
    for entry in run.storage.list(run.key("audit")):
        run.storage.delete(entry.key)
    assert sunspot("chaos", "run", "--kind", "kill", "--yes") == 0
    assert "but the rows cannot be checked: no audit was recorded" in sunspot.err
