"""Tests of a run's Prometheus metrics, and of the alerts and Grafana dashboard that use them."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import yaml

from sunspot.elastic.nodes import HEAD
from sunspot.observe.prometheus import COUNTERS, GAUGES, INCIDENTS, LIMIT_GAUGES, RUN_ACTIVE, RUN_GAUGES
from sunspot.run import open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.incidents import Cause
from sunspot.run.status import read_status
from sunspot.submitter.doctor.cluster_checks import OPERATOR
from sunspot.submitter.manifest.profile import manifests
from sunspot.train.reporter import checkpoint_interval
from tests.harness.manifests import render
from tests.harness.program import Program
from tests.harness.training import worker_processes

MONITORING = manifests() / "monitoring"
ALERTS = Path(__file__).parent / "alerts.yaml"

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")

START_S = 400
"""Seconds for the workers to start on a busy machine, and for their metrics to arrive."""

RAYS_LABELS = r'\b(Component|NodeAddress|SessionName|Version|WorkerId|otel_\w+)="[^"]*",?'
"""Pattern of the labels that Ray adds to all exported metrics. Their names follow Ray's own style."""

FORGOTTEN_S = 40
"""Seconds after which a gauge is gone: two of the agent's intervals, and the time in which a process ends."""


@functools.cache
def load(file: str) -> Any:
    text = (MONITORING / file).read_text()
    return json.loads(text) if file.endswith(".json") else yaml.safe_load(text)


def promtool(*words: str, text: str = "") -> None:
    answer = subprocess.run(["promtool", *words], input=text, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr


# ------------------------------------------------------------------------------------------------------------- alerts


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """Return the path of a file with the rules for Prometheus, which are the spec of the PrometheusRule."""
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(load("rules.yaml")["spec"], sort_keys=False))
    return path


@needs_promtool
def test_prometheus_can_load_the_rules(rules: Path) -> None:
    promtool("check", "rules", str(rules))


@needs_promtool
def test_the_alerts_pass_their_promtool_tests(rules: Path) -> None:
    shutil.copy(ALERTS, rules.parent)
    promtool("test", "rules", str(rules.parent / ALERTS.name))


def test_every_alert_names_a_command_and_has_tests_for_firing_and_staying_silent() -> None:
    rules = [rule for group in load("rules.yaml")["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert {rule["alert"] for rule in rules} == {
        "SunspotStalled",
        "SunspotCheckpointTooOld",
        "SunspotLossNotFinite",
        "SunspotGoodputLow",
        "SunspotStraggler",
        "SunspotMemoryClimbing",
        "SunspotDeadlineAtRisk",
        "SunspotBudgetTooSmall",
        "SunspotFailed",
        "SunspotNeverTrained",
        "SunspotEndedEarly",
        "SunspotNotStarted",
    }
    cases = [
        (test["name"], case) for test in yaml.safe_load(ALERTS.read_text())["tests"] for case in test["alert_rule_test"]
    ]
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]
        command = "sunspot doctor {{ $labels.run }} --namespace {{ $labels.namespace }}"
        assert command in rule["annotations"]["description"]
        mine = [(name, case) for name, case in cases if case["alertname"] == rule["alert"]]
        assert any(case.get("exp_alerts") for _, case in mine)
        silent = [name for name, case in mine if not case.get("exp_alerts")]
        assert any("ended" in name for name in silent)
        assert any("ended" not in name for name in silent)


# ---------------------------------------------------------------------------------------------------------- manifests


def groups() -> Iterator[dict[str, Any]]:
    """Yield the heads and worker groups of the rendered clusters and of the permanent cluster."""
    clusters = [yaml.safe_load((manifests() / "raycluster.yaml").read_text())["spec"]]
    for profile, settings in [("kind", {}), ("gke-spot", {}), ("eks-spot", {"NUM_WORKERS": "2..4", "LOADER": "ray"})]:
        clusters.append(render(profile, settings).manifest["spec"]["rayClusterSpec"])
    for cluster in clusters:
        yield from (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])


def test_the_pod_monitor_selects_every_pod() -> None:
    monitor = load("podmonitor.yaml")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert set(endpoint) <= {"port", "interval", "metricRelabelings"}
    found = list(groups())
    assert len(found) >= 8
    for group in found:
        template = group["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        assert str(ports[endpoint["port"]]) == group["rayStartParams"]["metrics-export-port"]


def test_the_pod_monitor_for_the_operator_uses_the_label_in_the_network_policy() -> None:
    spec = load("operator.yaml")["spec"]
    assert spec["selector"]["matchLabels"] == dict([OPERATOR.split("=")])
    assert spec["namespaceSelector"] == {"any": True}
    [endpoint] = spec["podMetricsEndpoints"]
    assert endpoint["honorLabels"], "otherwise every run would appear in the operator's namespace"
    [keep] = endpoint["metricRelabelings"]
    assert keep["regex"] in json.dumps(load("rules.yaml"))


def test_the_head_declares_all_of_its_ports() -> None:
    """The operator makes the head's Service from the ports that it declares, or from a default list if it declares
    none.
    """
    for group in groups():
        ports = {port["name"]: port["containerPort"] for port in group["template"]["spec"]["containers"][0]["ports"]}
        if "num-cpus" in group["rayStartParams"]:
            assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
        else:
            assert ports == {"metrics": 8080}


def test_prometheus_is_allowed_to_scrape_every_pod() -> None:
    policy = load("network.yaml")
    for group in groups():
        template = group["template"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        [rule] = policy["spec"]["ingress"]
        assert [str(port["port"]) for port in rule["ports"]] == [group["rayStartParams"]["metrics-export-port"]]


def test_relabeling_rules_keep_the_exported_metrics() -> None:
    keep, drop = load("podmonitor.yaml")["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    assert keep["action"] == "keep"
    assert all(re.fullmatch(keep["regex"], name) for name in wanted())
    assert not re.fullmatch(keep["regex"], "ray_node_cpu_utilization")
    assert drop["action"] == "labeldrop"
    kept = ("run", "rank", "cause", "le", "WorkerId", "pod", "namespace")
    assert not [label for label in kept if re.fullmatch(drop["regex"], label)]


def build(folder: str) -> dict[str, dict[str, Any]]:
    """Return the objects that `kubectl apply -k` applies, by kind."""
    built = subprocess.run(["kubectl", "kustomize", str(manifests() / folder)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return {item["kind"]: item for item in yaml.safe_load_all(built.stdout)}


@needs_kubectl
def test_kustomize_builds_the_monitoring_objects() -> None:
    objects = build("monitoring")
    assert set(objects) == {"ConfigMap", "NetworkPolicy", "PodMonitor", "PrometheusRule"}
    base = yaml.safe_load((manifests() / "base" / "kustomization.yaml").read_text())
    assert {item["metadata"]["namespace"] for item in objects.values()} == {base["namespace"]}
    assert objects["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(objects["ConfigMap"]["data"]["dashboard.json"]) == load("dashboard.json")
    assert objects["PrometheusRule"]["apiVersion"] == "monitoring.coreos.com/v1"
    assert objects["PrometheusRule"]["spec"] == load("rules.yaml")["spec"]
    assert objects["PodMonitor"]["spec"] == load("podmonitor.yaml")["spec"]


@needs_kubectl
def test_the_google_and_azure_monitors_collect_the_same_metrics() -> None:
    """The monitors also use the same rules if the cluster stores rules as objects."""
    ours, google, azure = map(build, ["monitoring", "monitoring-google", "monitoring-azure"])
    assert set(google) == {"ConfigMap", "NetworkPolicy", "PodMonitoring", "Rules"}
    assert {google[kind]["apiVersion"] for kind in ("PodMonitoring", "Rules")} == {"monitoring.googleapis.com/v1"}
    assert google["Rules"]["spec"] == ours["PrometheusRule"]["spec"]
    spec = ours["PodMonitor"]["spec"]
    [endpoint] = spec["podMetricsEndpoints"]
    renamed = {"metricRelabeling" if key == "metricRelabelings" else key: value for key, value in endpoint.items()}
    assert google["PodMonitoring"]["spec"] == {"selector": spec["selector"], "endpoints": [renamed]}

    assert set(azure) == {"ConfigMap", "NetworkPolicy", "PodMonitor"}
    assert azure["PodMonitor"]["apiVersion"] == "azmonitoring.coreos.com/v1"
    limits = {"labelLimit": 63, "labelNameLengthLimit": 511, "labelValueLengthLimit": 1023}
    assert azure["PodMonitor"]["spec"] == {**spec, **limits}

    for theirs, label in [(google, {"app.kubernetes.io/name": "collector"}), (azure, {"rsName": "ama-metrics"})]:
        [rule] = ours["NetworkPolicy"]["spec"]["ingress"]
        rule = {**rule, "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": label}}]}
        assert theirs["NetworkPolicy"]["spec"] == {**ours["NetworkPolicy"]["spec"], "ingress": [rule]}


# ---------------------------------------------------------------------------------------------------------- dashboard


def queries() -> list[str]:
    """Return the expressions of the dashboard."""
    return [target["expr"] for panel in load("dashboard.json")["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_is_valid() -> None:
    dashboard = load("dashboard.json")
    assert dashboard["uid"]
    assert dashboard["title"]
    assert dashboard["schemaVersion"] >= 39
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert {"namespace", "run"} < set(variables)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert columns.stop <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        for source in (panel, *panel["targets"]):
            assert source["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            assert target["expr"].count('namespace="$namespace", run="$run"') >= 1


@needs_promtool
def test_prometheus_can_parse_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    expressions = [query.replace("$__rate_interval", "1m") for query in queries()]
    listed = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(expressions)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": listed}]}))
    promtool("check", "rules", str(tmp_path / "panels.yaml"))


# ------------------------------------------------------------------------------------------------------------ exported


@pytest.mark.parametrize(
    ("every_s", "steps_s", "commit_s", "interval_s"),
    [(60, 500, 1, 60), (0, 500, 1, 500), (60, 20, 1, 20), (60, 500, 90, 90)],
)
def test_the_checkpoint_interval_is_never_shorter_than_the_duration_of_a_commit(
    every_s: float, steps_s: float, commit_s: float, interval_s: float
) -> None:
    assert checkpoint_interval(every_s, steps_s, commit_s) == interval_s


class Series(NamedTuple):
    """One series that a node exposes."""

    name: str
    labels: dict[str, str]
    value: float


def scrape(run: str) -> tuple[list[Series], str]:
    """Return a run's series that this machine's Ray exports, and their text without Ray's own labels."""
    # Ray might still consider a node alive that an earlier test lost.
    [node] = [node for node in ray.nodes() if HEAD in node["Resources"]]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    lines = urllib.request.urlopen(url, timeout=30).read().decode().splitlines()
    matches = [re.fullmatch(r"(ray_sunspot_\w+)\{(.*)\} (\S+)", line) for line in lines]
    found = [
        Series(match[1], dict(re.findall(r'(\w+)="([^"]*)"', match[2])), float(match[3]))
        for match in matches
        if match and f'run="{run}"' in match[2]
    ]
    ours = [line for line in lines if line.startswith(("# HELP ray_sunspot_", "# TYPE ray_sunspot_"))]
    ours += [match[0] for match in matches if match and f'run="{run}"' in match[2]]
    return found, re.sub(RAYS_LABELS, "", "\n".join(ours) + "\n")


def by_rank(series: list[Series], name: str) -> dict[str, float]:
    return {one.labels["rank"]: one.value for one in series if one.name == f"ray_sunspot_{name}"}


def only(series: list[Series], name: str) -> float:
    [value] = [one.value for one in series if one.name == f"ray_sunspot_{name}"]
    return value


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bray_\w+", expression))


def wanted() -> set[str]:
    """Return the metrics that the dashboard and the rules use."""
    rules = [rule for group in load("rules.yaml")["spec"]["groups"] for rule in group["rules"]]
    variables = [variable.get("definition", "") for variable in load("dashboard.json")["templating"]["list"]]
    return set().union(*map(metrics_in, [*queries(), *variables, *(rule["expr"] for rule in rules)]))


def test_the_dashboard_uses_only_existing_rules() -> None:
    recorded = {
        rule["record"] for group in load("rules.yaml")["spec"]["groups"] for rule in group["rules"] if "record" in rule
    }
    assert set(re.findall(r"sunspot:[\w:]+", " ".join(queries()))) <= recorded


@pytest.mark.slow
def test_a_real_run_exports_every_metric_of_the_dashboard_and_the_alerts(
    program: Program, make_data: Callable[..., str], tmp_path: Path
) -> None:
    """The values match the run, and Prometheus's own check of names and units finds no fault."""
    data = make_data(rows=320, test_rows=32)
    every = {f"ray_sunspot_{name}" for name in (*COUNTERS, *GAUGES, *RUN_GAUGES, *LIMIT_GAUGES, INCIDENTS, RUN_ACTIVE)}
    every |= {f"ray_sunspot_step_duration_seconds_{part}" for part in ("bucket", "sum", "count")}
    assert wanted() <= every
    began = time.time()
    process = program.start(
        TASK="tests.tasks.slow",
        RUN_NAME="exported",
        DATASET=data,
        DEADLINE="2020-01-01T00:00Z",
        GLOBAL_BATCH_SIZE=16,  # an epoch has 20 steps
        EPOCHS=2000,  # the run does not end before its metrics are scraped
        CHECKPOINT_EVERY_S=30,
        REPORT_EVERY_S=1,
    )
    try:
        seen: list[Series] = []
        while {one.name for one in seen} != every or len(by_rank(seen, "rows_total")) < 2:
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            assert time.time() - began < START_S, f"missing: {every - {one.name for one in seen}}"
            time.sleep(0.5)
            seen, text = scrape("exported")
    finally:
        process.terminate()
        output, _ = process.communicate()
    ended = time.time()

    gauges = {name: only(seen, name) for name in RUN_GAUGES}
    assert gauges["planned_steps"] == 40_000
    assert gauges["workers"] == 2
    assert gauges["attempt"] == 1
    assert began < gauges["attempt_timestamp_seconds"] <= gauges["checkpoint_timestamp_seconds"] < ended
    assert 0 < gauges["loss"] < 3
    assert 0 < gauges["goodput_ratio"] < 1
    assert 0 < gauges["checkpoint_interval_seconds"] < 30  # an epoch takes less
    assert 0 < gauges["checkpoint_commit_seconds"] < 30
    assert only(seen, RUN_ACTIVE) == 1
    assert only(seen, "deadline_missed_seconds") > 1e8
    assert only(seen, "budget_excess_ratio") == 0
    incidents = {one.labels["cause"]: one.value for one in seen if one.name == "ray_sunspot_incidents"}
    assert incidents == {str(cause): 0 for cause in Cause if cause.incident}
    for rank, resident in by_rank(seen, "resident_memory_bytes").items():
        assert 50e6 < resident < 5e9
        assert 0 < by_rank(seen, "memory_available_bytes")[rank] < 1e13
    if shutil.which("promtool"):
        promtool("check", "metrics", text=text)

    # Counters keep their last value, which is that of the whole run.
    run = open_run(program.settings["STORAGE_PATH"], "exported")
    [attempt], status = read_attempts(run), read_status(run)
    assert attempt.metadata.world_size == 2
    assert status, output
    steps = status.step
    while set(by_rank(series := scrape("exported")[0], "steps_total").values()) != {float(steps)}:
        assert time.time() - ended < FORGOTTEN_S, by_rank(series, "steps_total")
        time.sleep(0.5)
    assert by_rank(series, "step_duration_seconds_count") == by_rank(series, "steps_total")
    assert sum(by_rank(series, "rows_total").values()) == 16 * steps
    evaluations = (steps - 1) // 20  # a run that stops at the end of an epoch skips its last evaluation
    assert min(by_rank(series, "evaluated_batches_total").values()) >= evaluations
    for rank, seconds in by_rank(series, "step_seconds_total").items():
        own = by_rank(series, "forward_seconds_total")[rank] + by_rank(series, "data_wait_seconds_total")[rank]
        assert 0.01 * steps < own < seconds < ended - began


@pytest.mark.slow
def test_gauges_show_an_incident_and_disappear_when_the_run_ends(
    program: Program, make_data: Callable[..., str]
) -> None:
    data = make_data(rows=320)
    process = program.start(
        TASK="tests.tasks.slow", RUN_NAME="struck", DATASET=data, GLOBAL_BATCH_SIZE=16, EPOCHS=2000, REPORT_EVERY_S=1
    )

    def wait_for(condition: Callable[[list[Series]], Any], within_s: float) -> list[Series]:
        began = time.time()
        while not condition(series := scrape("struck")[0]):
            assert time.time() - began < within_s, series
            time.sleep(0.5)
        return series

    try:
        wait_for(lambda series: by_rank(series, "steps_total"), START_S)
        worker_processes()[-1].kill()
        counted = {"worker lost": 1.0, "joined": 1.0}

        def recovered(series: list[Series]) -> bool:
            causes = {one.labels["cause"]: one.value for one in series if one.name == "ray_sunspot_incidents"}
            attempts = [one.value for one in series if one.name == "ray_sunspot_attempt"]
            workers = {one.labels["WorkerId"] for one in series if one.name == "ray_sunspot_steps_total"}
            told = {cause: times for cause, times in causes.items() if times}
            return 3.0 in attempts and told == counted and len(workers) >= 3  # the counters of earlier workers stay

        series = wait_for(recovered, START_S)
        assert only(series, RUN_ACTIVE) == 1
    finally:
        process.terminate()
        process.communicate()
    series = wait_for(
        lambda series: all(one.name.endswith(("_total", "_bucket", "_count", "_sum")) for one in series), FORGOTTEN_S
    )
    assert series
