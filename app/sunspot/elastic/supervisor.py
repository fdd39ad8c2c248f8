"""Checks for node changes and stop requests twice a second, and passes them on to the workers.

The supervisor runs in the driver. It waits for the control channel and for Ray, but never for storage, because storage
that hangs must not delay a notice or a SIGTERM. A thread of `run.outcome` reads storage for the driver, including the
stop marker. Another thread reads how many workers the run should have (wanted_workers.py). Because a terminal may block
a process that prints to it, lines about nodes go to `observe.progress`, which prints in a thread of its own.
"""

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import ray

from sunspot.background import Background, Timer
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.membership_channel import MembershipServer
from sunspot.elastic.messages import Incident, WorkerGroup
from sunspot.elastic.nodes import NODE_CHECK_EVERY_S, NodeMonitor, ask_for_nodes, describe_asked
from sunspot.elastic.wanted_workers import WantedWorkers
from sunspot.errors import EndAtOnceError, shorten
from sunspot.machine.stop_signals import end_signals
from sunspot.ray_internals.coordinator import ask_of_groups
from sunspot.ray_internals.nodes import drain_nodes, draining_nodes, name_node
from sunspot.run.incidents import Cause
from sunspot.run.requests import StopRequest
from sunspot.settings import WorkerRange

log = logging.getLogger(__name__)

WARN_AFTER_S = 30.0
"""Seconds for which node checks can fail before the user is warned. An occasional failure does no harm."""

SHORT_S = 60.0
"""Seconds for which a run that has given back workers may be too small. After that, a restart replaces lost workers.

Ray places all missing processes together. While it waits for the workers that were given back, it may therefore never
replace a lost worker."""

SICK_CHECK_EVERY_S = 5.0
"""Seconds between two checks for a sick node."""

ASK_AGAIN_S = 20.0
"""Seconds between two requests for missing workers. Ray Train replaces each request within 20 s by a request for the
workers that it has started (`ray_internals.coordinator.RAY_TICK_S`)."""

INTERRUPTED = (
    "interrupted: saving and ending; the same command continues from there. Press Ctrl-C again to end without saving"
)


class Supervisor:
    """Passes notices and requests on to the worker group, over the control channel."""

    def __init__(
        self,
        control: ControlClient,
        stop_request: StopRequest,
        monitor: NodeMonitor | None = None,
        membership: MembershipServer | None = None,
        wanted: WantedWorkers | None = None,
    ) -> None:
        """Create a supervisor. It checks the nodes only if `monitor` is set.

        `wanted` is the number of workers that the run should have. In restart mode, `membership` and `wanted` are None.
        """
        self._control = control
        self._stop_request = stop_request
        self._monitor = monitor
        self._membership = membership
        self._wanted = wanted
        self._range: WorkerRange | None = None
        "The number of workers wanted, as last passed on to the group."
        self._gave_back = False
        "True once the group has been told to have fewer workers than Ray has started."
        self._unchanged: tuple[object, float] = (None, 0.0)
        "The newest group, the live nodes, and the time of the last change of either."
        self._sick_check = Timer()
        self._ask_again = Timer()
        self._left: set[str] = set()
        "Sick nodes that the group was told to leave."
        self._stopping = False
        "True once a signal has arrived and the user has been told its effect."
        self._leaving = False
        "True once the head node is about to go and the workers have been asked to save."
        self._asked: dict[str, int] = {}
        "Workers that were requested from each node group."
        self._looked = time.monotonic()
        "Time of the last successful node check, or infinity once the user was warned."

    def tick(self) -> None:
        """Pass new notices and requests on to the workers."""
        self._pass_on_stop()
        if self._monitor:
            try:
                self._pass_on_size(self._monitor)
                self._look_at_nodes(self._monitor)
                self._looked = time.monotonic()
            except Exception as error:  # the next check may succeed
                failed_s = time.monotonic() - self._looked
                if failed_s > WARN_AFTER_S:
                    self._looked = math.inf
                    log.warning(
                        f"could not check the nodes for {failed_s:.0f} s, so a preemption notice may be missed: "
                        f"{shorten(error)}"
                    )

    def _pass_on_stop(self) -> None:
        request = self._stop_request
        if request.asked:
            self._control.send(ControlChannel.request_stop)
        if self._stopping or request.signal is None:
            return
        self._stopping = True
        why = "interrupted" if request.signal is signal.SIGINT else f"told to end by {request.signal.name}"
        if self._monitor and self._control.call_or_none(ControlChannel.has_group) is False:
            print(f"{why}: no worker is training, so the run ends without saving", flush=True)
        elif request.signal is signal.SIGINT:
            print(INTERRUPTED, flush=True)
        else:
            print(f"{why}: the run saves and ends", flush=True)

    def _pass_on_size(self, monitor: NodeMonitor) -> None:
        """Notify the members and Ray's autoscaler if the run should now have a different number of workers.

        While Ray has started fewer workers than the run should have, ask the autoscaler again every ASK_AGAIN_S.
        """
        if not (self._wanted and self._membership):
            return
        if self._wanted.range == self._range:
            fewer = self._membership.snapshot().size < self._range.most
            if fewer and self._ask_again.due(ASK_AGAIN_S):
                ask_for_nodes(monitor.per_worker, self._range.most)
            return
        before, self._range = self._range, self._wanted.range
        why = self._wanted.describe()
        self._membership.limit(self._range.most, why)
        monitor.limit(self._range.most)
        self._gave_back = self._gave_back or self._range.most < self._membership.snapshot().size
        if before or self._wanted.narrowed:
            self._control.send(ControlChannel.log, f"workers wanted: {self._range}, {why}")
        ask_for_nodes(monitor.per_worker, self._range.most)

    def _size_of(self, group: WorkerGroup, size: int, nodes: list[dict[str, Any]]) -> int:
        """Return the number of workers above which a restart is worthwhile.

        This is usually `size`, the number of workers that Ray has started. `size` includes lost workers, because Ray
        replaces them. However, Ray does not replace workers that the run has given up (on request, or with a sick
        node). After the run has given up workers, the result is therefore the number of workers in the group, once
        neither the group nor the nodes have changed for SHORT_S.
        """
        seen = group.attempt, [node["NodeID"] for node in nodes if node["Alive"]]
        if self._unchanged[0] != seen:
            self._unchanged = seen, time.monotonic()
        lasts = self._gave_back and time.monotonic() - self._unchanged[1] > SHORT_S
        return group.world_size if lasts else max(group.world_size, size)

    def _look_at_nodes(self, monitor: NodeMonitor) -> None:
        """Restart the worker group if nodes are preempted, or if additional or better nodes are available.

        A lost node is only recorded, because Ray Train restarts the group itself. In survivor mode, a preemption does
        not restart the group if the group keeps some of its nodes. If the head is preempted, the group saves, and
        keeps training until the loss of the head ends the whole cluster.
        """
        group, draining = self._control.call(ControlChannel.group), draining_nodes()
        if self._membership:  # the server may have formed a group that the control channel does not know yet
            self._membership.drain(draining)
        nodes = ray.nodes()
        if self._membership and group:  # Ray replaces lost workers, so that only room for more workers counts
            if self._wanted and self._sick_check.due(SICK_CHECK_EVERY_S) and draining.keys() <= self._left:
                self._leave_sick_node(self._membership, group, self._wanted.range.least)
            staying = {rank: node for rank, node in group.nodes.items() if node not in self._left}
            size = self._size_of(group, self._membership.snapshot().size, nodes)
            group = replace(group, world_size=size, nodes=staying)  # an excluded node is not preempted
        event = monitor.check(group, nodes, draining, time.monotonic())
        if event:  # handled before anything that may fail, because the monitor finds each event only once
            drain_nodes(event.spare)
            incident = Incident(event.cause, event.detail, noticed=time.time())
            some_stay = self._membership and group and not set(group.nodes.values()) <= set(draining)
            if event.cause is Cause.NODE_LOST or (some_stay and event.cause is Cause.PREEMPTED):
                self._control.send(ControlChannel.add_incident_facts, incident)
                if some_stay and event.cause is Cause.PREEMPTED:
                    leaving = "its workers leave after their step, and the others keep training"
                    self._control.send(ControlChannel.log, f"{event.cause}: {event.detail}; {leaving}")
            else:
                self._control.send(ControlChannel.restart_group, incident, event.deadline)
        if not self._leaving and ray.get_runtime_context().get_node_id() in draining:
            self._control.send(ControlChannel.request_save)
            self._leaving = True
            self._control.send(
                ControlChannel.log, "the head is being preempted: the workers save, and a new head continues from there"
            )
        if monitor.asked != self._asked:
            ask_of_groups(monitor.per_worker, monitor.asked)
            self._asked = monitor.asked
            self._control.send(ControlChannel.log, f"requested workers: {describe_asked(self._asked)}")

    def _leave_sick_node(self, membership: MembershipServer, group: WorkerGroup, least: int) -> None:
        """Exclude a sick node of the group, if there is one, so that Ray schedules nothing more on this node.

        The node's workers are replaced only by a restart. If other nodes have room, the group restarts once neither
        the group nor the nodes have changed for SHORT_S.
        """
        windows = self._control.call(ControlChannel.step_times)
        sick = membership.leave_sick_node(windows, group, ray.get_runtime_context().get_node_id(), least)
        if not sick:
            return
        self._left.add(sick.node)
        self._gave_back = True
        line = f"the run stops using {name_node(sick.node)}, and the other nodes keep training: {sick.why}"
        self._control.send(ControlChannel.log, line)
        self._control.send(ControlChannel.add_left_out, [line])
        drain_nodes([sick.node], sick.why)


@contextmanager
def supervised(
    control: ControlClient,
    stop_request: StopRequest,
    monitor: NodeMonitor | None = None,
    membership: MembershipServer | None = None,
    wanted: WantedWorkers | None = None,
) -> Iterator[None]:
    """Context manager that supervises the workers. SIGINT, SIGTERM and SIGHUP request a stop.

    A second SIGINT raises `EndAtOnceError`.
    """

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop_request.signal is signal.SIGINT:
            raise EndAtOnceError
        stop_request.note_signal(number)  # and nothing else, because a signal may interrupt any code

    is_main = threading.current_thread() is threading.main_thread()
    handled = [signal.SIGINT, *end_signals()] if is_main else []
    before = {number: signal.signal(number, ask_to_stop) for number in handled}
    try:
        with Background(NODE_CHECK_EVERY_S, Supervisor(control, stop_request, monitor, membership, wanted).tick):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
