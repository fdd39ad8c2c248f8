"""Makes a process a worker of the run: joins the group, claims the run with it, and records what ends the worker."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from types import TracebackType
from typing import Self, cast

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from sunspot.background import Background, start_thread
from sunspot.checkpoint import NodeMemory
from sunspot.code_archive import find_code
from sunspot.elastic.claim import LocalState, agree_on_start
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.failures import describe_end
from sunspot.elastic.membership_channel import MembershipAddress
from sunspot.elastic.receipts import Phases, explain_error, first_incident
from sunspot.elastic.restore import load_start
from sunspot.elastic.watchdog import Watchdog
from sunspot.errors import StorageError, SunspotError, SupersededError, find_in
from sunspot.log import print_logs, sent_warnings
from sunspot.observe.prometheus import EXPORT_EVERY_S
from sunspot.parallel.collectives import WorkerPlace, listening_to_rounds
from sunspot.parallel.nccl_log import begin_log, own_log
from sunspot.plan import Plan
from sunspot.ray_internals.backend import processes_up
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.ray_internals.output import quiet_ray_train
from sunspot.ray_internals.workers import launch_time
from sunspot.ray_session import enter_folder
from sunspot.run import Claimant, Run, open_run
from sunspot.run.attempts import is_of_newest_driver, record_error
from sunspot.run.failures import Hang, record_failure
from sunspot.run.logs import shipped_worker_output
from sunspot.settings import Settings
from sunspot.train.build import WorkerSetup, build_worker, prepare_learner
from sunspot.train.learner import Learner
from sunspot.train.reporter import first_status, show_claim
from sunspot.train.survivor import Survivor
from sunspot.train.worker import RegroupError, Worker

FAILURE_S, FATAL_S = 5.0, 60.0
"""The longest that a failed worker waits for storage to take its traceback, or an error that no retry can fix."""


@dataclass(frozen=True)
class WorkerConfig:
    """What the driver gives each worker, to join the run."""

    plan: Plan
    owner: str
    driver: str
    control: ControlClient
    threads: int
    collective_timeout_s: float
    membership: MembershipAddress | None = None
    "Where workers that outlive each other form their groups; None: Ray Train forms them, and ends them together."
    folder: str = ""
    "The driver's working directory, which relative paths in TASK_ARGS mean."

    @property
    def limit_s(self) -> float:
        """The longest wait in one collective: one that waits for storage in a step keeps the others waiting."""
        return self.plan.settings.storage_timeout_s + self.collective_timeout_s

    @cached_property
    def run(self) -> Run:
        """The run, with this process's connection to its storage, which serves all groups that it is in."""
        return open_run(self.plan.settings.storage_path, self.plan.settings.run_name)

    def claimant(self) -> Claimant:
        """Who claims the run for a group."""
        return Claimant(self.run, self.owner, self.driver)


class Joining:
    """The steps by which this process becomes a worker of the run: form a group, claim the run with it, and build.

    `loop.train_in_group` calls the three methods in this order. Every rank of the group does the same, because most of
    what they do is a collective. The context ends when the process has left the group.
    """

    def __init__(self, config: WorkerConfig, survivor: Survivor | None = None) -> None:
        """A `survivor` forms the group itself. Without one, Ray Train has formed it."""
        self._config, self._survivor = config, survivor
        self._claimant = config.claimant()
        self._phases = Phases()
        self._found: LocalState | None = None
        "The state that this process found on its node when the group claimed the run, until it is loaded."
        self._contexts = ExitStack()
        "Contexts that end when this process has left the group."

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.__exit__(kind, error, trace)

    # ------------------------------------------------------------------------------------------------------------ form

    def form(self) -> WorkerPlace | None:
        """Form the group with the other workers, and return this worker's place in it.

        Returns None if no further group forms.
        """
        config, survivor = self._config, self._survivor
        set_up_process(config, survivor)
        if survivor is None:
            carrier = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.limit_s))
            context = ray.train.get_context()
            device = ray.train.torch.get_device()
            self._phases = Phases(launched=launch_time(), up=processes_up(), formed=time.time())
            group = cast(dist.ProcessGroup, carrier)
            return WorkerPlace(group, context.get_world_rank(), context.get_world_size(), device)
        settings = config.plan.settings
        if settings.parallel == "ddp" and survivor.others_train:  # a model in parts is built by all workers together
            survivor.prepare_alone(self._prepare_learner, settings.hang_timeout_s)
        place = survivor.form()
        if place:
            # Output of the previous attempt must not reach storage once another process owns the run.
            survivor.await_outputs()
            self._phases = Phases(formed=time.time())
        return place

    def _prepare_learner(self) -> Learner:
        return prepare_learner(self._config.plan, self._config.control)

    # ----------------------------------------------------------------------------------------------------------- claim

    def claim(self, place: WorkerPlace) -> WorkerSetup | None:
        """Claim the run's next attempt with the other workers, from the newest state that any of them can reach.

        Returns None if the run is no longer this job's to train. An error that no retry can fix is reported to the
        driver, so that the next worker group of this job ends at once.
        """
        config, survivor = self._config, self._survivor
        plan, control, run = config.plan, config.control, self._claimant.run
        if control.ask(ControlChannel.group_end).fatal:
            return None
        group = cast(dist.ProcessGroup, place.group)
        watchdog = self._watch(place)
        memory = open_memory(run, plan.settings, place, survivor)
        live = survivor.kept[0] if survivor and survivor.kept else None
        dist.barrier(group=group)  # until every node is rid of what earlier processes left
        try:
            start, self._found = agree_on_start(self._claimant, plan.settings, group, live)
        except SunspotError as error:
            tell_fatal(error, control, survivor if ends_alone(survivor, place.rank) else None)
            raise
        if start is None:
            return None
        attempt = start.attempt
        place = replace(place, nodes=list(start.nodes.values()))
        watchdog.claimed(attempt)
        if memory:
            memory.keep_parts_of(start.copy.snapshot.checkpoint if start.copy else None)
        if place.rank == 0:
            control.tell(ControlChannel.explain_start, first_incident(start))
            if not start.live:  # otherwise others wait for this process, and the status already shows that they train
                show_claim(run, first_status(start, plan, control.try_ask(ControlChannel.incident)))
        outputs = self._contexts.enter_context(ExitStack())
        outputs.enter_context(shipped_worker_output(run, attempt.number, place.rank))
        return WorkerSetup(plan, run, start, place, memory, watchdog, control, outputs, survivor)

    def _watch(self, place: WorkerPlace) -> Watchdog:
        """Watch this process for hangs, and send its warnings to the driver, until it leaves the group."""
        control, survivor, limit_s = self._config.control, self._survivor, self._config.plan.settings.hang_timeout_s

        def note_hang(hang: Hang, late: bool) -> None:  # those of all ranks together tell which rank is to blame
            control.tell(ControlChannel.add_hang, replace(hang, stacks=""), late)

        if survivor:
            self._contexts.callback(self._claimant.given_up.set)  # once this process has left the group
        self._contexts.enter_context(sent_warnings(lambda text: control.tell(ControlChannel.log, text)))
        around_pauses = partial(survivor.building, limit_s) if survivor else nullcontext
        watchdog = Watchdog(self._claimant.run, place.rank, place.world_size, limit_s, note_hang, around_pauses)
        self._contexts.enter_context(watchdog)
        self._contexts.enter_context(listening_to_rounds(watchdog.heartbeat))
        return watchdog

    # ----------------------------------------------------------------------------------------------------------- build

    def build(self, setup: WorkerSetup) -> Worker:
        """Load the state that the claimed attempt starts from, and build the worker that trains from it."""
        survivor, start, place = setup.survivor, setup.start, setup.place
        if survivor:
            with setup.watchdog.paused():
                survivor.align(bool(start.live), self._prepare_learner)
        if survivor and start.live:
            state = survivor.hand_over(place, start.live, setup.plan.total_steps)
        else:
            assert self._found
            state = load_start(setup.run, setup.plan.settings, start, self._found, cast(dist.ProcessGroup, place.group))
        worker = build_worker(setup, state, self._phases)
        if survivor:
            survivor.begin(worker)
        rank = f"rank {place.rank} of {place.world_size} on {place.device} of {socket.gethostname()}"
        print(f"attempt {start.attempt.number}: {rank}, from step {start.attempt.step}, {state.tier}")
        self._found = None  # as large as the model and its optimizer
        if worker.reporter:
            setup.outputs.enter_context(worker.reporter.publisher)
            setup.outputs.callback(worker.reporter.end)
            self._contexts.enter_context(worker.commands)
        self._contexts.enter_context(Background(EXPORT_EVERY_S, worker.telemetry.export))
        return worker

    @contextmanager
    def recorded_errors(self, setup: WorkerSetup) -> Iterator[None]:
        """Record the error that ends this worker while the context lasts.

        Raises `RegroupError` in place of an error that ends only the group and not this process.
        """
        survivor = setup.survivor
        try:
            yield
        except GroupRestartError:
            raise  # training continues with the next group
        except Exception as error:
            if survivor and survivor.outlives(error):
                survivor.close(setup.outputs)
                raise RegroupError from error
            if not ends_alone(survivor, setup.place.rank):
                record_end(error, setup)
            raise


def set_up_process(config: WorkerConfig, survivor: Survivor | None) -> None:
    """Set up this process's output, code, working directory, threads and GPU arithmetic for training."""
    settings = config.plan.settings
    print_logs()
    try:
        find_code(settings.code)
    except SunspotError as error:
        tell_fatal(error, config.control, survivor)
        raise
    enter_folder(config.folder)
    torch.set_num_threads(config.threads)
    if ray.train.torch.get_device().type == "cuda" and "NCCL_DEBUG" not in os.environ:
        begin_log(own_log())
    round_products(settings.precision == "tf32")
    quiet_ray_train()


def ends_alone(survivor: Survivor | None, rank: int) -> bool:
    """Return True if a process ends without ending its group, as a replacement that has not trained yet.

    Rank 0 never does: the processes of the group before come first (`Membership`), so none of them is left to train.
    """
    return bool(survivor and survivor.replaces and rank)


def tell_fatal(error: SunspotError, control: ControlClient, survivor: Survivor | None) -> None:
    """Report an error that no retry can fix to the driver, unless others train without this process."""
    if not (survivor and survivor.replaces):
        control.try_ask(ControlChannel.set_fatal_error, error)


def round_products(rounded: bool) -> None:
    """Have a GPU round the factors of products of fp32 numbers (TF32) or not, of matrices and of convolutions."""
    torch.set_float32_matmul_precision("high" if rounded else "highest")
    torch.backends.cudnn.allow_tf32 = rounded  # which torch has on, unlike that of matrices


def open_memory(run: Run, settings: Settings, place: WorkerPlace, survivor: Survivor | None) -> NodeMemory | None:
    """Where this worker's copies outlive it: under DDP on one worker of each node, as each has the whole state."""
    nodes, context = place.nodes, ray.train.get_context()
    first = nodes.index(nodes[place.rank]) == place.rank if survivor else context.get_local_rank() == 0
    if not settings.snapshot_cost or (settings.parallel == "ddp" and not first):
        return None
    return survivor.open_memory(run.location, first) if survivor else NodeMemory(run.location, told=first)


def record_end(error: Exception, setup: WorkerSetup) -> None:
    """Record the error that ends this worker, unless another process owns the run.

    One that no retry can fix goes to the control channel, as storage may be what failed, and to storage, for the job's
    next driver.
    """
    run, control, place = setup.run, setup.control, setup.place
    fatal, attempt = find_in(error), setup.start.attempt
    superseded = isinstance(fatal, SupersededError)
    by_next_group = False
    if superseded:
        with suppress(StorageError):
            by_next_group = is_of_newest_driver(run, attempt)
    if fatal and not by_next_group:
        control.try_ask(ControlChannel.set_fatal_error, fatal)
    if superseded:
        return
    end = describe_end(error, attempt, place.rank, setup.watchdog.step, place.nodes[place.rank])
    control.tell(ControlChannel.add_rank_error, end)
    control.tell(ControlChannel.add_incident_facts, explain_error(end))

    def record() -> None:
        with suppress(StorageError):
            if fatal:
                record_error(run, attempt.number, fatal)
            record_failure(run, end.failure)

    # The others wait for this worker's end, and not for storage, least of all when that is what failed.
    with suppress(TimeoutError):
        limit_s = FATAL_S if fatal and not isinstance(fatal, StorageError) else FAILURE_S
        start_thread(record, "record-end").result(limit_s)
