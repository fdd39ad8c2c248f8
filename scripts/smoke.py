"""`make smoke`: test a real cluster on CPUs from end to end: image, base, submit, wait, and the model's accuracy.

The test uses the cluster of KUBE_CONTEXT, or creates one with kind. It uses the S3 server at AWS_ENDPOINT_URL, below
SUNSPOT_STORAGE_PATH, or starts one on this machine. All objects that it creates have unique names and are deleted at
the end. Nothing else is changed.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.cluster import kubectl, options, sunspot, until
from scripts.kind import REPOSITORY, call, create_cluster, create_secret, load_image, refuse_missing_tools
from sunspot.errors import SunspotError, run_and_exit

CLUSTER = "sunspot-smoke"
"""Name of the cluster to create with kind if KUBE_CONTEXT is not set."""

NAME = f"smoke-{uuid.uuid4().hex[:12]}"
"""Name of this test's folder in storage, and part of its namespace's name."""

NAMESPACE = f"sunspot-{NAME}"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
POD_VARIABLES = ("AWS_ENDPOINT_URL", *KEYS, "AWS_REGION", "AWS_DEFAULT_REGION")
"""Variables that are valid in pods. Other AWS_ variables name files and profiles on this machine."""

S3_PORT = 9000
"""Port to which k8s/base lets pods connect."""

MIN_ACCURACY = 0.96
WAIT_S = 1800
"""Seconds for one run from submission to end. Two cores need about five minutes."""

GONE_S = 240
"""Seconds for a finished run's cluster to disappear, including the profile's TTL and the pods' grace period."""


def main(train: Callable[[str, str], None] | None = None) -> int:
    """Run the whole test, and print how long each part took.

    `train` follows a run with an image and a loader, by default as `follow_run` does.
    """
    image = os.environ["IMAGE"]
    began = time.monotonic()
    with _cluster(), _s3_server() as secret, _namespace():
        with _step(f"load {image} onto the nodes"):
            load = os.environ.get("LOAD_IMAGE")
            if load:
                call(*shlex.split(load), image)
            else:
                load_image(CLUSTER, image)
        with _step("create the Secret"):
            create_secret(os.environ["KUBE_CONTEXT"], NAMESPACE, secret)
        for loader in ("torch", "ray"):
            (train or follow_run)(image, loader)
    print(f"smoke test passed in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def follow_run(image: str, loader: str) -> None:
    """Follow one run from its submission to the end of its cluster, and check its files in storage."""
    run = f"smoke-{loader}"
    cluster = options(NAMESPACE)
    with _step(f"{run}: submit"):
        settings = [word for name in (f"LOADER={loader}", "AUDIT=true") for word in ("--set", name)]
        sunspot("submit", "--run", run, "--profile", "kind", "--image", image, *settings, *cluster)
    with _step(f"{run}: wait"):
        sunspot("wait", run, "--timeout", str(WAIT_S), *cluster)
    with _step(f"{run}: check what it left"):
        status = json.loads(sunspot("status", run, "--json", *cluster, quiet=True))
        assert status["state"] == "succeeded", status
        sunspot("checkpoints", "verify", run)
        sunspot("audit", run)
        with tempfile.TemporaryDirectory() as folder:
            sunspot("checkpoints", "get", run, "--output", folder)
            accuracy = _score(folder)
        print(f"accuracy on the held-out digits: {accuracy:.2%}", flush=True)
        assert accuracy >= MIN_ACCURACY, f"below {MIN_ACCURACY:.0%}"
    with _step(f"{run}: wait for its cluster to go"):
        listing = ("get", "rayclusters.ray.io,pods", "-l", f"sunspot/run={run}", "-o", "name")
        until(f"end of its RayCluster and pods ({run})", GONE_S, lambda: not kubectl(*listing, namespace=NAMESPACE))


def _score(checkpoint: str) -> float:
    """Return the accuracy of the downloaded model on the sample's held-out rows."""
    from sunspot.data.image_sources import find_sources
    from sunspot.data.source import read_rows, rows_in
    from sunspot.predict.classifier import Classifier
    from sunspot.settings import load_settings

    _, test = find_sources(load_settings({"DATASET": "sample"}))
    assert test
    rows = read_rows(test, 0, rows_in(test))
    predicted, _ = Classifier(checkpoint).predict(rows["image"])
    return float((predicted == rows["label"]).mean())


@contextmanager
def _cluster() -> Iterator[None]:
    """Use the cluster of KUBE_CONTEXT. Without it, create a cluster and delete it at the end."""
    if os.environ.get("KUBE_CONTEXT"):
        yield
        return
    refuse_missing_tools()
    os.environ["KUBE_CONTEXT"] = f"kind-{CLUSTER}"
    try:
        with _step("create a kind cluster with the KubeRay operator"):
            create_cluster(CLUSTER)
        yield
    finally:
        call("kind", "delete", "cluster", "--name", CLUSTER)


@contextmanager
def _s3_server() -> Iterator[dict[str, str]]:
    """Yield the content of the Secret, and set this process's environment to the same server and storage path."""
    if os.environ.get("AWS_ENDPOINT_URL"):
        with _folder(os.environ.get("SUNSPOT_STORAGE_PATH", "s3://sunspot")) as path:
            os.environ["SUNSPOT_STORAGE_PATH"] = path
            yield {name: os.environ[name] for name in POD_VARIABLES if name in os.environ}
        return

    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise, each request is logged
    address = _address_for_nodes()
    server = ThreadedMotoServer(address, S3_PORT, verbose=False)
    server.start()
    secret = {
        "AWS_ENDPOINT_URL": f"http://{address}:{S3_PORT}",
        "AWS_ACCESS_KEY_ID": "smoke",
        "AWS_SECRET_ACCESS_KEY": "smoke-test",
        "AWS_REGION": "us-east-1",
    }
    os.environ.update(secret, SUNSPOT_STORAGE_PATH="s3://sunspot/runs")
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="sunspot")
    try:
        yield secret
    finally:
        server.stop()


@contextmanager
def _folder(storage_path: str) -> Iterator[str]:
    """Yield a new folder of this test's own below a storage path, and delete the folder at the end."""
    from sunspot.storage import open_storage

    storage = open_storage(storage_path)
    if storage.list(NAME):
        raise SunspotError(f"smoke test not started: {storage.locate(NAME)} already exists")
    try:
        yield storage.locate(NAME)
    finally:
        for upload in storage.list_unfinished(NAME):
            storage.discard(upload)
        storage.delete_many([entry.key for entry in storage.list(NAME)])
        storage.delete_folders(NAME)


def _address_for_nodes() -> str:
    """Return the address at which the cluster's nodes reach this machine."""
    path = "{.items[0].status.addresses[?(@.type=='InternalIP')].address}"
    node = kubectl("get", "nodes", "-o", f"jsonpath={path}", namespace="default")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((node, 9))  # sends nothing
        return str(probe.getsockname()[0])


@contextmanager
def _namespace() -> Iterator[None]:
    """Apply k8s/base in a namespace of this test's own."""
    with tempfile.TemporaryDirectory(dir=REPOSITORY) as folder:  # kustomize requires a relative path to the base
        base = os.path.relpath(REPOSITORY / "k8s" / "base", folder)
        Path(folder, "kustomization.yaml").write_text(f"namespace: {NAMESPACE}\nresources: [{base}]\n")
        with _step("apply k8s/base"):
            kubectl("apply", "-k", folder, namespace=NAMESPACE)
    try:
        yield
    finally:
        with _step("delete the namespace"):
            kubectl("delete", "namespace", NAMESPACE, "--timeout=300s", namespace=NAMESPACE)


@contextmanager
def _step(name: str) -> Iterator[None]:
    print(f"== {name}", flush=True)
    began = time.monotonic()
    yield
    print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    run_and_exit(main)
