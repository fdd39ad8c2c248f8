"""Runs a Ray trainer, and finds out how it ended.

In restart mode, a trainer starts one worker group after another. In survivor mode, a trainer only replaces lost
processes, and ends when all of its workers have ended.
"""

import functools
import logging
import math
import os
import pkgutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.data
from ray.exceptions import OutOfMemoryError
from ray.train import LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer

from sunspot.background import Background, start_thread
from sunspot.data.ray_loader import StepStreams
from sunspot.data.source import rows_in
from sunspot.elastic.control import ControlChannel, ControlClient, open_control
from sunspot.elastic.failure_callback import ALWAYS_CONTINUE, FailureCallback, find_worker_error
from sunspot.elastic.failures import FailureJudge
from sunspot.elastic.groups import GroupChoice
from sunspot.elastic.membership import MembershipSnapshot
from sunspot.elastic.membership_channel import FILES_PER_MEMBER, MembershipServer, ask_living
from sunspot.elastic.nodes import NodeMonitor, asked_nodes, choose_placement, find_room, wait_for_nodes
from sunspot.elastic.sick_nodes import SickNodes
from sunspot.elastic.supervisor import supervised
from sunspot.elastic.wanted_workers import SCALE_CHECK_EVERY_S, WantedWorkers
from sunspot.elastic.watchdog import FIRST_STEP_S
from sunspot.errors import SunspotError
from sunspot.formatting import plural
from sunspot.machine.open_files import allow_open_files
from sunspot.observe.progress import News, shown_progress
from sunspot.observe.prometheus import exported_run
from sunspot.plan import Plan, Resources, choose_resources
from sunspot.ray_internals.backend import BackendConfig, SurvivorConfig
from sunspot.ray_internals.controller import end_groups_at_once, replace_lost_alone
from sunspot.ray_internals.coordinator import install_coordinator, offer_whole_replicas
from sunspot.ray_internals.nodes import reachable_nodes, staying_nodes
from sunspot.run import Claimant, open_run
from sunspot.run.attempts import read_attempts
from sunspot.run.requests import StopRequest
from sunspot.settings import Settings, WorkerRange, choose_shard_degree
from sunspot.storage.limits import retry_storage
from sunspot.tasks import load_task
from sunspot.train.broken_gpus import BrokenInTraining, RequiredResources, leave_out_at_start, new_nodes_checked
from sunspot.train.group_outcome import GroupOutcome, TrainerStart, find_reason
from sunspot.train.joining import WorkerConfig
from sunspot.train.loop import train_loop
from sunspot.train.probe import probe_all_nodes
from sunspot.train.this_machine import refuse_lack

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 300
"""Maximum number of seconds that a worker waits for the others in one collective (torch's default is 30 minutes)."""

WATCHDOG_GRACE_S = 60
"""Seconds added to HANG_TIMEOUT_S, so that watchdogs report a hang before a collective fails (elastic/watchdog.py)."""

MEMBERS_CHECK_EVERY_S = 0.5
"""Seconds between two checks of whether a trainer still has workers."""

NO_MEMBERS_S = 20.0
"""Maximum number of seconds that a trainer may be without workers."""

ENDED_S = 5.0
"""Maximum number of seconds between the announced end of all workers and the trainer's end. Ray needs about 2 s."""

NO_GROUP_S = 60.0
"""Maximum number of seconds that a run waits for a worker group before `sunspot stop` or a move ends the run.

A group that starts within this time can still save the steps that are only in the nodes' memory. Otherwise, the run
ends without saving.
"""

NO_ROOM_S = 30.0
"""Seconds without room for a worker on any node after which the run no longer waits for a worker group.

Within this time, a container can restart, or a pod can join a new head. Their shared memory still has the newest steps.
"""

NO_RESIZE_S = 1e9
"""Seconds between two resizes of a worker group by Ray, which is long enough that they never happen.

Ray would resize the group without a notice, and lose the steps since its last checkpoint. Sunspot adds workers
itself.
"""


@dataclass(frozen=True)
class TrainingContext:
    """The objects that the driver provides while a Ray trainer runs."""

    plan: Plan
    claimant: Claimant
    stop_request: StopRequest
    control: ControlClient
    membership: MembershipServer | None
    "The members of the group in survivor mode, or None in restart mode."
    workers: WorkerRange
    resources: Resources
    nodes: NodeMonitor
    scratch: str
    "A folder for Ray's own files."


@contextmanager
def open_context(
    plan: Plan,
    claimant: Claimant,
    stop_request: StopRequest,
    note_end: Callable[[str], None] = lambda why: None,
    sick_nodes: SickNodes | None = None,
) -> Iterator[TrainingContext]:
    """Check the nodes, and yield a context for a trainer.

    Until the context is closed, nodes and signals are monitored, and progress is shown. `note_end` is called with the
    reason why the newest worker group ended (see `trainer.fit`). In survivor mode, the group stops using the nodes that
    `sick_nodes` finds. Raises `SunspotError` if the run cannot train on these nodes.
    """
    settings = plan.settings
    given = settings.num_workers
    choice = choose_node_groups(settings)
    nodes = reachable_nodes(ray.nodes())  # Ray lists a lost node for a while
    probe_all_nodes(settings.storage_path, settings.run_name, nodes)
    resources = choose_resources(settings, ray.cluster_resources(), len(nodes))
    if plan.one_machine:
        refuse_lack(settings, resources.per_worker, ray.cluster_resources())
    print(f"  {resources.reason}", flush=True)
    left_out = leave_out_at_start(nodes, required_resources(plan, resources)) if resources.use_gpu else []
    if settings.parallel == "hsdp":
        rooms = find_room(nodes, resources.per_worker).values()
        degree = choose_shard_degree(given, settings.shard_degree, rooms)
        plan = replace(plan, settings=settings.model_copy(update={"shard_degree": degree}))
        given = given.in_multiples_of(degree)
        print(f"  replicas of the model: {given.replicas}, each with {plural(degree, 'worker')}", flush=True)
    restarts = not plan.outlives and (given.elastic or choice)
    lag_s = install_coordinator() if restarts else 0.0
    if restarts and given.multiple > 1:
        if lag_s:
            raise SunspotError(
                "Ray's autoscaling coordinator on this cluster may start a number of workers that is not a multiple of "
                f"{given.multiple}, the number of workers in a replica of the model; set SUNSPOT_NUM_WORKERS to a "
                "single number, or SUNSPOT_PARALLEL to ddp or fsdp"
            )
        offer_whole_replicas(resources.per_worker, given.multiple)
    wanted: WantedWorkers | None = None
    with ExitStack() as stack:
        stack.enter_context(exported_run(claimant.run, bool(settings.deadline or settings.budget)))
        control = stack.enter_context(open_control())
        control.send(ControlChannel.add_left_out, left_out)
        workers, membership = given, None
        if plan.outlives:
            wanted = WantedWorkers(claimant.run, given)
            retry_storage(settings.storage_timeout_s, "reading how many workers are wanted", wanted.read)
            stack.enter_context(Background(SCALE_CHECK_EVERY_S, wanted.read))
            asked = asked_nodes(resources.per_worker, wanted.range, plan.one_machine)
            workers = stack.enter_context(asked)
            allow_open_files("the driver", FILES_PER_MEMBER, given.most)
            membership = stack.enter_context(MembershipServer(workers.least, control, given.multiple, sick_nodes))
        fetch = functools.partial(fetch_news, control, note_end)
        stack.enter_context(shown_progress(fetch, plan.total_steps, plan.steps.per_epoch))
        usable = stack.enter_context(new_nodes_checked(control, nodes)) if resources.use_gpu else reachable_nodes
        monitor = NodeMonitor(resources.per_worker, given, usable, lag_s, choice)
        stack.enter_context(supervised(control, stop_request, monitor, membership, wanted))
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        yield TrainingContext(plan, claimant, stop_request, control, membership, workers, resources, monitor, scratch)


def choose_node_groups(settings: Settings) -> GroupChoice | None:
    """Wait for nodes of the run's node groups, and return an object that chooses between the groups.

    Returns None if the run has no node groups.
    """
    if not settings.job.node_groups:
        return None
    if install_coordinator():
        raise SunspotError(
            "Ray's autoscaling coordinator on this cluster cannot request nodes of a particular group, so a run can "
            "have only one node group; remove the other groups"
        )
    choice = GroupChoice(settings.job.node_groups, settings.num_workers.most)
    per_worker = {name: float(amount) for name, amount in settings.resources_per_worker.items()}
    wait_for_nodes(choice, per_worker, settings.num_workers, settings.job.nodes_timeout_s)
    return choice


def required_resources(plan: Plan, resources: Resources) -> RequiredResources:
    """Return the resources that the run needs to continue if nodes are excluded."""
    return RequiredResources(resources.per_worker, plan.settings.num_workers.least)


def train_group(context: TrainingContext, start: TrainerStart) -> GroupOutcome:
    """Run a Ray trainer until it ends, and return how it ended."""
    control, membership = context.control, context.membership
    settings = context.plan.settings
    control.send(ControlChannel.add_incident_facts, start.incident)
    control.send(ControlChannel.set_counts, start.counts)
    trainer = make_trainer(context)

    lacking_since: float | None = None

    def has_nothing_to_save() -> bool:
        nonlocal lacking_since
        request = context.stop_request
        if not request.asked or control.call_or_none(ControlChannel.has_group) is not False:
            lacking_since = None
            return False
        now = time.monotonic()
        lacking_since = lacking_since or now
        waited = now - lacking_since > NO_GROUP_S or context.nodes.without_room_s(now) > NO_ROOM_S
        return request.signal is not None or waited

    error: Exception | None = None
    limit_s = settings.hang_timeout_s + FIRST_STEP_S if settings.hang_timeout_s else math.inf
    # Run in a thread, because in the main thread Ray would abort the workers at the first SIGINT.
    fitting = start_thread(trainer.fit, "trainer")
    try:
        if not only_driver_remains(fitting, membership.snapshot if membership else None, has_nothing_to_save, limit_s):
            fitting.result()
    except TrainingFailedError as failure:
        error = find_worker_error(failure)
    except OutOfMemoryError as failure:  # Ray's memory monitor may also end the controller
        error = failure
    command = control.call_or_none(ControlChannel.command)
    return GroupOutcome(
        reason=find_reason(error, command is not None and command.restart, context.plan.one_machine),
        error=error,
        end=control.call_or_none(ControlChannel.group_end),
        incident=control.call_or_none(ControlChannel.incident) or start.incident,
    )


def fetch_news(control: ControlClient, note_end: Callable[[str], None]) -> News:
    """Return the news to print. Also call `note_end` with the reason why the newest worker group ended."""
    news = control.call(ControlChannel.fetch_news)
    note_end(news.ended)
    return news


def only_driver_remains(
    fitting: Future[Any],
    read_membership: Callable[[], MembershipSnapshot] | None,
    has_nothing_to_save: Callable[[], bool] = lambda: False,
    limit_s: float = math.inf,
) -> bool:
    """Wait until a trainer ends, and return False. Return True as soon as waiting is pointless, in one of these cases:

    1. All workers have finished or are lost, and the trainer has not noticed. Ray does not poll workers while it places
       a replacement.
    2. `has_nothing_to_save` returns True. This means that a stop was requested before any worker could save.
    3. All workers that were training are lost, and no replacement has started training within `limit_s` seconds. The
       replacements may hang, and nothing else watches them.
    """
    empty_since: float | None = None
    trained = time.monotonic()
    while not wait([fitting], MEMBERS_CHECK_EVERY_S).done:
        if has_nothing_to_save():
            return True
        if read_membership is None:
            continue
        membership = read_membership()
        if membership.trains or not membership.generation.members:
            trained = time.monotonic()
        elif time.monotonic() - trained > limit_s:
            lost = "all workers that were training have been lost"
            log.warning(f"{lost}, and no replacement has started training within {limit_s:.0f} s")
            return True
        if membership.trains or not (membership.ended or membership.has_no_members):
            empty_since = None
        elif empty_since is None:
            empty_since = time.monotonic()
        elif time.monotonic() - empty_since > (ENDED_S if membership.ended else NO_MEMBERS_S):
            return True
    return False


def make_worker_config(context: TrainingContext) -> WorkerConfig:
    """Return the configuration that the driver passes to each worker process."""
    plan, claimant = context.plan, context.claimant
    return WorkerConfig(
        plan=plan,
        owner=claimant.owner,
        driver=claimant.driver,
        control=context.control,
        threads=context.resources.threads,
        collective_timeout_s=max(COLLECTIVE_TIMEOUT_S, plan.settings.hang_timeout_s + WATCHDOG_GRACE_S),
        membership=context.membership.address if context.membership else None,
        folder=os.getcwd(),
    )


def make_trainer(context: TrainingContext) -> Any:
    """Create a Ray trainer that stores only Ray's own files, in a temporary folder.

    Sunspot stores its own checkpoints and history (sunspot/checkpoint) without the trainer, because Ray's uploads can
    lose files, and a single failure to write Ray's snapshot ends the training.
    """
    plan, resources = context.plan, context.resources
    settings, workers = plan.settings, context.workers
    config = make_worker_config(context)
    leave_out = BrokenInTraining(context.control, required_resources(plan, resources), not context.membership)
    survivor_mode = context.membership is not None
    judge = FailureJudge(context.control, settings.max_failures, leave_out, survivor_mode, plan.one_machine)
    sources = {"train": plan.source, "test": plan.test} if settings.loader == "ray" else {}
    if config.membership:
        trainer: Any = TorchTrainer
        backend: dict[str, Any] = {"torch_config": SurvivorConfig()}
        callbacks = replace_lost_alone(functools.partial(ask_living, config.membership))
        placement = choose_placement(find_room(staying_nodes(), resources.per_worker))
    else:
        trainer, backend = choose_trainer(plan, int(config.collective_timeout_s))
        callbacks = end_groups_at_once()
        placement = "PACK"
    return trainer(
        functools.partial(train_loop, config),
        scaling_config=ScalingConfig(
            num_workers=(workers.least, workers.most) if workers.elastic or settings.job.node_groups else workers.least,
            elastic_resize_monitor_interval_s=NO_RESIZE_S,
            use_gpu=resources.use_gpu,
            resources_per_worker=resources.per_worker,
            placement_strategy=placement,
        ),
        run_config=RunConfig(
            name=settings.run_name,
            storage_path=context.scratch,
            failure_config=ALWAYS_CONTINUE,
            logging_config=LoggingConfig(log_level="WARNING"),
            callbacks=[FailureCallback(context.control, judge, survivor_mode), *callbacks],
        ),
        # The datasets hold row ids. The streams put them in order, and read the rows.
        datasets={name: ray.data.range(rows_in(source)) for name, source in sources.items() if source},
        dataset_config=make_streams(plan, resources) if sources else None,
        **backend,
    )


def choose_trainer(plan: Plan, timeout_s: int) -> tuple[Any, dict[str, Any]]:
    """Return the Ray trainer class for the plan's task, and the keyword argument that configures its backend.

    Imports only the task's library.
    """
    task = load_task(plan.settings)
    if not task.find_ray_trainer:
        return TorchTrainer, {"torch_config": BackendConfig(timeout_s=timeout_s)}
    location = task.find_ray_trainer(plan.settings, plan.source)
    library = location.partition(":")[0].rpartition(".")[2]
    make_config = pkgutil.resolve_name(f"{location.removesuffix('Trainer')}Config")
    config = BackendConfig(timeout_s=timeout_s, library=make_config())
    return pkgutil.resolve_name(location), {f"{library}_config": config}


def make_streams(plan: Plan, resources: Resources) -> StepStreams:
    """Create the streams that give each worker its rows."""
    settings = plan.settings
    begins_at = functools.partial(first_step, settings.storage_path, settings.run_name)
    return StepStreams(plan.data, plan.total_steps, begins_at, resources.reading_cpus)


def first_step(storage_path: str, run_name: str) -> int:
    """Return the step that the newest worker group starts from. Ray calls this when it creates the group's streams."""
    run = open_run(storage_path, run_name)
    run.storage.refresh(run.key("attempts"))  # this node may have cached the listing of the previous group
    return read_attempts(run)[-1].step
