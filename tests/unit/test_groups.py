"""Tests of how many workers are requested from each node group as nodes come and go."""

from __future__ import annotations

from sunspot.elastic.groups import GroupChoice, nodes_to_release
from sunspot.settings import NodeGroup, load_settings

SPOT = NodeGroup(name="spot", most=4, after_s=300)
ON_DEMAND = NodeGroup(name="ondemand", most=4, after_s=300)
BASE = NodeGroup(name="base", most=1, after_s=0)


class Story:
    def __init__(self, *groups: NodeGroup) -> None:
        self.choice, self.now = GroupChoice(groups, 4), 0.0

    def after(self, seconds: int, **room: int) -> list[int]:
        """Return the workers requested from each group if these numbers of workers fit on its nodes for `seconds`."""
        asked: dict[str, int] = {}
        for _ in range(seconds):
            self.now += 1
            asked = self.choice.choose(room, self.now)
        return list(asked.values())


def test_on_demand_nodes_replace_missing_spot_nodes_until_spot_nodes_return() -> None:
    story = Story(SPOT, ON_DEMAND)
    assert story.after(300) == [4, 0], "nodes need time to come"
    assert story.after(1) == [4, 4]
    assert story.after(1000, ondemand=4) == [4, 4], "spot is still requested"
    assert story.after(299, spot=4, ondemand=4) == [4, 4]
    assert story.after(1, spot=4, ondemand=4) == [4, 0]
    assert story.after(1000, spot=4) == [4, 0]


def test_only_the_missing_workers_are_requested_from_the_next_node_group() -> None:
    story = Story(SPOT, ON_DEMAND)
    story.after(10, spot=4)
    assert story.after(299, spot=3) == [4, 0]
    assert story.after(1, spot=3) == [4, 1]
    assert story.after(100, spot=1, ondemand=1) == [4, 1], "the wait begins again"
    assert story.after(199, spot=0, ondemand=1) == [4, 1]
    assert story.after(1, spot=0, ondemand=1) == [4, 4], "all workers that are missing when the wait ends are requested"


def test_spot_nodes_that_come_and_go_do_not_change_the_request() -> None:
    story = Story(SPOT, ON_DEMAND)
    story.after(301)
    for _ in range(10):
        assert story.after(200, spot=4, ondemand=4) == [4, 4]
        assert story.after(5, ondemand=4) == [4, 4]


def test_a_run_waits_longer_before_each_return_to_spot_nodes_that_are_lost_again() -> None:
    story = Story(SPOT, ON_DEMAND)
    story.after(301)
    for wait_s in (300, 600, 1200, 1800, 1800):
        assert story.after(wait_s - 1, spot=4, ondemand=4) == [4, 4]
        assert story.after(1, spot=4, ondemand=4) == [4, 0]
        assert story.after(301, ondemand=4) == [4, 4]
    story.after(1800, spot=4, ondemand=4)
    story.after(7200, spot=4)
    assert story.after(300) == [4, 4]
    assert story.after(300, spot=4, ondemand=4) == [4, 0], "a loss two hours after the return counts as the first"


def test_a_run_also_waits_longer_if_only_some_spot_nodes_are_lost_again() -> None:
    story = Story(SPOT, ON_DEMAND)
    assert story.after(301, spot=1) == [4, 3]
    assert story.after(300, spot=3, ondemand=3) == [4, 1]
    assert story.after(300, spot=2, ondemand=3) == [4, 2]
    assert story.after(300, spot=1, ondemand=3) == [4, 3], "the nodes of one loss can go one after the other"
    assert story.after(599, spot=3, ondemand=3) == [4, 3]
    assert story.after(1, spot=3, ondemand=3) == [4, 1]


def test_a_run_keeps_one_on_demand_worker_and_requests_spot_nodes_for_the_others() -> None:
    story = Story(BASE, SPOT, ON_DEMAND)
    assert story.after(1) == [1, 3, 0], "these workers never fit into the group before, so they are requested at once"
    assert story.after(1000, base=1, spot=3) == [1, 3, 0]
    assert story.after(1000, base=4, spot=3) == [1, 3, 0], "the base group needs only one of its four nodes"
    assert story.after(300, base=1, spot=1) == [1, 3, 2]
    assert story.after(300, base=0, spot=3) == [1, 4, 1], "spot replaces the missing base, and has no worker left"


def test_a_restarted_driver_keeps_the_nodes_that_it_finds() -> None:
    story = Story(SPOT, ON_DEMAND)
    assert story.after(1, ondemand=4) == [4, 4]
    story = Story(SPOT, ON_DEMAND)
    assert story.after(300, spot=4, ondemand=4) == [4, 4]
    assert story.after(1, spot=4, ondemand=4) == [4, 0], "the surplus nodes are released in the end"


def test_nodes_without_workers_are_released_first() -> None:
    room, group_of = {"a": 1, "b": 1, "c": 1}, dict.fromkeys("abc", "ondemand")
    assert nodes_to_release(room, group_of, {"ondemand": 3}, "abc") == []
    assert nodes_to_release(room, group_of, {"ondemand": 1}, "ab") == ["c", "a"]
    assert nodes_to_release({"a": 2, "b": 2}, group_of, {"ondemand": 3}, "") == [], (
        "a node is kept if half of it is needed"
    )
    assert nodes_to_release(room, dict.fromkeys("abc", ""), {"ondemand": 0}, "") == [], "nodes of no group are kept"


def test_node_groups_are_read_from_a_setting() -> None:
    text = '[{"name": "spot", "most": 4, "after_s": 300.0}]'
    settings = load_settings({"NODE_GROUPS": text})
    assert settings.job.node_groups == (SPOT,)
    assert settings.environment()["SUNSPOT_NODE_GROUPS"] == text
    assert load_settings().environment()["SUNSPOT_NODE_GROUPS"] == ""
