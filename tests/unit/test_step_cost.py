"""Tests how many operators a step runs, because each of them is a kernel launch on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.bench.in_process import our_steps, plan_steps
from scripts.bench.plain import plain_steps
from sunspot.plan import Plan
from tests.harness.process_group import in_processes

STEPS = 20
"""Number of steps in which operators are counted, after as many to warm up."""

NO_LAUNCH = ("aten.empty", "aten.new_empty", "aten.detach", "profiler.")
"""Prefixes of operators that start nothing on a GPU. Neither do operators that return a view."""

WAYS: dict[str, Callable[[Plan], Iterator[None]]] = {
    "plain": partial(plain_steps, with_loader=True),
    "auto": partial(our_steps, survives=True),
    "off": partial(our_steps, survives=False),
}


class Launches(TorchDispatchMode):
    """Counts the operators that would start work on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [each.alias_info for each in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if not is_view and not str(function).startswith(NO_LAUNCH):
            self.operators[str(function)] += 1
        return function(*args, **(kwargs or {}))


def launches_per_step(root: Path, group: dist.ProcessGroup) -> dict[str, float]:
    """Return the mean number of launches in a step of each of the WAYS on this rank."""
    launches = {}
    for name, way in WAYS.items():
        steps = way(plan_steps(str(root / name), "scripts.bench.small_task", batch_rows=16))
        for _ in islice(steps, STEPS):
            pass
        with Launches() as counted:
            for _ in islice(steps, STEPS):
                pass
        launches[name] = counted.operators.total() / STEPS
    return launches


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_launches_at_most_two_more_operators_than_a_plain_loop(workers: int, tmp_path: Path) -> None:
    for launches in in_processes(tmp_path, workers, partial(launches_per_step, tmp_path)):
        assert launches["plain"] > 20
        assert launches["auto"] <= launches["plain"] + 2
        assert launches["off"] <= launches["plain"] + 2
