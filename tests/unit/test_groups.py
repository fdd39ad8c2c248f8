"""Which groups of nodes the workers are asked of, as time passes and nodes come and go."""

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
        """What is asked of each group when there was room for so many workers all the while."""
        asked: dict[str, int] = {}
        for _ in range(seconds):
            self.now += 1
            asked = self.choice.choose(room, self.now)
        return list(asked.values())


def test_on_demand_stands_in_for_spot_and_steps_back() -> None:
    story = Story(SPOT, ON_DEMAND)
    assert story.after(300) == [4, 0], "nodes need time to come"
    assert story.after(1) == [4, 4]
    assert story.after(1000, ondemand=4) == [4, 4], "spot is asked for all the while"
    assert story.after(299, spot=4, ondemand=4) == [4, 4]
    assert story.after(1, spot=4, ondemand=4) == [4, 0]
    assert story.after(1000, spot=4) == [4, 0]


def test_only_what_is_missing_is_asked_of_the_next() -> None:
    story = Story(SPOT, ON_DEMAND)
    story.after(10, spot=4)
    assert story.after(299, spot=3) == [4, 0]
    assert story.after(1, spot=3) == [4, 1]
    assert story.after(100, spot=1, ondemand=1) == [4, 1], "the wait begins anew"
    assert story.after(199, spot=0, ondemand=1) == [4, 1]
    assert story.after(1, spot=0, ondemand=1) == [4, 4], "what is missing when the wait ends"


def test_spot_that_comes_and_goes_changes_nothing() -> None:
    story = Story(SPOT, ON_DEMAND)
    story.after(301)
    for _ in range(10):
        assert story.after(200, spot=4, ondemand=4) == [4, 4]
        assert story.after(5, ondemand=4) == [4, 4]


def test_some_on_demand_and_the_rest_on_spot() -> None:
    story = Story(BASE, SPOT, ON_DEMAND)
    assert story.after(1) == [1, 3, 0], "at once: they can never run on the group before"
    assert story.after(1000, base=1, spot=3) == [1, 3, 0]
    assert story.after(1000, base=4, spot=3) == [1, 3, 0], "only one of the four is to stay"
    assert story.after(300, base=1, spot=1) == [1, 3, 2]
    assert story.after(300, base=0, spot=3) == [1, 4, 1], "the base is missing: spot stands in, and it has none left"


def test_a_driver_that_starts_again_keeps_the_nodes_it_finds() -> None:
    story = Story(SPOT, ON_DEMAND)
    assert story.after(1, ondemand=4) == [4, 4]
    story = Story(SPOT, ON_DEMAND)
    assert story.after(300, spot=4, ondemand=4) == [4, 4]
    assert story.after(1, spot=4, ondemand=4) == [4, 0], "but not for ever"


def test_nodes_are_given_back_those_without_workers_first() -> None:
    room, group_of = {"a": 1, "b": 1, "c": 1}, dict.fromkeys("abc", "ondemand")
    assert nodes_to_release(room, group_of, {"ondemand": 3}, "abc") == []
    assert nodes_to_release(room, group_of, {"ondemand": 1}, "ab") == ["c", "a"]
    assert nodes_to_release({"a": 2, "b": 2}, group_of, {"ondemand": 3}, "") == [], "half a node is needed"
    assert nodes_to_release(room, dict.fromkeys("abc", ""), {"ondemand": 0}, "") == [], "nodes of no group"


def test_the_groups_are_a_setting() -> None:
    text = '[{"name": "spot", "most": 4, "after_s": 300.0}]'
    settings = load_settings({"NODE_GROUPS": text})
    assert settings.node_groups == (SPOT,)
    assert settings.environment()["SUNSPOT_NODE_GROUPS"] == text
    assert load_settings().environment()["SUNSPOT_NODE_GROUPS"] == ""
