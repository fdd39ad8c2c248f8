"""Asks nodes what is wrong there; before training, whether every one reads and writes the run's storage."""

import logging
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sunspot.background import map_parallel
from sunspot.errors import StorageError, SunspotError, shorten
from sunspot.formatting import plural
from sunspot.run import open_run
from sunspot.storage.prove import prove

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 120
"""How long a node may take to answer; it starts a process for that."""

MAX_PROBES = 256
"""Most nodes that are asked at once: each makes some ten small requests of the storage."""

MAX_NODES_NAMED, MAX_PROBLEMS_NAMED = 3, 3
"""Most nodes that a message names for one problem, and most problems; other nodes are counted."""

PROBE_KEY = re.compile(r"probe-[0-9a-f]{32}")
"""Matches the part that differs in what nodes say of the same problem."""


def probe_all_nodes(storage_path: str, run_name: str, nodes: list[dict[str, object]]) -> None:
    """Check that every other node sees what this one wrote; raises `StorageError` naming those that do not."""
    here = ray.get_runtime_context().get_node_id()
    others = [str(node["NodeID"]) for node in nodes if node["NodeID"] != here]
    if not others:
        return
    run = open_run(storage_path, run_name)
    key, content = run.key(f"probe-{uuid.uuid4().hex}"), uuid.uuid4().bytes
    run.storage.write(key, content)
    try:
        problems = ask_nodes("the storage", probe_here, dict.fromkeys(others, (storage_path, run_name, key, content)))
    finally:
        run.storage.delete(key)
    if problems:
        raise StorageError(
            f"{run.location}: {len(problems)} of {plural(len(others), 'other node')} cannot use it: "
            f"{list_problems(problems)}. With workers on several nodes, SUNSPOT_STORAGE_PATH must be s3://..., "
            "gs://... or az://..., or a file system that all nodes share"
        )


Problems = dict[str, str]
"""What is wrong on each node that has a problem."""


def ask_nodes(
    what: str,
    act: Callable[..., str],
    nodes: Mapping[str, tuple[object, ...]],
    calls: int = 0,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Problems:
    """Ask what `act` finds wrong on each node, given its arguments; warns of nodes that did not answer about `what`.

    A process ends after `calls` answers (0: never): what it has seen of GPUs, a worker after it would see.
    """
    task = ray.remote(num_cpus=0, max_retries=1, max_calls=calls)(act)

    def ask(node: str) -> tuple[str, str]:
        """Return the problem of a node, and why it did not say; both empty when it has none."""
        there: Any = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        try:
            return ray.get(there.remote(*nodes[node]), timeout=timeout_s), ""
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:  # the node is gone, or about to be
            return "", shorten(error)

    answers = dict(zip(nodes, map_parallel(ask, list(nodes), MAX_PROBES), strict=True))
    silent = [node for node, (_, silence) in answers.items() if silence]
    if silent:
        why = answers[silent[0]][1]
        log.warning(f"{plural(len(silent), 'node')} did not answer, asked about {what}: {_name(silent)}: {why}")
    return {node: PROBE_KEY.sub("probe-...", problem) for node, (problem, _) in answers.items() if problem}


def list_problems(problems: Problems) -> str:
    """Write the problems as `1a2b, 3c4d: this; 5e6f: that`."""
    named = list(dict.fromkeys(problems.values()))[:MAX_PROBLEMS_NAMED]
    return "; ".join(f"{_name([node for node in problems if problems[node] == each])}: {each}" for each in named)


def _name(nodes: list[str]) -> str:
    """Name nodes as `1a2b, 3c4d, 5e6f and 15 others`."""
    names, left = ", ".join(node[:12] for node in nodes[:MAX_NODES_NAMED]), len(nodes) - MAX_NODES_NAMED
    return names if left <= 0 else f"{names} and {plural(left, 'other')}"


def probe_here(storage_path: str, run_name: str, key: str, content: bytes) -> str:
    """Say why this node cannot use the run's storage, in which `key` has `content`; empty when it can."""
    run = open_run(storage_path, run_name)
    try:
        if run.storage.read(key) != content:
            return "it reads something else than was written"
        prove(run.storage, run.name)
    except SunspotError as error:
        return str(error)
    return ""
