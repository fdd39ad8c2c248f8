"""Tests of the commands, permissions and network policies in k8s/ui and k8s/gitops/wait."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from sunspot import __version__
from sunspot.cli import make_parser
from sunspot.submitter.manifest.profile import manifests
from tests.harness.manifests import build

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")

DEPLOYMENTS = ["ui", "gitops/wait"]

BASE_NETWORK = manifests() / "base/network.yaml"


def find(folder: str, kind: str) -> dict[str, Any]:
    [found] = [item for item in build(manifests() / folder) if item["kind"] == kind]
    return found


def template(folder: str) -> dict[str, Any]:
    pod: dict[str, Any] = find(folder, "Deployment")["spec"]["template"]
    return pod


def base_policies(labels: dict[str, str]) -> Iterator[str]:
    """Yield the names of policies in k8s/base that select pods with these labels."""
    for policy in yaml.safe_load_all(BASE_NETWORK.read_text()):
        if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items():
            yield policy["metadata"]["name"]


@pytest.mark.parametrize("folder", DEPLOYMENTS)
def test_each_pod_runs_an_existing_command_and_writes_only_to_tmp(folder: str) -> None:
    pod = template(folder)["spec"]
    [container] = pod["containers"]
    python, module, *words = container["command"]
    assert (python, module, words.pop(0)) == ("python", "-m", "sunspot")
    make_parser().parse_args(words)
    assert container["image"] == f"sunspot-submitter:{__version__}"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["enableServiceLinks"] is False
    assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def policies(folder: str) -> dict[str, dict[str, Any]]:
    """Return the specs of a folder's network policies, keyed by name."""
    found = [item for item in build(manifests() / folder) if item["kind"] == "NetworkPolicy"]
    return {item["metadata"]["name"]: item["spec"] for item in found}


def test_base_network_policies_let_the_sunspot_wait_pod_reach_storage() -> None:
    labels = template("gitops/wait")["metadata"]["labels"]
    everyone = {"deny-by-default", "within-clusters", "to-dns", "to-storage", "to-tracking", "to-workload-identity"}
    assert set(base_policies(labels)) == everyone
    selectors = [find("gitops/wait", "Deployment")["spec"]["selector"]]
    selectors += [spec["podSelector"] for spec in policies("gitops/wait").values()]
    for selector in selectors:
        assert selector["matchLabels"].items() <= labels.items()


def test_the_live_page_reaches_only_storage_and_is_isolated_from_runs() -> None:
    labels = template("ui")["metadata"]["labels"]
    assert list(base_policies(labels)) == [], (
        "otherwise, the page could reach every port of a run, and every run could reach the page"
    )
    assert find("ui", "Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    own = policies("ui")
    assert {name: spec["policyTypes"] for name, spec in own.items()} == {"to-ui": ["Ingress"], "from-ui": ["Egress"]}
    for spec in own.values():
        assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    base = {spec["metadata"]["name"]: spec["spec"] for spec in yaml.safe_load_all(BASE_NETWORK.read_text())}
    allowed = [rule for name in ("to-dns", "to-storage", "to-workload-identity") for rule in base[name]["egress"]]
    assert own["from-ui"]["egress"] == allowed


def test_the_live_page_has_its_own_storage_credentials() -> None:
    [container] = template("ui")["spec"]["containers"]
    secrets = [source["secretRef"] for source in container["envFrom"] if "secretRef" in source]
    assert secrets == [{"name": "sunspot-storage-read", "optional": True}], "the credentials of runs may write"


def test_the_live_page_accepts_the_host_names_of_its_service() -> None:
    [container] = template("ui")["spec"]["containers"]
    arguments = make_parser().parse_args(container["command"][3:])
    service = find("ui", "Service")["metadata"]
    name, namespace = service["name"], service["namespace"]
    full = f"{name}.{namespace}.svc.cluster.local"
    assert set(arguments.host) == {
        *(name, f"{name}.{namespace}", f"{name}.{namespace}.svc", full),
        "sunspot.example.com",
    }


def test_the_live_page_has_no_token_and_can_be_reached_only_from_the_ingress() -> None:
    pod = template("ui")["spec"]
    assert pod["automountServiceAccountToken"] is find("ui", "ServiceAccount")["automountServiceAccountToken"] is False
    [container] = pod["containers"]
    [port] = container["ports"]
    arguments = make_parser().parse_args(container["command"][3:])
    assert (arguments.address, arguments.port) == ("0.0.0.0", port["containerPort"])
    [rule] = policies("ui")["to-ui"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": port["containerPort"]}]
    assert [list(peer) for peer in rule["from"]] == [["namespaceSelector"]]
    service = find("ui", "Service")["spec"]
    assert service["selector"].items() <= template("ui")["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] == port["name"]
    settings = find("ui", "ConfigMap")
    assert container["envFrom"][0] == {"configMapRef": {"name": settings["metadata"]["name"]}}
    assert settings["data"] == {"SUNSPOT_STORAGE_PATH": "s3://sunspot/runs"}


def test_the_sunspot_wait_pod_cannot_create_objects() -> None:
    """A user who can create RayJobs can run any pod."""
    rules = find("gitops/wait", "Role")["rules"]
    granted = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert granted == {("configmaps", "get"), *(("rayjobs", verb) for verb in ("delete", "get", "list", "patch"))}
    assert [rule["resourceNames"] for rule in rules if rule["resources"] == ["configmaps"]] == [["kube-root-ca.crt"]]
    account = find("gitops/wait", "ServiceAccount")["metadata"]["name"]
    assert [subject["name"] for subject in find("gitops/wait", "RoleBinding")["subjects"]] == [account]
    assert template("gitops/wait")["spec"]["serviceAccountName"] == account
