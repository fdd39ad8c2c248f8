"""Tests of waiting until the previous worker group has freed its GPU memory, with a fake CUDA and clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from sunspot.train import device_memory
from sunspot.train.device_memory import DEVICE_WAIT_S, await_device_memory
from tests.harness.control import LocalControl

GB = 10**9


class Gpu:
    """A GPU of 80 GB, of which other processes use `taken` at each time, with a control channel and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.control = 1000.0, LocalControl()
        self.taken: Callable[[float], float] = lambda waited_s: 0
        self._began = 0.0
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GB - self._taken_now(), 80 * GB))
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(device_memory, "time", clock)

    def _taken_now(self) -> int:
        return int(self.taken(self.now - self._began) * GB)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def begin_group(self, taken: Callable[[float], float]) -> float:
        """Return how many seconds a group waits. `taken` maps waiting seconds to the GB that other processes use."""
        self.taken, self._began = taken, self.now
        await_device_memory(torch.device("cuda:0"), "node", self.control)
        return self.now - self._began


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_group_waits_until_the_memory_of_the_previous_group_is_free(
    gpu: Gpu, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.begin_group(lambda waited_s: 0.5) == 0, "the first group on a node does not wait"
    assert not capsys.readouterr().out
    waited_s = gpu.begin_group(lambda waited_s: max(0.5, 60 - 20 * waited_s))
    assert 2.5 < waited_s < 3.5
    begin, end = capsys.readouterr().out.splitlines()
    assert begin.startswith(
        "cuda:0: 20 GB of its memory is free, but 79.5 GB was free when the previous group began; waiting up"
    )
    assert end == "cuda:0: 79.5 GB of its memory is free now"
    assert gpu.begin_group(lambda waited_s: 1.0) == 0, "a small difference belongs to no group"


def test_only_the_first_group_waits_for_memory_used_by_another_program(gpu: Gpu) -> None:
    assert gpu.begin_group(lambda waited_s: 30) == 0
    assert gpu.begin_group(lambda waited_s: 30) == 0, "the other program had the memory before"
    assert gpu.begin_group(lambda waited_s: 50) == pytest.approx(DEVICE_WAIT_S, abs=0.5)
    assert gpu.begin_group(lambda waited_s: 50) == 0
