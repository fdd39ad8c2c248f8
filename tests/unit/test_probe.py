"""The check before training that every node sees the run's storage, with a fake of Ray's part in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import ray.exceptions

from app.errors import StorageError, SunspotError
from app.train import probe
from app.train.probe import leave_out_broken_gpus, probe_all_nodes

Answer = Callable[[str], str]


class FakeRay:
    """Asks `answer` for what each node says."""

    def __init__(self, answer: Answer) -> None:
        self.exceptions = ray.exceptions
        self.most_at_once, self.here = 0, "here"
        self._answer, self._asked, self._lock = answer, 0, threading.Lock()
        self.arguments: dict[str, tuple[object, ...]] = {}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self.here)

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        return lambda function: SimpleNamespace(options=self._options)

    def _options(self, scheduling_strategy: Any) -> Any:
        def remote(*arguments: object) -> str:
            self.arguments[scheduling_strategy.node_id] = arguments
            return str(scheduling_strategy.node_id)

        return SimpleNamespace(remote=remote)

    def get(self, node: str, timeout: float) -> str:
        with self._lock:
            self._asked += 1
            self.most_at_once = max(self.most_at_once, self._asked)
        try:
            return self._answer(node)
        finally:
            with self._lock:
                self._asked -= 1


def probe_fakes(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int, answer: Answer) -> FakeRay:
    fake = FakeRay(answer)
    monkeypatch.setattr(probe, "ray", fake)
    nodes: list[dict[str, object]] = [
        {"NodeID": "here"},
        *({"NodeID": f"{n:012d}".ljust(56, "0")} for n in range(count)),
    ]
    try:
        probe_all_nodes(str(folder), "run", nodes)
    finally:
        assert not list(folder.rglob("*")), "it left something behind"
    return fake


def test_a_thousand_nodes_are_asked_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(node: str) -> str:
        time.sleep(0.02)
        return ""

    began = time.monotonic()
    fake = probe_fakes(monkeypatch, tmp_path, 1000, answer)
    assert 100 < fake.most_at_once <= probe.PROBES_AT_ONCE
    assert time.monotonic() - began < 10, "one after another takes 20 s"


def test_all_nodes_that_cannot_use_the_storage_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(node: str) -> str:
        number = int(node[:12])
        if number in (3, 4):
            raise ray.exceptions.GetTimeoutError("no answer")
        return (
            "it reads something else than was written"
            if number < 20
            else f"run/probe-{uuid4().hex}: denied"
            if number > 39
            else ""
        )

    with pytest.raises(StorageError) as refused:
        probe_fakes(monkeypatch, tmp_path, 50, answer)
    text = str(refused.value)
    assert "28 of 50 other nodes cannot use it" in text
    assert "000000000000, 000000000001, 000000000002 and 15 others: it reads something else than was written" in text
    assert "000000000040, 000000000041, 000000000042 and 7 others: run/probe-...: denied" in text
    assert "SUNSPOT_STORAGE_PATH must be s3://..., gs://... or az://..., or a file system that all nodes share" in text
    assert "\n" not in text
    [warning] = [line for line in capsys.readouterr().out.splitlines() if line]
    assert warning.startswith("warning: 2 nodes did not answer, asked about the storage: 000000000003, 000000000004: ")
    assert "no answer" in warning


def test_a_defect_of_the_check_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(node: str) -> str:
        raise ray.exceptions.RayTaskError("probe_here", "", ValueError("a defect"))

    with pytest.raises(ray.exceptions.RayTaskError):
        probe_fakes(monkeypatch, tmp_path, 3, answer)


@pytest.mark.parametrize(
    ("broken", "head", "least", "left_out"),
    [("", "c", 10, ""), ("a", "c", 2, "a"), ("ab", "c", 1, None), ("a", "c", 3, None), ("a", "a", 1, None)],
    ids=["none", "one, and the others do", "all", "too few others", "the head's"],
)
def test_a_node_whose_gpu_cannot_be_used_is_left_out_where_the_others_do(
    broken: str,
    head: str,
    least: int,
    left_out: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drained: list[str] = []
    fake = FakeRay(lambda node: "no driver" if node[0] in broken else "")
    fake.here = head * 56
    monkeypatch.setattr(probe, "ray", fake)
    monkeypatch.setattr(probe, "drain_nodes", lambda nodes, why: drained.extend(nodes))
    resources = {"a" * 56: {"GPU": 8.0}, "b" * 56: {"GPU": 2.0}, "c" * 56: {"CPU": 8.0}}
    nodes = [{"NodeID": node, "Resources": has, "Alive": True} for node, has in resources.items()]
    if left_out is not None:
        leave_out_broken_gpus(nodes, {"GPU": 1.0}, least)
        assert fake.arguments == {"a" * 56: (8,), "b" * 56: (2,)}, "the GPUs that each node promises"
        assert drained == [node * 56 for node in left_out]
        assert ("1 of 2 nodes with GPUs cannot compute on them, and is left out" in capsys.readouterr().out) == bool(
            left_out
        )
        return
    with pytest.raises(SunspotError, match=r"of 2 nodes with GPUs cannot compute on them: .*: no driver"):
        leave_out_broken_gpus(nodes, {"GPU": 1.0}, least)
    assert not drained


def test_a_cluster_of_one_node_is_asked_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert probe_fakes(monkeypatch, tmp_path, 0, lambda node: pytest.fail("asked")).most_at_once == 0
