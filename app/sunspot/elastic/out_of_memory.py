"""Recognizes workers that died because they ran out of memory, and describes them for users."""

import re
from collections.abc import Mapping

from ray.exceptions import OutOfMemoryError

from sunspot.elastic.messages import RankError
from sunspot.errors import shorten
from sunspot.ray_internals.nodes import name_node

NODE_MEMORY = re.compile(
    r"Memory on the node \(IP: \S+, ID: (?P<node>\w+)\).*? was (?P<used>[\d.]+)GB(?: used)? / (?P<limit>[\d.]+)GB", re.S
)
"""Matches Ray's message about a node's memory (2.60), in which a GB has 2^30 bytes. In a pod, the limit is the
container's."""

PROCESS_MEMORY = re.compile(r"memory used=(?P<used>[\d.]+)GB")
"""Matches Ray's message about the memory of a process that Ray has ended."""

MEMORY_ERRORS = re.compile(
    r"out of (shared )?memory|can't allocate memory|cannot allocate memory|unable to allocate|STATUS_ALLOC_FAILED"
    r"|DataLoader worker .* is killed by signal: (Killed|Bus error)",
    re.IGNORECASE,
)
"""Matches messages of torch, CUDA's libraries, NumPy and the system about too little memory. torch raises such errors
as RuntimeError. The shared memory of data loaders is part of a pod's memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if a process raised this error because the host or GPU ran out of memory."""
    of_system = isinstance(error, RuntimeError | OSError) and MEMORY_ERRORS.search(str(error))
    return isinstance(error, MemoryError) or bool(of_system)


def find_killed_for_memory(error: BaseException) -> tuple[str, str]:
    """Return the Ray ID of a node on which Ray killed a process to free memory, and a description with Ray's figures.

    `error` is Ray's error for the process, or the error of the health check that found the process dead. Returns two
    empty strings if the process was not killed for this reason.
    """
    cause = getattr(error, "health_check_failure", error)
    if not isinstance(cause, OutOfMemoryError):
        return "", ""
    text = str(cause)
    found, process = NODE_MEMORY.search(text), PROCESS_MEMORY.search(text)
    if not found:
        return "unknown", f"out of memory: {shorten(cause)}"
    own = f", {process['used']} GiB of them by this process" if process else ""
    used = f"{found['used']} of {found['limit']} GiB in use on {name_node(found['node'])}{own}"
    return found["node"], f"out of memory: {used}"


def find_short_of_memory(errors: Mapping[int, Exception], reported: list[RankError]) -> set[str]:
    """Return the nodes on which processes ran out of host or GPU memory."""
    killed = {find_killed_for_memory(error)[0] for error in errors.values()}
    return {*killed, *(error.node or "unknown" for error in reported if error.out_of_memory)} - {""}


def advise_memory(reported: list[RankError], one_machine: bool = False) -> str:
    """Return advice for a run that has run out of memory. `reported` contains the errors that ranks have reported."""
    if any(re.search("CUDA|CUBLAS|CUDNN", error.failure.message) for error in reported):
        return "lower SUNSPOT_MICRO_BATCH_SIZE, which does not change the result, or choose GPUs with more memory"
    if one_machine:
        return "lower SUNSPOT_NUM_WORKERS, end other programs, or change the task so that it needs less"
    return "give the workers more memory (worker.memory in the profile), or change the task so that it needs less"
