"""`make cluster` creates a cluster for runs on this machine, and `make cluster-down` deletes it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from scripts.kind import (
    BUCKET,
    CONTEXT,
    ENDPOINTS,
    KEYS,
    NAME,
    call,
    create_cluster,
    create_secret,
    install_operator,
    load_image,
    refuse_missing_tools,
    wait_for,
)
from sunspot.command_line import CommandParser
from sunspot.errors import run_and_exit

AFTER = """
The cluster and its bucket are ready. In this shell:

  export {variables}
  make submit PROFILE=kind RUN=digits IMAGE={image}
  .venv/bin/sunspot wait digits

`make cluster-down` deletes the cluster and the content of the bucket."""


def main(words: Sequence[str] | None = None) -> int:
    """Create or complete the cluster, or delete it."""
    parser = CommandParser("python -m scripts.kind", __doc__)
    parser.add_argument("what", choices=("up", "down"))
    parser.add_argument("--image", metavar="REF", default="", help="image to load; built if docker does not have it")
    arguments = parser.parse_args(words)
    refuse_missing_tools()
    if arguments.what == "down":
        call("kind", "delete", "cluster", "--name", NAME)
    else:
        make(arguments.image)
    return 0


def make(image: str) -> None:
    """Create the missing parts of the cluster. Existing parts are kept."""
    call("docker", "version", "--format", "docker {{.Server.Version}}")  # fails if docker is not running
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode:
        # Build without CUDA, because kind's nodes have no GPU, and for this machine's architecture.
        call("make", "image", "HEAD=1", "PLATFORM=", f"IMAGE={image}")
    if NAME in call("kind", "get", "clusters", quiet=True).split():
        install_operator(CONTEXT)
    else:
        create_cluster(NAME, "--config", "scripts/kind/cluster.yaml")
    call("kubectl", "--context", CONTEXT, "apply", "-f", "scripts/kind/bucket.yaml")
    wait_for(CONTEXT, "bucket", "bucket")
    call("kubectl", "--context", CONTEXT, "apply", "-k", "k8s/base")
    create_secret(CONTEXT, "sunspot", {"AWS_ENDPOINT_URL": ENDPOINTS["pods"], **KEYS})
    load_image(NAME, image)
    variables = {"AWS_ENDPOINT_URL": ENDPOINTS["here"], **KEYS, "SUNSPOT_STORAGE_PATH": BUCKET}
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    print(AFTER.format(variables=words, image=image))


if __name__ == "__main__":
    run_and_exit(main, "interrupted: `make cluster` continues from here, and `make cluster-down` deletes everything")
