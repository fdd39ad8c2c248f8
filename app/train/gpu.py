"""Whether torch can compute on the GPU that a node or pod promises: Kubernetes and Ray count devices, not drivers."""

import ctypes
import runpy
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from app.errors import SunspotError, shorten
from app.storage.probe import Check, Result, failure

LEAST_DRIVER = {12: 525, 13: 580}
"""The oldest NVIDIA driver for each major version of CUDA (NVIDIA, CUDA Compatibility, minor version compatibility)."""

SIDE = 1024
"""Of the matrices that are multiplied."""


def find_gpu_problem() -> str:
    """Why torch would find no GPU in this process; empty if it would, or is not made for NVIDIA's.

    Takes milliseconds: it asks the driver itself, and imports no torch.
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
            f"needs driver {LEAST_DRIVER.get(needed, 'a newer one')} or later"
        )
    return ""


def try_gpu() -> Check:
    """Multiply matrices on the GPU and compare with what must come out."""
    name = "GPU"
    if problem := find_gpu_problem():
        return failure(name, SunspotError(problem))
    import torch  # takes seconds, and what is above none

    try:
        ones = torch.ones(SIDE, SIDE, device="cuda")
        right = float((ones @ ones).sum()) == SIDE**3
        device = torch.cuda.get_device_properties(0)
    except (RuntimeError, AssertionError) as error:
        fix = "see docs/cluster.md for the oldest driver and GPU that work"
        return Check(name, Result.FAILED, f"torch {torch.__version__} cannot compute: {shorten(error)}", fix)
    said = f"{device.name}, compute capability {device.major}.{device.minor}, torch {torch.__version__}"
    if not right:
        return Check(
            name, Result.FAILED, f"{said}: a product of matrices is wrong", "drain the node: the GPU is broken"
        )
    return Check(name, Result.OK, f"{said}: a product of matrices is right")
