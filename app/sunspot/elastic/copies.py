"""Which of the copies in the nodes' shared memory a worker group may start from."""

from collections.abc import Sequence
from typing import NamedTuple

from sunspot.checkpoint.memory import MemorySnapshot
from sunspot.checkpoint.node_state import PartCopy
from sunspot.checkpoint.replicas import ranks_by_node
from sunspot.run.attempts import Attempt, lineage
from sunspot.run.checkpoints import leads_to_newest
from sunspot.run.incidents import TIER

RESTORES = 2
"""Groups that may come to no step from one copy in memory before it is passed over: one may have been unlucky."""


class Machine(NamedTuple):
    """What a rank knows of its node."""

    host: str
    node: str
    "Ray's id of the node."
    snapshot: MemorySnapshot | None
    heartbeats: list[tuple[int, int, float]]
    parts: tuple[MemorySnapshot, ...] = ()
    "Of states in parts, from the lowest rank of each node alone."
    forked: bool = False
    "Whether the rank's process was forked (sunspot/warm)."


def choose_copy(
    attempts: list[Attempt], machines: Sequence[Machine]
) -> tuple[int, MemorySnapshot | None, list[PartCopy]]:
    """The newest copy on any node, and the rank that has it; of a state in parts, the first of them, and all."""
    rank, snapshot = choose_snapshot(attempts, [machine.snapshot for machine in machines])
    parts = choose_parts(attempts, machines)
    if parts and (not snapshot or _recency(parts[0].held) > _recency(snapshot)):
        return *parts[0], parts
    return rank, snapshot, []


def choose_snapshot(
    attempts: list[Attempt], snapshots: list[MemorySnapshot | None]
) -> tuple[int, MemorySnapshot | None]:
    """The newest of the ranks' snapshots in the lineage of the newest attempt, and the lowest rank that has it.

    A snapshot of a superseded attempt is not in that lineage, however far it went.
    """
    spans = lineage(attempts)
    candidates = [
        (*_recency(snapshot), -rank)
        for rank, snapshot in enumerate(snapshots)
        if snapshot and leads_to_newest(snapshot.checkpoint, spans)
    ]
    rank = -max(candidates)[-1] if candidates else 0
    return rank, snapshots[rank] if candidates else None


def choose_parts(attempts: list[Attempt], machines: Sequence[Machine]) -> list[PartCopy]:
    """The newest state of which every part is on some node, in the lineage of the newest attempt; empty without one.

    Each part is to be read by one rank of a node that holds it: where it is likely to be needed, if it is there.
    """
    spans, holders = lineage(attempts), dict[tuple[int, bool, str, int], dict[int, dict[str, MemorySnapshot]]]()
    for machine in machines:
        for held in machine.parts:
            if held.part < held.parts and leads_to_newest(held.checkpoint, spans):
                state = holders.setdefault((*_recency(held), held.checkpoint, held.parts), {})
                state.setdefault(held.part, {})[machine.node] = held
    whole = [key for key, state in holders.items() if len(state) == key[-1]]
    if not whole:
        return []
    ranks = ranks_by_node(machine.node for machine in machines)
    chosen, count = [], dict.fromkeys(ranks, 0)
    for part, copies in sorted(holders[max(whole)].items()):
        likely = machines[part * len(machines) // max(whole)[-1]].node
        node = likely if likely in copies else min(copies, key=lambda each: count[each])
        chosen.append(PartCopy(ranks[node][count[node] % len(ranks[node])], copies[node]))
        count[node] += 1
    return chosen


def without_copies(machines: Sequence[Machine], faulty: Sequence[PartCopy]) -> list[Machine]:
    """The machines without copies of parts that are damaged."""
    gone = {(machines[rank].node, held) for rank, held in faulty}
    return [
        machine._replace(parts=tuple(held for held in machine.parts if (machine.node, held) not in gone))
        for machine in machines
    ]


def without_crashing(machines: Sequence[Machine], before: Sequence[Attempt]) -> tuple[list[Machine], str]:
    """The machines without the copy from which the last RESTORES groups came to no step, and its name if there is one.

    Only groups count all of whose nodes are still there: the loss of a node ends a group, too, and says nothing of the
    copy that it started from.
    """
    last = [attempt for attempt in before if attempt.chosen][-RESTORES:]
    names = {attempt.starts_from if attempt.metadata.get(TIER) == "memory" else None for attempt in last}
    hosts = {host for attempt in last for host in attempt.metadata.get("nodes", {}).values()}
    took_step = {attempt for machine in machines for attempt, _, _ in machine.heartbeats}
    crashed = len(last) == RESTORES and hosts <= {machine.host for machine in machines}
    if not crashed or len(names) > 1 or None in names or took_step & {attempt.number for attempt in last}:
        return list(machines), ""
    [name] = names

    def keep(held: MemorySnapshot | None) -> bool:
        return held is not None and held.checkpoint != name

    left = [
        machine._replace(
            snapshot=machine.snapshot if keep(machine.snapshot) else None, parts=tuple(filter(keep, machine.parts))
        )
        for machine in machines
    ]
    return left, str(name) if left != list(machines) else ""


def _recency(snapshot: MemorySnapshot) -> tuple[int, bool]:
    """The larger, the newer."""
    return snapshot.step, snapshot.evaluated
