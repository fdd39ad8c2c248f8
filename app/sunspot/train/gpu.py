"""Checks that torch can compute on the GPUs of a node or pod. Kubernetes and Ray do not check this."""

import ctypes
import os
import runpy
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from sunspot.elastic.messages import OUT_OF_MEMORY
from sunspot.errors import SunspotError, shorten
from sunspot.formatting import plural
from sunspot.storage.prove import Check, Result, failure

MIN_DRIVER = {12: 525, 13: 580}
"""Oldest NVIDIA driver for each major version of CUDA (NVIDIA, CUDA Compatibility, minor version compatibility)."""

SIDE = 1024
"""Number of rows and of columns in the matrices that are multiplied."""

WRITTEN = 0x5A5AA5A5
"""Number that is written to each GPU's memory and read back."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""Variables that name the GPUs of a process, or the MIG instances."""


def find_gpu_problem(promised: int = 1) -> str:
    """Return why torch cannot use all of the `promised` GPUs, or an empty string if it can.

    The string is also empty if torch is built for GPUs of a vendor other than NVIDIA. The check queries the driver and
    does not import torch. It takes about a third of a second for each GPU.
    """
    try:
        built: dict[str, Any] = runpy.run_path(str(distribution("torch").locate_file("torch/version.py")))
    except (PackageNotFoundError, OSError) as error:
        return f"torch cannot be found: {shorten(error)}"
    if built.get("hip") or built.get("xpu"):
        return ""
    if not built.get("cuda"):
        return f"torch {built['__version__']} is a build without CUDA; install a build with CUDA"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return (
            f"NVIDIA's driver cannot be loaded ({error}); install it on the node (the GPU operator, or the cloud's "
            "installer), and set LD_LIBRARY_PATH to its folder, as the image does for GKE"
        )
    code = driver.cuInit(0)
    if code:
        return f"NVIDIA's driver finds no GPU (cuInit returned {code}); see the node's device plugin"
    supported = ctypes.c_int()
    needed = int(str(built["cuda"]).split(".")[0])
    driver.cuDriverGetVersion(ctypes.byref(supported))
    if supported.value // 1000 < needed:
        return (
            f"the driver supports CUDA {supported.value // 1000}, but torch {built['__version__']} is built for CUDA "
            f"{needed}: it needs driver {MIN_DRIVER.get(needed, 'a newer one')} or later"
        )
    if any("MIG-" in os.environ.get(name, "") for name in VISIBLE):
        promised = min(promised, 1)  # CUDA shows a process only one MIG instance, even if it has several
    found = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(found))
    if found.value < promised:
        return (
            f"{plural(promised, 'GPU')} promised, but NVIDIA's driver finds {found.value}; see the node's device plugin"
        )
    return "; ".join(filter(None, (find_device_problem(driver, number) for number in range(promised))))


def find_device_problem(driver: Any, number: int) -> str:
    """Return why NVIDIA's driver cannot write and read the memory of a GPU, or an empty string if it can."""
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    place = ctypes.c_uint64()
    read = ctypes.c_uint32()
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
            code = getattr(driver, name)(*arguments)
            if code:
                return "" if code == OUT_OF_MEMORY else f"GPU {number} cannot be used ({name} returned {code})"
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)  # also frees the memory
    return "" if read.value == WRITTEN else f"GPU {number} does not return the data that is written into its memory"


def try_gpus(promised: int) -> Check:
    """Multiply matrices on each GPU, and return the result as a check. The check fails if a product is wrong."""
    name = "GPU"
    problem = find_gpu_problem(promised)
    if problem:
        return failure(name, SunspotError(problem))
    import torch  # imported here because it takes seconds, unlike the checks above

    devices = range(min(promised, torch.cuda.device_count()))
    try:
        every = [torch.ones(SIDE, SIDE, device=f"cuda:{number}") for number in devices]
        wrong = [number for number, ones in enumerate(every) if float((ones @ ones).sum()) != SIDE**3]
        device = torch.cuda.get_device_properties(0)
    except (RuntimeError, AssertionError) as error:
        fix = "see docs/cluster.md for the oldest driver and GPU that work"
        return Check(name, Result.FAILED, f"torch {torch.__version__} cannot compute: {shorten(error)}", fix)
    found = f"{len(devices)} x {device.name}" if len(devices) > 1 else device.name
    found += f", compute capability {device.major}.{device.minor}, torch {torch.__version__}"
    if wrong:
        text = f"{found}: a matrix product is wrong on GPU {', '.join(map(str, wrong))}"
        return Check(name, Result.FAILED, text, "drain the node, because the GPU is broken")
    return Check(name, Result.OK, f"{found}: a matrix product is right")
