"""Checks before training that every node reads and writes the run's storage."""

import uuid

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.errors import StorageError, SunspotError, shorten
from app.run import open_run

PROBE_TIMEOUT_S = 120
"""How long a node may take to answer; it starts a process for that."""


def probe_all_nodes(storage_path: str, run_name: str, nodes: list[dict[str, object]]) -> None:
    """Check that every other node sees what this one wrote; raises `StorageError` naming the node."""
    here = ray.get_runtime_context().get_node_id()
    others = [str(node["NodeID"]) for node in nodes if node["NodeID"] != here]
    if not others:
        return
    run = open_run(storage_path, run_name)
    probe = ray.remote(num_cpus=0, max_retries=1)(probe_here)
    key, content = run.key(f"probe-{uuid.uuid4().hex}"), uuid.uuid4().bytes
    run.storage.write(key, content)
    try:
        for node in others:
            there = probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            try:
                problem = ray.get(there.remote(storage_path, run_name, key, content), timeout=PROBE_TIMEOUT_S)
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError as error:  # the node is gone, or about to be
                print(f"warning: node {node[:12]} did not say if it sees the storage: {shorten(error)}", flush=True)
                continue
            if problem:
                raise StorageError(
                    f"{run.location}: node {node[:12]} cannot use it: {problem}. With workers on several nodes, "
                    "SUNSPOT_STORAGE_PATH must be s3://... or a file system that all nodes share"
                )
    finally:
        run.storage.delete(key)


def probe_here(storage_path: str, run_name: str, key: str, content: bytes) -> str:
    """Why this node cannot use the run's storage, in which `key` has `content`; empty when it can."""
    run = open_run(storage_path, run_name)
    try:
        if run.storage.read(key) != content:
            return "it reads something else than was written"
        run.storage.prove(run.name)
    except SunspotError as error:
        return str(error)
    return ""
