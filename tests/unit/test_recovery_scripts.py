"""Tests, without a cluster, of the scripts that inject faults into a live run: the removed nodes, and the report."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import scripts.cluster
import scripts.recovery
import scripts.subjects
from scripts.cluster import Pod, begin, commands_of_the_environment, finish, until
from scripts.recovery import Fault, choose, inject, table
from scripts.subjects import STOCK, Group, Stock, SunspotRun, read_groups, wait_until_complete
from sunspot.errors import ClusterError, GaveUpError, SettingsError, SunspotError
from sunspot.run import open_run
from sunspot.run.attempts import Attempt, Metadata, checkpoint_name, claim
from sunspot.run.history import Journal
from sunspot.run.incidents import Cause, Receipt
from sunspot.run.status import RunState
from sunspot.submitter.cluster.observation import RunAccess
from sunspot.submitter.manifest.render import JobRequest
from tests.harness.constants import SetConstants

PODS = [
    Pod("head", "n0", "10.0.0.1", True),
    Pod("a", "n1", "10.0.1.1", False),
    Pod("b", "n2", "10.0.2.1", False),
    Pod("c", "n0", "10.0.0.2", False),
]
RECEIPT = Receipt(
    attempt=2,
    since=1,
    cause=Cause.PREEMPTED,
    detail="n1 drains",
    noticed=101.0,
    save_began=101.5,
    committed=None,
    restarted=108.0,
    first_step=110.0,
    left=101.5,
    step=50,
    last_step=52,
    tier="memory",
    world_before=3,
    world_after=2,
)


class Run:
    """A run with the groups that a test gives it."""

    job = "job"
    namespace = "sunspot"
    workers = 2

    def __init__(self, *groups: Group) -> None:
        self.all = list(groups)

    def submit(self) -> None: ...

    def end(self) -> None: ...

    def rank0(self) -> str:
        return "a"

    def groups(self) -> list[Group]:
        return self.all


@pytest.fixture(autouse=True)
def _looks_often(set_constants: SetConstants) -> None:
    set_constants(scripts.cluster, LOOK_EVERY_S=0.01)


def test_a_fault_removes_the_nodes_of_its_target() -> None:
    chance = random.Random(0)
    assert choose("head", PODS, "a", chance) == ["n0"]
    assert choose("rank0", PODS, "a", chance) == ["n1"]
    assert choose("worker", PODS, "a", chance) == ["n2"], "neither rank 0's node nor the head's"
    assert choose("all", PODS, "a", chance) == ["n1", "n2"], "the head would go with its own"
    assert choose("worker", PODS[:2], "a", chance) == ["n1"], "there is no other"
    for target, alive, rank0 in (("rank0", PODS, "gone"), ("worker", [PODS[0], PODS[3]], ""), ("head", PODS[1:], "a")):
        assert choose(target, alive, rank0, chance) == []
    assert {choose("worker", PODS, "", chance)[0] for _ in range(20)} == {"n1", "n2"}


def test_the_table_shows_the_cost_of_each_fault() -> None:
    fault = Fault("reclaim", "worker", ["n1"], 100.0, 3, Group(2, 2, 110.0, 2, RECEIPT))
    better = replace(fault, after=Group(2, 2, 114.0, 0), complete_s=40.0)
    lines = table([fault, better]).splitlines()
    assert lines[2] == "| reclaim | worker | 3 to 2 | 1.0 | 1.5 |  |  |  |  | 8.0 |  | 10.0 | 2 |  |"
    assert lines[3] == "| reclaim | worker | 3 to 2 |  |  |  |  |  |  |  |  | 14.0 | 0 | 40.0 |"
    assert lines[-1].split("|")[12:14] == [" 12.0 ", " 1 "]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("target", "lines"),
    [
        ("rank0", ["kill n1", "step", "add n1"]),
        ("head", ["kill n0", "add head n0", "step"]),
        ("all", ["kill n1", "kill n2", "add n1", "add n2", "step"]),
    ],
)
def test_inject_brings_removed_nodes_back_and_waits_for_the_next_step(
    target: str, lines: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The nodes return before the next step if the group cannot take a step without them."""
    monkeypatch.setattr(scripts.recovery, "pods", lambda job, namespace: PODS)
    log = tmp_path / "log"
    names = {"kill": "kill", "add": "add", "add_head": "add head"}
    commands = {name: f"echo {what} {{node}} >> {log}" for name, what in names.items()}
    before, late = Group(1, 2, time.time() - 60, 0), Group(2, 1, time.time() - 30, 9)
    run = Run(before)

    def groups() -> list[Group]:
        if not log.exists() or not log.stat().st_size:
            return [before]
        if len(run.all) == 1:
            run.all += [late, Group(3, 1, time.time() + 3600, 4)]
            with log.open("a") as file:
                file.write("step\n")
        return run.all

    run.groups = groups
    fault = inject(run, "kill", target, commands, random.Random(0))
    assert (fault.target, fault.after.replayed, fault.after.world_size) == (target, 4, 1)
    assert 3590 < fault.first_step_s < 3610
    said, taken = log.read_text().splitlines(), len(fault.nodes)
    assert sorted(said[:taken]) + said[taken:] == lines


def test_a_group_is_complete_once_all_workers_have_trained_for_some_time(set_constants: SetConstants) -> None:
    set_constants(scripts.subjects, START_S=0)
    now = time.time()
    trained = Group(3, 2, now - 30, 0)
    assert wait_until_complete(Run(trained), now - 60) is trained
    for newest in (
        replace(trained, world_size=1),
        replace(trained, first_step=now),
        replace(trained, first_step=now - 70),
    ):
        with pytest.raises(GaveUpError, match="no 2 workers that train within 0 s"):
            wait_until_complete(Run(trained, newest), now - 60)
    with pytest.raises(GaveUpError):
        wait_until_complete(Run(), 0)


def test_worker_groups_are_read_from_the_log_of_a_driver() -> None:
    """Check logs like those that Ray writes, with prefixes, colors, other lines, and a start without steps."""
    records = [
        {"time": 1.0, "event": "start", "from_step": 0, "world": 2},
        {"time": 2.0, "step": 1, "world": 2},
        {"time": 3.0, "step": 2, "world": 2},
        {"time": 4.0, "step": 3, "world": 2},
        {"time": 9.0, "event": "start", "from_step": 1, "world": 1},
        {"time": 10.0, "event": "start", "from_step": 1, "world": 2},
        {"time": 11.0, "step": 2, "world": 2},
    ]
    prefix = "\x1b[36m(RayTrainWorker pid=7, ip=10.0.0.1)\x1b[0m "
    lines = [prefix + json.dumps(record) for record in reversed(records)]
    lines += ["Training {'CPU': 1} at the time of writing", '{"time" is no json}', "", "warning: {}"]
    assert read_groups(lines) == [Group(1, 2, 2.0, 0), Group(2, 2, 11.0, 2)]


def test_the_worker_groups_and_rank_0_of_a_sunspot_run_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    states = [(RunState.RUNNING, "2 workers train")]
    cluster, storage = SimpleNamespace(trouble=""), SimpleNamespace(trouble="")
    snapshot = SimpleNamespace(state=lambda: states[-1], cluster=cluster, storage=storage)
    monkeypatch.setattr(RunAccess, "observe", lambda access: snapshot)
    monkeypatch.setattr(scripts.subjects, "connect", lambda context, namespace: None)
    ours = SunspotRun(JobRequest("kind", {"RUN_NAME": "mine", "NUM_WORKERS": "2..3"}))
    assert (ours.job, ours.namespace, ours.workers) == (ours.rendered.name, "sunspot", 3)
    ours.run = open_run(str(tmp_path), "mine")
    assert ours.groups() == []
    claim(ours.run, [], Attempt(2, "me", checkpoint_name(50, 1), 50, metadata=Metadata(nodes={"0": "a", "1": "b"})))
    events = Journal(ours.run, "events", 2)
    events.append(RECEIPT.record())
    events.flush()
    assert ours.groups() == [Group(2, 2, 110.0, 2, RECEIPT)]
    assert ours.rank0() == "a"
    states.append((RunState.SUCCEEDED, "at step 94"))
    with pytest.raises(SunspotError, match="cannot inject another fault: mine succeeded, at step 94"):
        ours.groups()
    cluster.trouble = "gone"  # then it is not known
    assert ours.groups()


def test_rank_0_of_the_stock_ray_train_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts.subjects, "pods", lambda job, namespace: PODS)
    stock = Stock(JobRequest("kind", {"RUN_NAME": "mnist", "NUM_WORKERS": "2..3"}))
    assert (stock.job, stock.workers, stock.rank0()) == ("mnist-stock", 3, "")
    lines = [f'(RayTrainWorker pid=7, ip={ip}) {{"time": 1.0, "event": "start"}}' for ip in ("10.0.1.1", "10.0.2.1")]
    stock.lines = dict.fromkeys([*lines, '(RayTrainWorker pid=8, ip=10.0.0.2) {"time": 2.0, "step": 1}'])
    assert stock.rank0() == "b"


def test_workers_of_the_stock_ray_train_loop_get_the_same_pods_as_sunspot_workers(tmp_path: Path) -> None:
    """The profile changes the worker pods of the stock loop, too. It does not change the head."""
    profile = tmp_path / "spread.yaml"
    profile.write_text("extends: kind\nworker: {pod: {spec: {securityContext: {runAsUser: 7}}}}\n")
    _, job = Stock(JobRequest(str(profile), {"RUN_NAME": "mine", "NUM_WORKERS": "2"})).objects
    cluster = job["spec"]["rayClusterSpec"]
    head, workers = (each["template"]["spec"] for each in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]))
    assert workers["securityContext"] == {**head["securityContext"], "runAsUser": 7} != head["securityContext"]


def test_the_stock_ray_train_loop_uses_the_defaults_of_ray_and_kuberay() -> None:
    text = STOCK.read_text()
    spec = yaml.safe_load(text)["spec"]
    assert set(spec) == {"submissionMode", "entrypoint", "rayClusterSpec"}
    for word in ("RAY_", "terminationGracePeriod", "autoscaler", "Probe", "preStop"):
        assert word not in text
    cluster = spec["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_fault_commands_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILL", "false {node}")
    monkeypatch.delenv("RECLAIM", raising=False)
    assert commands_of_the_environment("kill")["kill"] == "false {node}"
    with pytest.raises(SettingsError, match="RECLAIM=: set it to a command"):
        commands_of_the_environment("kill", "reclaim")
    with pytest.raises(SunspotError, match="ended with exit code 3: no n1"):
        finish(begin("echo no {node}; exit 3", "n1"))


def test_unanswered_requests_are_retried() -> None:
    answers = iter([ClusterError("gone"), None, "there"])

    def ask() -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert until("word", 60, ask) == "there"
    with pytest.raises(GaveUpError, match="no word within 0 s: gone"):
        until("word", 0, lambda: (_ for _ in ()).throw(ClusterError("gone")))
