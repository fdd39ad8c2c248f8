"""What the driver does twice a second while workers train: it tells them of nodes that come and go, and to stop.

It waits for the control channel and for Ray, never for storage: one that hangs must not swallow a notice or a SIGTERM.
What the driver reads in storage meanwhile, the stop marker too, it reads in a thread of `run.outcome`. As a terminal
may keep whoever prints to it waiting, lines about nodes go to `observe.progress`, which prints in a thread of its own.
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

import ray

from sunspot.background import Background
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.membership_channel import MembershipServer
from sunspot.elastic.messages import Incident
from sunspot.elastic.nodes import NODE_CHECK_EVERY_S, NodeMonitor, describe_asked
from sunspot.errors import EndAtOnceError, shorten
from sunspot.ray_internals.coordinator import ask_of_groups
from sunspot.ray_internals.nodes import drain_nodes, draining_nodes
from sunspot.run.incidents import Cause
from sunspot.run.requests import StopRequest
from sunspot.stop_signals import end_signals

log = logging.getLogger(__name__)

WARN_AFTER_S = 30.0
"""How long looks at the nodes may fail before the user is warned: one that fails now and then does no harm."""

INTERRUPTED = (
    "interrupted: it saves and ends, and the same command goes on from there; Ctrl-C again ends it at once, unsaved"
)


class Supervisor:
    """Passes on to the worker group, over the control channel, what it has to act on."""

    def __init__(
        self,
        control: ControlClient,
        stop_request: StopRequest,
        monitor: NodeMonitor | None = None,
        membership: MembershipServer | None = None,
    ) -> None:
        """Without a `monitor`, nodes are not looked at; with a `membership`, workers outlive each other."""
        self._control, self._stop_request, self._monitor = control, stop_request, monitor
        self._membership = membership
        self._stopping = False
        "A signal has come, and the user was told what follows from it."
        self._leaving = False
        "This node, the head, is to go, and the workers were asked to save."
        self._asked: dict[str, int] = {}
        "Workers that were asked of each group of nodes."
        self._looked = time.monotonic()
        "When the nodes were last looked at without an error; infinite once the user was warned."

    def tick(self) -> None:
        """Pass on what is new."""
        self._pass_on_stop()
        if self._monitor:
            try:
                self._look_at_nodes(self._monitor)
                self._looked = time.monotonic()
            except Exception as error:  # the next look may do better
                if (failed_s := time.monotonic() - self._looked) > WARN_AFTER_S:
                    self._looked = math.inf
                    log.warning(
                        f"no look at the nodes for {failed_s:.0f} s, so a notice may be missed: {shorten(error)}"
                    )

    def _pass_on_stop(self) -> None:
        request = self._stop_request
        if request.asked:
            self._control.tell(ControlChannel.request_stop)
        if self._stopping or request.signal is None:
            return
        self._stopping = True
        told = "interrupted" if request.signal is signal.SIGINT else f"told to end by {request.signal.name}"
        if self._monitor and self._control.try_ask(ControlChannel.has_group) is False:
            print(f"{told}: no worker trains, so it ends without a save", flush=True)
        elif request.signal is signal.SIGINT:
            print(INTERRUPTED, flush=True)
        else:
            print(f"{told}: it saves, and ends", flush=True)

    def _look_at_nodes(self, monitor: NodeMonitor) -> None:
        """Restart the worker group when nodes are preempted or added.

        A lost node is only noted: Ray Train restarts the group itself. When the head is to go, the group saves; it
        trains on until the head takes everything with it.
        """
        group, draining = self._control.ask(ControlChannel.group), draining_nodes()
        if self._membership:  # it may have formed a group that the control channel does not know yet
            self._membership.drain(draining)
        if self._membership and group:  # lost workers are replaced: only room for more is news
            group = replace(group, world_size=max(group.world_size, self._membership.state.size))
        event = monitor.check(group, ray.nodes(), draining, time.monotonic())
        if event:  # before what may fail, as the monitor finds it once
            drain_nodes(event.spare)
            incident = Incident(event.cause, event.detail, noticed=time.time())
            outlived = self._membership and group and not set(group.nodes.values()) <= set(draining)
            if event.cause is Cause.NODE_LOST or (outlived and event.cause is Cause.PREEMPTED):
                self._control.tell(ControlChannel.add_incident_facts, incident)
                if outlived and event.cause is Cause.PREEMPTED:
                    gone = f"{event.cause}: {event.detail}; its workers leave after their step, and the others train on"
                    self._control.tell(ControlChannel.log, gone)
            else:
                self._control.tell(ControlChannel.restart_group, incident, event.deadline)
        if not self._leaving and ray.get_runtime_context().get_node_id() in draining:
            self._control.tell(ControlChannel.request_save)
            self._leaving = True
            self._control.tell(
                ControlChannel.log, "the head was told to go: the workers save, and a new head continues from there"
            )
        if monitor.asked != self._asked:
            ask_of_groups(monitor.per_worker, monitor.asked)
            self._asked = monitor.asked
            self._control.tell(ControlChannel.log, f"asked for {describe_asked(self._asked)}")


@contextmanager
def supervised(
    control: ControlClient,
    stop_request: StopRequest,
    monitor: NodeMonitor | None = None,
    membership: MembershipServer | None = None,
) -> Iterator[None]:
    """Supervise the workers while the context lasts, and let SIGINT, SIGTERM and SIGHUP ask for a stop.

    A second SIGINT raises `EndAtOnceError`.
    """

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop_request.signal is signal.SIGINT:
            raise EndAtOnceError
        stop_request.note_signal(number)  # and nothing else, because a signal may interrupt anything

    is_main = threading.current_thread() is threading.main_thread()
    handled = [signal.SIGINT, *end_signals()] if is_main else []
    before = {number: signal.signal(number, ask_to_stop) for number in handled}
    try:
        with Background(NODE_CHECK_EVERY_S, Supervisor(control, stop_request, monitor, membership).tick):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
