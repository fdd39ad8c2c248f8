"""Checks before training that every node reads and writes the run's storage."""

import re
import uuid
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.errors import StorageError, SunspotError, shorten
from app.formatting import plural
from app.run import open_run
from app.storage.base import map_parallel

PROBE_TIMEOUT_S = 120
"""How long a node may take to answer; it starts a process for that."""

PROBES_AT_ONCE = 256
"""Nodes that are asked at once: each makes some ten small requests of the storage."""

NODES_NAMED, PROBLEMS_SHOWN = 3, 3
"""Nodes that a message names for one problem, and problems that it has; other nodes are counted."""

PROBE_KEY = re.compile(r"probe-[0-9a-f]{32}")
"""Differs in what nodes say of the same problem."""


def probe_all_nodes(storage_path: str, run_name: str, nodes: list[dict[str, object]]) -> None:
    """Check that every other node sees what this one wrote; raises `StorageError` naming those that do not."""
    here = ray.get_runtime_context().get_node_id()
    others = [str(node["NodeID"]) for node in nodes if node["NodeID"] != here]
    if not others:
        return
    run = open_run(storage_path, run_name)
    probe = ray.remote(num_cpus=0, max_retries=1)(probe_here)
    key, content = run.key(f"probe-{uuid.uuid4().hex}"), uuid.uuid4().bytes

    def ask(node: str) -> tuple[str, str]:
        """Why the node cannot use the storage, and why it did not say; both empty when it can."""
        there: Any = probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        try:
            return ray.get(there.remote(storage_path, run_name, key, content), timeout=PROBE_TIMEOUT_S), ""
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:  # the node is gone, or about to be
            return "", shorten(error)

    run.storage.write(key, content)
    try:
        answers = dict(zip(others, map_parallel(ask, others, PROBES_AT_ONCE), strict=True))
    finally:
        run.storage.delete(key)
    silent = [node for node, (_, silence) in answers.items() if silence]
    if silent:
        see, why = "they see" if len(silent) > 1 else "it sees", answers[silent[0]][1]
        nodes_said = f"{plural(len(silent), 'node')} did not say whether {see} the storage"
        print(f"warning: {nodes_said}: {_name(silent)}: {why}", flush=True)
    problems: dict[str, list[str]] = {}
    for node, (problem, _) in answers.items():
        if problem:
            problems.setdefault(PROBE_KEY.sub("probe-...", problem), []).append(node)
    if problems:
        failed, shown = sum(map(len, problems.values())), list(problems.items())[:PROBLEMS_SHOWN]
        texts = "; ".join(f"{_name(its)}: {problem}" for problem, its in shown)
        raise StorageError(
            f"{run.location}: {failed} of {plural(len(others), 'other node')} cannot use it: {texts}. With workers on "
            "several nodes, SUNSPOT_STORAGE_PATH must be s3://... or a file system that all nodes share"
        )


def _name(nodes: list[str]) -> str:
    """`1a2b, 3c4d, 5e6f and 15 others`."""
    names, left = ", ".join(node[:12] for node in nodes[:NODES_NAMED]), len(nodes) - NODES_NAMED
    return names if left <= 0 else f"{names} and {plural(left, 'other')}"


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
