"""Tests of kubeconfigs: credentials, namespaces, and messages about broken files."""

from __future__ import annotations

import json
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from sunspot.cli import main
from sunspot.submitter.cluster import kubeconfig
from sunspot.submitter.cluster.api import connect
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import JOBS, FakeCluster, answer, rayjob


class Config:
    """The kubeconfig of the fake cluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._path = cluster.kubeconfig

    def set(self, part: str, **entries: Any) -> None:
        """Add entries to the kubeconfig's only cluster, user or context."""
        config = json.loads(self._path.read_text())
        config[f"{part}s"][0][part] |= entries
        for name in [name for name, value in entries.items() if value is None]:
            del config[f"{part}s"][0][part][name]
        self._path.write_text(json.dumps(config))

    def sign_in_by(self, program: str, **more: Any) -> Path:
        """Configure a Python program as the plugin that supplies the user's credential."""
        path = self._path.parent / "plugin"
        path.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{program}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        config = json.loads(self._path.read_text())
        plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(path), **more}
        config["users"][0]["user"] = {"exec": plugin}
        self._path.write_text(json.dumps(config))
        return path


@pytest.fixture
def config(cluster: FakeCluster) -> Config:
    return Config(cluster)


def give(token: str) -> str:
    """Return a program that prints a plugin's credential."""
    return f"print(json.dumps({{'status': {{'token': {token}}}}}))"


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("part", "entries", "said"),
    [
        ("cluster", {"proxy-url": "socks5://localhost:1080"}, "needs PySocks; .*pip install pysocks"),
        (
            "user",
            {"token": None, "auth-provider": {"name": "azure"}},
            "auth-provider azure gives user me no credential",
        ),
        ("user", {"token": None, "tokenFile": "/nowhere/token"}, "No such file or directory: '/nowhere/token'"),
        ("cluster", {"server": "https://127.0.0.1:1", "certificate-authority-data": "a"}, "cannot be used"),
        ("context", {"cluster": "other"}, "other"),
    ],
)
def test_a_broken_kubeconfig_entry_is_reported_in_one_line(
    config: Config, sunspot: Command, part: str, entries: dict[str, Any], said: str
) -> None:
    config.set(part, **entries)
    assert sunspot("status", "run", "--context", "fake") == 4
    assert "Traceback" not in sunspot.err
    assert re.search(said, sunspot.err)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- a\n- b\n", b"", b"a: [", b"clusters: 1"])
def test_an_invalid_kubeconfig_is_reported_in_one_line(cluster: FakeCluster, sunspot: Command, content: bytes) -> None:
    cluster.kubeconfig.write_bytes(content)
    assert sunspot("status", "run", "--context", "fake") == 4
    assert sunspot.err.startswith(f"error: cannot connect to a cluster: {cluster.kubeconfig}")
    assert len(sunspot.err.splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------- plugins


def test_a_credential_plugin_gets_its_environment_and_can_print_a_sign_in_link(
    cluster: FakeCluster, config: Config, set_constants: SetConstants, capfd: pytest.CaptureFixture[str]
) -> None:
    set_constants("sunspot.submitter.printing", NOTE_AFTER_S=0)
    program = "print('open https://sign.in/', file=sys.stderr)\n"
    program += "info = json.loads(os.environ['KUBERNETES_EXEC_INFO'])\nassert info['spec']['cluster']['server']\n"
    config.sign_in_by(
        program + give("os.environ['ME']"), env=[{"name": "ME", "value": "secret"}], provideClusterInfo=True
    )
    connect().list_jobs()
    said = capfd.readouterr().err
    assert "open https://sign.in/" in said
    assert "asking kubectl's credential plugin" in said
    assert cluster.tokens == {"Bearer secret"}


def test_a_credential_plugin_can_return_a_certificate(cluster: FakeCluster, config: Config) -> None:
    config.set("cluster", server="https://127.0.0.1:1")
    config.sign_in_by("print(json.dumps({'status': {'clientCertificateData': 'cert', 'clientKeyData': 'key'}}))")
    client, _ = kubeconfig.make_client(None)
    files = (client.configuration.cert_file, client.configuration.key_file)
    assert [Path(file).read_text() for file in files] == ["cert", "key"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("sys.exit('token expired')", r"credential plugin \S+plugin ended with 1; sign in again"),
        ("print('hello')", "did not print an ExecCredential"),
        ("print('[]')", "did not print an ExecCredential"),
        ("print(json.dumps({'status': {}}))", "did not print an ExecCredential"),
        ("time.sleep(60)", "did not answer within 1 s"),
        (None, "cannot be run here .No such file or directory.; get it from the cloud"),
    ],
)
def test_a_credential_plugin_that_returns_no_credential_is_reported(
    cluster: FakeCluster,
    config: Config,
    sunspot: Command,
    set_constants: SetConstants,
    program: str | None,
    said: str,
) -> None:
    set_constants(kubeconfig, PLUGIN_WITHIN_S=1)
    path = config.sign_in_by(program or "", installHint="get it\nfrom the cloud")
    if program is None:
        path.unlink()
    assert sunspot("status", "run", "--context", "fake") == 4
    assert re.search(f"no credential for http://.*{said}", sunspot.err)
    assert cluster.requests == []


def test_a_rejected_credential_is_renewed_once(cluster: FakeCluster, config: Config, sunspot: Command) -> None:
    config.sign_in_by(give("'t'"))
    cluster.put_job(rayjob("run-1"))
    cluster.on("GET", JOBS, answer(401, "Unauthorized"), times=1)
    assert sunspot("status", "run") == 0
    assert "without the cluster" not in sunspot.err
    cluster.on("GET", JOBS, answer(401, "Unauthorized"))
    assert sunspot("status", "run", "--context", "fake") == 4
    assert "rejected these credentials" in sunspot.err


# ---------------------------------------------------------------------------------------------------------- namespaces


@pytest.mark.parametrize(
    ("own", "given", "asked"),
    [
        ("team-a", (), "team-a"),
        ("team-a", ("--namespace", "b"), "b"),
        ("default", (), "sunspot"),
        (None, (), "sunspot"),
    ],
)
def test_the_default_namespace_is_that_of_the_context(
    cluster: FakeCluster, config: Config, sunspot: Command, own: str | None, given: tuple[str, ...], asked: str
) -> None:
    config.set("context", namespace=own)
    sunspot("status", "run", *given)
    assert f"/namespaces/{asked}/rayjobs" in cluster.requests[0][1]


def test_submit_uses_the_same_namespace_as_other_subcommands(
    cluster: FakeCluster, config: Config, sunspot: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config.set("context", namespace="team-a")
    profile = tmp_path / "mine.yaml"
    for text, asked in (("notice_s: 30", "team-a"), ("namespace: vision", "vision")):
        profile.write_text(text)
        with pytest.raises(SystemExit):
            main(["submit", "--run", "run", "--profile", str(profile), "--storage", "s3://b/p"])
        assert f"there is no namespace {asked}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", ["status", "wait", "logs -f", "stop", "resume", "delete", "dashboard", "chaos --kind kill", "doctor"]
)
def test_an_invalid_namespace_is_rejected_before_any_request(cluster: FakeCluster, sunspot: Command, verb: str) -> None:
    assert sunspot(*verb.split(), "run", "--namespace", "../../x") == 2
    assert "namespace '../../x' is not a valid name; correct --namespace" in sunspot.err
    assert cluster.requests == []
