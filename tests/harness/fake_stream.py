"""A device whose operations run later than they are queued, as on a GPU, simulated on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

COPY = torch.ops.aten.copy_.default
VALUE = torch.ops.aten._local_scalar_dense.default


class FakeStream(TorchDispatchMode):
    """Queues all operations on tensors inside this context. If more than `lag` operations wait, the oldest one runs.

    Reading a value waits for all operations. As on a GPU, reading does not wait if the value is in main memory. The
    targets and sources of non-blocking copies are assumed to be in main memory.
    """

    def __init__(self, lag: float, before: Callable[[str], None]) -> None:
        """`before` is called with the name of each operation before it runs."""
        super().__init__()
        self._lag = lag
        self._before = before
        self._queue: deque[tuple[str, Callable[[], None]]] = deque()
        self._in_main_memory = set[int]()
        "The addresses of tensors in main memory."
        self.queued = 0
        "Number of operations so far."

    def queue(self, name: str, operation: Callable[[], None]) -> None:
        """Queue an operation."""
        self.queued += 1
        self._queue.append((name, operation))
        while len(self._queue) > self._lag:
            self.run_next()

    def run_next(self) -> None:
        """Run the oldest waiting operation."""
        with _disable_current_modes(), torch.no_grad():
            name, operation = self._queue.popleft()
            self._before(name)
            operation()

    def synchronize(self) -> None:
        """Run all waiting operations."""
        while self._queue:
            self.run_next()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        aliases = [each.alias_info for each in function._schema.returns]
        is_view = bool(aliases) and all(alias and not alias.is_write for alias in aliases)
        if function is VALUE and args[0].data_ptr() not in self._in_main_memory:
            self.synchronize()
        if function is VALUE or is_view or function.namespace == "c10d":
            return function(*args, **given[1])
        # The operation runs on copies now, for the shapes of its results, and later on the tensors themselves.
        leaves, structure = tree_flatten(given)
        copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in leaves]
        now = call(function, tree_unflatten(copies, structure))
        changed = {id(copy): each for copy, each in zip(copies, leaves, strict=True)}
        if function is COPY and args[2:] == (True,):
            self._in_main_memory.update(each.data_ptr() for each in args[:2])
        made = [each.data for each in tensors_in(now) if id(each) not in changed]
        later = tree_map(lambda each: each.data if isinstance(each, torch.Tensor) else each, given)

        def run() -> None:
            inputs = {id(each) for each in tensors_in(later)}
            results = [each for each in tensors_in(call(function, later)) if id(each) not in inputs]
            for each, result in zip(made, results, strict=True):
                each.copy_(result)

        self.queue(str(function), run)
        return tree_map(lambda each: changed.get(id(each), each), now)


class FakeEvent:
    """A place in the queue of a fake stream."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self._reached = True

    def record(self) -> None:
        def reach() -> None:
            self._reached = True

        self._reached = False
        self._stream.queue("event", reach)

    def synchronize(self) -> None:
        while not self._reached:
            self._stream.run_next()


def call(function: Any, given: Any) -> Any:
    return function(*given[0], **given[1])


def tensors_in(nested: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(nested)[0] if isinstance(each, torch.Tensor)]
