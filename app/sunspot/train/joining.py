"""Makes a process a worker of the run.

The process joins a group, claims the run together with the rest of the group, and builds its own model.
"""

import os
import socket
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import cast

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from sunspot.background import Background, start_thread
from sunspot.checkpoint import CheckpointManager, NodeMemory
from sunspot.checkpoint.manager import AHEAD_OF_STORAGE
from sunspot.code_archive import find_code
from sunspot.elastic.claim import LocalState, StartPoint, agree_on_start
from sunspot.elastic.control import CommandPoller, ControlChannel, ControlClient
from sunspot.elastic.failures import describe_end
from sunspot.elastic.membership_channel import MembershipAddress
from sunspot.elastic.receipts import Phases, explain_error, first_incident
from sunspot.elastic.restore import TrainingState, load_start
from sunspot.elastic.watchdog import Watchdog
from sunspot.errors import StorageError, SunspotError, SupersededError, find_in
from sunspot.log import print_logs, sent_warnings
from sunspot.observe.prometheus import EXPORT_EVERY_S, Telemetry
from sunspot.parallel.collectives import WorkerPlace, listening_to_rounds, run_on_all_ranks
from sunspot.parallel.nccl_log import begin_log, own_log
from sunspot.parallel.replica_groups import ReplicaGroups
from sunspot.parallel.sharding import is_fsdp
from sunspot.plan import Plan
from sunspot.ray_internals.backend import processes_up
from sunspot.ray_internals.output import quiet_ray_train
from sunspot.ray_internals.workers import launch_time
from sunspot.ray_session import enter_folder
from sunspot.run import Claimant, Run, open_run
from sunspot.run.attempts import IN_PLACE, is_of_newest_driver, record_error
from sunspot.run.failures import Hang, record_failure
from sunspot.run.logs import shipped_worker_output
from sunspot.settings import Settings
from sunspot.train.build import build_learner, make_loader, prepare_learner
from sunspot.train.device_memory import await_device_memory
from sunspot.train.evaluate import ends_in_memory, leaves_out_evaluation
from sunspot.train.learner import Learner
from sunspot.train.profiler import LOOK_EVERY_S
from sunspot.train.reporter import Reporter, first_status, show_claim
from sunspot.train.start_report import open_journals, record_left_out, report_rates
from sunspot.train.survivor import Survivor
from sunspot.train.worker import GroupStart, Worker

FAILURE_S = 5.0
"""Maximum number of seconds that a failed worker waits for storage to take its traceback."""

FATAL_S = 60.0
"""Maximum number of seconds that a failed worker waits for storage to take an error that no retry can fix."""


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration that each worker gets from the driver."""

    plan: Plan
    owner: str
    driver: str
    control: ControlClient
    threads: int
    collective_timeout_s: float
    membership: MembershipAddress | None = None
    "Address at which surviving workers form their groups. None if Ray Train forms the groups and ends them together."
    folder: str = ""
    "Working directory of the driver, to which relative paths in TASK_ARGS refer."

    @property
    def limit_s(self) -> float:
        """Maximum number of seconds to wait in a collective for a worker that may itself be waiting for storage."""
        return self.plan.settings.storage_timeout_s + self.collective_timeout_s

    @cached_property
    def run(self) -> Run:
        """The run. It is opened only once, so that all groups of this process use the same storage connection."""
        return open_run(self.plan.settings.storage_path, self.plan.settings.run_name)

    def replica_groups(self) -> ReplicaGroups | None:
        """Return new `ReplicaGroups`, which have not formed yet, or None if PARALLEL is not hsdp."""
        settings = self.plan.settings
        return ReplicaGroups(settings.shard_degree) if settings.parallel == "hsdp" else None

    def claimant(self) -> Claimant:
        """Return a new claimant of the run. Each group needs its own."""
        return Claimant(self.run, self.owner, self.driver)


@dataclass(frozen=True)
class WorkerSetup:
    """Everything that is needed to build a worker after its group has claimed the run."""

    plan: Plan
    run: Run
    start: StartPoint
    place: WorkerPlace
    memory: NodeMemory | None
    watchdog: Watchdog
    control: ControlClient
    outputs: ExitStack
    "Contexts that write the rest of the log, the metrics and the status to storage when they are closed."
    survivor: Survivor | None = None
    "This process and the learner that it keeps, or None if the process ends with its group."


class Joining(ExitStack):
    """Makes this process a worker of the run, in the steps `form`, `claim` and `build`.

    `loop.train_in_group` calls these methods in this order. Each method contains collectives, so every rank of the
    group must call the same methods. The context ends when the process has left the group. An error in any step ends
    the context, too. `loop.train_in_groups` then asks `Survivor.outlives` whether the process can join another group.
    """

    def __init__(self, config: WorkerConfig, survivor: Survivor | None = None) -> None:
        """Prepare to join a group. A `survivor` forms the group itself. Without a survivor, Ray Train forms it."""
        super().__init__()
        self._config, self._survivor = config, survivor
        self._claimant = config.claimant()
        self._phases = Phases()
        self._found: LocalState | None = None
        "The state that this process found on its node when the group claimed the run, until it is loaded."

    # ------------------------------------------------------------------------------------------------------------ form

    def form(self) -> WorkerPlace | None:
        """Form a group with the other workers. Return this worker's place in the group, or None if no group forms."""
        config, survivor = self._config, self._survivor
        set_up_process(config, survivor)
        if survivor is None:
            carrier = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.limit_s))
            context = ray.train.get_context()
            device = ray.train.torch.get_device()
            self._phases = Phases(launched=launch_time(), up=processes_up(), formed=time.time())
            group = cast(dist.ProcessGroup, carrier)
            replicas = config.replica_groups()
            if replicas:
                replicas.form(timedelta(seconds=config.limit_s))
            return WorkerPlace(group, context.get_world_rank(), context.get_world_size(), device, replicas=replicas)
        settings = config.plan.settings
        if settings.parallel != "fsdp" and survivor.others_train:  # under fsdp, all workers build their parts together
            survivor.prepare_alone(partial(self._prepare_alone, survivor), settings.hang_timeout_s)
        place = survivor.form()
        if place:
            # Otherwise the output of the previous attempt would arrive once another attempt owns the run.
            survivor.await_outputs()
            self._phases = Phases(formed=time.time())
        return place

    def _prepare_alone(self, survivor: Survivor) -> Learner:
        """Build a learner while the other workers train. Under hsdp, the driver has chosen the learner's shard."""
        replicas = survivor.replicas
        if not replicas:
            return self._prepare_learner()
        device = ray.train.torch.get_device()
        with replicas.pretend(survivor.shard):
            return self._prepare_learner(WorkerPlace(None, survivor.shard, replicas.degree, device, replicas=replicas))

    def _prepare_learner(self, place: WorkerPlace | None = None) -> Learner:
        return prepare_learner(self._config.plan, self._config.control, place)

    # ----------------------------------------------------------------------------------------------------------- claim

    def claim(self, place: WorkerPlace) -> WorkerSetup | None:
        """Claim the run's next attempt with the other workers, starting from the newest state that any worker has.

        Returns None if this job may no longer train the run. An error that no retry can fix is reported to the
        driver and then raised. After such a report, this method returns None in every later group of the job.
        """
        config, survivor = self._config, self._survivor
        plan = config.plan
        control = config.control
        run = self._claimant.run
        if control.call(ControlChannel.group_end).fatal:
            return None
        group = cast(dist.ProcessGroup, place.group)
        watchdog = self._watch(place)
        memory = open_memory(run, plan.settings, place, survivor)
        live = survivor.kept[0] if survivor and survivor.kept else None
        dist.barrier(group=group)  # until each node has removed what earlier processes left
        try:
            start, self._found = agree_on_start(self._claimant, plan.settings, group, live)
        except SunspotError as error:
            report_fatal(error, control, survivor if ends_alone(survivor, place.rank) else None)
            raise
        if start is None:
            return None
        attempt = start.attempt
        place = replace(place, nodes=list(start.nodes.values()))
        watchdog.claimed(attempt)
        if memory:
            memory.keep_parts_of(start.copy.snapshot.checkpoint if start.copy else None)
        if place.rank == 0:
            control.send(ControlChannel.add_incident_facts, first_incident(start))
            if not start.live:  # survivors wait for this process, and the status already shows that they train
                show_claim(run, first_status(start, plan, control.call_or_none(ControlChannel.incident)))
        outputs = self.enter_context(ExitStack())
        outputs.enter_context(shipped_worker_output(run, attempt.number, place.rank))
        return WorkerSetup(plan, run, start, place, memory, watchdog, control, outputs, survivor)

    def _watch(self, place: WorkerPlace) -> Watchdog:
        """Watch this process for hangs until it leaves the group, and send the watchdog's warnings to the driver."""
        control = self._config.control
        survivor = self._survivor
        limit_s = self._config.plan.settings.hang_timeout_s

        def note_hang(hang: Hang, late: bool) -> None:  # the hangs of all ranks together show which rank is to blame
            control.send(ControlChannel.add_hang, replace(hang, stacks=""), late)

        if survivor:
            self.callback(self._claimant.cancelled.set)  # once this process has left the group
        self.enter_context(sent_warnings(lambda text: control.send(ControlChannel.log, text)))
        around_pauses = partial(survivor.building, limit_s) if survivor else nullcontext
        watchdog = Watchdog(self._claimant.run, place.rank, place.world_size, limit_s, note_hang, around_pauses)
        self.enter_context(watchdog)
        self.enter_context(listening_to_rounds(watchdog.heartbeat))
        return watchdog

    # ----------------------------------------------------------------------------------------------------------- build

    def build(self, setup: WorkerSetup) -> Worker:
        """Load the state that the claimed attempt starts from, and build a worker that continues from it."""
        survivor = setup.survivor
        start = setup.start
        place = setup.place
        if survivor and start.live:
            prepare = partial(self._prepare_learner, place if place.replicas else None)
            state = survivor.continue_from(place, start, prepare, setup.watchdog, setup.control)
        else:
            assert self._found
            if survivor and survivor.learner:
                with setup.watchdog.paused():
                    survivor.forget()  # all workers build new learners together
            state = load_start(setup.run, setup.plan.settings, start, self._found, cast(dist.ProcessGroup, place.group))
        worker = build_worker(setup, state, self._phases)
        if survivor:
            survivor.begin(worker)
        rank = f"rank {place.rank} of {place.world_size} on {place.device} of {socket.gethostname()}"
        print(f"attempt {start.attempt.number}: {rank} starts at step {start.attempt.step} (state: {state.tier})")
        self._found = None  # as large as the model and its optimizer
        if worker.reporter:
            setup.outputs.enter_context(worker.reporter.publisher)
            setup.outputs.callback(worker.reporter.end)
            self.enter_context(worker.commands)
            look = partial(worker.profiler.look_for_request, setup.run, start.attempt.number)
            self.enter_context(Background(LOOK_EVERY_S, look))
        self.enter_context(Background(EXPORT_EVERY_S, worker.telemetry.export))
        return worker


def build_worker(setup: WorkerSetup, state: TrainingState, phases: Phases) -> Worker:
    """Build the worker from the `state` that its group starts from. All workers of the group call this together.

    If this process has kept its learner, `Survivor.continue_from` has already loaded the state into the learner.
    Otherwise, this function builds the learner, and loads the state. `phases` holds the end time of each completed
    phase of the group's start.
    """
    plan = setup.plan
    start = setup.start
    place = setup.place
    watchdog = setup.watchdog
    attempt = start.attempt
    survivor = setup.survivor
    learner = survivor.learner if survivor else None
    if learner is None:  # the same on all workers (`Survivor.continue_from`)
        with watchdog.paused():  # fetching weights and reading rows may take any time
            if place.device.type == "cuda":  # all workers wait before any of them allocates memory
                awaits = partial(await_device_memory, place.device, place.nodes[place.rank], setup.control)
                run_on_all_ranks(place.group, awaits)
            learner = build_learner(plan, place, attempt, state, make_loader)
    journals = open_journals(setup.run, start) if place.rank == 0 else None
    evaluated = state.evaluated and not ends_in_memory(plan, attempt.step, state)
    left_out = not evaluated and leaves_out_evaluation(start, plan.total_steps)
    if journals:
        if left_out:
            record_left_out(attempt.step, journals.events)
        with watchdog.paused():  # a task may compute the rates of all steps
            report_rates(learner, start, state, setup.control)
    # Under fsdp, the checkpoint manager forms a process group of its own.
    with survivor.groups.forming(survivor.is_closed) if survivor and is_fsdp(learner.model) else nullcontext():
        checkpoints = CheckpointManager(
            setup.run,
            attempt,
            plan,
            learner.saved(),
            place=place,
            memory=setup.memory,
            windows=state.ledger,
            journals=journals,
        )
    if survivor:
        status = start.past.status
        committed = status.checkpoint_time if status else None
        checkpoints.continue_commits(survivor.committer, [*start.before, attempt], committed)
    reporter = None
    if journals:
        phases = Phases(**phases, loaded=time.time())
        reporter = Reporter(setup.run, plan, start, state, setup.control, journals, checkpoints, phases)
        reporter.announce()
    gauges = reporter.gauges if reporter else None
    telemetry = Telemetry(plan.settings.run_name, place.rank, place.device, lambda: checkpoints.stall_s, gauges)
    group_start = GroupStart(
        attempt.step,
        evaluated or left_out,
        state.metrics,
        in_place=state.tier == IN_PLACE,
        window=survivor.window if survivor else None,
        is_closed=survivor.is_closed if survivor else None,
        weights_checked=state.tier not in AHEAD_OF_STORAGE,
    )
    commands = CommandPoller(setup.control, survivor.regroups if survivor else lambda: False)
    return Worker(learner, group_start, checkpoints, commands, watchdog, telemetry, reporter, setup.outputs)


def set_up_process(config: WorkerConfig, survivor: Survivor | None) -> None:
    """Set up this process's log, code, working directory, threads and GPU arithmetic for training."""
    settings = config.plan.settings
    print_logs()
    try:
        find_code(settings.job.code)
    except SunspotError as error:
        report_fatal(error, config.control, survivor)
        raise
    enter_folder(config.folder)
    torch.set_num_threads(config.threads)
    if ray.train.torch.get_device().type == "cuda" and "NCCL_DEBUG" not in os.environ:
        begin_log(own_log())
    set_tf32(settings.precision == "tf32")
    quiet_ray_train()


def ends_alone(survivor: Survivor | None, rank: int) -> bool:
    """Return True if this process can end without ending its group.

    This is the case for a replacement that has not trained, unless it has rank 0. The processes of the previous group
    get the lowest ranks (`Membership`), so if a replacement has rank 0, no other process is left that could train.
    """
    return bool(survivor and survivor.replaces and rank)


def report_fatal(error: SunspotError, control: ControlClient, survivor: Survivor | None) -> None:
    """Report to the driver an error that no retry can fix, unless the other workers can train without this process."""
    if not (survivor and survivor.replaces):
        control.call_or_none(ControlChannel.set_fatal_error, error)


def set_tf32(allowed: bool) -> None:
    """Allow or forbid GPUs to round fp32 inputs of matrix products and convolutions to TF32."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed  # torch's default is True for convolutions, and False for matrices


def open_memory(run: Run, settings: Settings, place: WorkerPlace, survivor: Survivor | None) -> NodeMemory | None:
    """Return the shared memory for this worker's copies, or None if this worker keeps no copies.

    Under DDP, every worker has the whole state, so only one worker per node keeps copies.
    """
    nodes = place.nodes
    first = nodes.index(nodes[place.rank]) == place.rank if survivor else ray.train.get_context().get_local_rank() == 0
    if not settings.snapshot_cost or (settings.parallel == "ddp" and not first):
        return None
    return survivor.open_memory(run.location, first) if survivor else NodeMemory(run.location, warns=first)


def record_end(error: Exception, setup: WorkerSetup) -> None:
    """Record the error that ends this worker, unless its group can continue without it (`ends_alone`).

    An error that no retry can fix is sent through the control channel, because storage itself may have failed. It is
    also written to storage, where the job's next driver finds it. If another process owns the run, nothing is written
    to storage.
    """
    run = setup.run
    control = setup.control
    place = setup.place
    if ends_alone(setup.survivor, place.rank):
        return
    attempt = setup.start.attempt
    fatal = find_in(error)
    superseded = isinstance(fatal, SupersededError)
    by_next_group = False
    if superseded:
        with suppress(StorageError):
            by_next_group = is_of_newest_driver(run, attempt)
    if fatal and not by_next_group:
        control.call_or_none(ControlChannel.set_fatal_error, fatal)
    if superseded:
        return
    end = describe_end(error, attempt, place.rank, setup.watchdog.step, place.nodes[place.rank])
    control.send(ControlChannel.add_rank_error, end)
    control.send(ControlChannel.add_incident_facts, explain_error(end))

    def record() -> None:
        with suppress(StorageError):
            if fatal:
                record_error(run, attempt.number, fatal)
            record_failure(run, end.failure)

    # The other workers wait for this one to end, so it must not wait for storage for long.
    with suppress(TimeoutError):
        limit_s = FATAL_S if fatal and not isinstance(fatal, StorageError) else FAILURE_S
        start_thread(record, "record-end").result(limit_s)
