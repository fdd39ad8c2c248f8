"""What is said of a GPU that torch would not find, with stand-ins for NVIDIA's driver."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from app.storage.probe import Result
from app.train import gpu
from app.train.gpu import find_gpu_problem, try_gpu


def pretend(monkeypatch: pytest.MonkeyPatch, build: dict[str, Any], *, cuda: int = 0, code: int = 0) -> None:
    """Pretend that torch is of that build, and the driver made for that version of CUDA (0: there is no driver)."""

    def load(name: str) -> Any:
        if not cuda:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuInit=lambda flags: code, cuDriverGetVersion=get_version)

    def get_version(target: Any) -> None:
        ctypes.cast(target, ctypes.POINTER(ctypes.c_int))[0] = cuda

    monkeypatch.setattr(gpu.runpy, "run_path", lambda path: {"__version__": "2.15.0", **build})
    monkeypatch.setattr(gpu.ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("build", "driver", "told"),
    [
        ({"cuda": "13.2"}, {}, "driver cannot be loaded (libcuda.so.1: cannot open"),
        ({"cuda": "13.2"}, {"cuda": 13000, "code": 100}, "finds no GPU (cuInit returned 100)"),
        ({"cuda": "13.2"}, {"cuda": 12080}, "made for CUDA 12, torch 2.15.0 for 13: it needs driver 580 or later"),
        ({"cuda": None}, {"cuda": 13000}, "a build without CUDA"),
        ({"cuda": "13.2"}, {"cuda": 13000}, ""),
        ({"cuda": "12.8"}, {"cuda": 13020}, ""),
        ({"cuda": None, "hip": "7.0"}, {}, ""),
    ],
)
def test_why_torch_would_find_no_gpu(
    monkeypatch: pytest.MonkeyPatch, build: dict[str, Any], driver: dict[str, int], told: str
) -> None:
    pretend(monkeypatch, build, **driver)
    problem = find_gpu_problem()
    assert told in problem
    assert bool(problem) == bool(told)


def test_a_check_fails_with_the_fix_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"cuda": "13.2"})
    check = try_gpu()
    assert (check.result, check.fix[:22]) == (Result.FAILED, "install it on the node")
