"""Tests that processes form whole replicas, and keep the shards that they hold (PARALLEL=hsdp)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.elastic.membership import Member, Membership
from sunspot.elastic.replicas import arrange, newest_whole

DEGREE = 2


def members(*names: str) -> list[Member]:
    """Return members on nodes that are named by their first letters."""
    return [Member(name, node=name[0]) for name in names]


def names(arranged: list[Member]) -> list[str]:
    return [member.uid for member in arranged]


@given(st.data())
def test_as_many_replicas_as_possible_are_formed_and_members_with_a_state_keep_their_shards(
    data: st.DataObject,
) -> None:
    nodes = data.draw(st.lists(st.sampled_from("abc"), max_size=9))
    degree = data.draw(st.integers(1, 3))
    everyone = [Member(f"{node}{number}", node) for number, node in enumerate(nodes)]
    shards = {member: data.draw(st.integers(0, degree - 1)) for member in everyone if data.draw(st.booleans())}
    bound = {member: float(data.draw(st.integers(4, 5))) for member in shards if data.draw(st.booleans())}
    arranged = arrange(everyone, shards, bound, degree)
    assert len(set(arranged)) == len(arranged)
    assert not len(arranged) % degree
    assert all(rank % degree == shards[member] for rank, member in enumerate(arranged) if member in bound)
    left = [member for member in everyone if member not in arranged]
    held = Counter(shards[member] for member in left if member in bound)
    free = sum(member not in bound for member in left)
    assert sum(not held[shard] for shard in range(degree)) > free, "the members that are left can form a replica"
    kept = {member: step for member, step in bound.items() if member in arranged}
    if degree > 1:
        assert newest_whole(kept, shards, degree) == newest_whole(bound, shards, degree), "the newest state is left out"


def test_members_on_the_same_node_form_a_replica() -> None:
    everyone = members("a1", "b1", "a2", "b2")
    assert names(arrange(everyone, {}, {}, DEGREE)) == ["a1", "a2", "b1", "b2"]


def test_a_replica_forms_across_nodes_if_no_node_has_all_shards() -> None:
    everyone = members("a1", "b2")
    shards = dict(zip(everyone, (1, 0), strict=True))
    assert names(arrange(everyone, shards, dict.fromkeys(everyone, 5.0), DEGREE)) == ["b2", "a1"]


def test_a_process_that_has_waited_for_a_group_gets_its_former_shard_again() -> None:
    waited, newcomer = members("a1", "a2")
    assert names(arrange([newcomer, waited], {waited: 0}, {}, DEGREE)) == ["a1", "a2"]
    assert names(arrange([newcomer, waited], {waited: 1}, {}, DEGREE)) == ["a2", "a1"]


class Group:
    """A membership server's state with four processes on two nodes, all of which train."""

    def __init__(self) -> None:
        self.membership = Membership(4, DEGREE)
        for name in ("a1", "a2", "b1", "b2"):
            self.come(name)
        self.now = 1.0
        self.decide()

    def come(self, name: str) -> None:
        self.membership.enter(Member(name, name[0]))
        self.membership.request_to_join(name, 0.0)

    def lose(self, name: str) -> None:
        """Lose a member, and let all other members ask for the next group."""
        self.membership.lose(name, self.now)
        for member in self.membership.generation.members:
            self.membership.request_to_join(member.uid, self.now, 5)

    def change(self) -> None:
        """Let all members ask for the next group after a step."""
        for member in self.membership.generation.members:
            self.membership.request_to_join(member.uid, self.now, 6)

    def decide(self) -> list[str]:
        """Let time pass, and return the names of the newest group's members, by rank."""
        self.now += 1.0
        self.membership.decide(self.now)
        return [member.uid for member in self.membership.generation.members]


def test_the_replica_of_a_lost_worker_leaves_and_comes_back_with_a_new_process() -> None:
    group = Group()
    group.lose("a1")
    assert group.decide() == ["b1", "b2"]
    group.decide()
    assert group.membership.newcomers == 0, "a2 alone is no replica"
    group.come("a3")
    group.decide()
    assert group.membership.newcomers == 2
    group.change()
    assert group.decide() == ["b1", "b2", "a3", "a2"], "a2 has its former shard"


def test_the_workers_of_two_broken_replicas_continue_as_one_replica() -> None:
    group = Group()
    group.membership.lose("a1", group.now)
    group.lose("b2")
    assert group.decide() == ["b1", "a2"]


@pytest.mark.parametrize("steps", [(6, 5, 5), (5, 6, 6)])
def test_a_group_is_formed_of_members_whose_shards_belong_to_the_same_step(steps: tuple[int, ...]) -> None:
    """Otherwise, nobody could continue, because shards of different steps do not form a state."""
    membership = Membership(4, DEGREE)
    for uid in ("a1", "a2", "a3", "a4"):
        membership.enter(Member(uid, "a"))
        membership.request_to_join(uid, 0.0)
    membership.decide(1.0)
    membership.lose("a1", 2.0)
    for uid, step in zip(("a2", "a3", "a4"), steps, strict=True):
        membership.request_to_join(uid, 2.0, step)
    membership.decide(3.0)
    assert [member.uid for member in membership.generation.members] == ["a3", "a4"]


def test_no_group_forms_until_a_new_process_completes_a_replica() -> None:
    group = Group()
    group.membership.lose("a1", group.now)
    group.lose("b1")
    assert group.decide() == ["a1", "a2", "b1", "b2"], "the last group, of which only the second shard is left"
    assert not group.membership.snapshot().generation.number > 1
    group.come("b3")
    assert set(group.decide()) == {"b3", "b2"}


def test_a_draining_replica_leaves_once_another_replica_has_the_state() -> None:
    group = Group()
    group.membership.drain(["a"])
    group.decide()
    assert [member.uid for member in group.membership.leavers] == ["a1", "a2"]
    group.change()
    assert group.decide() == ["b1", "b2"]
