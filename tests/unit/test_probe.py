"""Tests of the check before training that every node can use the run's storage, with a fake Ray."""

from __future__ import annotations

import time
from pathlib import Path
from uuid import uuid4

import pytest
import ray.exceptions

from sunspot.errors import StorageError
from sunspot.train import probe
from sunspot.train.probe import probe_all_nodes
from tests.harness.asked_nodes import Answer, FakeRay


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


def test_a_thousand_nodes_are_checked_in_parallel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(node: str) -> str:
        time.sleep(0.02)
        return ""

    began = time.monotonic()
    fake = probe_fakes(monkeypatch, tmp_path, 1000, answer)
    assert 100 < fake.most_at_once <= probe.MAX_PROBES
    assert time.monotonic() - began < 10, "one after another takes 20 s"


def test_one_error_lists_all_nodes_that_cannot_use_the_storage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(node: str) -> str:
        number = int(node[:12])
        if number in (3, 4):
            raise ray.exceptions.GetTimeoutError("no answer")
        return (
            "it does not read what another node has written"
            if number < 20
            else f"run/probe-{uuid4().hex}: denied"
            if number > 39
            else ""
        )

    with pytest.raises(StorageError) as refused:
        probe_fakes(monkeypatch, tmp_path, 50, answer)
    text = str(refused.value)
    assert "28 of 50 other nodes cannot use it" in text
    assert (
        "000000000000, 000000000001, 000000000002 and 15 others: it does not read what another node has written" in text
    )
    assert "000000000040, 000000000041, 000000000042 and 7 others: run/probe-...: denied" in text
    assert "SUNSPOT_STORAGE_PATH must be s3://..., gs://... or az://..., or a file system that all nodes share" in text
    assert "\n" not in text
    [warning] = [line for line in capsys.readouterr().out.splitlines() if line]
    expected = "warning: 2 nodes did not answer when asked about the storage: 000000000003, 000000000004: "
    assert warning.startswith(expected)
    assert "no answer" in warning


def test_a_bug_in_the_storage_check_is_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(node: str) -> str:
        raise ray.exceptions.RayTaskError("probe_here", "", ValueError("a defect"))

    with pytest.raises(ray.exceptions.RayTaskError):
        probe_fakes(monkeypatch, tmp_path, 3, answer)


def test_a_cluster_of_one_node_is_not_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert probe_fakes(monkeypatch, tmp_path, 0, lambda node: pytest.fail("asked")).most_at_once == 0
