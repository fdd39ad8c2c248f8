"""Describes the states that a worker group may start from, and chooses one of the in-memory copies."""

from collections.abc import Sequence
from typing import NamedTuple

from sunspot.checkpoint.memory_files import Heartbeat, MemorySnapshot
from sunspot.checkpoint.node_state import PartCopy
from sunspot.checkpoint.part_exchange import ranks_by_node
from sunspot.run.attempts import Attempt, attempts_with_start, lineage
from sunspot.run.checkpoints import leads_to_newest

RESTORES = 2
"""Number of consecutive groups without a step that can start from an in-memory copy before this copy is skipped."""


class LiveState(NamedTuple):
    """The state that a surviving process has kept from the previous group."""

    checkpoint: str
    "Name that a checkpoint of this state would have."
    evaluated: bool
    "True if an epoch that ends at this step has been evaluated."
    shard: int = 0
    "Shard of the state that the process has, or 0 if it has the whole state."
    shards: int = 1
    "Number of shards of the state."


class NodeInventory(NamedTuple):
    """The usable states on a node, as reported by one of its ranks."""

    host: str
    node: str
    "Ray's id of the node."
    snapshot: MemorySnapshot | None
    heartbeats: list[Heartbeat]
    parts: Sequence[MemorySnapshot] = ()
    "Copies of parts of sharded states. Only the lowest rank on each node reports them."
    live: LiveState | None = None
    "The reporting rank's live state."
    group: str = ""
    "KubeRay's name for the node group, or an empty string if it is unknown."
    process: str = ""
    "A unique name of the rank's process."


class ChosenCopy(NamedTuple):
    """An in-memory copy from which a group starts."""

    rank: int
    "Lowest rank whose node has the copy."
    snapshot: MemorySnapshot
    "The copy, or its first part if the state is sharded."
    parts: Sequence[PartCopy] = ()
    "All parts, if the state is sharded."


class SurvivingState(NamedTuple):
    """The survivors' newest live state, and the ranks that have it."""

    checkpoint: str
    evaluated: bool
    "True if all `ranks` have evaluated the epoch that ends at this step."
    ranks: tuple[int, ...]
    """Ranks that have the state, or their shard of it. Ranks that have not evaluated it come first, because all ranks
    use the first rank's metrics."""
    shards: int = 1
    "Number of shards of the state. Rank r has shard r % shards."


def choose_copy(attempts: list[Attempt], inventories: Sequence[NodeInventory]) -> ChosenCopy | None:
    """Return the newest in-memory copy in the newest attempt's lineage, on any node.

    Among equally new copies, the copy of the lowest rank is chosen. A superseded attempt's copy is not in the lineage,
    even if the copy is newer.
    """
    spans = lineage(attempts)
    found = [
        ChosenCopy(rank, inventory.snapshot)
        for rank, inventory in enumerate(inventories)
        if inventory.snapshot and leads_to_newest(inventory.snapshot.checkpoint, spans)
    ]
    parts = choose_parts(attempts, inventories)
    if parts:
        found.append(ChosenCopy(*parts[0], parts))
    return max(found, key=lambda copy: _recency(copy.snapshot), default=None)


def choose_parts(attempts: list[Attempt], inventories: Sequence[NodeInventory]) -> list[PartCopy]:
    """Return copies of all shards of the newest complete sharded state in the newest attempt's lineage.

    A state is complete if the nodes together have all of its shards. Each shard is assigned to a rank on a node that
    has a copy of the shard, preferably on the node that is likely to need the shard.
    """
    spans = lineage(attempts)
    states = dict[tuple[int, bool, str, int], dict[int, dict[str, MemorySnapshot]]]()  # part -> node -> copy
    for inventory in inventories:
        for held in inventory.parts:
            if held.part < held.parts and leads_to_newest(held.checkpoint, spans):
                state = states.setdefault((*_recency(held), held.checkpoint, held.parts), {})
                state.setdefault(held.part, {})[inventory.node] = held
    complete = [key for key, state in states.items() if len(state) == key[-1]]
    if not complete:
        return []
    ranks = ranks_by_node(inventory.node for inventory in inventories)
    chosen = []
    count = dict.fromkeys(ranks, 0)
    for part, copies in sorted(states[max(complete)].items()):
        likely = inventories[part * len(inventories) // max(complete)[-1]].node
        node = likely if likely in copies else min(copies, key=lambda each: count[each])
        chosen.append(PartCopy(ranks[node][count[node] % len(ranks[node])], copies[node]))
        count[node] += 1
    return chosen


def exclude_damaged_parts(inventories: Sequence[NodeInventory], faulty: Sequence[PartCopy]) -> list[NodeInventory]:
    """Return the inventories without the damaged copies of shards."""
    gone = {(inventories[rank].node, held) for rank, held in faulty}
    return [
        inventory._replace(parts=tuple(held for held in inventory.parts if (inventory.node, held) not in gone))
        for inventory in inventories
    ]


def exclude_crashing_copy(
    inventories: Sequence[NodeInventory], before: Sequence[Attempt]
) -> tuple[list[NodeInventory], str]:
    """Remove the copy from which the last RESTORES groups started without completing a step.

    Returns the remaining inventories, and the name of the removed copy or an empty string. No copy is removed if one of
    these groups has lost a node, because this loss may have ended the group.
    """
    last = attempts_with_start(before)[-RESTORES:]
    names = {attempt.starts_from if attempt.metadata.tier == "memory" else None for attempt in last}
    hosts = {host for attempt in last for host in attempt.metadata.nodes.values()}
    took_step = {each.attempt for inventory in inventories for each in inventory.heartbeats}
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
    """Return a sort key that is larger for a newer copy."""
    return snapshot.step, snapshot.evaluated
