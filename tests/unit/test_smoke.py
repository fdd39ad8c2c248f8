"""Tests, without a cluster, that the smoke test never touches the user's runs and secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from scripts import smoke
from sunspot.errors import SunspotError

SECRETS = {"AWS_SECRET_ACCESS_KEY": "CANARY-KEY", "AWS_SESSION_TOKEN": "CANARY-TOKEN"}

KUBECTL = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *"-f -"*) cat > "$STDIN";; esac
"""


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's storage with two runs, and replace kubectl with a program that records its arguments."""
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    runs = tmp_path / "runs"
    for name in ("llama/checkpoints/1/model.pt", "mnist/run.json"):
        (runs / name).parent.mkdir(parents=True)
        (runs / name).write_text(name)
    for name, value in {
        **SECRETS,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "STDIN": str(tmp_path / "stdin"),
        "AWS_PROFILE": "theirs",
        "AWS_ENDPOINT_URL": "http://storage.example",
        "SUNSPOT_STORAGE_PATH": str(runs),
        "KUBE_CONTEXT": "theirs",
        "LOAD_IMAGE": "true",
        "IMAGE": "sunspot:1",
    }.items():
        monkeypatch.setenv(name, value)
    return runs


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_failed_smoke_test_does_not_change_storage(storage: Path) -> None:
    before = files(storage)

    def train(image: str, loader: str) -> None:
        place = Path(os.environ["SUNSPOT_STORAGE_PATH"])
        assert place.parent == storage, "a folder of its own in the user's storage"
        (place / "smoke-torch").mkdir(parents=True)
        (place / "smoke-torch" / "run.json").write_text("{}")
        raise SunspotError("smoke test failed")

    with pytest.raises(SunspotError):
        smoke.main(train)
    assert files(storage) == before
    assert (storage / "llama/checkpoints/1/model.pt").read_text() == "llama/checkpoints/1/model.pt"


def test_the_smoke_test_never_changes_existing_runs(storage: Path) -> None:
    (storage / smoke.NAME).mkdir()
    (storage / smoke.NAME / "run.json").write_text("{}")
    before = files(storage)
    with pytest.raises(SunspotError, match=f"{smoke.NAME} already exists"):
        smoke.main()
    assert files(storage) == before


def test_the_smoke_test_sends_secrets_only_to_the_cluster(storage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    smoke.main(lambda *_: None)
    secret = json.loads((storage.parent / "stdin").read_text())
    assert secret["stringData"] == {**SECRETS, "AWS_ENDPOINT_URL": "http://storage.example"}
    calls = (storage.parent / "calls").read_text()
    for seen in (calls, *capfd.readouterr()):
        assert "CANARY" not in seen
    assert f"delete namespace {secret['metadata']['namespace']} " in calls, "the test's own, not one that may be there"
