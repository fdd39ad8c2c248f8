"""Leaves out nodes whose GPUs cannot be used: when a run starts, when they join it, and when one breaks as it trains.

A node is left out by draining it: nothing begins there any more, and it ends once it is idle.
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
"""CUDA's codes of errors that no program causes, after which a GPU may still answer."""

SUSPECT_TIMEOUT_S = 30.0
"""How long a node may take to answer after a loss, while the others wait: Ray misses a node in half of that."""


@dataclass(frozen=True)
class Needed:
    """What a run needs of the nodes that stay."""

    per_worker: dict[str, float]
    "Resources of each worker."
    least: int
    "Fewest workers that the run trains with."

    def refuse_loss(self, broken: Sequence[str], nodes: Sequence[Mapping[str, Any]], told: str) -> None:
        """Raise `SunspotError`, which begins with `told`, unless the run does without the broken ones of these nodes.

        It never does without this node, the head.
        """
        if ray.get_runtime_context().get_node_id() in broken:
            raise SunspotError(f"{told}; the head cannot be left out")
        room = sum(find_room([dict(node) for node in nodes if node["NodeID"] not in broken], self.per_worker).values())
        if room < self.least:
            raise SunspotError(
                f"{told}; the other nodes have room for {room} of at least {plural(self.least, 'worker')}"
            )


def find_broken_gpus(nodes: Sequence[Mapping[str, Any]], timeout_s: float = PROBE_TIMEOUT_S) -> Problems:
    """Find what is wrong with the GPUs that these nodes promise."""
    promised = {str(node["NodeID"]): (ceil(gpus),) for node in nodes if (gpus := node["Resources"].get("GPU"))}
    return ask_nodes("their GPUs", find_gpu_problem, promised, 1, timeout_s)


def leave_out_at_start(nodes: Sequence[Mapping[str, Any]], needed: Needed) -> list[str]:
    """Leave out the nodes with broken GPUs, and return a line on each; raises like `Needed.refuse_loss`."""
    problems = find_broken_gpus(nodes)
    if not problems:
        return []
    promising = sum(bool(node["Resources"].get("GPU")) for node in nodes)
    told = f"{len(problems)} of {plural(promising, 'node')} with GPUs cannot compute on them"
    needed.refuse_loss(list(problems), nodes, f"{told}: {list_problems(problems)}")
    verb = "are" if len(problems) > 1 else "is"
    log.warning(f"{told}, and {verb} left out: {list_problems(problems)}")
    return _leave_out(problems)


@contextmanager
def new_nodes_tried(
    control: ControlClient, nodes: Sequence[Mapping[str, Any]]
) -> Iterator[Callable[[list[dict[str, Any]]], list[dict[str, Any]]]]:
    """Leave out nodes that join with broken GPUs while the context lasts; `nodes` have been tried before.

    Yields a filter for nodes (as in `ray.nodes()`) that are reachable and have been tried: a group grows by no others.
    That costs the training nothing: a node is asked as it joins, for a few seconds, while the others train, and room
    for more workers must last as long anyway (`nodes.SETTLED_S`). A group that waits for nodes does not wait for this:
    Ray may start it on one that turns out to be broken, and then starts it again without.
    """
    tried = {str(node["NodeID"]) for node in nodes}

    def look() -> None:
        draining = draining_nodes()
        known = {*tried, *draining}
        joined = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in known]
        if not joined:
            return
        try:
            if problems := find_broken_gpus(joined):
                lines = _leave_out(problems)
                control.send(ControlChannel.add_left_out, lines)
                log.warning("; ".join(lines))
        finally:
            tried.update(str(node["NodeID"]) for node in joined)

    def usable(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [node for node in reachable_nodes(nodes) if node["NodeID"] in tried]

    with Background(NODE_CHECK_EVERY_S, look):
        yield usable


@dataclass(frozen=True)
class BrokenInTraining:
    """Leaves out the nodes on which a GPU has ended a rank; for Ray Train's controller, before the next group."""

    control: ControlClient
    needed: Needed
    group_ends: bool = False
    "True if the loss of one rank ends its group. Otherwise the others train on, and must still hear of notices."

    def __call__(self, suspects: Suspects) -> list[str]:
        """Leave out those of these nodes whose GPU is broken, and return a line on each.

        An error of CUDA may be the program's, and a process may be lost for any reason. So the GPU's driver on such a
        node is asked, as at the start, which takes seconds. Raises like `Needed.refuse_loss` where a GPU had an error
        and cannot be used any more. One that still answers is tried again, and so is one that does not answer, whose
        node may be going.
        """
        known = {id: HARDWARE_ERRORS.get(code or 0) for id, code in suspects.items()}
        told = {id: f"its GPU had {error}" for id, error in known.items() if error}
        nodes, draining = ray.nodes(), draining_nodes()
        asked = [node for node in nodes if node["NodeID"] in suspects and node["NodeID"] not in draining]
        asked = reachable_nodes([node for node in asked if node["Resources"].get("GPU") or node["NodeID"] in told])
        dead = find_broken_gpus(asked, SUSPECT_TIMEOUT_S)
        problems = {node["NodeID"]: told[node["NodeID"]] for node in asked if node["NodeID"] in told} | dead
        if not problems:
            return []
        try:
            self.needed.refuse_loss(list(problems), staying_nodes(), f"a GPU broke: {list_problems(problems)}")
        except SunspotError:
            if any(suspects[id] is not None for id in dead):
                raise
            return []
        if self.group_ends:  # before the drain, which a group that still counted would take for a notice
            self.control.call(ControlChannel.forget_group)
        return _leave_out(problems)


def _leave_out(problems: Problems) -> list[str]:
    drain_nodes(list(problems), "its GPU cannot be used")
    return [f"node {node[:12]} left out: {problem}" for node, problem in problems.items()]
