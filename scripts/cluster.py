"""Reads a script's cluster with kubectl, and runs the user's commands that remove and add nodes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sunspot.errors import ClusterError, GaveUpError, SettingsError, StorageError, SunspotError

LOOK_EVERY_S = 2

KUBECTL_S = 400
"""Seconds for kubectl to answer, in case its connection died unnoticed. Its own timeouts are shorter."""

COMMAND_S = 900
"""Seconds for a user's command to end."""


@dataclass(frozen=True)
class Pod:
    """A running pod of a RayJob."""

    name: str
    node: str
    ip: str
    head: bool


def pods(job: str, namespace: str) -> list[Pod]:
    """Return the running pods of a RayJob."""
    cluster = kubectl_json("get", "rayjob", job, namespace=namespace).get("status", {}).get("rayClusterName")
    if not cluster:
        return []
    items = kubectl_json("get", "pods", "-l", f"ray.io/cluster={cluster}", namespace=namespace)["items"]
    return [
        Pod(
            pod["metadata"]["name"],
            pod["spec"]["nodeName"],
            pod["status"]["podIP"],
            pod["metadata"]["labels"]["ray.io/node-type"] == "head",
        )
        for pod in items
        if pod["status"].get("phase") == "Running" and pod["status"].get("podIP")  # leaves out pods on lost nodes
        if not pod["metadata"].get("deletionTimestamp")
    ]


def ready_nodes(namespace: str) -> set[str]:
    """Return the names of the nodes that are ready."""
    return {
        node["metadata"]["name"]
        for node in kubectl_json("get", "nodes", namespace=namespace)["items"]
        if any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"].get("conditions", ()))
    }


def kubectl(*words: str, namespace: str, text: str | None = None) -> str:
    """Run kubectl with `text` as its input, and return its output. Raises `ClusterError`."""
    try:
        command = ["kubectl", *options(namespace), *words]
        done = subprocess.run(command, input=text and text.encode(), capture_output=True, timeout=KUBECTL_S)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"kubectl {words[0]}: no answer within {KUBECTL_S} s") from error
    if done.returncode:
        raise ClusterError(f"kubectl {words[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


def kubectl_json(*words: str, namespace: str) -> dict[str, Any]:
    """Return a Kubernetes object or a list of objects."""
    return dict(json.loads(kubectl(*words, "-o", "json", namespace=namespace)))


def options(namespace: str) -> list[str]:
    """Return the options with which kubectl and `sunspot` find the cluster."""
    context = os.environ.get("KUBE_CONTEXT")
    return [*(["--context", context] if context else []), "--namespace", namespace]


def sunspot(*words: str, quiet: bool = False) -> str:
    """Run a `sunspot` command like a user. With `quiet`, return its output instead of showing it."""
    if not quiet:
        print("$", shlex.join(["sunspot", *words]), flush=True)
    command = [sys.executable, "-m", "sunspot.cli", *words]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE if quiet else None)
    if done.returncode:
        raise SunspotError(f"sunspot {' '.join(words)} ended with exit code {done.returncode}")
    return done.stdout or ""


def commands_of_the_environment(*needed: str) -> dict[str, str]:
    """Return the user's commands that remove and add nodes: `reclaim`, `kill`, `add` and `add_head`.

    Raises `SettingsError` if one of the `needed` commands is missing.
    """
    commands = {name: os.environ.get(name.upper(), "") for name in ("reclaim", "kill", "add", "add_head")}
    for name in needed:
        if "{node}" not in commands[name]:
            raise SettingsError(f"{name.upper()}={commands[name]}: set it to a command that contains {{node}}")
    return commands


def begin(command: str, node: str) -> subprocess.Popen[str]:
    """Start a user's command for a node."""
    words = command.replace("{node}", node)
    return subprocess.Popen(words, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(command: subprocess.Popen[str]) -> None:
    """Wait for a command to end. Raises `SunspotError` with its output if it fails."""
    try:
        output, _ = command.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired as error:
        command.kill()
        raise SunspotError(f"{command.args!s} has not ended within {COMMAND_S} s") from error
    if command.returncode:
        raise SunspotError(f"{command.args!s} ended with exit code {command.returncode}: {output.strip()}")


def until(what: str, seconds: float, condition: Callable[[], Any]) -> Any:
    """Wait until `condition` returns a true value, and return that. Raises `GaveUpError` after `seconds`.

    `condition` is called again if storage or the cluster does not answer.
    """
    deadline = time.monotonic() + seconds
    while True:
        trouble = ""
        try:
            found = condition()
            if found:
                return found
        except (ClusterError, StorageError) as error:
            trouble = f": {error}"
        if time.monotonic() > deadline:
            raise GaveUpError(f"no {what} within {seconds:.0f} s{trouble}")
        time.sleep(LOOK_EVERY_S)
