"""Trains a plan with Ray Train's trainer, and decides how the training has ended."""

import functools
import logging
import math
import os
import pkgutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.data
from ray.exceptions import OutOfMemoryError
from ray.train import ControllerError, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer

from sunspot.background import start_thread
from sunspot.data.ray_loader import StepStreams
from sunspot.data.source import rows_in
from sunspot.elastic.control import ControlChannel, ControlClient, open_control
from sunspot.elastic.failures import FailureJudge, WorkersFailedError
from sunspot.elastic.groups import GroupChoice
from sunspot.elastic.membership import MembershipSnapshot
from sunspot.elastic.membership_channel import MembershipServer, ask_living
from sunspot.elastic.messages import FailureCounts, GroupEnd, Incident
from sunspot.elastic.nodes import NodeMonitor, asked_nodes, choose_placement, find_room, wait_for_nodes
from sunspot.elastic.out_of_memory import advise_memory, find_killed_for_memory
from sunspot.elastic.receipts import FailureRecorder
from sunspot.elastic.supervisor import supervised
from sunspot.elastic.watchdog import FIRST_STEP_S
from sunspot.errors import SunspotError, shorten
from sunspot.observe.progress import News, shown_progress
from sunspot.observe.prometheus import exported_run
from sunspot.plan import Plan, Resources, choose_resources
from sunspot.ray_internals.backend import BackendConfig, SurvivorConfig
from sunspot.ray_internals.controller import (
    GroupRestartError,
    end_controllers,
    end_groups_at_once,
    failure_policy,
    live_controllers,
    remove_placement_groups,
    replace_lost_alone,
    reserved_groups,
)
from sunspot.ray_internals.coordinator import install_coordinator
from sunspot.ray_internals.nodes import reachable_nodes, staying_nodes
from sunspot.ray_session import ray_session
from sunspot.run import Claimant, open_run
from sunspot.run.attempts import fatal_error, read_attempts
from sunspot.run.checkpoints import Checkpoint, SkippedCheckpoint, find_newest_good
from sunspot.run.incidents import Cause
from sunspot.run.requests import StopRequest
from sunspot.settings import WorkerRange
from sunspot.storage.limits import retry_storage
from sunspot.tasks import load_task
from sunspot.train.broken_gpus import BrokenInTraining, RequiredResources, leave_out_at_start, new_nodes_checked
from sunspot.train.joining import WorkerConfig
from sunspot.train.loop import train_loop
from sunspot.train.probe import probe_all_nodes
from sunspot.train.this_machine import refuse_lack

log = logging.getLogger(__name__)

DRIVER_TRIES = 3
"""Number of starts of the trainer if Ray's controller fails. MAX_FAILURES does not count them: no worker has failed."""

DRIVER_BACKOFF_S = 5
"""Seconds before the second start. Each further start waits for this much longer."""

COLLECTIVE_TIMEOUT_S = 300
"""Maximum number of seconds that a worker waits for the others in one collective (torch's default is 30 minutes)."""

WATCHDOG_GRACE_S = 60
"""Seconds added to HANG_TIMEOUT_S, so that watchdogs report a hang before a collective fails (elastic/watchdog.py)."""

MEMBERS_CHECK_EVERY_S = 0.5
"""Seconds between two checks whether a trainer still has workers."""

NO_MEMBERS_S = 20.0
"""Maximum number of seconds that a trainer may be without workers."""

ENDED_S = 5.0
"""Maximum number of seconds between the announced end of all workers and the trainer's end. Ray needs about 2 s."""

NO_RESIZE_S = 1e9
"""Seconds between two resizes of a worker group by Ray, which is long enough that they never happen.

Ray would resize the group without a notice, and lose the steps since its last checkpoint. Sunspot adds workers
itself.
"""


def first_step(storage_path: str, run_name: str) -> int:
    """Return the step that the newest worker group starts from. Ray calls this when it makes the group's streams."""
    run = open_run(storage_path, run_name)
    run.storage.refresh(run.key("attempts"))  # this node may have cached the listing of the previous group
    return read_attempts(run)[-1].step


@dataclass(frozen=True)
class TrainerStart:
    """The reason why one of Ray's trainers starts."""

    incident: Incident = field(default_factory=Incident)
    "The incident that ended the previous trainer."
    counts: FailureCounts = field(default_factory=FailureCounts)
    "Number of worker groups that have failed before, by kind."


def fit(
    plan: Plan, claimant: Claimant, stop_request: StopRequest, note_end: Callable[[str], None] = lambda why: None
) -> Checkpoint:
    """Train to the end of the plan, or until a stop is requested, and return the newest checkpoint.

    `note_end` is called repeatedly with the reason why the newest worker group ended, or an empty text while a group
    trains. Raises the error that ended the run: the workers' own `SunspotError`, or a `SunspotError` with Ray's reason.
    """
    start: TrainerStart | None = TrainerStart()
    failure: Exception | None = None
    attempt = 1
    with ray_session():
        while start:
            now = start
            reserved = reserved_groups()
            others = live_controllers()
            try:
                start = fit_once(plan, claimant, stop_request, now, note_end)
            except (ControllerError, OutOfMemoryError) as error:  # Ray's memory monitor may also end the controller
                _, killed = find_killed_for_memory(getattr(error, "controller_failure", error))
                reason = killed or shorten(error)
                if killed and plan.one_machine:
                    failure = WorkersFailedError(f"{killed} while workers started; {advise_memory([], True)}", True)
                    break
                if attempt == DRIVER_TRIES or stop_request.asked or fatal_error(claimant):
                    failure = WorkersFailedError(f"Ray's controller failed: {reason}")
                    break
                attempt += 1
                log.warning(f"Ray's controller failed, start {attempt} of {DRIVER_TRIES}: {reason}")
                time.sleep(DRIVER_BACKOFF_S * (attempt - 1))
                start = replace(now, incident=Incident(Cause.DRIVER_LOST, "Ray's controller failed"))
            except (TrainingFailedError, WorkersFailedError) as error:
                failure = error
                break
            # A trainer that waits for a node, or whose controller failed, keeps its workers' resources reserved, so no
            # new group could start. A waiting controller would also start a group of its own once a node has come.
            end_controllers(others)
            remove_placement_groups(reserved_groups() - reserved)
    return outcome_of_training(plan, claimant, stop_request, failure)


def outcome_of_training(
    plan: Plan, claimant: Claimant, stop_request: StopRequest, failure: Exception | None
) -> Checkpoint:
    """Return the newest checkpoint of a run that finished or was stopped. Otherwise raises the error that ended it."""
    run = claimant.run
    fatal, checkpoint, skipped = read_end(plan, claimant)
    if fatal:
        raise fatal
    if checkpoint and not failure and (is_last(checkpoint, plan) or stop_request.marked):
        return checkpoint
    if checkpoint:
        step = f"step {checkpoint.step} of {plan.total_steps}"
        kept = f"{step} is kept in {run.location}, and the same command continues from there"
    else:
        kept = f"no checkpoint {'is intact' if skipped else 'was made'} in {run.location}"
    if not failure:
        stop_request.raise_signal(kept, plan.settings.job_id)
    reason = failure or "the workers ended before the last step"
    more = f"`sunspot doctor {run.name}` explains more"
    if checkpoint:  # otherwise the summary of the run says that it has no checkpoint
        more = f"{kept}; {more}"
    error = SunspotError(f"training failed: {reason}\n{more}")
    error.final = isinstance(failure, WorkersFailedError) and failure.final
    raise error from failure


def read_end(
    plan: Plan, claimant: Claimant
) -> tuple[Exception | None, Checkpoint | None, tuple[SkippedCheckpoint, ...]]:
    """Return the error that ended the run for good, or None, its newest checkpoint, and the checkpoints passed over."""

    def read() -> tuple[Exception | None, Checkpoint | None, tuple[SkippedCheckpoint, ...]]:
        fatal = fatal_error(claimant)
        if fatal:
            return fatal, None, ()
        run = claimant.run
        return None, *find_newest_good(run, read_attempts(run), trust_listing=True)

    return retry_storage(plan.settings.storage_timeout_s, "reading the end", read)


def has_ended(plan: Plan, claimant: Claimant) -> bool:
    """Return True if the run is complete, or an error has ended it for good."""
    fatal, checkpoint, _ = read_end(plan, claimant)
    return bool(fatal or (checkpoint and is_last(checkpoint, plan)))


def is_last(checkpoint: Checkpoint, plan: Plan) -> bool:
    """Return True if a checkpoint completes the run."""
    return checkpoint.completes(plan.total_steps, plan.settings.early_stop_evaluations)


def fit_once(
    plan: Plan,
    claimant: Claimant,
    stop_request: StopRequest,
    start: TrainerStart,
    note_end: Callable[[str], None] = lambda why: None,
) -> TrainerStart | None:
    """Run one of Ray's trainers to its end, and return how the next one starts, or None if there is no next one."""
    settings = plan.settings
    choice = None
    lag_s = 0.0
    if settings.node_groups:
        if install_coordinator():
            raise SunspotError(
                "several groups of nodes cannot be used, because Ray's coordinator asks for any node; keep one"
            )
        choice = GroupChoice(settings.node_groups, settings.num_workers.most)
        per_worker = {name: float(amount) for name, amount in settings.resources_per_worker.items()}
        wait_for_nodes(choice, per_worker, settings.num_workers, settings.nodes_timeout_s)
    nodes = reachable_nodes(ray.nodes())  # Ray lists a lost node for a while
    probe_all_nodes(settings.storage_path, settings.run_name, nodes)
    resources = choose_resources(settings, ray.cluster_resources(), len(nodes))
    if plan.one_machine:
        refuse_lack(settings, resources.per_worker, ray.cluster_resources())
    print(f"  {resources.reason}", flush=True)
    required = RequiredResources(resources.per_worker, settings.num_workers.least)
    left_out = leave_out_at_start(nodes, required) if resources.use_gpu else []
    given = settings.num_workers
    outlive = can_outlive(plan)
    if given.elastic and not (outlive or choice):
        lag_s = install_coordinator()
    with (
        exported_run(settings.run_name),
        open_control() as control,
        asked_nodes(resources.per_worker, given, plan.one_machine) if outlive else nullcontext(given) as workers,
        MembershipServer(workers.least, control) if outlive else nullcontext() as membership,
        shown_progress(functools.partial(fetch_news, control, note_end), plan.total_steps, plan.steps.per_epoch),
        new_nodes_checked(control, nodes) if resources.use_gpu else nullcontext(reachable_nodes) as usable,
        supervised(
            control,
            stop_request,
            NodeMonitor(resources.per_worker, given, usable, lag_s, choice),
            membership,
        ),
        tempfile.TemporaryDirectory() as scratch,
    ):
        control.send(ControlChannel.add_incident_facts, start.incident)
        control.send(ControlChannel.add_left_out, left_out)
        control.send(ControlChannel.set_counts, start.counts)
        config = WorkerConfig(
            plan=plan,
            owner=claimant.owner,
            driver=claimant.driver,
            control=control,
            threads=resources.threads,
            collective_timeout_s=max(COLLECTIVE_TIMEOUT_S, settings.hang_timeout_s + WATCHDOG_GRACE_S),
            membership=membership.address if membership else None,
            folder=os.getcwd(),
        )
        limit_s = settings.hang_timeout_s + FIRST_STEP_S if settings.hang_timeout_s else math.inf
        placement = choose_placement(find_room(staying_nodes(), resources.per_worker)) if outlive else "PACK"
        trainer = make_trainer(config, resources, workers, placement, scratch)
        try:
            leave_out = BrokenInTraining(control, required, not outlive)
            judge = FailureJudge(control, settings.max_failures, leave_out, outlive, plan.one_machine)
            with failure_policy(judge, outlive):
                # Run in a thread, because in the main thread Ray would abort the workers at the first SIGINT.
                fitting = start_thread(trainer.fit, "trainer")

                def has_nothing_to_save() -> bool:
                    return stop_request.signal is not None and control.call_or_none(ControlChannel.has_group) is False

                if not only_driver_remains(
                    fitting, membership.snapshot if membership else None, has_nothing_to_save, limit_s
                ):
                    fitting.result()
                over = not membership or stop_request.asked or has_ended(plan, claimant)
                return None if over else start_again(control, start, settings.max_failures)
        except TrainingFailedError as error:
            again = start_again(control, start, settings.max_failures, error) if membership else None
            if again is None:
                raise
            return again
        finally:  # the workers know more about their end than Ray does
            # If the control channel does not answer, the error that Ray has raised remains.
            end = control.call_or_none(ControlChannel.group_end) or GroupEnd()
            if end.fatal:
                raise end.fatal
            if end.gave_up:
                raise WorkersFailedError(end.gave_up, end.counts.final)


def fetch_news(control: ControlClient, note_end: Callable[[str], None]) -> News:
    """Return the news for the terminal, and pass to `note_end` why the newest worker group ended."""
    news = control.call(ControlChannel.fetch_news)
    note_end(news.ended)
    return news


def can_outlive(plan: Plan) -> bool:
    """Return True if workers keep training after a loss, because each has all rows and Ray replaces a lost worker."""
    settings = plan.settings
    if settings.survivors == "off":  # checked first, so that the task need not be loaded
        return False
    task = load_task(settings)
    return not task.needs_all_workers and settings.loader == "torch" and not settings.node_groups


def start_again(
    control: ControlClient, start: TrainerStart, max_failures: int, error: TrainingFailedError | None = None
) -> TrainerStart | None:
    """Return how the next trainer starts after all workers of this one have ended, or None to give up.

    `error` is None if Ray reported no error, because the workers were gone before Ray polled them, or because Ray is
    still waiting for a node to place a worker on.
    """
    end = control.call_or_none(ControlChannel.group_end)
    if end is None or end.fatal or end.gave_up or isinstance(error, ControllerError):
        return None
    incident = control.call(ControlChannel.incident)
    if error:
        failures = getattr(error, "worker_failures", {})
        asked = any(isinstance(each, GroupRestartError) for each in failures.values())
    else:
        asked = control.call(ControlChannel.command).restart
        incident = incident.completed_by(Incident(Cause.NODE_LOST, "no worker was left, and Ray waited for a node"))
    if asked or (error and end.counts != start.counts):  # the judge of failures has counted this end already
        return TrainerStart(incident, end.counts)
    # Keep the error and the lack of memory that a judge has noted, because they also limit the next trainer.
    noted = replace(start.counts, error=end.counts.error, loops=end.counts.loops)
    counts = noted.since(end.progress.committed)
    if counts.charged >= max_failures:
        return None
    return TrainerStart(incident, replace(counts, charged=counts.charged + 1))


def only_driver_remains(
    fitting: Future[Any],
    read_membership: Callable[[], MembershipSnapshot] | None,
    has_nothing_to_save: Callable[[], bool] = lambda: False,
    limit_s: float = math.inf,
) -> bool:
    """Wait for the end of a trainer and return False, or return True once it has no workers and would wait for a node.

    While Ray places a replacement, it does not poll the other workers, so it does not notice that they have finished or
    are lost. Also returns True in two more cases. If `has_nothing_to_save` returns True, a signal has asked for a stop
    and no worker could save. If all workers that trained are lost and no replacement has trained within `limit_s`, the
    replacements may hang, because nothing else watches them.
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
            log.warning(f"all workers that trained are lost, and no replacement has trained within {limit_s:.0f} s")
            return True
        if membership.trains or not (membership.ended or membership.has_no_members):
            empty_since = None
        elif empty_since is None:
            empty_since = time.monotonic()
        elif time.monotonic() - empty_since > (ENDED_S if membership.ended else NO_MEMBERS_S):
            return True
    return False


def make_trainer(config: WorkerConfig, resources: Resources, workers: WorkerRange, placement: str, scratch: str) -> Any:
    """Make Ray's trainer for this number of workers. It keeps only Ray's own files, in `scratch`.

    Ray's uploads can lose files, and one failed write of its snapshot ends the training. So Sunspot has checkpoints and
    a history of its own, from which it resumes (sunspot/checkpoint).
    """
    plan = config.plan
    settings = plan.settings
    sources = {"train": plan.source, "test": plan.test} if settings.loader == "ray" else {}
    if config.membership:
        trainer: Any = TorchTrainer
        backend: dict[str, Any] = {"torch_config": SurvivorConfig()}
        callbacks = replace_lost_alone(functools.partial(ask_living, config.membership))
    else:
        trainer, backend = choose_trainer(plan, int(config.collective_timeout_s))
        callbacks = [FailureRecorder(config.control), *end_groups_at_once()]
    return trainer(
        functools.partial(train_loop, config),
        scaling_config=ScalingConfig(
            num_workers=(workers.least, workers.most) if workers.elastic or settings.node_groups else workers.least,
            elastic_resize_monitor_interval_s=NO_RESIZE_S,
            use_gpu=resources.use_gpu,
            resources_per_worker=resources.per_worker,
            placement_strategy=placement,
        ),
        run_config=RunConfig(
            name=settings.run_name,
            storage_path=scratch,
            failure_config=FailureConfig(max_failures=settings.max_failures),
            logging_config=LoggingConfig(log_level="WARNING"),
            callbacks=callbacks,
        ),
        # The datasets hold row ids. The streams put them in order, and read the rows.
        datasets={name: ray.data.range(rows_in(source)) for name, source in sources.items() if source},
        dataset_config=make_streams(plan, resources) if sources else None,
        **backend,
    )


def choose_trainer(plan: Plan, timeout_s: int) -> tuple[Any, dict[str, Any]]:
    """Return Ray's trainer for the plan's task, and its argument for the backend. Imports only the task's library."""
    task = load_task(plan.settings)
    if not task.find_ray_trainer:
        return TorchTrainer, {"torch_config": BackendConfig(timeout_s=timeout_s)}
    location = task.find_ray_trainer(plan.settings, plan.source)
    library = location.partition(":")[0].rpartition(".")[2]
    make_config = pkgutil.resolve_name(f"{location.removesuffix('Trainer')}Config")
    config = BackendConfig(timeout_s=timeout_s, library=make_config())
    return pkgutil.resolve_name(location), {f"{library}_config": config}


def make_streams(plan: Plan, resources: Resources) -> StepStreams:
    """Make the streams that give each worker its rows. A Ray actor unpickles them, and so imports this module."""
    settings = plan.settings
    begins_at = functools.partial(first_step, settings.storage_path, settings.run_name)
    return StepStreams(plan.data, plan.total_steps, begins_at, resources.reading_cpus)
