"""Tests of the problem reported for a GPU that torch cannot use, with a fake NVIDIA driver."""

from __future__ import annotations

from typing import Any

import pytest

from sunspot.storage.prove import Result
from sunspot.train import gpu
from sunspot.train.gpu import find_gpu_problem, try_gpus


class Driver:
    """A fake NVIDIA driver for one version of CUDA. `broken` maps a GPU to the call that fails and its error code."""

    def __init__(
        self, cuda: int, code: int = 0, gpus: int = 1, broken: dict[int, tuple[str, int]] | None = None
    ) -> None:
        self._cuda = cuda
        self._code = code
        self._gpus = gpus
        self._broken = broken or {}
        self._memory: dict[int, int] = {}
        self.in_use = list[int]()

    def cuInit(self, flags: int) -> int:
        return self._code

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self._cuda
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._gpus
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        assert number < self._gpus
        device._obj.value = number
        return self._answer("cuDeviceGet", number)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        code = self._answer("cuDevicePrimaryCtxRetain", device.value)
        if not code:
            self.in_use.append(device.value)
        return code

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0

    def cuMemAlloc_v2(self, place: Any, size: Any) -> int:
        return self._answer("cuMemAlloc_v2", self.in_use[-1])

    def cuMemsetD32_v2(self, place: Any, number: Any, count: Any) -> int:
        assert count.value == 1
        self._memory[self.in_use[-1]] = number.value
        return 0

    def cuMemcpyDtoH_v2(self, target: Any, place: Any, size: Any) -> int:
        if self._broken.get(self.in_use[-1], ("",))[0] != "forgets":
            target._obj.value = self._memory[self.in_use[-1]]
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        if device.value in self.in_use:
            self.in_use.remove(device.value)
        return 0

    def _answer(self, call: str, number: int) -> int:
        failing, code = self._broken.get(number, ("", 0))
        return code if call == failing else 0


def pretend(monkeypatch: pytest.MonkeyPatch, build: dict[str, Any], **driver: Any) -> Driver:
    """Pretend that this build of torch is installed, and this driver, if any."""
    loaded = Driver(**{"cuda": 0, **driver})

    def load(name: str) -> Any:
        if not driver:
            raise OSError(f"{name}: cannot open shared object file")
        return loaded

    monkeypatch.setattr(gpu.runpy, "run_path", lambda path: {"__version__": "2.15.0", **build})
    monkeypatch.setattr(gpu.ctypes, "CDLL", load)
    return loaded


@pytest.mark.parametrize(
    ("build", "driver", "told"),
    [
        ({"cuda": "13.2"}, {}, "driver cannot be loaded (libcuda.so.1: cannot open"),
        ({"cuda": "13.2"}, {"cuda": 13000, "code": 100}, "finds no GPU (cuInit returned 100)"),
        (
            {"cuda": "13.2"},
            {"cuda": 12080},
            "supports CUDA 12, but torch 2.15.0 is built for CUDA 13: it needs driver 580 or later",
        ),
        ({"cuda": None}, {"cuda": 13000}, "a build without CUDA"),
        ({"cuda": "13.2"}, {"cuda": 13000}, ""),
        ({"cuda": "12.8"}, {"cuda": 13020}, ""),
        ({"cuda": None, "hip": "7.0"}, {}, ""),
    ],
)
def test_the_reason_why_torch_finds_no_gpu_is_explained(
    monkeypatch: pytest.MonkeyPatch, build: dict[str, Any], driver: dict[str, int], told: str
) -> None:
    pretend(monkeypatch, build, **driver)
    problem = find_gpu_problem()
    assert told in problem
    assert bool(problem) == bool(told)


def test_a_failed_check_stores_its_fix_in_a_separate_field(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"cuda": "13.2"})
    check = try_gpus(1)
    assert (check.result, check.fix[:22]) == (Result.FAILED, "install it on the node")


@pytest.mark.parametrize(
    ("gpus", "broken", "told"),
    [
        (8, {}, ""),
        (7, {}, "8 GPUs promised, but NVIDIA's driver finds 7; see the node's device plugin"),
        (
            8,
            {5: ("cuDevicePrimaryCtxRetain", 999)},
            "GPU 5 cannot be used (cuDevicePrimaryCtxRetain returned 999)",
        ),
        (
            8,
            {0: ("forgets", 0), 7: ("cuDeviceGet", 101)},
            "GPU 0 does not return the data that is written into its memory; "
            "GPU 7 cannot be used (cuDeviceGet returned 101)",
        ),
        (8, {3: ("cuMemAlloc_v2", 2), 4: ("cuDevicePrimaryCtxRetain", 2)}, ""),
        (9, {8: ("cuDevicePrimaryCtxRetain", 999)}, ""),
    ],
    ids=["all work", "one is gone", "one is dead", "two are", "full ones work", "one that is not promised"],
)
def test_every_requested_gpu_is_checked(
    monkeypatch: pytest.MonkeyPatch, gpus: int, broken: dict[int, tuple[str, int]], told: str
) -> None:
    driver = pretend(monkeypatch, {"cuda": "13.2"}, cuda=13000, gpus=gpus, broken=broken)
    assert find_gpu_problem(8) == told
    assert not driver.in_use


def test_only_one_mig_instance_is_visible_to_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows a process only one MIG instance, even if its pod has several."""
    pretend(monkeypatch, {"cuda": "13.2"}, cuda=13000, gpus=1)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert not find_gpu_problem(2)
