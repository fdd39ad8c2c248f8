"""Tests of rendered manifests: golden files for every profile, determinism, and rejected input.

After an intended change, rewrite the golden files and read the diff:
WRITE_GOLDEN=1 python -m pytest tests/unit/test_render.py -k golden
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sunspot.cli import main
from sunspot.errors import SettingsError
from sunspot.run.owner import CERTIFICATES, POD_NAMESPACE
from sunspot.settings import Settings
from sunspot.settings.search_space import load_search
from sunspot.submitter.cluster.api import POD_ROLE, ROLE, ROLES
from sunspot.submitter.cluster.preflight import find_references
from sunspot.submitter.manifest.profile import load_profile
from sunspot.submitter.manifest.quantities import parse_quantity
from sunspot.submitter.manifest.render import JobRequest, Rendered, image_problem, settings_of, to_yaml
from sunspot.submitter.manifest.yaml_files import read_documents
from tests.harness import GOLDEN
from tests.harness.manifests import (
    IMAGE,
    OF_THE_IMAGE,
    ON_A_CLOUD,
    STORAGE_PATH,
    build,
    in_pods,
    render,
    render_as_given,
)

REPOSITORY = Path(__file__).parents[2]
MANIFESTS = REPOSITORY / "k8s"
PROFILES = sorted(path.stem for path in (MANIFESTS / "profiles").glob("*.yaml"))
GPU_PROFILES = [name for name in PROFILES if name != "kind"]
NODE_PROFILES = [name for name in PROFILES if name.endswith("-8gpu")]
SPOT_PROFILES = [name for name in PROFILES if name.endswith("-spot")]

VIEWER = "sunspot-viewer"

AZURE = "azure.workload.identity"

EXAMPLES = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs/profiles.md").read_text(), re.DOTALL)
"""Profiles in docs/profiles.md."""

POD_EXAMPLES = [text for text in EXAMPLES if "pod:" in text]
"""Profiles in docs/profiles.md that patch a pod."""

FULL = """
extends: gke-spot
namespace: vision
image: registry.example/sunspot:1.2
image_pull_policy: Always
image_pull_secrets: [registry]
service_account: trainer
env: {NCCL_DEBUG: WARN}
env_from_secrets: [bucket, tracking]
env_secrets: {HF_TOKEN: {secret: hub, key: token}}
priority_class: batch
labels: {team: vision}
annotations: {example.com/owner: me}
settings: {LOADER: ray, NUM_WORKERS: 4..16, EPOCHS: 5, AUDIT: true, TASK_ARGS: {width: 64}}
head: {memory: 16Gi, node_selector: {pool: cpu}, tolerations: [{key: dedicated, operator: Exists}]}
worker:
  gpus: 4
  cpu: 24
  memory: 96Gi
  placement: spread
  gpu_selector: {cloud.google.com/gke-accelerator: nvidia-l4}
  tolerations: [{key: dedicated, value: gpu, effect: NoSchedule}]
data_workers: {max: 6, cpu: 7500m, memory: 24Gi, node_selector: {pool: data}}
pre_running_deadline_s: 900
active_deadline_s: 86400
ttl_s: 30
backoff_limit: 5
"""
"""A custom profile with all the keys that no shipped profile has."""

OF_LOST_NODES = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for key in ("not-ready", "unreachable")
]
"""Every pod's tolerations for an unreachable node."""


def load(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(path.read_text())
    return manifest


def own_profile(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def cluster_of(rendered: Rendered) -> dict[str, Any]:
    cluster: dict[str, Any] = rendered.manifest["spec"]["rayClusterSpec"]
    return cluster


def groups_of(rendered: Rendered) -> list[dict[str, Any]]:
    """Return the groups of head pods, training pods and, if any, data pods."""
    return [cluster_of(rendered)["headGroupSpec"], *cluster_of(rendered)["workerGroupSpecs"]]


def pods_of(rendered: Rendered) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in groups_of(rendered)]


def settings_of_job(rendered: Rendered) -> Settings:
    """Return the settings that the job will read."""
    return load_search(settings_of(rendered.manifest)).settings


def variables_of(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in pod["containers"][0]["env"]}


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(SettingsError) as raised:
        render(*arguments, **options)
    return str(raised.value)


@pytest.fixture
def full(tmp_path: Path) -> Rendered:
    return render(own_profile(tmp_path, FULL), {})


# -------------------------------------------------------------------------------------------------- files in k8s/


def test_the_example_raycluster_matches_the_example_rayjob() -> None:
    assert load(MANIFESTS / "raycluster.yaml")["spec"] == load(MANIFESTS / "rayjob.yaml")["spec"]["rayClusterSpec"]


def test_manifests_use_the_ray_version_from_the_lock_file() -> None:
    locked = re.findall(r"^ray==([\d.]+)", (REPOSITORY / "requirements" / "train.txt").read_text(), re.MULTILINE)
    assert [load(MANIFESTS / "rayjob.yaml")["spec"]["rayClusterSpec"]["rayVersion"]] == locked


def test_the_kind_profile_renders_the_example_rayjob_unchanged() -> None:
    """The run's identity and the derived settings are ignored."""
    rendered = json.loads(json.dumps(render("kind", {}).manifest))
    lies = json.loads(json.dumps(load(MANIFESTS / "rayjob.yaml")))
    del rendered["metadata"]["annotations"]
    rendered["metadata"]["name"] = "mnist"
    for spec in (rendered["spec"], lies["spec"]):
        cluster = spec["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            group["template"]["metadata"]["labels"].pop("sunspot/run", None)
            pod = group["template"]["spec"]
            for constraint in pod.get("topologySpreadConstraints", ()):
                constraint["labelSelector"]["matchLabels"].pop("sunspot/run", None)
            container = pod["containers"][0]
            container["env"] = [entry for entry in container["env"] if not entry["name"].startswith("SUNSPOT_")]
    assert rendered == lies


def base_objects() -> list[dict[str, Any]]:
    folder = MANIFESTS / "base"
    listed = load(folder / "kustomization.yaml")["resources"]
    return [item for name in listed for item in yaml.safe_load_all((folder / name).read_text())]


def test_the_base_enforces_the_restricted_pod_security_standard() -> None:
    (namespace,) = [item for item in base_objects() if item["kind"] == "Namespace"]
    assert namespace["metadata"]["name"] == load(MANIFESTS / "base" / "kustomization.yaml")["namespace"] == "sunspot"
    for mode in ("enforce", "audit", "warn"):
        assert namespace["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] == "restricted"


def test_only_the_submitter_has_permissions() -> None:
    bindings = [item for item in base_objects() if item["kind"].endswith("Binding")]
    assert [subject["name"] for item in bindings for subject in item["subjects"]] == ["sunspot-submitter"]
    roles = {item["metadata"]["name"]: item["rules"] for item in base_objects() if item["kind"].endswith("Role")}
    assert set(roles) == {ROLE, VIEWER, *ROLES.values()}
    assert [item["roleRef"]["name"] for item in bindings] == [ROLE]
    assert POD_ROLE != ROLE, "permission to submit a run does not include killing pods"
    assert roles[POD_ROLE] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]}]
    assert roles["sunspot-dashboard"] == [
        {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["get", "create"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]},
    ]
    assert roles[ROLE] == [
        {
            "apiGroups": ["ray.io"],
            "resources": ["rayjobs"],
            "verbs": ["create", "get", "list", "patch", "delete"],
        },
        {"apiGroups": ["ray.io"], "resources": ["rayjobs/status"], "verbs": ["get"]},
        {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["resourcequotas", "limitranges"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["kube-root-ca.crt"], "verbs": ["get"]},
    ]
    assert {verb for rule in roles[VIEWER] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert not any("secrets" in rule["resources"] for rule in roles[VIEWER])
    accounts = [item for item in base_objects() if item["kind"] == "ServiceAccount"]
    assert not any(item["automountServiceAccountToken"] for item in accounts)
    assert {"sunspot-train", "sunspot-autoscaler"} <= {item["metadata"]["name"] for item in accounts}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_network_policies_and_the_disruption_budget_select_the_pods_of_a_run(profile: str) -> None:
    elastic = render(profile, in_pods(profile, "1..2"))
    head, workers = (
        {**group["template"]["metadata"]["labels"], "ray.io/node-type": kind}
        for group, kind in zip(groups_of(elastic), ("head", "worker"), strict=True)
    )
    selected: dict[str, set[str]] = {"head": set(), "workers": set()}
    for item in base_objects():
        if item["kind"] in ("NetworkPolicy", "PodDisruptionBudget"):
            wanted = (item["spec"].get("podSelector") or item["spec"]["selector"])["matchLabels"].items()
            for name, labels in (("head", head), ("workers", workers)):
                if wanted <= labels.items():
                    selected[name].add(item["metadata"]["name"])
    everyone = {"deny-by-default", "within-clusters", "to-dns", "to-storage", "to-tracking", "to-workload-identity"}
    assert selected["workers"] == everyone
    assert selected["head"] == everyone | {"from-operator", "autoscaler-to-api-server", "sunspot-head"}
    assert "sunspot/autoscaler" not in groups_of(render(profile, {}))[0]["template"]["metadata"]["labels"]


def egress(policy: str, base: list[dict[str, Any]]) -> list[dict[str, Any]]:
    [found] = [item for item in base if (item["kind"], item["metadata"]["name"]) == ("NetworkPolicy", policy)]
    return list(found["spec"]["egress"])


def ports_of(rule: dict[str, Any]) -> set[int]:
    return {port["port"] for port in rule["ports"]}


@pytest.mark.parametrize("server", ["169.254.169.254", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254"])
def test_pods_cannot_reach_the_metadata_server(server: str) -> None:
    """The metadata server gives out the node's identity on port 80, which is open for tracking servers."""
    _, http = egress("to-tracking", base_objects())
    assert ports_of(http) == {80}
    address = ipaddress.ip_address(server)
    blocks = [peer["ipBlock"] for peer in http["to"] if "ipBlock" in peer]
    inside = [block for block in blocks if address in ipaddress.ip_network(block["cidr"])]
    assert len(inside) == 1
    assert any(address in ipaddress.ip_network(part) for part in inside[0]["except"])


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kustomize_builds_the_base() -> None:
    built = build(MANIFESTS / "base")
    assert {item["metadata"].get("namespace", "sunspot") for item in built} == {"sunspot"}
    assert [ports_of(rule) for rule in egress("to-storage", built)] == [{443, 9000, 7070}]
    assert [ports_of(rule) for rule in egress("to-tracking", built)] == [{5000}, {80}]


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
@pytest.mark.parametrize("cloud", ["gke", "eks", "aks"])
def test_a_cloud_overlay_changes_only_workload_identity(cloud: str) -> None:
    def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        return {(item["kind"], item["metadata"]["name"]): item for item in objects}

    base, own = by_name(build(MANIFESTS / "base")), by_name(build(MANIFESTS / f"base-{cloud}"))
    assert set(own) == set(base)
    changed = {name: item for name, item in own.items() if item != base[name]}
    if cloud == "aks":
        assert set(changed) == {("ServiceAccount", f"sunspot-{name}") for name in ("train", "autoscaler")}
        assert all(list(item["metadata"]["annotations"]) == [f"{AZURE}/client-id"] for item in changed.values())
        return
    [(name, policy)] = changed.items()
    assert name == ("NetworkPolicy", "to-workload-identity")
    *same, added = policy["spec"]["egress"]
    assert same == base[name]["spec"]["egress"]
    address = {"gke": "169.254.169.254/32", "eks": "fd00:ec2::23/128"}[cloud]
    assert added == {"to": [{"ipBlock": {"cidr": address}}], "ports": [{"protocol": "TCP", "port": 80}]}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_the_component_that_isolates_runs_removes_only_one_network_policy(tmp_path: Path) -> None:
    names = {folder: os.path.relpath(MANIFESTS / folder, tmp_path) for folder in ("base-gke", "runs-apart")}
    text = f"resources: [{names['base-gke']}]\ncomponents: [{names['runs-apart']}]\n"
    (tmp_path / "kustomization.yaml").write_text(text)
    apart = build(tmp_path)
    left_out = [item["metadata"]["name"] for item in build(MANIFESTS / "base-gke") if item not in apart]
    assert left_out == ["within-clusters"]


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_an_additional_port_can_be_patched_into_the_base(tmp_path: Path) -> None:
    """The patch is the example in docs/cluster.md."""
    [example] = re.findall(r"```yaml\n(resources: .*?)```", (REPOSITORY / "docs/cluster.md").read_text(), re.DOTALL)
    base = os.path.relpath(MANIFESTS / "base", tmp_path)  # kustomize takes no absolute path
    (tmp_path / "kustomization.yaml").write_text(example.replace("../k8s/base", base))
    patched = build(tmp_path)
    assert [ports_of(rule) for rule in egress("to-storage", patched)] == [{443, 9000, 7070, 8333}]
    assert egress("to-tracking", patched) == egress("to-tracking", base_objects())


# -------------------------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("profile", PROFILES)
def test_rendered_manifests_match_the_golden_files(profile: str) -> None:
    path = GOLDEN / f"{profile}.yaml"
    text = render(profile, {}).to_yaml()
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_rendering_is_deterministic_across_processes() -> None:
    settings = {"SUNSPOT_EPOCHS": "3", "SUNSPOT_NUM_WORKERS": "2..4", "SUNSPOT_SEED": "7", "SUNSPOT_AUDIT": "true"}
    texts = set()
    for order, seed in ((1, "1"), (-1, "2")):
        environment = {**dict(list(settings.items())[::order]), "PYTHONHASHSEED": seed, "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [sys.executable, "-m", "sunspot.cli", "render", "--profile", "gke-spot", *ON_A_CLOUD],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        texts.add(done.stdout)
    assert texts == {render("gke-spot", {name.removeprefix("SUNSPOT_"): v for name, v in settings.items()}).to_yaml()}


def test_options_override_the_environment_which_overrides_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = own_profile(tmp_path, "settings: {EPOCHS: 1, SEED: 1, max_steps: 1, SUNSPOT_AUDIT: true}")
    monkeypatch.setenv("SUNSPOT_SEED", "2")
    monkeypatch.setenv("SUNSPOT_MAX_STEPS", "2")
    monkeypatch.setenv("SUNSPOT_AUDIT", "")
    rendered = render(profile, {"SUNSPOT_MAX_STEPS": "3", "dataset": "mnist"})
    settings = settings_of_job(rendered)
    assert (settings.epochs, settings.seed, settings.max_steps, settings.dataset) == (1, 2, 3, "mnist")
    assert settings.audit
    sources = {value.name: value.source for value in rendered.derived}
    assert sources["SUNSPOT_EPOCHS"] == f"profile {profile}"
    assert (sources["SUNSPOT_SEED"], sources["SUNSPOT_MAX_STEPS"]) == ("the environment", "given")


def test_the_manifest_contains_only_given_and_derived_settings() -> None:
    """Other settings would override the image's defaults, such as its own task."""
    names = set(settings_of(render("kind", {}).manifest))
    of_every_job = {"STORAGE_PATH", "DATA_ROOT", "MAX_DRIVER_STARTS", "NOTICE_S"}
    chosen = {"RUN_NAME", "NUM_WORKERS", "USE_GPU", "RESOURCES_PER_WORKER", "JOB_ID"}
    assert names == {f"SUNSPOT_{name}" for name in of_every_job | chosen}
    assert "SUNSPOT_DATA_ROOT" not in settings_of(render("kind", {"DATA_ROOT": ""}).manifest)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_job_reads_back_the_rendered_settings(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(profile, {"TASK_ARGS": '{"a": "$(HOME) $$ ${X} é\\n"}', "LEARNING_RATE": "1e-5"})
    assert rendered.settings.task_args == {"a": "$(HOME) $$ ${X} é\n"}
    assert settings_of_job(rendered).job.job_id == rendered.name
    live = yaml.safe_load(rendered.to_yaml())
    environment = settings_of_job(rendered).environment()
    assert settings_of(live).items() <= environment.items()
    for pod in pods_of(rendered):
        escaped = variables_of(pod)["SUNSPOT_TASK_ARGS"]
        assert re.sub(r"\$\$", "$", escaped) == environment["SUNSPOT_TASK_ARGS"]
        assert not re.search(r"(?<!\$)(\$\$)*\$\(", escaped)  # Kubernetes would expand an unescaped $


# ---------------------------------------------------------------------------------------------------------------- name


def test_the_job_name_contains_the_run_and_a_hash_of_all_inputs(tmp_path: Path) -> None:
    longest = "a" * 38
    first = render("gke-spot", {"RUN_NAME": longest})
    assert re.fullmatch(rf"{longest}-[0-9a-f]{{8}}", first.name)
    assert len(first.name) == 47
    assert first.name == render("gke-spot", {"RUN_NAME": longest}).name
    variants = [
        render("gke-spot", {}),
        render("gke-spot", {}, generation=2),
        render("gke-spot", {}, image="registry.example/sunspot:2"),
        render("gke-spot", {}, namespace="other"),
        render("gke-spot", {}, queue="gpus"),
        render("gke-spot", {}, cluster="sunspot"),
        render("gke-spot", {"EPOCHS": "9"}),
        render("aks-spot", {}),
        render(own_profile(tmp_path, "extends: gke-spot\nlabels: {team: vision}"), {}),
    ]
    assert len({variant.name for variant in variants}) == len(variants)


def test_the_job_name_does_not_depend_on_how_values_are_spelled(tmp_path: Path) -> None:
    by_path = render(own_profile(tmp_path, "extends: gke-spot\nnotice_s: 15"), {"LEARNING_RATE": "0.0010"})
    by_name = render("gke-spot", {"LEARNING_RATE": "1e-3"})
    assert by_path.name == by_name.name
    assert by_path.derived != by_name.derived


def test_annotations_record_the_generation_and_derived_values() -> None:
    rendered = render("gke-spot", {"NUM_WORKERS": "2..8"}, generation=3)
    annotations = rendered.manifest["metadata"]["annotations"]
    assert annotations["sunspot/generation"] == "3"
    derived = json.loads(annotations["sunspot/derived"])
    assert derived["training pods"] == "2..8"
    assert derived == {value.name: value.value for value in rendered.derived}
    assert "generateName" not in rendered.manifest["metadata"]


# --------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("workers", ["2", "1..2"])
@pytest.mark.parametrize("profile", PROFILES)
def test_every_container_meets_the_restricted_standard(profile: str, workers: str) -> None:
    check_restricted(render(profile, in_pods(profile, workers)))


def test_containers_of_a_full_profile_meet_the_restricted_standard(full: Rendered) -> None:
    check_restricted(full)
    assert len(pods_of(full)) == 3


def empty_volumes(pod: dict[str, Any]) -> dict[str, Any]:
    """Return a pod's `emptyDir` volumes keyed by name."""
    return {volume["name"]: volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume}


def test_pods_know_their_namespace_and_cluster_without_a_token() -> None:
    """A manifest is the same in all clusters, but its RayJob is a different owner in each."""
    for pod in pods_of(render("kind", {})):
        [container] = pod["containers"]
        [namespace] = [entry for entry in container["env"] if entry["name"] == POD_NAMESPACE]
        assert namespace["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
        [volume] = [volume for volume in pod["volumes"] if "configMap" in volume]
        [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
        [item] = volume["configMap"]["items"]
        assert f"{mount['mountPath']}/{item['path']}" == str(CERTIFICATES)
        assert (volume["configMap"]["name"], volume["configMap"]["optional"]) == ("kube-root-ca.crt", True)
        assert pod["automountServiceAccountToken"] is False


def check_restricted(rendered: Rendered) -> None:
    cluster = cluster_of(rendered)
    contexts = [container["securityContext"] for pod in pods_of(rendered) for container in pod["containers"]]
    if "autoscalerOptions" in cluster:
        contexts.append(cluster["autoscalerOptions"]["securityContext"])
    for context in contexts:
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
    head, *others = pods_of(rendered)
    for pod in (head, *others):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert (context.get("runAsUser"), context.get("fsGroup")) in (
            (1000, 1000),
            (None, None),
        )  # None if the namespace assigns it
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["enableServiceLinks"] is False
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        autoscaled = pod is head and "autoscalerOptions" in cluster
        assert kinds == {"emptyDir", "configMap"} | ({"projected"} if autoscaled else set())
        mounts = {mount["mountPath"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounts == {"/tmp", "/dev/shm", "/etc/sunspot"}
    assert not any(pod["automountServiceAccountToken"] for pod in (head, *others))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_rendered_job_has_the_fields_that_a_run_needs(profile: str) -> None:
    rendered = render(profile, {})
    spec = rendered.manifest["spec"]
    assert spec["submissionMode"] == "HTTPMode"
    assert spec["entrypoint"] == "python -m sunspot.train"
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] == 60
    assert spec["backoffLimit"] == 2
    assert 0 < spec["preRunningDeadlineSeconds"] <= 1800
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert not {"activeDeadlineSeconds", "deletionStrategy", "submitterPodTemplate", "suspend"} & set(spec)

    head, workers = groups_of(rendered)
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0", "metrics-export-port": "8080"}
    assert head["template"]["metadata"]["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    for pod in pods_of(rendered):
        resources = pod["containers"][0]["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert resources["requests"]["ephemeral-storage"] == resources["limits"]["ephemeral-storage"]
        assert "cpu" not in resources["limits"]
        check_volumes(pod)
        variables = variables_of(pod)
        assert variables["RAY_TRAIN_ENABLE_STATE_TRACKING"] == "1"
        assert variables["RAY_USAGE_STATS_ENABLED"] == "0", "nothing was asked"
        assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= 30
        assert pod["serviceAccountName"] == "sunspot-train"
        secrets = (
            []
            if profile != "on-demand" and load_profile(profile, {}).cloud
            else [{"secretRef": {"name": "sunspot-storage"}}]
        )
        assert pod["containers"][0]["envFrom"] == secrets
    assert not any("gpu" in name for name in pods_of(rendered)[0]["containers"][0]["resources"]["limits"])
    assert (workers["groupName"], workers["replicas"]) == ("workers", 1 if profile in NODE_PROFILES else 2)


def check_volumes(pod: dict[str, Any]) -> None:
    """Check volume sizes. /dev/shm counts against the container's memory limit, and /tmp against its disk limit."""
    limits = pod["containers"][0]["resources"]["limits"]
    volumes = empty_volumes(pod)
    assert volumes["shared-mem"] == {"medium": "Memory", "sizeLimit": limits["memory"]}
    assert volumes["tmp"] == {"sizeLimit": limits["ephemeral-storage"]}


def test_a_cache_gets_a_volume_on_the_pods_that_read_rows(tmp_path: Path) -> None:
    mine = own_profile(
        tmp_path,
        "extends: gke-spot\n"
        "worker: {data_cache: 200Gi, ephemeral_storage: 10Gi}\n"
        "data_workers: {cpu: 8, memory: 24Gi, max: 2, ephemeral_storage: 10Gi}",
    )
    rendered = render(mine, {"LOADER": "ray", "DATA_CACHE_GB": "5"})
    head, workers, data = pods_of(rendered)
    resources = workers["containers"][0]["resources"]
    assert resources["requests"]["ephemeral-storage"] == resources["limits"]["ephemeral-storage"] == "220Gi"
    assert empty_volumes(workers)["data-cache"] == {"sizeLimit": "210Gi"}
    assert empty_volumes(workers)["tmp"] == {"sizeLimit": "10Gi"}
    assert {"name": "data-cache", "mountPath": "/data-cache"} in workers["containers"][0]["volumeMounts"]
    assert variables_of(workers)["SUNSPOT_DATA_CACHE"] == "/data-cache"
    assert float(variables_of(workers)["SUNSPOT_DATA_CACHE_GB"]) * 1e9 == pytest.approx(200 * 2**30, rel=1e-5)
    names = [entry["name"] for entry in workers["containers"][0]["env"]]
    assert len(names) == len(set(names)), "a setting of the run is replaced, not repeated"
    for pod in (head, data):
        check_volumes(pod)
        assert "SUNSPOT_DATA_CACHE" not in variables_of(pod)
    why = {value.name: value.source for value in rendered.derived}
    assert why["training pod's ephemeral-storage"] == f"profile {mine}, plus data_cache=200Gi"


def test_volume_sizes_match_the_limits_of_a_custom_profile(full: Rendered) -> None:
    assert [pod["containers"][0]["resources"]["limits"]["memory"] for pod in pods_of(full)] == ["16Gi", "96Gi", "24Gi"]
    for pod in pods_of(full):
        check_volumes(pod)


@pytest.mark.parametrize("profile", PROFILES)
def test_ray_detects_a_lost_node_before_connections_to_it_time_out(profile: str) -> None:
    """The head checks its nodes, and each node checks that the head still knows it."""
    for pod in pods_of(render(profile, {})):
        ray = {name: int(value) for name, value in variables_of(pod).items() if re.match("RAY_[a-z]", name)}
        period, timeout = ray["RAY_health_check_period_ms"], ray["RAY_health_check_timeout_ms"]
        found_ms = ray["RAY_health_check_failure_threshold"] * (period + timeout)
        assert found_ms == 12_000
        assert found_ms < ray["RAY_grpc_client_keepalive_timeout_ms"] <= 20_000
        assert ray["RAY_raylet_liveness_self_check_interval_ms"] <= 5_000


@pytest.mark.parametrize("profile", PROFILES)
def test_the_drain_ends_before_the_node_is_removed(profile: str) -> None:
    notice = load_profile(profile, {}).notice_s
    assert notice is not None
    for pod in pods_of(render(profile, {})):
        check_drain(pod, notice)


@pytest.mark.parametrize("notice", [5, 6, 15, 19, 20, 21, 30, 120, 3600])
def test_the_drain_takes_only_part_of_the_notice_period(tmp_path: Path, notice: int) -> None:
    for pod in pods_of(render(own_profile(tmp_path, f"notice_s: {notice}"), {})):
        check_drain(pod, notice)


def check_drain(pod: dict[str, Any], notice: int) -> None:
    drain = int(variables_of(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert pod["terminationGracePeriodSeconds"] == notice
    assert float(variables_of(pod)["SUNSPOT_NOTICE_S"]) == drain
    assert 0 < drain <= notice - 2
    assert drain <= notice * 0.9
    assert drain >= notice * 0.6


def test_the_run_uses_a_drain_timeout_set_in_the_profile(tmp_path: Path) -> None:
    profile = own_profile(tmp_path, "notice_s: 30\nenv: {RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S: '20'}")
    rendered = render(profile, {})
    assert settings_of_job(rendered).job.notice_s == 20
    assert {variables_of(pod)["SUNSPOT_NOTICE_S"] for pod in pods_of(rendered)} == {"20"}


@pytest.mark.parametrize("drain", ["9999", "30", "28s", ""])
def test_a_drain_longer_than_the_grace_period_is_rejected(drain: str, tmp_path: Path) -> None:
    """Otherwise, workers would rely on time that they do not have."""
    for notice in ("notice_s: 30", "namespace: sunspot"):  # the second uses the notice of k8s/rayjob.yaml
        profile = own_profile(tmp_path, f"{notice}\nenv: {{RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S: '{drain}'}}")
        assert re.search(f"DRAIN_TIMEOUT_S={drain} .*below 30, .*set notice_s", refusal(profile, {}))


def test_spot_profiles_have_the_preemption_notice_of_their_cloud() -> None:
    notices = {name: load_profile(name, {}).notice_s for name in SPOT_PROFILES}
    assert notices == {"aks-spot": 10, "eks-spot": 100, "gke-spot": 15, "karpenter-spot": 100}


@pytest.mark.parametrize("profile", SPOT_PROFILES)
def test_workers_run_on_spot_nodes_and_the_head_does_not(profile: str) -> None:
    spot = load_profile(profile, {}).spot
    assert spot
    head, workers = pods_of(render(profile, {}))
    assert workers["nodeSelector"] == {spot.label: spot.value, **OF_THE_IMAGE}
    assert head["nodeSelector"] == OF_THE_IMAGE
    assert {"key": spot.label, "operator": "Exists"} in workers["tolerations"]
    required = head["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    expressions = [term["matchExpressions"] for term in required["nodeSelectorTerms"]]
    assert expressions == [[{"key": spot.label, "operator": "NotIn", "values": [spot.value]}]]
    assert head["tolerations"] == OF_LOST_NODES


@pytest.mark.parametrize("profile", PROFILES)
def test_pods_on_an_unreachable_node_are_evicted_promptly(profile: str) -> None:
    for pod in pods_of(render(profile, {})):
        assert pod["tolerations"][:2] == OF_LOST_NODES


def test_the_head_can_have_its_own_image(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: kind\nimage: sunspot:1\nhead: {image: 'sunspot-head:1'}\n")
    rendered = render(str(profile), {})
    assert [pod["containers"][0]["image"] for pod in pods_of(rendered)] == ["sunspot-head:1", "sunspot:1"]
    assert [value.value for value in rendered.derived if "image" in value.name] == ["sunspot:1", "sunspot-head:1"]
    with pytest.raises(SettingsError, match="image sunspot:2: the head would keep"):
        render(str(profile), {}, image="sunspot:2")


def test_the_head_can_be_evictable(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: kind\nannotations: {example.com/owner: me}\nhead: {evictable: true}\n")
    head, workers = (group["template"]["metadata"] for group in groups_of(render(str(profile), {})))
    assert head["annotations"] == {"example.com/owner": "me"}
    [budget] = read_documents(MANIFESTS / "base" / "disruption.yaml")
    selector = budget["spec"]["selector"]
    [expression] = selector["matchExpressions"]
    assert expression == {"key": "sunspot/evictable", "operator": "DoesNotExist"}
    assert head["labels"]["sunspot/evictable"] == "true"
    assert "sunspot/evictable" not in workers["labels"]
    profile.write_text("extends: kind\nhead: {evictable: false}\n")
    head, _ = (group["template"]["metadata"] for group in groups_of(render(str(profile), {})))
    assert head["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    assert "sunspot/evictable" not in head["labels"]


@pytest.mark.parametrize("profile", sorted(set(GPU_PROFILES) - set(NODE_PROFILES)))
def test_each_gpu_gets_one_worker(profile: str) -> None:
    rendered = render(profile, {"NUM_WORKERS": "3"})
    _, group = groups_of(rendered)
    pod = group["template"]["spec"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (3, 3, 3)
    assert group["resources"] == {"CPU": "6", "GPU": "1", "training-worker": "1"}
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in pod["tolerations"]
    assert settings_of_job(rendered).use_gpu == "true"
    assert settings_of_job(rendered).resources_per_worker == {"CPU": 6, "GPU": 1, "training-worker": 1}
    reading = render(profile, {"LOADER": "ray"})
    assert settings_of_job(reading).resources_per_worker == {"CPU": 5, "GPU": 1, "training-worker": 1}
    without = render(profile, {"USE_GPU": "false"})
    assert "gpu" not in json.dumps(groups_of(without)[1]["template"])
    assert settings_of_job(without).resources_per_worker == {"CPU": 6, "training-worker": 1}


@pytest.mark.parametrize("profile", NODE_PROFILES)
def test_a_pod_can_use_all_gpus_of_a_node(profile: str) -> None:
    node = {"gke": (208, 1743, 0), "eks": (192, 2048, 0), "aks": (96, 1900, 0)}[profile[:3]]
    rendered = render(profile, {"NUM_WORKERS": "16"})
    head, group = groups_of(rendered)
    assert (group["replicas"], group["resources"]["GPU"], group["resources"]["training-worker"]) == (2, "8", "8")
    pod = group["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    asked = {name: parse_quantity(amount) for name, amount in resources["requests"].items()}
    assert node[0] * 0.85 <= asked["cpu"] <= node[0] - 4, "nearly the whole node, minus what Kubernetes and daemons use"
    assert node[1] * 0.75 <= asked["memory"] / 2**30 <= node[1] * 0.92
    assert asked["ephemeral-storage"] >= 80 * 2**30
    assert resources["limits"]["nvidia.com/gpu"] == "8"
    volumes = {name: volume["sizeLimit"] for name, volume in empty_volumes(pod).items()}
    assert volumes["shared-mem"] == resources["limits"]["memory"] == "1600Gi"
    assert settings_of_job(rendered).resources_per_worker == {
        "CPU": asked["cpu"] // 8,
        "GPU": 1,
        "training-worker": 1,
    }
    why = {value.name: value.source for value in rendered.derived}
    assert why["training pod's memory"] == f"profile {profile}: 200Gi per GPU, for 8 GPUs"
    assert head["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"] == "8Gi"


@pytest.mark.parametrize(
    ("workers", "degree", "pods", "said"),
    [
        ("32", "", (4, 4), "4 nodes of 8 workers: 4 replicas of 8"),
        ("8..32", "", (1, 4), "1..4 nodes of 8 workers: 1..4 replicas of 8"),
        ("16..32", "16", (2, 4), "2..4 nodes of 8 workers: 1..2 replicas of 16"),
        ("8", "4", (1, 1), "1 node of 8 workers: 2 replicas of 4"),
    ],
)
def test_replicas_of_the_model_fill_whole_nodes(workers: str, degree: str, pods: tuple[int, int], said: str) -> None:
    given = {"NUM_WORKERS": workers, "PARALLEL": "hsdp", "SHARD_DEGREE": degree}
    rendered = render("gke-a3-8gpu", given)
    _, group = groups_of(rendered)
    assert (group["minReplicas"], group["maxReplicas"]) == pods
    assert settings_of_job(rendered).shard_degree == int(degree or 8)
    explained = {value.name: (value.value, value.source) for value in rendered.derived}
    assert explained["replicas of the model"] == (said, "SUNSPOT_SHARD_DEGREE workers hold one replica")
    assert explained["SUNSPOT_SHARD_DEGREE"][1] == (
        "given" if degree else "the number of workers in a pod, which has all GPUs of a node"
    )


def test_workers_that_cannot_form_whole_replicas_are_refused_before_the_job_is_submitted(tmp_path: Path) -> None:
    hsdp = {"PARALLEL": "hsdp"}
    one = refusal("gke-spot", {**hsdp, "NUM_WORKERS": "4"})
    assert (
        "PARALLEL=hsdp: each node has room for 1 worker, so each worker would hold the whole model; set SUNSPOT_S"
        in one
    )
    assert "NUM_WORKERS=12 does not fill whole pods" in refusal("gke-a3-8gpu", {**hsdp, "NUM_WORKERS": "12"})
    split = refusal("gke-a3-8gpu", {**hsdp, "NUM_WORKERS": "8..32", "SHARD_DEGREE": "16"})
    assert "NUM_WORKERS=8..32: SUNSPOT_SHARD_DEGREE=16, and each replica of the model needs 16; use multiples" in split
    spread = render("gke-spot", {**hsdp, "NUM_WORKERS": "4", "SHARD_DEGREE": "2"})
    assert "4 nodes of 1 worker: 2 replicas of 2" in [value.value for value in spread.derived]


def test_pod_sizes_grow_with_gpus_and_workers(tmp_path: Path) -> None:
    mine = own_profile(tmp_path, "extends: gke-spot\nworker: {gpus: 8, memory: 100Gi, per_gpu: {cpu: 7500m}}")
    rendered = render(mine, {"NUM_WORKERS": "16..512"})
    head, workers = (pod["containers"][0]["resources"]["requests"] for pod in pods_of(rendered))
    assert (workers["cpu"], workers["memory"], workers["ephemeral-storage"]) == ("60", "100Gi", "80Gi")
    assert (head["cpu"], head["memory"], head["ephemeral-storage"]) == ("11920m", "39Gi", "10Gi")
    why = {value.name: value.source for value in rendered.derived}
    assert why["training pod's cpu"] == f"profile {mine}: 7500m per GPU, for 8 GPUs"
    assert why["training pod's memory"] == f"profile {mine}"
    assert why["training pod's ephemeral-storage"] == "profile on-demand: 10Gi per GPU, for 8 GPUs"
    assert why["head's memory"] == "head.per_worker for each of the 512 workers beyond 16"
    on_cpus = render(mine, {"NUM_WORKERS": "2", "USE_GPU": "false"})
    assert pods_of(on_cpus)[1]["containers"][0]["resources"]["requests"]["cpu"] == "60"
    own_profile(tmp_path, "extends: gke-spot\nhead: {per_worker: null}\nworker: {per_gpu: null}")
    plain = [pod["containers"][0]["resources"]["requests"] for pod in pods_of(render(mine, {"NUM_WORKERS": "99"}))]
    assert [(each["cpu"], each["memory"]) for each in plain] == [("2", "8Gi"), ("500m", "3Gi")]


def test_the_namespace_can_assign_user_ids_and_pods_can_have_a_cpu_limit(tmp_path: Path) -> None:
    text = "extends: kind\nassigned_ids: true\nhead: {cpu_limit: 2}\nworker: {cpu_limit: 500m}"
    rendered = render(own_profile(tmp_path, text), {"NUM_WORKERS": "1..2"})
    check_restricted(rendered)
    for pod, limit in zip(pods_of(rendered), ("2", "500m"), strict=True):
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert pod["containers"][0]["resources"]["limits"]["cpu"] == limit
    assert cluster_of(rendered)["autoscalerOptions"]["resources"]["limits"]["cpu"] == "1"
    plain = cluster_of(render("kind", {"NUM_WORKERS": "1..2"}))
    assert plain["autoscalerOptions"]["resources"]["limits"] == {"memory": "512Mi"}, (
        "an earlier profile leaves no trace"
    )


def test_a_pod_can_request_gpu_partitions_or_claims(tmp_path: Path) -> None:
    part = pods_of(
        render(own_profile(tmp_path, "extends: gke-spot\nworker: {gpu_resource: nvidia.com/mig-1g.10gb}"), {})
    )
    assert part[1]["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == "1"
    for key in ("nvidia.com/mig-1g.10gb", "nvidia.com/gpu"):
        assert {"key": key, "operator": "Exists"} in part[1]["tolerations"]
    text = "extends: on-demand\nworker: {gpus: 4, gpu_claim: four}"
    rendered = render(own_profile(tmp_path, text), {"NUM_WORKERS": "4"})
    pod = pods_of(rendered)[1]
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "four"}]
    resources = pod["containers"][0]["resources"]
    assert resources["claims"] == [{"name": "gpus"}]
    assert not any("gpu" in name for kind in ("requests", "limits") for name in resources[kind])
    assert groups_of(rendered)[1]["resources"] == {"CPU": "24", "GPU": "4", "training-worker": "4"}


def test_an_elastic_run_starts_with_its_minimum_and_has_an_autoscaler() -> None:
    rendered = render("gke-spot", {"NUM_WORKERS": "2..8"})
    cluster, (_, group) = cluster_of(rendered), groups_of(rendered)
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 2, 8)
    assert cluster["enableInTreeAutoscaling"] is True
    options = cluster["autoscalerOptions"]
    assert options["version"] == "v2"
    assert options["resources"]["requests"]["memory"] == options["resources"]["limits"]["memory"]
    head, workers = pods_of(rendered)
    assert (head["serviceAccountName"], workers["serviceAccountName"]) == ("sunspot-autoscaler", "sunspot-train")
    fixed = cluster_of(render("gke-spot", {"NUM_WORKERS": "2"}))
    assert not {"enableInTreeAutoscaling", "autoscalerOptions"} & set(fixed)


def test_only_the_autoscaler_container_gets_a_kubernetes_token() -> None:
    rendered = render("gke-spot", {"NUM_WORKERS": "2..8"})
    head, workers = pods_of(rendered)
    [token] = [volume for volume in head["volumes"] if "projected" in volume]
    paths = {(*source, *_paths(source)) for source in token["projected"]["sources"]}
    assert paths == {("serviceAccountToken", "token"), ("configMap", "ca.crt"), ("downwardAPI", "namespace")}
    mounts = cluster_of(rendered)["autoscalerOptions"]["volumeMounts"]
    where = {mount["mountPath"] for mount in mounts if mount["name"] == token["name"]}
    assert where == {"/var/run/secrets/kubernetes.io/serviceaccount"}, "Ray's autoscaler reads it there"
    for pod in (head, workers):
        assert pod["automountServiceAccountToken"] is False
        [container] = pod["containers"]
        assert token["name"] not in {mount["name"] for mount in container["volumeMounts"]}, (
            "the user's code runs in this container"
        )


def _paths(source: dict[str, Any]) -> list[str]:
    """Return the files in one source of a projected volume."""
    return [item["path"] for part in source.values() for item in part.get("items", [part])]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_placement_of_a_profile_sets_topology_spread_or_affinity(profile: str) -> None:
    rendered = render(profile, {"RUN_NAME": "mine"})
    pod = pods_of(rendered)[1]
    selector = {
        "matchLabels": {"app.kubernetes.io/part-of": "sunspot", "ray.io/group": "workers", "sunspot/run": "mine"}
    }
    if profile == "kind":
        (constraint,) = pod["topologySpreadConstraints"]
        assert (constraint["topologyKey"], constraint["whenUnsatisfiable"]) == (
            "kubernetes.io/hostname",
            "ScheduleAnyway",
        )
        assert constraint["labelSelector"] == selector
        assert "affinity" not in pod
    else:
        (preferred,) = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert preferred["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
        assert preferred["podAffinityTerm"]["labelSelector"] == selector
        assert "topologySpreadConstraints" not in pod
    assert any(value.name == "placement" and ": " in value.source for value in rendered.derived)


def test_zone_placement_requires_all_pods_to_be_in_one_zone(tmp_path: Path) -> None:
    rendered = render(own_profile(tmp_path, "extends: gke-spot\nworker: {placement: zone}"), {"RUN_NAME": "mine"})
    [head, pod] = pods_of(rendered)
    assert list(pod["affinity"]["podAffinity"]) == ["requiredDuringSchedulingIgnoredDuringExecution"]
    (near,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near["topologyKey"] == "topology.kubernetes.io/zone"
    labels = groups_of(rendered)[1]["template"]["metadata"]["labels"] | {"ray.io/group": "workers"}  # as KubeRay adds
    assert near["labelSelector"]["matchLabels"].items() <= labels.items(), (
        "otherwise, the first pod could never be placed"
    )
    assert "podAffinity" not in head["affinity"]
    assert "topologySpreadConstraints" not in pod


def test_a_label_in_the_profile_requests_gang_scheduling(tmp_path: Path) -> None:
    """The operator copies the label from the RayJob to the RayCluster."""
    [example] = [text for text in EXAMPLES if "gang" in text]
    rendered = render(own_profile(tmp_path, example), {})
    assert rendered.manifest["metadata"]["labels"]["ray.io/gang-scheduling-enabled"] == "true"
    [workers] = cluster_of(rendered)["workerGroupSpecs"]
    assert workers["replicas"] == 4, "the operator counts these"


def test_every_key_of_a_custom_profile_reaches_the_manifest(full: Rendered) -> None:
    manifest = full.manifest
    assert full.namespace == manifest["metadata"]["namespace"] == "vision"
    assert manifest["metadata"]["labels"]["team"] == "vision"
    spec = manifest["spec"]
    assert (spec["preRunningDeadlineSeconds"], spec["activeDeadlineSeconds"]) == (900, 86400)
    assert (spec["ttlSecondsAfterFinished"], spec["backoffLimit"]) == (30, 5)
    for group, pod in zip(groups_of(full), pods_of(full), strict=True):
        container = pod["containers"][0]
        assert (container["image"], container["imagePullPolicy"]) == ("registry.example/sunspot:1.2", "Always")
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("trainer", "batch")
        assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}, {"secretRef": {"name": "tracking"}}]
        assert {"name": "NCCL_DEBUG", "value": "WARN"} in container["env"]
        token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
        assert token in container["env"]
        assert group["template"]["metadata"]["labels"]["team"] == "vision"
        assert group["template"]["metadata"]["annotations"]["example.com/owner"] == "me"
    head, workers, data = pods_of(full)
    assert head["nodeSelector"] == {"pool": "cpu", **OF_THE_IMAGE}
    assert head["tolerations"] == [*OF_LOST_NODES, {"key": "dedicated", "operator": "Exists"}]
    assert head["containers"][0]["resources"]["limits"]["memory"] == "16Gi"
    assert workers["nodeSelector"] == {
        "cloud.google.com/gke-spot": "true",
        **OF_THE_IMAGE,
        "cloud.google.com/gke-accelerator": "nvidia-l4",
    }
    assert {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"} in workers["tolerations"]
    assert data["nodeSelector"] == {"cloud.google.com/gke-spot": "true", "pool": "data"}
    assert full.settings.task_args == {"width": 64}


def test_a_pod_can_have_several_gpus(full: Rendered) -> None:
    _, workers, _ = groups_of(full)
    assert (workers["minReplicas"], workers["replicas"], workers["maxReplicas"]) == (1, 1, 4)
    assert workers["resources"] == {"CPU": "24", "GPU": "4", "training-worker": "4"}
    assert settings_of_job(full).resources_per_worker == {"CPU": 4, "GPU": 1, "training-worker": 1}
    assert str(full.settings.num_workers) == "4..16"


def test_data_workers_form_a_worker_group_without_gpus(full: Rendered, tmp_path: Path) -> None:
    _, workers, data = groups_of(full)
    assert (workers["groupName"], data["groupName"]) == ("workers", "data")
    assert (data["minReplicas"], data["replicas"], data["maxReplicas"]) == (0, 0, 6)
    assert data["resources"] == {"CPU": "7", "GPU": "0"}
    assert "gpu" not in json.dumps(data["template"]["spec"]["containers"][0]["resources"])
    assert "gpu" not in json.dumps(data["template"]["spec"]["tolerations"]).replace("gke-spot", "")
    profile = tmp_path / "mine.yaml"
    fixed = render(str(profile), {"NUM_WORKERS": "4"})
    assert cluster_of(fixed)["enableInTreeAutoscaling"] is True  # the group itself may grow
    assert len(groups_of(render(str(profile), {"LOADER": "torch"}))) == 2


def test_workload_identity_replaces_a_secret(tmp_path: Path) -> None:
    rendered = render(own_profile(tmp_path, "extends: eks-spot\nenv_from_secrets: []\nservice_account: me"), {})
    assert all(pod["serviceAccountName"] == "me" for pod in pods_of(rendered))
    assert all(pod["containers"][0]["envFrom"] == [] for pod in pods_of(rendered))


@pytest.mark.parametrize("example", [text for text in EXAMPLES if text not in POD_EXAMPLES])
def test_documented_profiles_meet_the_restricted_standard(example: str, tmp_path: Path) -> None:
    check_restricted(render(own_profile(tmp_path, example), {}))


@pytest.mark.parametrize("example", POD_EXAMPLES)
def test_pod_patch_examples_only_add_fields(example: str, tmp_path: Path) -> None:
    """The pod has all fields of the example, and all fields that it had before."""
    profile = yaml.safe_load(example)
    rendered, before = render(own_profile(tmp_path, example), {}), render(profile["extends"], {})
    assert rendered.name != before.name
    for number, group in enumerate(("head", "worker")):
        template = groups_of(rendered)[number]["template"]
        assert lost(groups_of(before)[number]["template"], template) == []
        assert lost(profile.get(group, {}).get("pod", {}), template) == []


@pytest.mark.parametrize("example", [text for text in EXAMPLES if "rayjob:" in text])
@pytest.mark.parametrize("workers", ["2", "2..4"])
def test_rayjob_patch_examples_only_add_fields(example: str, workers: str, tmp_path: Path) -> None:
    profile = yaml.safe_load(example)
    rendered = render(own_profile(tmp_path, example), {"NUM_WORKERS": workers})
    before = render(own_profile(tmp_path, yaml.safe_dump({**profile, "rayjob": {}})), {"NUM_WORKERS": workers})
    assert rendered.name != before.name
    changed = {"metadata": {**before.manifest["metadata"], "name": rendered.name}, "spec": before.manifest["spec"]}
    assert lost(changed, rendered.manifest) == []
    patch = profile["rayjob"]
    if workers == "2":
        patch["spec"]["rayClusterSpec"].pop("autoscalerOptions", None)
    assert lost(patch, rendered.manifest) == []
    assert ("autoscalerOptions" in cluster_of(rendered)) is (workers != "2")


def test_objects_referenced_by_a_rayjob_patch_are_found(tmp_path: Path) -> None:
    text = """
extends: kind
rayjob:
  metadata: {annotations: {example.com/owner: me}}
  spec:
    rayClusterSpec:
      authOptions: {secretName: mine}
      gcsFaultToleranceOptions:
        redisAddress: redis:6379
        redisPassword: {valueFrom: {secretKeyRef: {name: redis, key: password}}}
      autoscalerOptions: {env: [{name: A, valueFrom: {secretKeyRef: {name: autoscaler, key: a}}}]}
      workerGroupSpecs: [{groupName: workers, labels: {rack: a}}]
"""
    rendered = render(own_profile(tmp_path, text), {"NUM_WORKERS": "1..2"})
    assert {("Secret", name) for name in ("mine", "redis", "autoscaler")} <= set(find_references(rendered.manifest))
    assert rendered.manifest["metadata"]["annotations"]["example.com/owner"] == "me"
    assert groups_of(rendered)[1]["labels"] == {"rack": "a"}
    elsewhere = render(own_profile(tmp_path, text), {}, cluster="shared").manifest
    assert "rayClusterSpec" not in elsewhere["spec"]
    assert elsewhere["metadata"]["annotations"]["example.com/owner"] == "me"


@pytest.mark.parametrize(
    ("patch", "told"),
    [
        ("metadata: {name: mine}", "metadata.name: it is made from the run's name"),
        ("metadata: {namespace: a}", "metadata.namespace: set namespace in the profile"),
        ("metadata: {labels: {sunspot/run: a}}", "labels.sunspot/run: Sunspot or another key of the profile sets it"),
        ("metadata: {annotations: {sunspot/generation: '9'}}", "sunspot/generation: Sunspot sets it"),
        (
            "spec: {entrypoint: python mine.py}",
            "rayjob.spec.entrypoint: it starts the training program; set SUNSPOT_TASK",
        ),
        ("spec: {entrypointNumCpus: 1}", "NumCpus: the driver must run on the head"),
        ("spec: {submissionMode: K8sJobMode}", "submissionMode: the other modes need a pod"),
        ("spec: {suspend: true}", "suspend: a queue sets it"),
        ("spec: {backoffLimit: 9}", "backoffLimit is already 2 in the manifest: set backoff_limit"),
        ("spec: {ttlSecondsAfterFinished: {a: 1}}", "ttlSecondsAfterFinished is already 60 in the manifest: set ttl_s"),
        ("spec: {rayClusterSpec: 3}", "rayClusterSpec is already .* in the manifest: runs rely on this value"),
        ("spec: {rayClusterSpec: {rayVersion: 2.9.0}}", "rayVersion: it must match the Ray version in the image"),
        ("spec: {rayClusterSpec: {authOptions: {mode: disabled}}}", "authOptions.mode: without a token"),
        ("spec: {rayClusterSpec: {headGroupSpec: {template: {}}}}", "template: set head or head.pod in the profile"),
        (
            "spec: {rayClusterSpec: {gcsFaultToleranceOptions: {redisPassword: {value: abcd}}}}",
            "redisPassword.value: .*a credential here; give it a valueFrom",
        ),
        (
            "spec: {rayClusterSpec: {workerGroupSpecs: [{groupName: workers, replicas: 9}]}}",
            r"workerGroupSpecs\[workers\].replicas is already 2 .* the profile and SUNSPOT_NUM_WORKERS",
        ),
        ("spec: {rayClusterSpec: {workerGroupSpecs: [{groupName: more}]}}", r"\[more\]: unknown group"),
        (
            "spec: {rayClusterSpec: {gcsFaultToleranceOptions: 3}}",
            "ToleranceOptions=3 has the wrong type; set it to a mapping",
        ),
        ("spec: {rayClusterSpec: {workerGroupSpecs: [workers]}}", "workerGroupSpecs: an item has no groupName"),
        ("managedBy: a", "rayjob.managedBy is an unknown key; choose one of metadata, spec"),
        ("spec: {managedBy: 2026-01-01}", "rayjob.spec=.*; set it to the spec of a KubeRay RayJob"),
    ],
)
def test_a_rayjob_patch_cannot_change_fields_that_runs_rely_on(patch: str, told: str, tmp_path: Path) -> None:
    said = refusal(own_profile(tmp_path, f"extends: kind\nrayjob: {{{patch}}}"), {})
    assert re.search(told, said)
    assert "abcd" not in said, "a credential is not repeated"


def lost(part: Any, whole: Any) -> list[str]:
    """Return the values of `part` that `whole` lacks at the same path. List items match at any position."""
    if isinstance(part, dict) and isinstance(whole, dict):
        if part.get("name") == whole.get("name") == "SUNSPOT_JOB_ID":
            return []
        return [value for key in part for value in lost(part[key], whole.get(key))]
    if isinstance(part, list) and isinstance(whole, list):
        return [value for item in part for value in min((lost(item, other) for other in whole), key=len, default=["?"])]
    return [] if part == whole else [str(part)]


def test_a_pod_patch_can_change_a_few_existing_fields(tmp_path: Path) -> None:
    text = """
extends: gke-spot
worker:
  pod:
    metadata: {annotations: {example.com/owner: me}}
    spec:
      enableServiceLinks: true
      securityContext: {runAsUser: 2000}
      containers:
      - {name: ray, env: [{name: NEW, value: "1"}]}
      - {name: sidecar, image: "sidecar:1"}
"""
    _, worker = pods_of(render(own_profile(tmp_path, text), {}))
    assert worker["enableServiceLinks"] is True
    assert worker["securityContext"]["runAsUser"] == 2000
    assert worker["securityContext"]["runAsNonRoot"] is True
    assert [container["name"] for container in worker["containers"]] == ["ray", "sidecar"]
    assert variables_of(worker)["NEW"] == "1"


def test_a_queue_becomes_a_kueue_label() -> None:
    rendered = render("gke-spot", {}, queue="gpus")
    assert rendered.manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert rendered.manifest["spec"]["shutdownAfterJobFinishes"] is True
    assert "kueue.x-k8s.io/elastic-job" not in rendered.manifest["metadata"]["annotations"]


@pytest.mark.parametrize("settings", [{"NUM_WORKERS": "1..2"}, {"LOADER": "ray"}])
def test_autoscaled_jobs_have_the_elastic_annotation_of_kueue(settings: dict[str, str], tmp_path: Path) -> None:
    profile = own_profile(tmp_path, "extends: gke-spot\nqueue: gpus\ndata_workers: {cpu: 4, memory: 8Gi, max: 2}")
    rendered = render(profile, settings)
    assert cluster_of(rendered)["enableInTreeAutoscaling"] is True
    assert rendered.manifest["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"


def test_a_job_for_an_existing_cluster_creates_no_pods() -> None:
    rendered = render("kind", {"EPOCHS": "3", "LEARNING_RATE": "1e-5"}, cluster="shared")
    spec = rendered.manifest["spec"]
    assert spec["clusterSelector"] == {"ray.io/cluster": "shared"}
    refused_by_the_operator = {"rayClusterSpec", "backoffLimit", "ttlSecondsAfterFinished"}
    assert not (refused_by_the_operator | {"shutdownAfterJobFinishes"}) & set(spec)
    assert spec["preRunningDeadlineSeconds"] == 600
    variables = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert all(isinstance(value, str) for value in variables.values())
    assert variables == settings_of(rendered.manifest)
    assert (variables["SUNSPOT_EPOCHS"], variables["SUNSPOT_JOB_ID"]) == ("3", rendered.name)
    assert "SUNSPOT_USE_GPU" not in variables
    assert "SUNSPOT_NOTICE_S" not in variables, "the pods of that cluster have their own"
    settings = settings_of_job(rendered)
    assert (settings.learning_rate, settings.job.job_id) == (1e-5, rendered.name)


# ------------------------------------------------------------------------------------------------------------- rejected


@pytest.mark.parametrize(
    ("profile", "settings", "options", "told"),
    [
        (
            "kind",
            {"STORAGE_PATH": "/mnt/nfs"},
            {},
            "SUNSPOT_STORAGE_PATH=/mnt/nfs is a local path.*set it to s3://bucket/prefix",
        ),
        ("kind", {"STORAGE_PATH": ""}, {}, "SUNSPOT_STORAGE_PATH=runs is a local path"),
        ("kind", {"JOB_ID": "me"}, {}, "SUNSPOT_JOB_ID=me .*unset it"),
        ("kind", {"NOTICE_S": "0"}, {}, "SUNSPOT_NOTICE_S=0 .*set notice_s in the profile"),
        ("kind", {"EPOCS": "3"}, {}, "SUNSPOT_EPOCS: no such setting; did you mean SUNSPOT_EPOCHS"),
        ("kind", {"USE_GPU": "true"}, {}, "SUNSPOT_USE_GPU=true .*worker.gpus"),
        (
            "kind",
            {"STORAGE_PATH": "s3://B_ad/x"},
            {},
            "SUNSPOT_STORAGE_PATH=s3://B_ad/x does not start with a valid bucket",
        ),
        ("kind", {"DATASET": "reviews"}, {}, "SUNSPOT_DATASET=reviews is a path on this machine, which pods cannot"),
        (
            "kind",
            {"NUM_WORKERS": "3000000000"},
            {},
            "SUNSPOT_NUM_WORKERS=3000000000 .*Kubernetes allows at most 2147483647",
        ),
        *(
            ("kind", {}, {"image": image}, "image=.*; set it to an image reference")
            for image in ("a b", "UPPER/x:1/", "http://reg/x:1", "x@sha256:123", "x:1\n", "reg/UPPER:1")
        ),
        ("kind", {}, {"generation": 0}, "generation 0 is not valid; set it to an integer >= 1"),
        ("kind", {}, {"namespace": "../../x"}, "namespace='../../x' is not valid; set it to a namespace's name"),
        ("kind", {}, {"cluster": ""}, "cluster '' .*set it to the name of a RayCluster"),
        ("kind", {}, {"image": ""}, "image='' is not valid; set it to an image reference"),
        ("kind", {}, {"namespace": "A_b"}, "namespace='A_b' is not valid; set it to a namespace's name"),
        ("kind", {"TASK_ARGS": '{"a": "$HOME"}'}, {"cluster": "shared"}, "SUNSPOT_TASK_ARGS=.*expand the \\$"),
        ("kind", {}, {"queue": "q", "cluster": "shared"}, "queue q: .*omit either the queue or the cluster"),
        ("gke-spot", {"RESOURCES_PER_WORKER": '{"CPU": 7}'}, {}, "a pod has only 6 CPUs for 1 worker; request fewer"),
        ("gke-spot", {"RESOURCES_PER_WORKER": '{"GPU": 2}'}, {}, "a worker has one GPU"),
        ("gke-spot", {"RESOURCES_PER_WORKER": '{"TPU": 2}'}, {}, "no pod offers TPU"),
        ("kind", {"RESOURCES_PER_WORKER": '{"GPU": 1}'}, {}, "a worker has no GPU"),
        (
            "kind",
            {"RESOURCES_PER_WORKER": '{"CPU": 2}', "LOADER": "ray"},
            {},
            "SUNSPOT_LOADER=ray needs one of",
        ),
        ("gke", {}, {}, "no profile named 'gke'; did you mean gke-spot"),
        ("xyzzy", {}, {}, "no profile named 'xyzzy'; choose one of aks"),
        ("./nowhere.yaml", {}, {}, "nowhere.yaml: No such file"),
    ],
)
def test_errors_about_invalid_settings_include_the_fix(
    profile: str, settings: dict[str, str], options: dict[str, Any], told: str
) -> None:
    assert re.search(told, refusal(profile, settings, **options))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("worker: {memry: 1Gi}", "worker.memry is an unknown key; did you mean worker.memory"),
        ("wroker: {}", "wroker is an unknown key; did you mean worker"),
        ("worker: {xyzzy: 1}", "worker.xyzzy is an unknown key; choose one of .*memory"),
        ("notice_s: 4", "notice_s=4 is not valid; set it to an integer >= 5"),
        ("notice_s: 010", "notice_s='010' is not valid; set it to an integer"),
        ("notice_s: 1:30", "notice_s='1:30' is not valid; set it to an integer"),
        ("1: 2", "1 is not a valid key; keys must be text"),
        ("worker: {memory: 24}", "worker.memory='24' is not valid; set it to a number of bytes with a unit, e.g. 16Gi"),
        ("worker: {memory: 0Gi}", "worker.memory='0Gi' is not valid; set it to a number of bytes"),
        ("worker: {cpu: 0}", "worker.cpu='0' is not valid; set it to a number of CPUs"),
        ("worker: {gpu_resource: cpu}", "worker.gpu_resource='cpu' is not valid; set it to a resource name"),
        (
            "worker: {tolerations: [{key: a, operator: Exists, value: b}]}",
            "tolerations.0.value='b' .*only with the operator Equal",
        ),
        ("notice_s: '30'", "notice_s='30' is not valid; set it to an integer"),
        ("worker: {cpu: 4Gi}", "worker.cpu='4Gi' is not valid; set it to a number of CPUs"),
        ("head: {memory: 500m}", "head.memory='500m' is not valid; set it to a number of bytes"),
        ("labels: {paid: true}", "labels.paid=True .*set it to labels with quoted values"),
        ("labels: {sunspot/run: x}", "labels.sunspot/run='sunspot/run' .*except Sunspot's own"),
        ("labels: {kueue.x-k8s.io/queue-name: x}", "labels.kueue.x-k8s.io/queue-name=.*except Sunspot's own"),
        ("env: {SUNSPOT_EPOCHS: '3'}", "env.SUNSPOT_EPOCHS=.*SUNSPOT_ settings, which go under settings"),
        ("env: {WANDB_API_KEY: abcd}", r"env.WANDB_API_KEY: .*env_secrets: {WANDB_API_KEY: {secret: NAME, key: KEY}}"),
        ("env: {HTTPS_PROXY: 'http://me:abcd@proxy:3128'}", "env.HTTPS_PROXY: .*read it from a Secret"),
        (
            "worker: {pod: {spec: {initContainers: [{name: a, env: [{name: HF_TOKEN, value: abcd}]}]}}}",
            r"initContainers\[a\].env\[HF_TOKEN\]: .*replace the value with a valueFrom",
        ),
        ("env_secrets: {TOKEN: {secret: hub}}", "env_secrets.TOKEN.key is missing; set it to a key in that Secret"),
        ("spot: {label: a}", "spot.value is missing; set it to the label's value"),
        ("worker: {tolerations: [{kee: a}]}", "worker.tolerations.0.kee is an unknown key; did you mean .*0.key"),
        (
            "extends: gke-spot\ndata_workers: {min: 3, max: 2, cpu: 1, memory: 1Gi}",
            "data_workers.max=2 .*>= min",
        ),
        ("data_workers: {max: 2, cpu: 1, memory: 1Gi}", "data_workers: without GPUs"),
        ("extends: gke-spot\nworker: {gpus: 4}", "SUNSPOT_NUM_WORKERS=2 .*set it to a multiple of 4"),
        (
            "extends: gke-spot\nworker: {gpus: 2}\nsettings: {NUM_WORKERS: 3..4}",
            r"SUNSPOT_NUM_WORKERS=3\.\.4 .*set it to a multiple of 2",
        ),
        ("extends: gke-spt", "no profile named 'gke-spt'; did you mean gke-spot"),
        ("extends: ./mine.yaml", "extends mine.yaml; remove one `extends`"),
        ("- a", "is not a profile; write it as a mapping"),
        ("a: [", "not valid YAML: "),
        ("settings: {EPOCS: 3}", "SUNSPOT_EPOCS: no such setting"),
        ("worker: {pod: {spec: {initContainers: {name: a}}}}", r"initContainers={.*}.*set it to a list of mappings"),
        ("worker: {pod: {spec: {containers: [{name: 3}]}}}", "worker.pod.spec.containers: an item has no name"),
        (
            "worker: {pod: {spec: {containers: [{name: a}]}}}",
            r"containers\[a\].image=None .*set it to an image reference",
        ),
        (
            "worker: {pod: {spec: {containers: [{name: ray, env: [{name: A, value: 1}]}]}}}",
            r"env\[A\].value=1 .*set it to text, in quotes",
        ),
        (
            "worker: {pod: {spec: {containers: [{name: a, envFrom: [mine]}]}}}",
            r"envFrom=\['mine'\] .*set it to a list of mappings",
        ),
        (
            "worker: {pod: {spec: {containers: [{name: ray, env: [{name: A, valueFrom: hub}]}]}}}",
            r"valueFrom='hub' .*set it to a mapping",
        ),
        (
            "worker: {pod: {spec: {volumes: [{name: a, secret: hub}]}}}",
            r"volumes\[a\].secret='hub' .*set it to a mapping",
        ),
        (
            "head: {pod: {spec: {containers: [{name: ray, image: a}]}}}",
            "head.pod.*image is already .*: set image in",
        ),
        ("worker: {pod: {spec: {containers: [{image: a}]}}}", "worker.pod.spec.containers: an item has no name"),
        ("worker: {pod: {spec: {containers: [{name: ray, args: [a]}]}}}", "args: KubeRay starts Ray in this container"),
        ("worker: {pod: {spec: {restartPolicy: Never}}}", "restartPolicy: KubeRay decides"),
        ("worker: {pod: {metadata: {labels: {ray.io/group: a}}}}", "labels.ray.io/group: KubeRay sets it"),
        (
            "worker: {pod: {spec: {containers: [{name: ray, env: [{name: SUNSPOT_SEED, value: '1'}]}]}}}",
            "SUNSPOT_SEED.: set it under settings",
        ),
        ("extends: gke-spot\nworker: {pod: {spec: {tolerations: []}}}", "tolerations .*set tolerations next to pod"),
        ("worker: {pod: {spec: {terminationGracePeriodSeconds: 1}}}", "GracePeriodSeconds .*set notice_s in"),
        (
            "worker: {pod: {spec: {nodeName: 2026-01-01}}}",
            "worker.pod=.*set it to the metadata and spec of a Kubernetes pod",
        ),
    ],
)
def test_errors_about_an_invalid_profile_include_the_fix(tmp_path: Path, text: str, told: str) -> None:
    said = refusal(own_profile(tmp_path, text), {})
    assert re.search(told, said)
    assert "abcd" not in said, "a credential is not repeated"


@pytest.mark.parametrize("profile", GPU_PROFILES)
@pytest.mark.parametrize("image", [None, "sunspot:2", "me/sunspot:2"])
def test_a_cloud_profile_requires_your_own_bucket_and_image(profile: str, image: str | None) -> None:
    with pytest.raises(SettingsError) as raised:
        render_as_given(JobRequest(profile, image=image))
    assert str(raised.value).startswith("2 problems")
    assert "SUNSPOT_STORAGE_PATH=s3://sunspot/runs is the default" in str(raised.value)
    assert f"image {image or 'sunspot:0.1.0'} has no registry" in str(raised.value)


@pytest.mark.parametrize("host", ["registry.example", "localhost", "registry:5000", "docker.io/me"])
def test_a_custom_profile_can_set_the_bucket_and_image(host: str, tmp_path: Path) -> None:
    text = f"extends: gke-spot\nimage: {host}/sunspot:1\nsettings: {{STORAGE_PATH: s3://mine/runs}}"
    assert render_as_given(JobRequest(own_profile(tmp_path, text))).settings.storage_path == "s3://mine/runs"
    with pytest.raises(SettingsError, match="image other:1 has no registry"):
        render_as_given(JobRequest(own_profile(tmp_path, text + "\nhead: {image: other:1}")))
    local = own_profile(tmp_path, "extends: on-demand\ncloud: null")
    assert render_as_given(JobRequest(local)).settings.storage_path == "s3://sunspot/runs", (
        "the bucket is in the cloud of the nodes"
    )


def test_render_reports_all_problems_at_once(tmp_path: Path) -> None:
    text = refusal(own_profile(tmp_path, "worker: {memry: 1Gi, cpu: x}\nnotice: 3"), {})
    assert [re.split("[ =]", line.strip())[0] for line in text.splitlines()[1:]] == [
        "notice",
        "worker.cpu",
        "worker.memry",
    ]
    text = refusal("kind", {"STORAGE_PATH": "x", "USE_GPU": "true", "NUM_WORKERS": "1..2"}, generation=0)
    assert text.startswith("3 problems")


def test_profiles_are_merged_by_key_and_null_removes_a_value(tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text(
        "extends: gke-spot\nworker: {memory: 48Gi}\nlabels: {team: vision, floor: '1', cost: a}"
    )
    profile = load_profile(own_profile(tmp_path, "extends: ./team.yaml\nlabels: {cost: b, team: null}\nspot: null"), {})
    assert profile.worker
    assert (profile.worker.memory, profile.groups[0].cpu, profile.worker.gpus) == ("48Gi", "6", 1)
    assert profile.labels == {"floor": "1", "cost": "b"}
    assert profile.spot is None
    assert profile.notice_s == 15


# ---------------------------------------------------------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    "text", ["1e-3", "1E5", "y", "N", "0x1F", ".inf", "1_000", "12:30", "~", "", "true", "no", "+1", "-", "1.0.0", "12"]
)
def test_strings_stay_strings_for_every_yaml_parser(text: str) -> None:
    """Go parses an unquoted 1e-3 as a number and y as true, but Python does not."""
    written = to_yaml({"value": text})
    assert re.fullmatch(r"value: (['\"]).*\1\n", written)
    assert yaml.safe_load(written) == {"value": text}


@pytest.mark.parametrize("text", ["10Gi", "250m", "s3://a/b", "a: b", "# a", "a\nb\n", " a", "é", "it's", '{"a": 1}'])
def test_strings_in_a_manifest_are_read_back_unchanged(text: str) -> None:
    assert yaml.safe_load(to_yaml({"value": text})) == {"value": text}


def test_yaml_output_contains_no_aliases(full: Rendered) -> None:
    shared = {"one": 1}
    assert to_yaml([shared, shared]) == "- one: 1\n- one: 1\n"
    assert "&id" not in full.to_yaml()
    assert yaml.safe_load(full.to_yaml()) == full.manifest


@pytest.mark.parametrize(
    ("reference", "pinned"),
    [
        ("sunspot", False),
        ("registry:5000/sunspot", False),
        ("registry:5000/sunspot:latest", False),
        ("sunspot:1.2", True),
        ("registry:5000/sunspot:1.2", False),
        (f"sunspot@sha256:{'0' * 64}", True),
        (f"a/sunspot:latest@sha256:{'0' * 64}", True),
    ],
)
def test_an_image_reference_that_can_change_causes_a_warning(reference: str, pinned: bool) -> None:
    problem = image_problem(reference)
    assert (problem == "") is pinned
    assert pinned or reference in problem


# ----------------------------------------------------------------------------------------------------------- command


def sunspot(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["render", *words])
    return (ended.value.code, *capsys.readouterr())


def test_render_prints_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = sunspot(capsys)
    assert (code, out, err) == (0, (GOLDEN / "kind.yaml").read_text(), "")
    words = ["--profile", "gke-spot", "--run", "mine", "--storage", "gs://b/p", "--set", "EPOCHS=3", "--image", IMAGE]
    words += ["--set", "SUNSPOT_TASK_ARGS={}", "--namespace", "other", "--queue", "q", "--generation", "2", "--json"]
    code, out, err = sunspot(capsys, *words)
    expected = render(
        "gke-spot",
        {"RUN_NAME": "mine", "STORAGE_PATH": "gs://b/p", "EPOCHS": "3", "TASK_ARGS": "{}"},
        image=IMAGE,
        namespace="other",
        queue="q",
        generation=2,
    )
    assert (code, json.loads(out), err) == (0, expected.manifest, "")
    assert "clusterSelector" in sunspot(capsys, "--cluster", "shared")[1]


@pytest.mark.parametrize(
    ("profile", "storage", "own"),
    [
        ("gke-spot", "s3://b/runs", "gs://b/runs"),
        ("gke-a3-8gpu", "az://b/runs", "gs://b/runs"),
        ("eks-spot", "gs://b/runs", "s3://b/runs"),
        ("aks-spot", "s3://b/runs", "az://b/runs"),
    ],
)
def test_render_warns_if_pods_have_no_credentials_for_the_storage(
    profile: str, storage: str, own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--run", "mine", "--image", IMAGE]
    code, _, err = sunspot(capsys, "--profile", profile, *words, "--storage", storage)
    assert code == 0
    assert err.startswith(f"{storage} is ")
    assert f"; set SUNSPOT_STORAGE_PATH to {own}, or add a Secret with keys: `env_from_secrets: [NAME]`" in err
    assert sunspot(capsys, "--profile", profile, *words, "--storage", own)[2] == ""
    with_keys = own_profile(tmp_path, f"extends: {profile}\nenv_from_secrets: [sunspot-storage]")
    assert sunspot(capsys, "--profile", with_keys, *words, "--storage", storage)[2] == ""


def test_explain_prints_the_origin_of_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = sunspot(capsys, "--explain", "--profile", "gke-spot", "--run", "mine", *ON_A_CLOUD)
    assert code == 0
    rows = [re.split(r"  +", line) for line in out.splitlines()]
    assert rows[0] == ["value", "is", "from"]
    assert ["SUNSPOT_RUN_NAME", "mine", "given"] in rows
    assert ["SUNSPOT_STORAGE_PATH", STORAGE_PATH, "given"] in rows
    assert ["SUNSPOT_DATA_ROOT", "/tmp/data", "k8s/rayjob.yaml"] in rows
    assert ["terminationGracePeriodSeconds", "15", "the notice, profile gke-spot"] in rows
    assert ["SUNSPOT_NOTICE_S", "13", "the time to save before RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S ends"] in rows
    assert len({row[0] for row in rows}) == len(rows), "a value is explained once"
    assert all(len(row) == 3 for row in rows)
    code, out, _ = sunspot(capsys, "--explain", "--json")
    assert {tuple(value) for value in json.loads(out)} == {("name", "value", "source")}


def test_explain_prints_the_profile_that_sets_a_value(tmp_path: Path) -> None:
    mine = own_profile(tmp_path, "extends: gke-spot\nhead: {cpu: 4}\nsettings: {EPOCHS: 3}")
    sources = {value.name: value.source for value in render(mine, {}).derived}
    assert sources["placement"].startswith("profile on-demand: ")
    assert sources["preRunningDeadlineSeconds"] == "profile on-demand"
    assert sources["terminationGracePeriodSeconds"] == "the notice, profile gke-spot"
    assert sources["SUNSPOT_EPOCHS"] == f"profile {mine}"
    assert sources["image"] == "given"


def test_explain_prints_the_profile_that_a_value_is_inherited_from(tmp_path: Path) -> None:
    said = "settings: {sunspot_epochs: 3, LOADER: ray}\nhead: {image: registry.example/head:1}\n"
    said += "workers: [{placement: zone, gpus: 1}, {gpus: 1}]\ndata_workers: {cpu: 1, memory: 1Gi, max: 2}\n"
    (tmp_path / "ours.yaml").write_text(f"extends: gke-spot\nimage: registry.example/sunspot:1\n{said}")
    mine = own_profile(tmp_path, "extends: ./ours.yaml\nnotice_s: 20")
    sources = {value.name: value.source for value in render(mine, {"NUM_WORKERS": "1..2"}).derived}
    for name in ("SUNSPOT_EPOCHS", "SUNSPOT_LOADER", "head's image", "data pods", "image"):
        assert sources[name] == "profile ./ours.yaml", name
    assert sources["placement"].startswith("profile ./ours.yaml: ")
    assert sources["terminationGracePeriodSeconds"] == f"the notice, profile {mine}"


def test_render_writes_a_directory_for_gitops(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mnist"
    for _ in range(2):
        code, out, err = sunspot(capsys, "--output", str(folder))
        assert (code, out) == (0, "")
        assert err.splitlines() == [f"wrote {folder}/rayjob.yaml", f"wrote {folder}/kustomization.yaml"]
        (folder / "notes.txt").write_text("mine")
    assert (folder / "rayjob.yaml").read_text() == (GOLDEN / "kind.yaml").read_text()
    assert load(folder / "kustomization.yaml") == {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["rayjob.yaml"],
    }
    assert (folder / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    code, _, err = sunspot(capsys, "--output", str(tmp_path / "file"))
    assert (code, len(err.splitlines())) == (2, 1)


@pytest.mark.parametrize(
    "words", [["--set", "EPOCHS"], ["--set", "=3"], ["--run", ""], ["--storage", ""], ["--storage", "./runs"]]
)
def test_render_prints_a_single_message_for_a_usage_error(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = sunspot(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["render", "--output", ""], "--output cannot be empty"),
        (["submit", "--wait", "--timeout", "nan"], "nan: must be a number of seconds >= 0"),
        (["wait", "run", "--timeout", "nan"], "nan: must be a number of seconds >= 0"),
        (["stop", "run", "--timeout", "-1"], "-1: must be a number of seconds >= 0"),
    ],
)
def test_invalid_option_values_are_rejected(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
