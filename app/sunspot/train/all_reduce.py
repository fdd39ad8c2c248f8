"""Times an all-reduce between two pods. Uses NCCL between all of their GPUs, or gloo if they have no GPUs.

The pods find each other through storage. The first pod serves a torch store and writes the store's address there.
"""

import multiprocessing
import socket
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sunspot.errors import NotFoundError, SunspotError, shorten
from sunspot.formatting import in_words, plural
from sunspot.parallel.nccl_log import begin_log, read_network
from sunspot.storage import Storage, open_storage
from sunspot.storage.prove import FOLDER, Check, Result, failure, seconds

NAME = "network"
"""Name of the check."""

GRADIENTS = 100_000_000
"""Bytes in the large all-reduce, about the size of ResNet-50's gradients (25.6 million numbers in fp32)."""

TIMES = 10
"""Number of times that each all-reduce is repeated. The first one also opens the connections."""

MAX_S = 0.2
"""Maximum duration of the large all-reduce in seconds. GPUs exchange gradients during the backward pass.

The backward pass of ResNet-50 takes about 0.2 s for 128 images on a T4, the slowest GPU that works: twice the 0.11 s of
its forward pass (NVIDIA, DeepLearningExamples, ResNet50 v1.5 for PyTorch). On a slower network, every GPU waits.
"""

WAIT_S = 300.0
"""Maximum number of seconds that a pod waits for the other one, which may still be waiting for its node."""

LOOK_S = 1.0
"""Seconds between two checks for the other pod."""

ANSWER_S = 60.0
"""Maximum number of seconds for the other pod's answer, and for each all-reduce."""

RDMA = Path("/dev/infiniband")
"""Directory of a pod's InfiniBand, RoCE or EFA devices, if the pod has requested them."""


@dataclass(frozen=True)
class Timing:
    """Median durations of a large and a small all-reduce."""

    large_s: float
    "Seconds for GRADIENTS bytes."
    small_s: float
    "Seconds for one number."
    network: str = ""
    "NCCL's name for the network between nodes (Socket, IB or Libfabric), or an empty string if it is unknown."


def try_all_reduce(storage_path: str, meeting: str, rank: int, gpus: int) -> Check:
    """Time an all-reduce between this pod and another one, and return the result as a check.

    `rank` is 0 in one pod and 1 in the other. The pods find each other by `meeting`, a name that they share.
    """
    gpus = min(gpus, torch.cuda.device_count())
    try:
        store, host = open_store(open_storage(storage_path), f"{FOLDER}/{meeting}", rank)
        workers = max(gpus, 1)
        act = partial(measure, host, store.port, 2 * workers, gpus)
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            timing, *_ = pool.map(act, range(rank * workers, (rank + 1) * workers))
    except TimeoutError:
        return Check(NAME, Result.WARNING, f"not tried: the other pod did not come within {in_words(WAIT_S)}")
    except SunspotError as error:
        return failure(NAME, error)
    except (RuntimeError, OSError) as error:
        fix = "pods of a run must reach each other on every port (within-clusters in k8s/base)"
        return Check(NAME, Result.FAILED, f"no all-reduce with the other pod: {shorten(error)}", fix)
    return judge(timing, gpus)


def judge(timing: Timing, gpus: int) -> Check:
    """Return the result of the network check for two pods with `gpus` GPUs each.

    The result is a warning if GPUs would have to wait for the network. The result's text gives the bandwidth in one
    direction in Gb/s, computed in the same way as NCCL's bus bandwidth (NVIDIA, nccl-tests, PERFORMANCE.md).
    """
    workers = 2 * max(gpus, 1)
    gigabits = GRADIENTS * 8e-9 / timing.large_s * 2 * (workers - 1) / workers
    by = f"NCCL over {timing.network or 'an unknown network'}, {plural(gpus, 'GPU')} per pod" if gpus else "gloo"
    large = f"100 MB in {timing.large_s * 1e3:.1f} ms ({gigabits:.1f} Gb/s)"
    seen = f"an all-reduce between two pods sums {large}, and one number in {timing.small_s * 1e3:.2f} ms, by {by}"
    if timing.network == "Socket" and RDMA.exists():
        fix = f"the pod has {RDMA}: for EFA, the image needs libfabric and its plug-in (docs/cluster.md)"
        return Check(NAME, Result.WARNING, seen, fix)
    if gpus and timing.large_s > MAX_S:
        fix = f"GPUs wait if it takes more than {MAX_S:g} s; use nodes in one zone, or with a faster network"
        return Check(NAME, Result.WARNING, seen, fix)
    return Check(NAME, Result.OK, seen)


def open_store(storage: Storage, key: str, rank: int) -> tuple[Any, str]:
    """Wait for the other pod. Return the store that connects the two pods, and the host that serves the store.

    Raises `TimeoutError` if the other pod does not appear in time, and `RuntimeError` if it cannot be reached.
    """
    if rank:
        host, port = _await_address(storage, key)
        limit = timedelta(seconds=ANSWER_S)
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        store.set("came", "")
        return store, host
    host = str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    storage.write(key, f"{host} {store.port}".encode())
    try:
        store.wait(["came"], timedelta(seconds=WAIT_S))
    except RuntimeError as error:
        raise TimeoutError from error
    finally:
        storage.delete(key)
    return store, host


def _await_address(storage: Storage, key: str) -> tuple[str, int]:
    """Wait until the first pod has written the store's address to storage, and return the address."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        storage.refresh(FOLDER)
        with suppress(NotFoundError):
            host, port = storage.read(key).decode().split()
            return host, int(port)
        time.sleep(LOOK_S)
    raise TimeoutError


def measure(host: str, port: int, world_size: int, gpus: int, rank: int) -> Timing:
    """Time the all-reduces in the process of one rank, on a GPU of its pod, or on the CPU if `gpus` is 0."""
    limit = timedelta(seconds=ANSWER_S)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "nccl"
        begin_log(log)
        device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(device)
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        backend = "nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        large_s, small_s = (time_all_reduce(torch.zeros(size, device=device)) for size in (GRADIENTS // 4, 1))
        dist.destroy_process_group()
        return Timing(large_s, small_s, read_network(log))


def time_all_reduce(values: torch.Tensor) -> float:
    """Return the median duration of TIMES all-reduces of `values`, in seconds."""

    def exchange() -> None:
        dist.all_reduce(values)
        values[0].item()  # waits for the GPU

    return statistics.median(seconds(exchange) for _ in range(TIMES))
