"""Calls a function on each node, and checks before training that all nodes can read and write the run's storage."""

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
from sunspot.settings import BUCKET_URLS
from sunspot.storage.prove import prove

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 120
"""Maximum number of seconds to wait for a node's answer. This includes the start of a process on the node."""

MAX_PROBES = 256
"""Maximum number of nodes to probe at once. Each node makes about ten small storage requests."""

MAX_NODES_NAMED = 3
"""Maximum number of nodes that a message names for one problem. The others are counted."""

MAX_PROBLEMS_NAMED = 3
"""Maximum number of problems that a message names."""

PROBE_KEY = re.compile(r"probe-[0-9a-f]{32}")
"""Pattern of a probe's key, which is the only difference between messages about the same problem."""


def probe_all_nodes(storage_path: str, run_name: str, nodes: list[dict[str, object]]) -> None:
    """Raise `StorageError` unless all other nodes can use the run's storage and read what this node writes to it."""
    here = ray.get_runtime_context().get_node_id()
    others = [str(node["NodeID"]) for node in nodes if node["NodeID"] != here]
    if not others:
        return
    run = open_run(storage_path, run_name)
    key = run.key(f"probe-{uuid.uuid4().hex}")
    content = uuid.uuid4().bytes
    run.storage.write(key, content)
    try:
        problems = ask_nodes("the storage", probe_here, dict.fromkeys(others, (storage_path, run_name, key, content)))
    finally:
        run.storage.delete(key)
    if problems:
        raise StorageError(
            f"{run.location}: {len(problems)} of {plural(len(others), 'other node')} cannot use this storage: "
            f"{list_problems(problems)}. If workers run on several nodes, SUNSPOT_STORAGE_PATH must be {BUCKET_URLS}, "
            "or a file system that all nodes share"
        )


Problems = dict[str, str]
"""Problems, keyed by Ray node ID."""


def ask_nodes(
    what: str,
    act: Callable[..., str],
    nodes: Mapping[str, tuple[object, ...]],
    calls: int = 0,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Problems:
    """Run `act` on each node with that node's arguments, and return the problems that it finds.

    A warning names the nodes that do not answer. `what` describes the check in this warning. The process on a node
    exits after `calls` calls of `act`, or never if `calls` is 0. Pass 1 for a check that uses the GPU, because Ray
    could otherwise start a training worker in the same process.
    """
    task = ray.remote(num_cpus=0, max_retries=1, max_calls=calls)(act)

    def ask(node: str) -> tuple[str, str]:
        """Return a pair: the problem that the node reports, and the reason why the node did not answer.

        At most one of the two is non-empty. Both are empty if the node is fine.
        """
        there: Any = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        try:
            return ray.get(there.remote(*nodes[node]), timeout=timeout_s), ""
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:  # the node is gone, or about to go
            return "", shorten(error)

    answers = dict(zip(nodes, map_parallel(ask, list(nodes), MAX_PROBES), strict=True))
    silent = [node for node, (_, silence) in answers.items() if silence]
    if silent:
        why = answers[silent[0]][1]
        log.warning(f"{plural(len(silent), 'node')} did not answer when asked about {what}: {_name(silent)} ({why})")
    return {node: PROBE_KEY.sub("probe-...", problem) for node, (problem, _) in answers.items() if problem}


def list_problems(problems: Problems) -> str:
    """Return the problems as text, in the form `NODE, NODE: PROBLEM; NODE: PROBLEM`."""
    named = list(dict.fromkeys(problems.values()))[:MAX_PROBLEMS_NAMED]
    return "; ".join(f"{_name([node for node in problems if problems[node] == each])}: {each}" for each in named)


def _name(nodes: list[str]) -> str:
    """Return up to MAX_NODES_NAMED nodes and the number of the others, as in `1a2b, 3c4d, 5e6f and 15 others`."""
    names = ", ".join(node[:12] for node in nodes[:MAX_NODES_NAMED])
    left = len(nodes) - MAX_NODES_NAMED
    return names if left <= 0 else f"{names} and {plural(left, 'other')}"


def probe_here(storage_path: str, run_name: str, key: str, content: bytes) -> str:
    """Return why this node cannot use the run's storage, or an empty string if it can.

    Also checks that this node reads `content` from the object `key`, which another node has written.
    """
    run = open_run(storage_path, run_name)
    try:
        if run.storage.read(key) != content:
            return "it does not read what another node has written"
        prove(run.storage, run.name)
    except SunspotError as error:
        return str(error)
    return ""
