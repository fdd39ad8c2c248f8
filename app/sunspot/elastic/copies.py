"""Chooses the copy in the nodes' shared memory that a worker group may start from."""

from collections.abc import Sequence
from typing import NamedTuple

from sunspot.checkpoint.memory_files import MemorySnapshot
from sunspot.checkpoint.node_state import PartCopy
from sunspot.checkpoint.replicas import ranks_by_node
from sunspot.run.attempts import Attempt, attempt_of, lineage, step_of
from sunspot.run.checkpoints import leads_to_newest

RESTORES = 2
"""Groups that may come to no step from one copy in memory before it is passed over: one may have been unlucky."""


class LiveState(NamedTuple):
    """The state that a process has from the group before, in which it has survived."""

    checkpoint: str
    "The name that a checkpoint of it would have."
    evaluated: bool
    "Whether an epoch that ends there has been evaluated."


class NodeInventory(NamedTuple):
    """The contents of a node, as one of its ranks knows them."""

    host: str
    node: str
    "Ray's id of the node."
    snapshot: MemorySnapshot | None
    heartbeats: list[tuple[int, int, float]]
    parts: Sequence[MemorySnapshot] = ()
    "Of states in parts, from the lowest rank of each node alone."
    live: LiveState | None = None
    "What the rank itself trains with."
    group: str = ""
    "The group of the node, as KubeRay names it; empty: none is known."
    process: str = ""
    "Tells the rank's process apart from all others."


class ChosenCopy(NamedTuple):
    """A copy of the state that a group starts from."""

    rank: int
    "The lowest rank whose node has it."
    snapshot: MemorySnapshot
    "Of a state in parts, the first one."
    parts: Sequence[PartCopy] = ()
    "Of a state in parts, all."


class SurvivingState(NamedTuple):
    """The ranks that have the state to go on from, and its name."""

    checkpoint: str
    evaluated: bool
    "Whether all of them have the evaluation of an epoch that ends there."
    ranks: tuple[int, ...]
    "First one that has no evaluation, if so: the metrics of all are the first one's."


def choose_live(attempts: list[Attempt], inventories: Sequence[NodeInventory]) -> SurvivingState | None:
    """Choose the state of the survivors that went furthest; None without survivors that have one.

    They differ by one step at most, which some had taken when others could not end it. The state of a process that was
    away for longer does not count: the others may have gone on from it, and deleted its checkpoint.
    """
    spans = lineage(attempts)
    live = {
        rank: inventory.live
        for rank, inventory in enumerate(inventories)
        if inventory.live
        and leads_to_newest(inventory.live.checkpoint, spans)
        and was_in_every_group(inventory, attempts)
    }
    if not live:
        return None
    furthest = max((state.checkpoint for state in live.values()), key=step_of)
    ranks = [rank for rank, state in live.items() if step_of(state.checkpoint) == step_of(furthest)]
    ranks.sort(key=lambda rank: live[rank].evaluated)
    return SurvivingState(furthest, live[ranks[0]].evaluated, tuple(ranks))


def was_in_every_group(inventory: NodeInventory, attempts: list[Attempt]) -> bool:
    """Whether a survivor's process was in each group that has begun since its last step: none took one without it."""
    assert inventory.live
    last = attempt_of(inventory.live.checkpoint)
    since = [attempt for attempt in attempts if attempt.number > last and attempt.chosen]
    return all(inventory.process in attempt.metadata.processes for attempt in since)


def choose_copy(attempts: list[Attempt], inventories: Sequence[NodeInventory]) -> ChosenCopy | None:
    """Choose the newest copy on any node, in the lineage of the newest attempt; of the same, the lowest rank's.

    A copy of a superseded attempt is not in that lineage, however far it went.
    """
    spans = lineage(attempts)
    found = [
        ChosenCopy(rank, inventory.snapshot)
        for rank, inventory in enumerate(inventories)
        if inventory.snapshot and leads_to_newest(inventory.snapshot.checkpoint, spans)
    ]
    if parts := choose_parts(attempts, inventories):
        found.append(ChosenCopy(*parts[0], parts))
    return max(found, key=lambda copy: _recency(copy.snapshot), default=None)


def choose_parts(attempts: list[Attempt], inventories: Sequence[NodeInventory]) -> list[PartCopy]:
    """Choose the newest state of which every part is on some node, in the lineage of the newest attempt.

    Each part is to be read by one rank of a node that holds it: where it is likely to be needed, if it is there.
    """
    spans, holders = lineage(attempts), dict[tuple[int, bool, str, int], dict[int, dict[str, MemorySnapshot]]]()
    for inventory in inventories:
        for held in inventory.parts:
            if held.part < held.parts and leads_to_newest(held.checkpoint, spans):
                state = holders.setdefault((*_recency(held), held.checkpoint, held.parts), {})
                state.setdefault(held.part, {})[inventory.node] = held
    whole = [key for key, state in holders.items() if len(state) == key[-1]]
    if not whole:
        return []
    ranks = ranks_by_node(inventory.node for inventory in inventories)
    chosen, count = [], dict.fromkeys(ranks, 0)
    for part, copies in sorted(holders[max(whole)].items()):
        likely = inventories[part * len(inventories) // max(whole)[-1]].node
        node = likely if likely in copies else min(copies, key=lambda each: count[each])
        chosen.append(PartCopy(ranks[node][count[node] % len(ranks[node])], copies[node]))
        count[node] += 1
    return chosen


def exclude_damaged_parts(inventories: Sequence[NodeInventory], faulty: Sequence[PartCopy]) -> list[NodeInventory]:
    """Remove the copies of parts that are damaged."""
    gone = {(inventories[rank].node, held) for rank, held in faulty}
    return [
        inventory._replace(parts=tuple(held for held in inventory.parts if (inventory.node, held) not in gone))
        for inventory in inventories
    ]


def exclude_crashing_copy(
    inventories: Sequence[NodeInventory], before: Sequence[Attempt]
) -> tuple[list[NodeInventory], str]:
    """Remove the copy from which the last RESTORES groups took no step; returns its name, too, if there is one.

    Only groups count all of whose nodes are still there: the loss of a node ends a group, too, and says nothing of the
    copy that it started from.
    """
    last = [attempt for attempt in before if attempt.chosen][-RESTORES:]
    names = {attempt.starts_from if attempt.metadata.tier == "memory" else None for attempt in last}
    hosts = {host for attempt in last for host in attempt.metadata.nodes.values()}
    took_step = {attempt for inventory in inventories for attempt, _, _ in inventory.heartbeats}
    crashed = len(last) == RESTORES and hosts <= {inventory.host for inventory in inventories}
    if not crashed or len(names) > 1 or None in names or took_step & {attempt.number for attempt in last}:
        return list(inventories), ""
    [name] = names

    def keep(held: MemorySnapshot | None) -> bool:
        return held is not None and held.checkpoint != name

    left = [
        inventory._replace(
            snapshot=inventory.snapshot if keep(inventory.snapshot) else None,
            parts=tuple(filter(keep, inventory.parts)),
        )
        for inventory in inventories
    ]
    return left, str(name) if left != list(inventories) else ""


def _recency(snapshot: MemorySnapshot) -> tuple[int, bool]:
    """Sort key: a larger one is a newer copy."""
    return snapshot.step, snapshot.evaluated
