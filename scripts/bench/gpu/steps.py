"""Measures a step compared with plain PyTorch, in alternating pairs, and the gain of each option."""

import time
from dataclasses import replace
from statistics import median

import torch

from scripts.bench.gpu.workloads import Workload, ours, plain, synchronize, workloads
from sunspot.errors import SunspotError
from sunspot.ray_session import ray_session

PAIRS = 3

LADDER = {
    "fp32": {"PRECISION": "fp32"},
    "tf32": {"PRECISION": "tf32"},
    "bf16": {"PRECISION": "bf16"},
    "compiled": {"PRECISION": "bf16", "COMPILE": "default"},
    "max-autotune": {"PRECISION": "bf16", "COMPILE": "max-autotune"},
}
"""Options to measure, each compared with the option before. Unlike the plain loop, all use the layout channels_last."""

ON_CPU = ("fp32", "bf16", "compiled")
"""Options to measure on a CPU, where max-autotune would search for the best code for minutes."""


def measure(device: torch.device) -> None:
    """Print a line for each workload, and then a line for each option of each workload."""
    ceiling = matrix_rate(device)
    print(f"matrix product, bf16 {ceiling / 1e12:8.1f} TFLOP/s", flush=True)
    with ray_session():
        for workload in workloads(device):
            precision = "bf16" if workload.tokens else "fp32"
            pairs = [
                (plain(workload, device, precision), ours(workload, device, PRECISION=precision)) for _ in range(PAIRS)
            ]
            theirs, mine = (median(pair[side] for pair in pairs) for side in (0, 1))
            ratios = sorted(b / a for a, b in pairs)
            print(
                f"{workload.name:30} {precision}  plain {theirs:8.3f} ms  ours {mine:8.3f} ms  "
                f"{median(ratios):.3f}x ({ratios[0]:.3f} to {ratios[-1]:.3f})  "
                f"{workload.rate(mine):,.0f} {workload.rate_unit}{utilization(workload, mine, ceiling)}",
                flush=True,
            )
        for workload in workloads(device):
            climb(replace(workload, steps=min(workload.steps, 400)), device)


def climb(workload: Workload, device: torch.device) -> None:
    """Print the time of a step with each option, and the gain compared with the option before."""
    before: float | None = None
    for name in LADDER if device.type == "cuda" else ON_CPU:
        try:
            step_ms = ours(workload, device, **LADDER[name])
        except SunspotError as error:  # for example, no compiler is installed
            print(f"{workload.name:30} {name:12}  left out: {error}", flush=True)
            continue
        gain = f"{before / step_ms:8.2f}x" if before else ""
        print(f"{workload.name:30} {name:12}  {step_ms:8.3f} ms {gain}", flush=True)
        before = step_ms


def matrix_rate(device: torch.device) -> float:
    """Return the operations per second of a square product in bf16: the median of ten after three warm-ups."""
    n = 8192 if device.type == "cuda" else 256
    left, right = torch.randn(2, n, n, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(13):
        began = time.perf_counter()
        left @ right
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * n**3 / median(times[3:])


def utilization(workload: Workload, step_ms: float, ceiling: float) -> str:
    """Return the utilization as a fraction of the measured matrix rate, or an empty text for images.

    A weight takes 6 operations per token, and attention takes 12 x layers x width x context operations per token
    (Chowdhery et al., PaLM, 2022, appendix B).
    """
    if not workload.tokens:
        return ""
    layers, width, context = (int(workload.args[name]) for name in ("layers", "width", "context"))
    weights = 12 * layers * width**2 + (context + 256) * width
    operations = workload.rate(step_ms) * (6 * weights + 12 * layers * width * context)
    return f"  {operations / ceiling:.1%} of the bf16 product"
