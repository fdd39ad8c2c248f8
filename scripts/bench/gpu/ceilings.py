"""What the device itself can do: the ceilings of all other figures."""

import functools
import time
from collections.abc import Callable
from statistics import median

import torch

REPEATS = 10


def measure(device: torch.device) -> None:
    """Print the rates of matrix products and of copies."""
    gpu = device.type == "cuda"
    print(f"matrix product, bf16   {matrix_rate(device, torch.bfloat16) / 1e12:8.1f} TFLOP/s")
    torch.set_float32_matmul_precision("high")
    print(f"matrix product, tf32   {matrix_rate(device, torch.float32) / 1e12:8.1f} TFLOP/s")
    torch.set_float32_matmul_precision("highest")
    print(f"matrix product, fp32   {matrix_rate(device, torch.float32) / 1e12:8.1f} TFLOP/s")
    if not gpu:
        return
    size = 2**30
    on_gpu, other = torch.randint(255, (2, size), dtype=torch.uint8, device=device)
    pinned, plain = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.ones(size, dtype=torch.uint8)
    for name, target, source in (
        ("on the GPU (read + write)", other, on_gpu),
        ("GPU to pinned memory", pinned, on_gpu),
        ("pinned memory to GPU", on_gpu, pinned),
        ("GPU to plain memory", plain, on_gpu),
    ):
        bytes_moved = size * (2 if "read" in name else 1)
        rate = bytes_moved / seconds(functools.partial(target.copy_, source), device)
        print(f"copy, {name:26} {rate / 1e9:8.1f} GB/s")


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a square product of random matrices, as torch.matmul makes it."""
    n = 8192 if device.type == "cuda" else 256
    left, right = torch.randn(2, n, n, device=device, dtype=dtype)
    return 2 * n**3 / seconds(lambda: left @ right, device)


def seconds(act: Callable[[], object], device: torch.device) -> float:
    """Median seconds of REPEATS calls, after three to warm up."""
    times = []
    for _ in range(3 + REPEATS):
        began = time.perf_counter()
        act()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[3:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
