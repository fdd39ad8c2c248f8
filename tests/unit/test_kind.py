"""Tests of `make cluster` and `make cluster-down` without a cluster: their kind, kubectl and docker commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from scripts.kind import ENDPOINTS, KEYS, REPOSITORY, TOOLS
from scripts.kind.__main__ import main
from sunspot.errors import SettingsError, SunspotError

FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
  "$FAILS"*) exit 1;;
  "kind get clusters") echo "other $CLUSTERS";;
  *"-f -") cat > "$STDIN";;
esac
"""
"""Script of a fake tool that records its arguments, and fails if the test asks for this."""

Kind = Callable[..., list[str]]


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """Return a function that runs `python -m scripts.kind` with fake tools, and returns their arguments."""
    for tool in (*TOOLS, "make"):
        (tmp_path / tool).write_text(FAKE)
        (tmp_path / tool).chmod(0o755)
    for tool in ("basename", "cat", "sh"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))

    def run(*words: str, clusters: str = "", fails: str = "nothing") -> list[str]:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        values = {"PATH": str(tmp_path), "CALLS": str(calls), "STDIN": str(tmp_path / "stdin")}
        for name, value in {**values, "CLUSTERS": clusters, "FAILS": fails}.items():
            monkeypatch.setenv(name, value)
        assert main(words) == 0
        return calls.read_text().splitlines()

    return run


def test_the_kind_script_creates_a_cluster_with_the_operator_and_a_bucket_and_the_image(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = kind("up", "--image", "sunspot:1")
    begun = [" ".join(call.replace("--context kind-sunspot ", "").split()[:3]) for call in calls[2:]]
    assert begun == [
        *("kind get clusters", "kind create cluster", "kubectl apply --server-side", "kubectl -n default"),
        *("kubectl apply -f", "kubectl -n bucket", "kubectl apply -k", "kubectl apply --server-side"),
        "kind load docker-image",
    ]
    assert calls[3].endswith("--name sunspot --wait 120s --config scripts/kind/cluster.yaml")
    assert all("--context kind-sunspot " in call for call in calls if call.startswith("kubectl"))
    secret = json.loads((tmp_path / "stdin").read_text())
    assert secret["stringData"] == {"AWS_ENDPOINT_URL": ENDPOINTS["pods"], **KEYS}
    out = capsys.readouterr().out
    assert f"export AWS_ENDPOINT_URL={ENDPOINTS['here']} AWS_ACCESS_KEY_ID=sunspot " in out
    assert "make submit PROFILE=kind RUN=digits IMAGE=sunspot:1\n" in out


def test_the_kind_script_reuses_an_existing_cluster(kind: Kind) -> None:
    calls = kind("up", "--image", "sunspot:1", clusters="sunspot", fails="docker image inspect")
    assert "make image HEAD=1 PLATFORM= IMAGE=sunspot:1" in calls
    assert not [call for call in calls if call.startswith("kind create")]
    assert kind("down") == ["kind delete cluster --name sunspot"]


def test_missing_tools_and_failures_are_reported_in_one_line(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(SunspotError, match=r"^kubectl ended with exit code 1; see its output above"):
        kind("up", "--image", "sunspot:1", fails="kubectl --context kind-sunspot apply")
    for tool in ("kind", "git"):
        (tmp_path / tool).unlink()
    with pytest.raises(SettingsError, match=r"^git and kind not found on PATH; install them \(git: http"):
        kind("up", "--image", "sunspot:1")


def test_pods_and_this_machine_each_have_an_address_for_the_bucket() -> None:
    folder = REPOSITORY / "scripts" / "kind"
    _, deployment, service = yaml.safe_load_all((folder / "bucket.yaml").read_text())
    [mapping] = yaml.safe_load((folder / "cluster.yaml").read_text())["nodes"][0]["extraPortMappings"]
    [port] = service["spec"]["ports"]
    [server] = deployment["spec"]["template"]["spec"]["containers"]
    assert ENDPOINTS["here"] == f"http://{mapping['listenAddress']}:{mapping['hostPort']}"
    assert mapping["containerPort"] == port["nodePort"]
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    assert ENDPOINTS["pods"] == f"http://{name}.{namespace}.svc.cluster.local:{port['port']}"
    assert f":{port['port']}" in server["args"]
    assert {each["value"] for each in server["env"]} == {KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]}
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
