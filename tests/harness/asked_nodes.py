"""Replaces Ray in tests of the node checks (app/sunspot/train/probe.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ray.exceptions

Answer = Callable[[str], str]


class FakeRay:
    """A Ray whose nodes answer with the result of the function `answer`."""

    def __init__(self, answer: Answer) -> None:
        self.exceptions = ray.exceptions
        self.most_at_once, self.here = 0, "here"
        self._answer = answer
        self._asked = 0
        self._lock = threading.Lock()
        self.arguments: dict[str, tuple[object, ...]] = {}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self.here)

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        return lambda function: SimpleNamespace(options=self._options)

    def _options(self, scheduling_strategy: Any) -> Any:
        def remote(*arguments: object) -> str:
            self.arguments[scheduling_strategy.node_id] = arguments
            return str(scheduling_strategy.node_id)

        return SimpleNamespace(remote=remote)

    def get(self, node: str, timeout: float) -> str:
        with self._lock:
            self._asked += 1
            self.most_at_once = max(self.most_at_once, self._asked)
        try:
            return self._answer(node)
        finally:
            with self._lock:
                self._asked -= 1
