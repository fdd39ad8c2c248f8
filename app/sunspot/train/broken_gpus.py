"""Excludes nodes with broken GPUs at the start of a run, when nodes join it, and after a worker is lost.

A node is excluded by draining it: Ray schedules nothing more on the node, and removes the node once it is idle.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import ray

from sunspot.background import Background
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.failures import Suspects
from sunspot.elastic.nodes import NODE_CHECK_EVERY_S, find_room
from sunspot.errors import SunspotError
from sunspot.formatting import plural
from sunspot.ray_internals.nodes import drain_nodes, draining_nodes, reachable_nodes, staying_nodes
from sunspot.train.gpu import find_gpu_problem
from sunspot.train.probe import PROBE_TIMEOUT_S, Problems, ask_nodes, list_problems

log = logging.getLogger(__name__)

HARDWARE_ERRORS = {214: "an uncorrectable error of its memory (ECC)", 220: "an uncorrectable error of NVLink"}
"""Hardware faults, keyed by CUDA error code. The GPU can still respond after such a fault."""

SUSPECT_TIMEOUT_S = 30.0
"""Maximum number of seconds to wait for a node's answer after a loss. Ray notices a lost node in half this time."""


@dataclass(frozen=True)
class RequiredResources:
    """Resources that the run needs to continue if nodes are excluded."""

    per_worker: dict[str, float]
    "Amount of each resource that one worker needs."
    least: int
    "Minimum number of workers."

    def refuse_loss(self, broken: Sequence[str], nodes: Sequence[Mapping[str, Any]], reason: str) -> None:
        """Raise `SunspotError` with this `reason` if the run cannot continue without the `broken` nodes.

        `nodes` are all nodes of the run, as in `ray.nodes()`. A run cannot continue without its head node, on which
        this code runs.
        """
        if ray.get_runtime_context().get_node_id() in broken:
            raise SunspotError(f"{reason}; the run cannot continue without its head node")
        room = sum(find_room([dict(node) for node in nodes if node["NodeID"] not in broken], self.per_worker).values())
        if room < self.least:
            raise SunspotError(
                f"{reason}; the other nodes can run {plural(room, 'worker')}, but the run needs at least {self.least}"
            )


def find_broken_gpus(nodes: Sequence[Mapping[str, Any]], timeout_s: float = PROBE_TIMEOUT_S) -> Problems:
    """Check the GPUs of these nodes, and return the problems, keyed by node."""
    promised = {str(node["NodeID"]): (ceil(gpus),) for node in nodes if (gpus := node["Resources"].get("GPU"))}
    return ask_nodes("their GPUs", find_gpu_problem, promised, 1, timeout_s)


def leave_out_at_start(nodes: Sequence[Mapping[str, Any]], required: RequiredResources) -> list[str]:
    """Exclude the nodes with broken GPUs, and return a line about each of them.

    Raises `SunspotError` if too few nodes remain (`RequiredResources.refuse_loss`).
    """
    problems = find_broken_gpus(nodes)
    if not problems:
        return []
    promising = sum(bool(node["Resources"].get("GPU")) for node in nodes)
    summary = f"{len(problems)} of {plural(promising, 'node')} with GPUs cannot compute on them"
    required.refuse_loss(list(problems), nodes, f"{summary}: {list_problems(problems)}")
    verb = "are" if len(problems) > 1 else "is"
    log.warning(f"{summary}, and {verb} left out: {list_problems(problems)}")
    return _leave_out(problems)


@contextmanager
def new_nodes_checked(
    control: ControlClient, nodes: Sequence[Mapping[str, Any]]
) -> Iterator[Callable[[list[dict[str, Any]]], list[dict[str, Any]]]]:
    """Context manager that excludes nodes that join with broken GPUs. `nodes` have already been checked.

    Yields a filter, which keeps only the nodes (as in `ray.nodes()`) that are reachable and have been checked. A group
    grows only onto those nodes. The check takes a few seconds, but does not delay growth, because a group waits longer
    than that before it grows (`nodes.SETTLED_S`). If a group has too few nodes to start, it does not wait for the check
    of new nodes. If Ray starts this group on a broken node, the group is restarted without that node.
    """
    checked = {str(node["NodeID"]) for node in nodes}

    def look() -> None:
        draining = draining_nodes()
        known = {*checked, *draining}
        joined = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in known]
        if not joined:
            return
        try:
            problems = find_broken_gpus(joined)
            if problems:
                lines = _leave_out(problems)
                control.send(ControlChannel.add_left_out, lines)
                log.warning("; ".join(lines))
        finally:
            checked.update(str(node["NodeID"]) for node in joined)

    def usable(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [node for node in reachable_nodes(nodes) if node["NodeID"] in checked]

    with Background(NODE_CHECK_EVERY_S, look):
        yield usable


@dataclass(frozen=True)
class BrokenInTraining:
    """Excludes nodes on which a broken GPU stopped a worker. Ray Train's controller calls this before each group."""

    control: ControlClient
    required: RequiredResources
    group_ends: bool = False
    "True if the loss of one rank ends its group. Otherwise the others keep training and must still receive notices."

    def __call__(self, suspects: Suspects) -> list[str]:
        """Exclude the suspect nodes whose GPU is broken, and return a line about each of them.

        A CUDA error can be the program's fault, and a process can be lost for any reason. Therefore the GPU driver is
        queried on each suspect node, which takes seconds. A node stays in use if its GPU works and has had no hardware
        error. A node that does not answer also stays in use, because it may be about to leave. Raises `SunspotError` if
        a GPU had a CUDA error and no longer works, but the run needs its node.
        """
        known = {id: HARDWARE_ERRORS.get(code or 0) for id, code in suspects.items()}
        faults = {id: f"its GPU had {error}" for id, error in known.items() if error}
        nodes = ray.nodes()
        draining = draining_nodes()
        asked = [node for node in nodes if node["NodeID"] in suspects and node["NodeID"] not in draining]
        asked = reachable_nodes([node for node in asked if node["Resources"].get("GPU") or node["NodeID"] in faults])
        dead = find_broken_gpus(asked, SUSPECT_TIMEOUT_S)
        problems = {node["NodeID"]: faults[node["NodeID"]] for node in asked if node["NodeID"] in faults} | dead
        if not problems:
            return []
        try:
            self.required.refuse_loss(list(problems), staying_nodes(), f"a GPU broke: {list_problems(problems)}")
        except SunspotError:
            if any(suspects[id] is not None for id in dead):
                raise
            return []
        if self.group_ends:  # otherwise the group would take the drain for a notice
            self.control.call(ControlChannel.forget_group)
        return _leave_out(problems)


def _leave_out(problems: Problems) -> list[str]:
    drain_nodes(list(problems), "its GPU cannot be used")
    return [f"node {node[:12]} left out: {problem}" for node, problem in problems.items()]
