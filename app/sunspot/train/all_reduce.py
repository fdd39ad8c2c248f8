"""Times an all-reduce between two pods: by NCCL among all of their GPUs, or by gloo where they have none.

The pods meet through the run's storage, as both reach it: the first serves a store of torch's, and writes where it is.
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

GRADIENTS = 100_000_000
"""Bytes of the large all-reduce: about what ResNet-50 has of gradients (25.6 million numbers in fp32)."""

TIMES = 10
"""How often each is repeated; the first time, they connect."""

MAX_S = 0.2
"""The longest that the large one may take between GPUs, which exchange gradients during the backward pass. That of
ResNet-50 takes a T4, the slowest GPU that works, about 0.2 s for 128 images: twice the 0.11 s of its forward pass
(NVIDIA, DeepLearningExamples, ResNet50 v1.5 for PyTorch). On a slower network, every GPU waits."""

WAIT_S, LOOK_S = 300.0, 1.0
"""How long a pod waits for the other, which may still lack its node, and how often it looks for it."""

ANSWER_S = 60.0
"""The longest that the other pod may take to answer, and each all-reduce."""

RDMA = Path("/dev/infiniband")
"""Where a pod has its devices of InfiniBand, RoCE or EFA, if it has asked for any."""


@dataclass(frozen=True)
class Timing:
    """What an all-reduce takes: medians."""

    large_s: float
    small_s: float
    network: str = ""
    "What NCCL takes between nodes, in its own words: Socket, IB, Libfabric; empty: it did not say."


def try_all_reduce(storage_path: str, meeting: str, rank: int, gpus: int) -> Check:
    """Time an all-reduce with the pod that has the same `meeting`, and of the ranks 0 and 1 the other."""
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
    """Say what was measured with so many GPUs in each pod, and whether GPUs would wait for it.

    Gb/s are those of one direction: NCCL's bus bandwidth (NVIDIA, nccl-tests, PERFORMANCE.md).
    """
    workers = 2 * max(gpus, 1)
    gigabits = GRADIENTS * 8e-9 / timing.large_s * 2 * (workers - 1) / workers
    by = f"NCCL over {timing.network or 'a network it did not name'}, {plural(gpus, 'GPU')} in each" if gpus else "gloo"
    large = f"100 MB in {timing.large_s * 1e3:.1f} ms ({gigabits:.1f} Gb/s)"
    seen = f"an all-reduce between two pods sums {large}, and one number in {timing.small_s * 1e3:.2f} ms, by {by}"
    if timing.network == "Socket" and RDMA.exists():
        fix = f"the pod has {RDMA}: for EFA, the image needs libfabric and its plug-in (docs/cluster.md)"
        return Check(NAME, Result.WARNING, seen, fix)
    if gpus and timing.large_s > MAX_S:
        fix = f"GPUs wait where it takes more than {MAX_S:g} s: have nodes in one zone, or with a faster network"
        return Check(NAME, Result.WARNING, seen, fix)
    return Check(NAME, Result.OK, seen)


def open_store(storage: Storage, key: str, rank: int) -> tuple[Any, str]:
    """Open a store for the processes of both pods, once both are there; also returns the host that serves it.

    Raises `TimeoutError` if the other pod does not come, and `RuntimeError` if it cannot be reached.
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
    """Wait for what the first pod writes."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        storage.refresh(FOLDER)
        with suppress(NotFoundError):
            host, port = storage.read(key).decode().split()
            return host, int(port)
        time.sleep(LOOK_S)
    raise TimeoutError


def measure(host: str, port: int, world_size: int, gpus: int, rank: int) -> Timing:
    """Time the all-reduces as one rank, in a process of its own: on the GPU of that rank, if its pod has any."""
    limit = timedelta(seconds=ANSWER_S)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "nccl"
        begin_log(log)
        device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(device)
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        way = "nccl" if gpus else "gloo"
        dist.init_process_group(way, store=store, rank=rank, world_size=world_size, timeout=limit)
        large_s, small_s = (time_all_reduce(torch.zeros(size, device=device)) for size in (GRADIENTS // 4, 1))
        dist.destroy_process_group()
        return Timing(large_s, small_s, read_network(log))


def time_all_reduce(values: torch.Tensor) -> float:
    """Return in how many seconds the values are summed over all ranks, the median of TIMES."""

    def exchange() -> None:
        dist.all_reduce(values)
        values[0].item()  # a GPU runs ahead

    return statistics.median(seconds(exchange) for _ in range(TIMES))
