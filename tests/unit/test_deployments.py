"""k8s/ui and k8s/gitops/wait as kustomize builds them: what their pods run, may do, and talk to."""

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


def find(folder: str, kind: str) -> dict[str, Any]:
    [found] = [item for item in build(manifests() / folder) if item["kind"] == kind]
    return found


def template(folder: str) -> dict[str, Any]:
    pod: dict[str, Any] = find(folder, "Deployment")["spec"]["template"]
    return pod


def base_policies(labels: dict[str, str]) -> Iterator[str]:
    """The policies of k8s/base that select such pods."""
    for policy in yaml.safe_load_all((manifests() / "base/network.yaml").read_text()):
        if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items():
            yield policy["metadata"]["name"]


@pytest.mark.parametrize("folder", DEPLOYMENTS)
def test_a_pod_runs_a_command_there_is_and_writes_nothing_but_its_tmp(folder: str) -> None:
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


@pytest.mark.parametrize("folder", DEPLOYMENTS)
def test_the_policies_of_the_base_let_a_pod_reach_storage(folder: str) -> None:
    labels = template(folder)["metadata"]["labels"]
    everyone = {"deny-by-default", "within-clusters", "to-dns", "to-storage", "to-tracking", "to-workload-identity"}
    assert set(base_policies(labels)) == everyone
    for kind, selector in (("Deployment", "selector"), ("NetworkPolicy", "podSelector")):
        assert find(folder, kind)["spec"][selector]["matchLabels"].items() <= labels.items()


def test_the_page_has_no_token_and_is_reached_by_the_ingress_alone() -> None:
    pod = template("ui")["spec"]
    assert pod["automountServiceAccountToken"] is find("ui", "ServiceAccount")["automountServiceAccountToken"] is False
    [container] = pod["containers"]
    [port] = container["ports"]
    arguments = make_parser().parse_args(container["command"][3:])
    assert (arguments.address, arguments.port) == ("0.0.0.0", port["containerPort"])
    [rule] = find("ui", "NetworkPolicy")["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": port["containerPort"]}]
    assert [list(peer) for peer in rule["from"]] == [["namespaceSelector"]]
    service = find("ui", "Service")["spec"]
    assert service["selector"].items() <= template("ui")["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] == port["name"]
    settings = find("ui", "ConfigMap")
    assert container["envFrom"][0] == {"configMapRef": {"name": settings["metadata"]["name"]}}
    assert settings["data"] == {"SUNSPOT_STORAGE_PATH": "s3://sunspot/runs"}


def test_who_waits_for_all_runs_can_create_nothing() -> None:
    """The right to create RayJobs is the right to run any pod."""
    rules = find("gitops/wait", "Role")["rules"]
    granted = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert granted == {("configmaps", "get"), *(("rayjobs", verb) for verb in ("delete", "get", "list", "patch"))}
    assert [rule["resourceNames"] for rule in rules if rule["resources"] == ["configmaps"]] == [["kube-root-ca.crt"]]
    account = find("gitops/wait", "ServiceAccount")["metadata"]["name"]
    assert [subject["name"] for subject in find("gitops/wait", "RoleBinding")["subjects"]] == [account]
    assert template("gitops/wait")["spec"]["serviceAccountName"] == account
