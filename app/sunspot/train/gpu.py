"""Checks that torch can compute on the GPUs that a node or pod promises: Kubernetes and Ray do not ask their driver."""

import ctypes
import os
import runpy
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from sunspot.elastic.messages import OUT_OF_MEMORY
from sunspot.errors import SunspotError, shorten
from sunspot.storage.prove import Check, Result, failure

MIN_DRIVER = {12: 525, 13: 580}
"""The oldest NVIDIA driver for each major version of CUDA (NVIDIA, CUDA Compatibility, minor version compatibility)."""

SIDE = 1024
"""Rows and columns of the matrices that are multiplied."""

WRITTEN = 0x5A5AA5A5
"""The number that each GPU has to keep for a moment."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def find_gpu_problem(promised: int = 1) -> str:
    """Say why torch cannot use each of the `promised` GPUs; empty if it can, or is not built for NVIDIA's.

    This asks the driver itself and imports no torch, and so takes about a third of a second for each GPU.
    """
    try:
        built: dict[str, Any] = runpy.run_path(str(distribution("torch").locate_file("torch/version.py")))
    except (PackageNotFoundError, OSError) as error:
        return f"torch cannot be found: {shorten(error)}"
    if built.get("hip") or built.get("xpu"):
        return ""
    if not built.get("cuda"):
        return f"torch {built['__version__']} is a build without CUDA; install one with it"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return (
            f"NVIDIA's driver cannot be loaded ({error}); install it on the node (the GPU operator, or the cloud's "
            "installer), and have LD_LIBRARY_PATH name its folder, as the image does for GKE's"
        )
    if code := driver.cuInit(0):
        return f"NVIDIA's driver finds no GPU (cuInit returned {code}); see the node's device plugin"
    supported, needed = ctypes.c_int(), int(str(built["cuda"]).split(".")[0])
    driver.cuDriverGetVersion(ctypes.byref(supported))
    if supported.value // 1000 < needed:
        return (
            f"the driver is made for CUDA {supported.value // 1000}, torch {built['__version__']} for {needed}: it "
            f"needs driver {MIN_DRIVER.get(needed, 'a newer one')} or later"
        )
    if any("MIG-" in os.environ.get(name, "") for name in VISIBLE):
        promised = min(promised, 1)  # CUDA shows a process one part of a GPU, however many there are
    found = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(found))
    if found.value < promised:
        return f"{promised} GPUs are promised, and NVIDIA's driver finds {found.value}"
    return "; ".join(filter(None, (find_device_problem(driver, number) for number in range(promised))))


def find_device_problem(driver: Any, number: int) -> str:
    """Say why NVIDIA's driver cannot use one GPU, which has to keep a number in its memory; empty if it can."""
    device, context, place, read = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint32()
    calls: list[tuple[Any, ...]] = [
        ("cuDeviceGet", ctypes.byref(device), number),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
        ("cuCtxSetCurrent", context),
        ("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(ctypes.sizeof(read))),
        ("cuMemsetD32_v2", place, ctypes.c_uint32(WRITTEN), ctypes.c_size_t(1)),
        ("cuMemcpyDtoH_v2", ctypes.byref(read), place, ctypes.c_size_t(ctypes.sizeof(read))),
    ]
    try:
        for name, *arguments in calls:
            if code := getattr(driver, name)(*arguments):
                return "" if code == OUT_OF_MEMORY else f"GPU {number} cannot be used ({name} returned {code})"
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)  # with the memory
    return "" if read.value == WRITTEN else f"GPU {number} does not keep what is written into its memory"


def try_gpus(promised: int) -> Check:
    """Multiply matrices on each GPU, and compare the product with the right one."""
    name = "GPU"
    if problem := find_gpu_problem(promised):
        return failure(name, SunspotError(problem))
    import torch  # takes seconds, and what is above none

    devices = range(min(promised, torch.cuda.device_count()))
    try:
        every = [torch.ones(SIDE, SIDE, device=f"cuda:{number}") for number in devices]
        wrong = [number for number, ones in enumerate(every) if float((ones @ ones).sum()) != SIDE**3]
        device = torch.cuda.get_device_properties(0)
    except (RuntimeError, AssertionError) as error:
        fix = "see docs/cluster.md for the oldest driver and GPU that work"
        return Check(name, Result.FAILED, f"torch {torch.__version__} cannot compute: {shorten(error)}", fix)
    said = f"{len(devices)} x {device.name}" if len(devices) > 1 else device.name
    said += f", compute capability {device.major}.{device.minor}, torch {torch.__version__}"
    if wrong:
        told = f"{said}: a product of matrices is wrong on GPU {', '.join(map(str, wrong))}"
        return Check(name, Result.FAILED, told, "drain the node: the GPU is broken")
    return Check(name, Result.OK, f"{said}: a product of matrices is right")
