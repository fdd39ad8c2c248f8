"""Makes a process a worker of the run: joins the group, claims the run with it, and records what ends the worker."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import cast

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from sunspot.background import Background, start_thread
from sunspot.checkpoint import NodeMemory
from sunspot.code_archive import find_code
from sunspot.elastic.claim import agree_on_start
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
from sunspot.train.build import Joined, build_worker, prepare_learner
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


@contextmanager
def join_run(config: WorkerConfig, survivor: Survivor | None = None) -> Iterator[Worker | None]:
    """Make this process a worker of the run; None when the run is no longer this job's to train.

    An error that no retry can fix is recorded, so that the next worker group of this job ends at once. A `survivor`
    forms the group itself, and raises `RegroupError` when it is to form another.
    """
    plan, control, settings = config.plan, config.control, config.plan.settings
    claimant = config.claimant()
    run = claimant.run
    print_logs()
    try:
        find_code(settings.code)
    except SunspotError as error:
        tell_fatal(error, control, survivor)
        raise
    enter_folder(config.folder)
    torch.set_num_threads(config.threads)
    if ray.train.torch.get_device().type == "cuda" and "NCCL_DEBUG" not in os.environ:
        begin_log(own_log())
    round_products(settings.precision == "tf32")
    quiet_ray_train()
    if survivor:
        prepare = partial(prepare_learner, plan, control)
        if settings.parallel == "ddp" and survivor.others_train:  # a model in parts is built by all together
            survivor.prepare_alone(prepare, settings.hang_timeout_s)
        formed = survivor.form()
        if not formed:
            yield None
            return
        survivor.await_outputs()  # or what they are of the attempt before would come when another owns the run
        place, phases = formed, Phases(formed=time.time())
    else:
        carrier = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=config.limit_s)))
        context, device = ray.train.get_context(), ray.train.torch.get_device()
        place = WorkerPlace(carrier, context.get_world_rank(), context.get_world_size(), device)
        phases = Phases(launched=launch_time(), up=processes_up(), formed=time.time())

    def note_hang(hang: Hang, late: bool) -> None:  # those of all ranks tell which one is to blame
        control.send(ControlChannel.add_hang, replace(hang, stacks=""), late)

    if control.call(ControlChannel.group_end).fatal:
        yield None
        return
    group = cast(dist.ProcessGroup, place.group)
    with ExitStack() as stack:
        if survivor:
            stack.callback(claimant.cancelled.set)  # once it has left the group
        stack.enter_context(sent_warnings(lambda text: control.tell(ControlChannel.log, text)))
        around_pauses = partial(survivor.building, settings.hang_timeout_s) if survivor else nullcontext
        watchdog = Watchdog(run, place.rank, place.world_size, settings.hang_timeout_s, note_hang, around_pauses)
        stack.enter_context(watchdog)
        stack.enter_context(listening_to_rounds(watchdog.heartbeat))

        # Claim the run with the others, from the newest state there is.
        memory = open_memory(run, settings, place, survivor)
        live = survivor.kept[0] if survivor and survivor.kept else None
        dist.barrier(group=group)  # on every node, what earlier processes left has been tidied
        try:
            start, found = agree_on_start(claimant, settings, group, live)
        except SunspotError as error:
            tell_fatal(error, control, survivor if ends_alone(survivor, place.rank) else None)
            raise
        if start is None:
            yield None
            return
        attempt, place = start.attempt, replace(place, nodes=list(start.nodes.values()))
        watchdog.claimed(attempt)
        if memory:
            memory.keep_parts_of(start.copy.snapshot.checkpoint if start.copy else None)
        if place.rank == 0:
            control.send(ControlChannel.explain_start, first_incident(start))
            if not start.live:  # others wait for this one, and the status says already that they train
                show_claim(run, first_status(start, plan, control.call_or_none(ControlChannel.incident)))
        outputs = stack.enter_context(ExitStack())
        outputs.enter_context(shipped_worker_output(run, attempt.number, place.rank))
        joined = Joined(plan, run, start, place, memory, watchdog, control, outputs, survivor)
        try:
            # Load that state, and build what trains.
            if survivor:
                with watchdog.paused():
                    survivor.align(bool(start.live), prepare)
            if survivor and start.live:
                state = survivor.hand_over(place, start.live, plan.total_steps)
            else:
                state = load_start(run, settings, start, found, group)
            worker = build_worker(joined, state, phases)
            if survivor:
                survivor.begin(worker)
            rank = f"rank {place.rank} of {place.world_size} on {place.device} of {socket.gethostname()}"
            print(f"attempt {attempt.number}: {rank}, from step {attempt.step}, {state.tier}")
            del state, found  # as large as the model and its optimizer

            # Report as long as it trains.
            if worker.reporter:
                outputs.enter_context(worker.reporter.publisher)
                outputs.callback(worker.reporter.end)
                stack.enter_context(worker.commands)
            stack.enter_context(Background(EXPORT_EVERY_S, worker.telemetry.export))
            yield worker
        except GroupRestartError:
            raise  # training goes on with the next group
        except Exception as error:
            if survivor and survivor.outlives(error):
                survivor.close(outputs)
                raise RegroupError from error
            if not ends_alone(survivor, place.rank):
                record_end(error, joined)
            raise


def ends_alone(survivor: Survivor | None, rank: int) -> bool:
    """Return True if a process ends without ending its group, as a replacement that has not trained yet.

    Rank 0 never does: the processes of the group before come first (`Membership`), so none of them is left to train.
    """
    return bool(survivor and survivor.replaces and rank)


def tell_fatal(error: SunspotError, control: ControlClient, survivor: Survivor | None) -> None:
    """Report an error that no retry can fix to the driver, unless others train without this process."""
    if not (survivor and survivor.replaces):
        control.call_or_none(ControlChannel.set_fatal_error, error)


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
    memory = (survivor and survivor.memory) or NodeMemory(run.location, warns=first)
    if survivor:
        survivor.memory = memory
    return memory


def record_end(error: Exception, joined: Joined) -> None:
    """Record the error that ends this worker, unless another process owns the run.

    One that no retry can fix goes to the control channel, as storage may be what failed, and to storage, for the job's
    next driver.
    """
    run, control, place = joined.run, joined.control, joined.place
    fatal, attempt = find_in(error), joined.start.attempt
    superseded = isinstance(fatal, SupersededError)
    by_next_group = False
    if superseded:
        with suppress(StorageError):
            by_next_group = is_of_newest_driver(run, attempt)
    if fatal and not by_next_group:
        control.call_or_none(ControlChannel.set_fatal_error, fatal)
    if superseded:
        return
    end = describe_end(error, attempt, place.rank, joined.watchdog.step, place.nodes[place.rank])
    control.send(ControlChannel.add_rank_error, end)
    control.send(ControlChannel.add_incident_facts, explain_error(end))

    def record() -> None:
        with suppress(StorageError):
            if fatal:
                record_error(run, attempt.number, fatal)
            record_failure(run, end.failure)

    # The others wait for this worker's end, and not for storage, least of all when that is what failed.
    with suppress(TimeoutError):
        limit_s = FATAL_S if fatal and not isinstance(fatal, StorageError) else FAILURE_S
        start_thread(record, "record-end").result(limit_s)
