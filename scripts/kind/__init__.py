"""Creates a cluster on this machine with kind, and installs the KubeRay operator, a bucket and the image in it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

from sunspot.errors import SettingsError, SunspotError

REPOSITORY = Path(__file__).parents[2]

NAME = "sunspot"

CONTEXT = f"kind-{NAME}"

OPERATOR = "https://github.com/ray-project/kuberay/ray-operator/config/default?ref=v1.7.0"

TOOLS = {
    "docker": "https://docs.docker.com/get-docker",
    "git": "https://git-scm.com/downloads",
    "kind": "https://kind.sigs.k8s.io/docs/user/quick-start",
    "kubectl": "https://kubernetes.io/docs/tasks/tools",
}
"""Programs that must be on PATH, with instructions to install them. kubectl fetches the operator with git."""

BUCKET = "s3://sunspot/runs"

ENDPOINTS = {"pods": "http://bucket.bucket.svc.cluster.local:7070", "here": "http://127.0.0.1:7070"}
"""Addresses of the bucket (bucket.yaml). Pods may reach port 7070 (k8s/base). cluster.yaml maps it to this machine."""

KEYS = {"AWS_ACCESS_KEY_ID": "sunspot", "AWS_SECRET_ACCESS_KEY": "sunspot-local", "AWS_REGION": "us-east-1"}
"""Credentials of the bucket, as in bucket.yaml. They are public, because the server only listens on 127.0.0.1."""


def create_cluster(name: str, *options: str) -> None:
    """Create a cluster, and install the KubeRay operator."""
    call("kind", "create", "cluster", "--name", name, "--wait", "120s", *options)
    install_operator(f"kind-{name}")


def install_operator(context: str) -> None:
    """Install the KubeRay operator unless it is installed already, and wait until it is ready."""
    # Server-side: the CRDs are too large for the annotation of a client-side apply.
    call("kubectl", "--context", context, "apply", "--server-side", "-k", OPERATOR)
    wait_for(context, "default", "kuberay-operator")


def wait_for(context: str, namespace: str, deployment: str) -> None:
    """Wait until the pods of a deployment are ready."""
    ready = ("rollout", "status", "--timeout=300s", f"deployment/{deployment}")
    call("kubectl", "--context", context, "-n", namespace, *ready)


def create_secret(context: str, namespace: str, values: dict[str, str]) -> None:
    """Create or replace the Secret with the keys of a bucket.

    The values are passed by stdin, because everyone on this machine can see the arguments of a command.
    """
    name = {"name": "sunspot-storage", "namespace": namespace}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": name, "stringData": values}
    call("kubectl", "--context", context, "apply", "--server-side", "-f", "-", text=json.dumps(secret))


def load_image(name: str, image: str) -> None:
    """Load an image from docker onto the nodes of a cluster."""
    call("kind", "load", "docker-image", "--name", name, image)


def refuse_missing_tools() -> None:
    """Raise `SettingsError` if tools are missing from PATH, and list them."""
    missing = {tool: place for tool, place in TOOLS.items() if not shutil.which(tool)}
    if missing:
        places = "; ".join(f"{tool}: {place}" for tool, place in missing.items())
        raise SettingsError(f"{' and '.join(missing)} not found on PATH; install them ({places})")


def call(*words: str, quiet: bool = False, text: str | None = None) -> str:
    """Run a command in the repository with `text` as input. With `quiet`, return its output instead of showing it."""
    if not quiet:
        print("$", shlex.join(words), flush=True)
    done = subprocess.run(words, cwd=REPOSITORY, input=text, text=True, stdout=subprocess.PIPE if quiet else None)
    if done.returncode:
        raise SunspotError(f"{Path(words[0]).name} ended with exit code {done.returncode}; see its output above")
    return (done.stdout or "").strip()
