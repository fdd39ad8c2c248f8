"""Waits until the previous worker group has released its GPU memory."""

import time

import torch

from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.formatting import as_bytes, in_words

DEVICE_WAIT_S = 20.0
"""Maximum number of seconds to wait for GPU memory, the same as for host memory (data/shared_rows.py).

After a process has ended, the GPU's driver takes some seconds to free contexts of tens of GB and registered host pages.
Memory that is in use for longer belongs to another program.
"""

LOOK_EVERY_S = 0.25
"""Seconds between two checks of the free memory."""

SLACK = 0.02
"""Fraction of a GPU's memory that may stay in use, because CUDA contexts and NCCL buffers vary in size."""


def await_device_memory(device: torch.device, node: str, control: ControlClient) -> None:
    """Wait up to DEVICE_WAIT_S seconds until the GPU has as much free memory as when the previous group started.

    The first group does not wait. Each group records how much memory is free after its own wait. If another program
    keeps some memory in use, only one group waits for the whole time, because the later groups expect less.
    """
    gpu = f"{node} {torch.cuda.get_device_properties(device).uuid}"
    before = control.call(ControlChannel.free_memory, gpu)
    free, total = torch.cuda.mem_get_info(device)
    lacks = free < before - SLACK * total
    if lacks:
        there = f"{as_bytes(free)} of its memory is free, but {as_bytes(before)} was free when the previous group began"
        wait = f"waiting up to {in_words(DEVICE_WAIT_S)} for the old processes to exit"
        print(f"{device}: {there}; {wait}", flush=True)
    until = time.monotonic() + DEVICE_WAIT_S
    while free < before - SLACK * total and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
        free, _ = torch.cuda.mem_get_info(device)
    if lacks:
        print(f"{device}: {as_bytes(free)} of its memory is free now", flush=True)
    control.send(ControlChannel.set_free_memory, gpu, free)
