"""Tests of manifests with a real API server, in a namespace of k8s/base that enforces the restricted standard.

KUBE_CONTEXT names the cluster. The tests only create that namespace, and delete it afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sunspot.storage.prove import Result
from sunspot.submitter.manifest.profile import manifests
from sunspot.submitter.manifest.quotas import check_limit_ranges, check_quotas, parse_exceeded
from sunspot.submitter.manifest.render import Rendered
from sunspot.submitter.manifest.requirements import pod_templates
from tests.harness import REPOSITORY, SHELL
from tests.harness.manifests import in_pods, render

PROFILES = sorted(path.stem for path in (manifests() / "profiles").glob("*.yaml"))

EXAMPLES = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs/profiles.md").read_text(), re.DOTALL)

FOR_OTHERS = ("priorityClassName", "runtimeClassName")
"""Pod fields that refer to objects which only the cluster's administrator creates."""

pytestmark = pytest.mark.skipif(not SHELL.get("KUBE_CONTEXT"), reason="KUBE_CONTEXT names no cluster")


def ask(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = ["kubectl", "--context", SHELL["KUBE_CONTEXT"], *words]
    return subprocess.run(command, input=text, env=SHELL, capture_output=True, text=True)


def kubectl(*words: str, text: str = "") -> str:
    """Run kubectl, and return the API server's warnings."""
    answer = ask(*words, text=text)
    assert answer.returncode == 0, answer.stderr
    return answer.stderr


def customize(folder: Path, namespace: str, resource: str, *components: str) -> str:
    """Write a kustomization of a folder in k8s/ for the namespace, and return its path."""
    paths = [os.path.relpath(manifests() / name, folder) for name in (resource, *components)]
    content = {"namespace": namespace, "resources": paths[:1], "components": paths[1:]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return str(folder)


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    name = f"sunspot-test-{uuid.uuid4().hex[:8]}"
    kubectl("apply", "-k", customize(tmp_path_factory.mktemp("base"), name, "base"))
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def pods_of(rendered: Rendered) -> Iterator[dict[str, Any]]:
    """Return pods of the RayJob roughly as the operator creates them."""
    for group, template in pod_templates(rendered.manifest).items():
        spec = {name: value for name, value in template["spec"].items() if name not in FOR_OTHERS}
        metadata = {**template["metadata"], "name": f"{rendered.name}-{group}", "namespace": rendered.namespace}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def assert_accepted(rendered: Rendered) -> None:
    """Assert that the API server accepts every field, every value and every pod."""
    objects = [rendered.manifest, *pods_of(rendered)]
    said = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=yaml.safe_dump_all(objects))
    assert "PodSecurity" not in said


@pytest.mark.parametrize("profile", PROFILES)
def test_the_api_server_accepts_every_profile(profile: str, namespace: str) -> None:
    for settings in ({}, in_pods(profile, "1..2")):
        assert_accepted(render(profile, settings, namespace=namespace))


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_api_server_accepts_every_example(example: str, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(example)
    assert_accepted(render(str(path), {}, namespace=namespace))


@pytest.mark.parametrize(
    "more",
    [
        "assigned_ids: true\nhead: {cpu_limit: 4}\nworker: {cpu_limit: 8}",
        "worker: {gpus: 2, gpu_claim: two}",
        "worker: {gpu_resource: nvidia.com/mig-1g.10gb}",
        "rayjob: {spec: {rayClusterSpec: {gcsFaultToleranceOptions: {backend: rocksdb, storage: {size: 1Gi}}}}}",
    ],
)
def test_the_api_server_accepts_manifests_with_rarely_used_profile_keys(
    more: str, namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: on-demand\n{more}\n")
    assert_accepted(render(str(path), {"NUM_WORKERS": "2..4"}, namespace=namespace))


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ("rayjob: {spec: {manageBy: me}}", "manageBy"),
        ("worker: {pod: {spec: {runtimeClas: fast}}}", "runtimeClas"),
        ("head: {pod: {spec: {hostNetwork: 'yes'}}}", "hostNetwork"),
    ],
)
def test_an_unknown_field_or_a_wrong_type_is_rejected(patch: str, field: str, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: kind\n{patch}")
    with pytest.raises(AssertionError, match=field):
        assert_accepted(render(str(path), {}, namespace=namespace))


@pytest.mark.parametrize("components", [[], ["runs-apart"]])
@pytest.mark.parametrize("base", ["base", "base-gke", "base-eks", "base-aks"])
def test_the_api_server_accepts_every_overlay(base: str, components: list[str], namespace: str, tmp_path: Path) -> None:
    kubectl("apply", "--dry-run=server", "--validate=strict", "-k", customize(tmp_path, namespace, base, *components))


@pytest.mark.parametrize("folder", ["ui", "gitops/wait"])
def test_the_api_server_accepts_every_deployment(folder: str, namespace: str, tmp_path: Path) -> None:
    said = kubectl("apply", "--dry-run=server", "--validate=strict", "-k", customize(tmp_path, namespace, folder))
    assert "PodSecurity" not in said


@contextlib.contextmanager
def applied(namespace: str, kind: str, spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Create an object in the namespace, yield it as stored by the API server, and delete it."""
    made = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "tried", "namespace": namespace}, "spec": spec}
    kubectl("apply", "-f", "-", text=yaml.safe_dump(made))
    try:
        deadline = time.monotonic() + 30
        while True:
            found: dict[str, Any] = yaml.safe_load(ask("get", "-n", namespace, kind, "tried", "-o", "yaml").stdout)
            if kind != "ResourceQuota" or found.get("status", {}).get("hard") or time.monotonic() > deadline:
                break  # a quota counts once its controller has seen it
            time.sleep(0.2)
        yield found
    finally:
        kubectl("delete", "-n", namespace, kind, "tried")


def try_pods(rendered: Rendered) -> str:
    """Create a run's pods one by one, and return the API server's errors."""
    return ask("apply", "--dry-run=server", "-f", "-", text=yaml.safe_dump_all(pods_of(rendered))).stderr


def test_the_quota_error_of_the_api_server_is_parsed(namespace: str) -> None:
    rendered = render("kind", {"NUM_WORKERS": "2"}, namespace=namespace)
    with applied(namespace, "ResourceQuota", {"hard": {"requests.memory": "4Gi", "pods": "9"}}):
        said = try_pods(rendered)
    exceeded = parse_exceeded(said)
    assert exceeded, said
    assert exceeded.name == "tried"
    assert exceeded.never_fits(rendered.manifest)


@pytest.mark.parametrize(
    ("spec", "refuses"),
    [
        ({"hard": {"requests.memory": "9Gi"}}, False),  # so the whole run is compared with it
        ({"hard": {"limits.cpu": "100"}}, True),
        ({"hard": {"pods": "0"}, "scopes": ["NotBestEffort"]}, True),
        ({"hard": {"pods": "0"}, "scopes": ["BestEffort"]}, False),
        ({"hard": {"pods": "0"}, "scopes": ["NotTerminating"]}, True),
        ({"hard": {"requests.nvidia.com/gpu": "0"}}, False),
    ],
)
def test_the_quota_check_agrees_with_the_api_server(namespace: str, spec: dict[str, Any], refuses: bool) -> None:
    rendered = render("kind", {"NUM_WORKERS": "2"}, namespace=namespace)
    with applied(namespace, "ResourceQuota", spec) as quota:
        said = try_pods(rendered)
    assert ("quota" in said) is refuses, said
    [found] = check_quotas([quota], (), rendered.manifest)
    assert (found.result is Result.FAILED) is (refuses or "requests.memory" in spec["hard"])


@pytest.mark.parametrize(
    "item",
    [
        {"type": "Container", "max": {"memory": "4Gi"}},
        {"type": "Container", "max": {"memory": "8Gi"}},
        {"type": "Container", "min": {"cpu": "1"}},
        {"type": "Container", "default": {"cpu": "200m"}},
        {"type": "Container", "default": {"cpu": "8"}, "maxLimitRequestRatio": {"cpu": "4"}},
        {"type": "Pod", "max": {"memory": "4Gi"}},
        {"type": "Pod", "max": {"cpu": "4"}},
    ],
)
def test_the_limit_range_check_agrees_with_the_api_server(namespace: str, item: dict[str, Any]) -> None:
    rendered = render("kind", {"NUM_WORKERS": "2"}, namespace=namespace)
    with applied(namespace, "LimitRange", {"limits": [item]}) as limits:
        refused = ask("apply", "--dry-run=server", "-f", "-", text=yaml.safe_dump_all(pods_of(rendered)))
    found = list(check_limit_ranges([limits], rendered.manifest))
    assert bool(found) is (refused.returncode != 0), refused.stderr
