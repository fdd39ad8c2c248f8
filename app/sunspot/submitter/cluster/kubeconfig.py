"""Chooses the API server, credentials and namespace from the kubeconfig or the current pod."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sunspot.errors import ClusterError, shorten
from sunspot.submitter.printing import progress_note

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, Configuration

PLUGIN_WITHIN_S = 300.0
"""Timeout of a credential plugin in seconds. The user might have to sign in with a browser first."""

NOT_CHOSEN = "default"
"""A context's namespace that is ignored, because minikube writes it into every context."""


def make_client(context: str | None) -> tuple[ApiClient, str]:
    """Return a client with fresh credentials, and the context's own namespace or an empty string.

    Sends no requests. Raises `ClusterError` if there is no cluster, or if the context or its credential is missing.
    """
    files = _kubeconfig()
    has_file = _has_file(files)
    if not has_file and (context or not _is_pod()):
        advice = "set KUBECONFIG to the file that your cluster's administrator or cloud gave you"
        raise ClusterError(f"no cluster is configured: {files} does not exist; {advice}")
    import urllib3
    from kubernetes.client import ApiClient, Configuration  # slow to import, and not needed to read storage
    from kubernetes.config import ConfigException, load_incluster_config

    configuration = Configuration()
    namespace = ""
    configuration.retries = urllib3.Retry(False)  # `api.Cluster` retries each request with its own timeout
    try:
        if has_file:
            namespace = _load_context(files, context, configuration)
        else:
            load_incluster_config(configuration)
        if str(configuration.proxy).startswith("socks") and not importlib.util.find_spec("socks"):
            needs = f"the proxy-url {configuration.proxy} in {files} needs PySocks"
            fix = "install it next to sunspot with `pip install pysocks`"
            raise ClusterError(f"cannot connect to a cluster: {needs}; {fix}")
        return ApiClient(configuration), namespace
    except ClusterError:
        raise
    except ConfigException as error:
        advice = "`kubectl config get-contexts` lists the valid values of --context"
        raise ClusterError(f"cannot connect to a cluster: {files}: {shorten(error)}; {advice}") from error
    except Exception as error:  # the client's parsers raise various errors for a damaged file
        unusable = f"{files} cannot be used ({type(error).__name__}: {shorten(error)})"
        advice = "fix the kubeconfig, and test it with `kubectl version`"
        raise ClusterError(f"cannot connect to a cluster: {unusable}; {advice}") from error


def is_configured() -> bool:
    """Return True if a kubeconfig exists or this process runs in a pod."""
    return _has_file(_kubeconfig()) or _is_pod()


def _kubeconfig() -> str:
    return os.environ.get("KUBECONFIG") or "~/.kube/config"


def _has_file(files: str) -> bool:
    return any(Path(os.path.expanduser(file)).is_file() for file in files.split(os.pathsep))


def _is_pod() -> bool:
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


def _load_context(files: str, context: str | None, configuration: Configuration) -> str:
    """Configure a client for a context, and return the context's own namespace."""
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    config = KubeConfigMerger(files).config
    loader = KubeConfigLoader(config, context)
    current = loader.current_context["context"]
    entry = next((item for item in config["users"].value if item["name"] == current.get("user")), None)
    user: dict[str, Any] = (entry["user"].value if entry and entry.value.get("user") else None) or {}
    provider = user.get("auth-provider", {}).get("name", "")
    if entry and "exec" in user and not {"token", "tokenFile"} & set(user):
        cluster = next(item for item in config["clusters"].value if item["name"] == current["cluster"])
        # The client itself would continue without credentials if the plugin is missing, would wait for it without
        # limit, and would hide its output.
        user |= _ask_plugin(user.pop("exec"), cluster.value["cluster"], Path(entry.path).absolute().parent)
    loader.load_and_set(configuration)
    if provider and not configuration.api_key:
        fault = f"auth-provider {provider} gives user {current['user']} no credential"
        raise ClusterError(f"cannot connect to a cluster: in {files}, {fault}; sign in again")
    namespace = str(current.get("namespace") or "")
    return "" if namespace == NOT_CHOSEN else namespace


def _ask_plugin(plugin: dict[str, Any], cluster: dict[str, Any], folder: Path) -> dict[str, str]:
    """Run a credential plugin, and return its credential as kubeconfig fields.

    The plugin's stderr is not captured. Raises `ClusterError` if the plugin fails.
    """
    command = [str(plugin["command"]), *(plugin.get("args") or ())]
    name = f"kubectl's credential plugin {command[0]}"
    interactive = sys.stdin is not None and sys.stdin.isatty() and plugin.get("interactiveMode") != "Never"
    spec: dict[str, Any] = {"interactive": interactive}
    if plugin.get("provideClusterInfo"):
        extensions = {item["name"]: item["extension"] for item in cluster.get("extensions") or ()}
        config = extensions.get("client.authentication.k8s.io/exec")
        spec["cluster"] = {**cluster, **({"config": config} if config else {})}
    info = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": spec}
    own = {item["name"]: item["value"] for item in plugin.get("env") or ()}
    try:
        with progress_note(f"asking {name}"):
            answer = subprocess.run(
                command,
                env={**os.environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(info)},
                cwd=folder,
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=PLUGIN_WITHIN_S,
                check=True,
            )
        status = json.loads(answer.stdout)["status"]
        if "token" in status:
            return {"token": str(status["token"])}
        return {
            f"client-{part}-data": base64.b64encode(status[f"client{part.title()}Data"].encode()).decode()
            for part in ("certificate", "key")
        }
    except OSError as error:
        fix = " ".join(str(plugin.get("installHint") or "install it in a folder on PATH").split())
        why = f"cannot be run here ({error.strerror or shorten(error)}); {fix}"
    except subprocess.TimeoutExpired:
        why = f"did not answer within {PLUGIN_WITHIN_S:.0f} s; check whether it is waiting for you to sign in"
    except subprocess.CalledProcessError as error:
        why = f"ended with {error.returncode}; sign in again, as its output above says"
    except (ValueError, KeyError, TypeError, AttributeError):
        why = "did not print an ExecCredential with a token, or with a certificate and its key; upgrade it"
    raise ClusterError(f"no credential for {cluster.get('server', 'the cluster')}: {name} {why}")
