"""A control channel in the process of the test."""

from collections.abc import Callable
from typing import Any

from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.messages import WorkerGroup


class LocalControl(ControlClient):
    """A channel without an actor, and what it was told: the name of each method, and what was given."""

    def __init__(self) -> None:
        self.channel = ControlChannel()
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    def send(self, method: Callable[..., Any], *given: Any, **named: Any) -> None:
        self.told.append((method.__name__, given))
        self.call(method, *given, **named)

    def call(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return method(self.channel, *given, **named)

    def heard(self, method: str) -> list[Any]:
        """What was given first with each call of a method."""
        return [given[0] for name, given in self.told if name == method]


def worker_group(attempt: int, *nodes: str) -> WorkerGroup:
    """The group of an attempt, with one rank on each of the nodes."""
    return WorkerGroup(attempt, len(nodes), dict(enumerate(nodes)))
