"""Provides a control channel inside the test's process."""

from collections.abc import Callable
from typing import Any

from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.messages import WorkerGroup


class LocalControl(ControlClient):
    """A control channel without an actor. It records each call's name and arguments."""

    def __init__(self) -> None:
        self.channel = ControlChannel()
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    def send(self, method: Callable[..., Any], *given: Any, **named: Any) -> None:
        self.told.append((method.__name__, given))
        self.call(method, *given, **named)

    def call(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return method(self.channel, *given, **named)

    def heard(self, method: str) -> list[Any]:
        """Return the first argument of each call of a method."""
        return [given[0] for name, given in self.told if name == method]


def worker_group(attempt: int, *nodes: str) -> WorkerGroup:
    """Return an attempt's worker group, with one rank per node."""
    return WorkerGroup(attempt, len(nodes), dict(enumerate(nodes)))
