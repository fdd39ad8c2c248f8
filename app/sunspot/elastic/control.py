"""The control channel between the driver and the workers.

The channel is a Ray actor on the driver's node, because workers cannot call the driver itself. It carries the driver's
commands to the workers, and all reports about the run from workers, Ray's controller and the driver. The connections in
membership_channel.py are separate. They show which processes are alive, and which of them form the group.
docs/decisions/0019-two-channels.md explains why there are two channels.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sunspot.background import Background
from sunspot.elastic.merged_incidents import Incidents
from sunspot.elastic.messages import Command, FailureCounts, GroupEnd, Incident, RankError, StepTimes, WorkerGroup
from sunspot.observe.progress import News, Progress
from sunspot.run.failures import Hang, describe_suspects, waited_for_rows
from sunspot.run.incidents import Cause
from sunspot.run.stragglers import RECENT_S

COMMAND_EVERY_S = 0.5
"""Seconds between two polls of the command. A preemption notice may be as short as 15 s."""

CONTROL_TIMEOUT_S = 60
"""Seconds without an answer after which the control channel, and with it the driver, is assumed to be gone."""

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class ControlChannel:
    """Holds the driver's command, the worker group's progress, and the known facts about the current incident."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._metrics: list[dict[str, Any]] = []
        self._step_times: list[StepTimes] = []
        "The windows of the last RECENT_S seconds, oldest first."
        self._lines: list[str] = []
        self._command = Command()
        self._group: WorkerGroup | None = None
        self._has_group = False
        self._incidents = Incidents()
        self._fatal_error: Exception | None = None
        self._errors: list[RankError] = []
        "Rank errors of the newest failed attempt."
        self._hangs: list[Hang] = []
        "Ranks that have hung since the current group began."
        self._judged = 0
        "Number of hangs in `_hangs` that belong to earlier groups."
        self._gave_up = ""
        self._counts = FailureCounts()
        self._lost_on: list[str] = []
        "Nodes on which processes were lost in survivor mode since the failure judge was last asked."
        self._free_memory: dict[str, int] = {}
        "Bytes that were free on each GPU when the newest group began to use it."
        self._failed_replacements: Counter[str] = Counter()
        "Number of replacements that could not train, by node."
        self._unjudged_replacements = 0
        "Number of failed replacements that the failure judge has not taken into account yet."
        self._ended = ""
        "The reason why the newest group ended, or an empty string once the next group begins."

    # ------------------------------------------------------------------------------------------ called by the workers

    def begin_group(self, group: WorkerGroup) -> Incident:
        """Register a new worker group, and return the incident that ended the previous group."""
        self._group, self._has_group = group, True
        self._command = replace(self._command, restart=False, deadline=None, moves=False)
        self._hangs, self._judged = [], 0
        self._ended = ""
        return self._with_last_step(self._incidents.begin_group())

    def close_incident(self) -> Incident:
        """Return the incident that led to the current group, and clear it.

        Call this after the group's first step.
        """
        return self._incidents.take_step()

    def free_memory(self, gpu: str) -> int:
        """Return how many bytes of a GPU's memory were free when the newest group began to use it.

        Returns 0 if no group has used the GPU.
        """
        return self._free_memory.get(gpu, 0)

    def set_free_memory(self, gpu: str, size: int) -> None:
        """Record how many bytes of a GPU's memory are free when a group begins to use it."""
        self._free_memory[gpu] = size

    def command(self) -> Command:
        """Return the newest command."""
        return self._command

    def set_fatal_error(self, error: Exception) -> None:
        """Record an error that no restart can fix, unless such an error is already recorded."""
        self._fatal_error = self._fatal_error or error

    def add_rank_error(self, error: RankError) -> None:
        """Record the error that ended a rank."""
        others = [other for other in self._errors if other.failure.attempt == error.failure.attempt]
        self._errors = [*others, error]

    def add_hang(self, hang: Hang, late: bool) -> None:
        """Record that a group is ending because a rank hung. `late` is True if another group has already begun."""
        self._hangs.insert(0 if late else len(self._hangs), hang)
        self._judged += late
        cause = Cause.NO_ROWS if waited_for_rows(self._hangs, hang.world_size) else Cause.HUNG
        detail = describe_suspects(self._hangs, hang.world_size)
        self._incidents.observe(Incident(cause, detail, hang.time))

    def count_failed_replacement(self, node: str) -> int:
        """Count a replacement that could not train, and return the number of such replacements on its node."""
        self._failed_replacements[node] += 1
        self._unjudged_replacements += 1
        return self._failed_replacements[node]

    def set_progress(self, progress: Progress) -> None:
        """Record the group's progress."""
        self._progress = progress

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Queue a record of the metric history, to be printed on the terminal."""
        self._metrics.append(record)

    def add_step_times(self, times: StepTimes) -> None:
        """Add the step times of a metric window, and forget those of old windows."""
        self._step_times = [each for each in self._step_times if each.time > times.time - RECENT_S] + [times]

    def log(self, line: str) -> None:
        """Queue a line to be printed on the terminal."""
        self._lines.append(line)

    # ------------------------------------------------ about losses and ends: called by Ray's controller and others

    def group_end(self) -> GroupEnd:
        """Return the known facts about the end of the newest group."""
        return GroupEnd(
            errors=self._errors,
            progress=self._progress,
            hangs=self._hangs[self._judged :],
            fatal=self._fatal_error,
            gave_up=self._gave_up,
            nodes=self._group.nodes if self._group else {},
            lost_on=self._lost_on,
            counts=self._counts,
            failed_replacements=self._unjudged_replacements,
        )

    def end_group(self) -> None:
        """Record that the newest group has ended, because its workers restart."""
        self._has_group = False

    def start_next_group(self, line: str) -> None:
        """Log why another group starts, and forget how the previous group ended."""
        self.log(line)
        self._ended, self._has_group = line, False
        self._progress = replace(self._progress, doing="starting again")
        self._errors, self._judged = [], len(self._hangs)

    def set_counts(self, counts: FailureCounts, replacements: int = 0) -> None:
        """Store the failure counts, which now include all losses reported so far.

        `replacements` is the number of newly reported processes that were replacements and could not train.
        """
        self._counts, self._lost_on = counts, []
        self._unjudged_replacements -= replacements

    def add_loss(self, node: str, incident: Incident, others_train: bool) -> None:
        """Record that a process was lost on a node. `others_train` is False if no other worker of its group is left.

        The driver calls this, and later rank 0 of the next group calls `begin_group`. Ray does not guarantee that the
        calls of two processes arrive in order, but forming a group takes much longer than this call. If this call
        arrived too late anyway, the receipt of this loss would lack the time and the lost rank. They would appear in
        the next receipt.
        """
        self.log(
            f"lost {incident.detail}; {'the other workers keep training' if others_train else 'no worker is left'}"
        )
        self._lost_on.append(node)
        self.add_incident_facts(incident)

    def explain_loss(self, detail: str) -> None:
        """Record that a lost worker had run out of memory. Ray reports this some time after the loss."""
        self._incidents.explain_loss(detail)

    def give_up(self, reason: str) -> None:
        """Record why no new group will start."""
        self._gave_up = reason

    def forget_group(self) -> None:
        """Forget the newest group, so that later changes to its nodes cause no event.

        Call this once the group has ended.
        """
        self._group = None

    # ------------------------------------------------------------ called by the driver, and some also by the workers

    def request_stop(self) -> None:
        """Ask the current worker group and all later ones to stop."""
        self._command = replace(self._command, stop=True)

    def request_save(self) -> None:
        """Ask the worker group to save a checkpoint and keep training."""
        self._command = replace(self._command, save=True)

    def restart_group(self, incident: Incident, deadline: float | None) -> None:
        """Ask the worker group to save and stop. `deadline` is the time at which the first of its nodes is lost."""
        self.add_incident_facts(incident)
        self.log(f"{incident.cause}: {incident.detail}; the workers will save a checkpoint and restart")
        moves = incident.cause is Cause.MOVED
        self._command = replace(self._command, restart=True, deadline=deadline, moves=moves)
        self._group = None

    def add_incident_facts(self, facts: Incident) -> None:
        """Merge `facts` into what is known about why the group is ending."""
        self._incidents.observe(facts)

    def add_left_out(self, lines: list[str]) -> None:
        """Record lines that say which nodes were excluded and why. They become part of the run's events."""
        self._incidents.note("node left out", lines)

    def incident(self) -> Incident:
        """Return what is known about the end of the newest group, including the group's last step."""
        return self._with_last_step(self._incidents.current())

    def _with_last_step(self, incident: Incident) -> Incident:
        return replace(incident, last_step=max(incident.last_step, self._progress.step))

    def group(self) -> WorkerGroup | None:
        """Return the newest worker group.

        Returns None if no group has begun yet, if the group was asked to stop, or if it failed because of a GPU.
        """
        return self._group

    def step_times(self) -> list[StepTimes]:
        """Return the step times of the newest windows, oldest first."""
        return self._step_times

    def has_group(self) -> bool:
        """Return True if a worker group has begun and has not ended."""
        return self._has_group

    def fetch_news(self) -> News:
        """Return the progress, and the metrics and lines that were added since the last call."""
        news = News(self._progress, self._metrics, self._lines, self._ended)
        self._metrics, self._lines = [], []
        return news


class ControlClient:
    """A picklable client of the `ControlChannel` actor, for use in other processes."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def send(
        self, method: Callable[Concatenate[ControlChannel, Given], None], *given: Given.args, **named: Given.kwargs
    ) -> None:
        """Call a method of the channel without waiting for it."""
        self._submit(method, *given, **named)

    def call(
        self, method: Callable[Concatenate[ControlChannel, Given], Answer], *given: Given.args, **named: Given.kwargs
    ) -> Answer:
        """Call a method of the channel and return its result. Raises `RayError` after CONTROL_TIMEOUT_S."""
        answer: Answer = ray.get(self._submit(method, *given, **named), timeout=CONTROL_TIMEOUT_S)
        return answer

    def call_or_none(
        self, method: Callable[Concatenate[ControlChannel, Given], Answer], *given: Given.args, **named: Given.kwargs
    ) -> Answer | None:
        """Call a method of the channel and return its result, or None if the channel is gone.

        If the channel is gone, the driver is gone, too, and Ray stops all of the driver's processes.
        """
        with suppress(RayError):
            return self.call(method, *given, **named)
        return None

    def _submit(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return getattr(self._actor, method.__name__).remote(*given, **named)


@contextmanager
def open_control() -> Iterator[ControlClient]:
    """Yield a client of a new control channel.

    The channel runs on the driver's node, so a preemption ends either both the channel and the driver, or neither.
    """
    here = ray.get_runtime_context().get_node_id()
    actor: Any = ray.remote(num_cpus=0)(ControlChannel)
    handle = actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)).remote()
    try:
        yield ControlClient(handle)
    finally:
        ray.kill(handle)


class CommandPoller(Background):
    """Context manager that fetches the driver's command twice a second, even during long steps."""

    def __init__(self, control: ControlClient, regroups: Callable[[], bool] = lambda: False) -> None:
        """Create a poller. `regroups` returns True if the group should change after the current step."""
        super().__init__(COMMAND_EVERY_S, self._fetch)
        self._control, self._regroups = control, regroups
        self._known = Command()

    def poll(self) -> Command:
        """Return the driver's newest command, or an empty command if the driver has not answered yet."""
        return replace(self._known, regroup=self._regroups())

    def _fetch(self) -> None:
        self._known = self._control.call_or_none(ControlChannel.command) or self._known
