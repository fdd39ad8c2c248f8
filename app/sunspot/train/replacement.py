"""Stops a replacement process that cannot train, without stopping the other workers."""

import os
import sys
import time
from contextlib import suppress
from typing import NoReturn

import ray
import ray.train

from sunspot.background import start_thread
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.errors import StorageError, format_trace, shorten
from sunspot.ray_internals.nodes import drain_nodes, head_nodes
from sunspot.run import Run
from sunspot.run.attempts import newest_number
from sunspot.run.failures import describe_failure, record_failure
from sunspot.train.joining import FAILURE_S, WorkerConfig

TRIES_ON_NODE = 2
"""Number of failed replacements on a node after which the node is left out."""

PAUSE_S = 10.0
"""Seconds until a replacement exits if its node cannot be left out. The pause doubles with each replacement."""

MAX_DOUBLINGS = 6
"""Maximum number of times that the pause doubles, up to 640 s."""


def end_replacement(error: Exception, config: WorkerConfig) -> NoReturn:
    """Report why this process cannot train, and exit. Ray then replaces the process like any lost process.

    Raising the error instead would stop all workers, because Ray Train would treat it as a training error.
    """
    try:
        report(error, config)
    except Exception as reporting:
        print(format_trace(reporting), file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def report(error: Exception, config: WorkerConfig) -> None:
    """Report the error to the driver and to storage.

    After several failures on the same node, exclude the node. If the node cannot be excluded, wait before returning.
    The wait gets longer with each failure.
    """
    print(format_trace(error), file=sys.stderr)
    control = config.control
    node = ray.get_runtime_context().get_node_id()
    tries = control.call_or_none(ControlChannel.count_failed_replacement, node) or 1
    line = f"a replacement on node {node[:12]} could not train and exits: {type(error).__name__}: {shorten(error)}"
    control.send(ControlChannel.log, f"{line}; the other workers keep training")
    with suppress(TimeoutError, StorageError):
        start_thread(lambda: _record(error, config.run, control), "record-end").result(FAILURE_S)
    if tries >= TRIES_ON_NODE and not leave_out(node, control, f"{tries} replacements could not train on it"):
        time.sleep(PAUSE_S * 2 ** min(tries - TRIES_ON_NODE, MAX_DOUBLINGS))


def leave_out(node: str, control: ControlClient, why: str) -> bool:
    """Exclude a node and return True. Return False if the node is the head node or a worker is training on it."""
    group = control.call_or_none(ControlChannel.group)
    if node in head_nodes() or (group and node in group.nodes.values()):
        return False
    control.send(ControlChannel.add_left_out, [f"node {node[:12]} left out: {why}"])
    drain_nodes([node], why)
    return True


def _record(error: Exception, run: Run, control: ControlClient) -> None:
    end = control.call_or_none(ControlChannel.group_end)
    rank = ray.train.get_context().get_world_rank()
    step = end.progress.step if end else 0
    record_failure(run, describe_failure(error, newest_number(run), rank, step))
