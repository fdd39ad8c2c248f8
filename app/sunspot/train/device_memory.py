"""Waits until the worker group before has given back the memory of a GPU."""

import time

import torch

from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.formatting import as_bytes, in_words

DEVICE_WAIT_S = 20.0
"""Limit on the wait for a GPU's memory, as for the host's (data/shared_rows.py). Once its processes are gone, the GPU's
driver takes seconds more for contexts of tens of GB and for registered pages of the host. What lasts longer is another
program's."""

LOOK_EVERY_S = 0.25

SLACK = 0.02
"""Share of a GPU's memory that need not come back: contexts of CUDA and buffers of NCCL are not always alike."""


def await_device_memory(device: torch.device, node: str, control: ControlClient) -> None:
    """Return once as much of the GPU is free as when the group before began on it, or DEVICE_WAIT_S later.

    The first group waits for nothing. What another program keeps is waited for once: the next group expects no more
    than this one has found.
    """
    gpu = f"{node} {torch.cuda.get_device_properties(device).uuid}"
    before = control.call(ControlChannel.free_memory, gpu)
    free, total = torch.cuda.mem_get_info(device)
    if lacks := free < before - SLACK * total:
        there = f"{as_bytes(free)} of its memory are free, {as_bytes(before)} were when the group before began"
        print(f"{device}: {there}; waiting up to {in_words(DEVICE_WAIT_S)} for the old processes' memory", flush=True)
    until = time.monotonic() + DEVICE_WAIT_S
    while free < before - SLACK * total and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
        free, _ = torch.cuda.mem_get_info(device)
    if lacks:
        print(f"{device}: {as_bytes(free)} of its memory are free", flush=True)
    control.send(ControlChannel.set_free_memory, gpu, free)
