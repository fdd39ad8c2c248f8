"""Where the host waits for the GPU during steps, counted by PyTorch's own synchronization warnings."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from scripts.bench.gpu.workloads import ours, workloads
from sunspot.ray_session import ray_session


def measure(device: torch.device) -> None:
    """Print the number of waits a step, and the lines that wait."""
    if device.type != "cuda":
        print("only a GPU is waited for")
        return
    with ray_session(), tempfile.TemporaryDirectory() as folder:
        for workload in workloads(device)[::3]:
            out = Path(folder, "waits")
            args = {**workload.args, "counted_task": workload.task, "waits": str(out)}
            counted = replace(workload, task="scripts.bench.gpu.counted_task", args=args, steps=200)
            ours(counted, device, REPORT_EVERY_S="3600", SNAPSHOT_COST="0")
            waits = Counter(out.read_text().splitlines())
            print(f"{workload.name}: {sum(waits.values()) / counted.steps:.2f} waits a step", flush=True)
            for place, times in waits.most_common(8):
                print(f"  {times:5} x {place}")
