"""Arranges processes in whole replicas, each of which holds one copy of the model (PARALLEL=hsdp)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sunspot.elastic.membership import Member


def arrange(
    members: Sequence[Member], shards: Mapping[Member, int], bound: Mapping[Member, float], degree: int
) -> list[Member]:
    """Return members that form as many whole replicas of `degree` members as possible, in the order of their ranks.

    The member with rank r gets shard r % degree of replica r // degree. `shards` contains the shard that each member
    held last. Some members must keep this shard, because they hold its state. `bound` maps these members to the steps
    of their states. The other members can take any shard, but must build their model again if they get a new shard.

    After a loss, the steps can differ by one. If the bound members hold all shards of a step, one replica gets all
    shards of the newest such step, and can send them to the others.

    Members on the same node form replicas first, because communication within a node is fastest. Replicas of bound
    members precede the other replicas, and both kinds keep the order of `members`.
    """
    if degree == 1:
        return list(members)
    newest = newest_whole(bound, shards, degree)
    holders = [member for member in members if bound.get(member) == newest]
    replicas = _split_by_node(holders, shards, bound, degree)[:1]
    first = {member for replica in replicas for member in replica}
    replicas += _split_by_node([member for member in members if member not in first], shards, bound, degree)
    position = {member: number for number, member in enumerate(members)}
    replicas.sort(key=lambda replica: (not bound.keys() >= set(replica), min(position[member] for member in replica)))
    return [member for replica in replicas for member in replica]


def newest_whole(steps: Mapping[Member, float], shards: Mapping[Member, int], degree: int) -> float:
    """Return the newest step for which the members hold all shards, or -inf if there is no such step.

    `steps` contains the step of each member's state.
    """
    held = [{step for member, step in steps.items() if shards[member] == shard} for shard in range(degree)]
    return max(set.intersection(*held), default=-math.inf)


def _split_by_node(
    members: Sequence[Member], shards: Mapping[Member, int], bound: Collection[Member], degree: int
) -> list[list[Member]]:
    """Return as many whole replicas as possible. As few of these replicas as possible span several nodes."""
    pools: dict[str, list[Member]] = {}
    for member in members:
        pools.setdefault(member.node, []).append(member)
    replicas: list[list[Member]] = []
    left: list[Member] = []
    for pool in pools.values():
        whole, others = _split(pool, shards, bound, degree)
        replicas += whole
        left += others
    return replicas + _split(left, shards, bound, degree)[0]


def _split(
    pool: Sequence[Member], shards: Mapping[Member, int], bound: Collection[Member], degree: int
) -> tuple[list[list[Member]], list[Member]]:
    """Return the whole replicas that the members in `pool` can form, and the remaining members."""
    free = [member for member in pool if member not in bound]
    held: list[list[Member]] = [[] for _ in range(degree)]
    for member in pool:
        if member in bound:
            held[shards[member]].append(member)
    replicas = []
    while sum(not holders for holders in held) <= len(free):
        replica = []
        for shard, holders in enumerate(held):
            if not holders:
                holders.append(min(free, key=lambda each: _rank_for(shard, shards.get(each))))
                free.remove(holders[0])
            replica.append(holders.pop(0))
        replicas.append(replica)
    return replicas, [*(member for holders in held for member in holders), *free]


def _rank_for(shard: int, before: int | None) -> int:
    """Return a sort key for a process that last held shard `before`. A smaller key means a better fit for `shard`."""
    if before == shard:
        return 0
    return 1 if before is None else 2
