"""From a plan to a Ray Train run: the trainer, its configuration, and what came of it."""

from __future__ import annotations

import tempfile
import time
import uuid
from dataclasses import dataclass
from typing import Any

from app.elastic.control import StopRequest, watch_stop
from app.errors import StorageError, SunspotError, shorten
from app.plan import Plan, choose_resources
from app.ray_session import ray_session
from app.run import Run, open_run
from app.run.attempts import fatal_error, read_attempts
from app.run.checkpoints import Checkpoint, find_newest_good
from app.run.incidents import Cause
from app.run.status import Status
from app.storage.base import retry_storage

DRIVER_TRIES = 3
"""Starts of the trainer when Ray's own controller fails: no fault of a worker, so MAX_FAILURES is not charged."""

DRIVER_BACKOFF_S = 5

COLLECTIVE_TIMEOUT_S = 300
"""A worker that waits longer than this for the others in one all-reduce fails (torch's default is 30 minutes)."""

AFTER_WATCHDOG_S = 60
"""And not before the watchdogs have told where all ranks stand (app/elastic/watchdog.py)."""

PROOF_TIMEOUT_S = 120
"""How long a node may take to say whether it sees the storage; it starts a process for that."""

NEVER_S = 1e9
"""Ray resizes a worker group without a word to it, and its steps since the last checkpoint are lost: we grow it."""


@dataclass(frozen=True)
class FirstStep:
    """The step that the newest worker group starts from; asked by Ray when it makes the group's streams."""

    storage_path: str
    run_name: str

    def __call__(self) -> int:
        return read_attempts(open_run(self.storage_path, self.run_name))[-1].step


def fit(
    plan: Plan, run: Run, owner: str, before: Status | None = None, stop_request: StopRequest | None = None
) -> Checkpoint:
    """Train to the end of the plan, or until the run is to stop, and return the newest checkpoint.

    `before` is the status that this driver found: its first worker group's receipt says how that came about. The
    caller, too, may ask for a stop, through `stop_request`.

    Raises what ended the run: the workers' own `SunspotError`, `SupersededError`, or `SunspotError` with Ray's reason.
    """
    from app.elastic.receipts import first_incident

    stop_request = StopRequest() if stop_request is None else stop_request  # an empty one is false
    incident = first_incident(read_attempts(run), before)
    from ray.train import ControllerError, TrainingFailedError

    with ray_session():
        for attempt in range(1, DRIVER_TRIES + 1):
            try:
                failure: Exception | None = None
                _fit_once(plan, run, owner, stop_request, incident)
            except ControllerError as error:
                failure = error
                if attempt < DRIVER_TRIES and not stop_request and not fatal_error(run, owner):
                    print(
                        f"warning: Ray's controller failed, start {attempt + 1} of {DRIVER_TRIES}: {error}", flush=True
                    )
                    time.sleep(DRIVER_BACKOFF_S * attempt)
                    incident = {"cause": Cause.DRIVER_LOST, "detail": "Ray's controller failed"}
                    continue
            except TrainingFailedError as error:
                failure = error
            break

    if fatal := fatal_error(run, owner):
        raise fatal
    limit_s = plan.settings.storage_timeout_s
    checkpoint, _ = retry_storage(lambda: find_newest_good(run, read_attempts(run)), limit_s, "reading the end", print)
    finished = checkpoint and checkpoint.step == plan.total_steps and checkpoint.evaluated
    if checkpoint and not failure and (finished or stop_request.marked):
        return checkpoint
    at = f"step {checkpoint.step} of {plan.total_steps}" if checkpoint else "no checkpoint"
    if stop_request.terminated and not failure:
        raise SunspotError(f"told to end by SIGTERM, with {at} kept in {run.location}; the same command goes on there")
    raise SunspotError(
        f"training failed with {at} kept in {run.location}; the same command goes on from there\n"
        f"{failure or 'the workers ended before the last step'}"
    ) from failure


def _fit_once(plan: Plan, run: Run, owner: str, stop_request: StopRequest, incident: dict[str, Any]) -> None:
    import ray
    import ray.data
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from app.data.ray_loader import StepStreams
    from app.data.source import rows_in
    from app.elastic.control import open_control
    from app.elastic.nodes import watch_nodes
    from app.elastic.receipts import FailureRecorder
    from app.observe.progress import shown_progress
    from app.observe.prometheus import exported_run
    from app.ray_internals import answering, install_coordinator
    from app.train.loop import train_loop

    settings = plan.settings
    nodes = answering(ray.nodes())  # one that was just lost lives on in Ray's list for a while
    prove_on_all_nodes(settings.storage_path, settings.run_name, nodes)
    resources = choose_resources(settings, ray.cluster_resources(), len(nodes))
    for reason in resources.reasons:
        print(f"  {reason}", flush=True)
    streams = StepStreams(
        plan.source,
        plan.test,
        plan.steps,
        settings.seed,
        plan.total_steps,
        FirstStep(settings.storage_path, settings.run_name),
        resources.reading_cpus,
    )
    datasets = {}
    if settings.loader == "ray":
        # Row ids stand for the rows; StepStreams puts them in order and reads them.
        datasets = {"train": ray.data.range(rows_in(plan.source))}
        if plan.test:
            datasets["test"] = ray.data.range(rows_in(plan.test))
    workers = settings.num_workers
    collective_timeout_s = max(COLLECTIVE_TIMEOUT_S, settings.hang_timeout_s + AFTER_WATCHDOG_S)
    behind_s = install_coordinator() if workers.elastic else 0.0
    with (
        exported_run(settings.run_name),
        open_control() as control,
        shown_progress(control, plan.total_steps, plan.steps.per_epoch),
        watch_stop(run, control, stop_request),
        watch_nodes(control, resources.per_worker, workers, behind_s),
        tempfile.TemporaryDirectory() as scratch,
    ):
        control.note.remote(**incident)
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={
                "settings": settings,
                "owner": owner,
                "train": plan.source,
                "test": plan.test,
                "steps": plan.steps,
                "total_steps": plan.total_steps,
                "threads": resources.threads,
                "control": control,
                "collective_timeout_s": collective_timeout_s,
            },
            torch_config=TorchConfig(timeout_s=int(collective_timeout_s)),
            scaling_config=ScalingConfig(
                num_workers=(workers.least, workers.most) if workers.elastic else workers.least,
                elastic_resize_monitor_interval_s=NEVER_S,
                use_gpu=resources.use_gpu,
                resources_per_worker=resources.per_worker,
            ),
            run_config=RunConfig(
                name=settings.run_name,
                # Ray keeps nothing that a run needs: its own uploads can lose files, and one failed write of its
                # snapshot ends the training. Checkpoints, history and resuming are ours (app/checkpoint/commit.py).
                storage_path=scratch,
                failure_config=FailureConfig(max_failures=settings.max_failures),
                logging_config=LoggingConfig(log_level="WARNING"),
                callbacks=[FailureRecorder(control)],
            ),
            dataset_config=streams,
            datasets=datasets,
        )
        try:
            trainer.fit()
        finally:  # what a worker knows of its end is more than what Ray does
            if fatal := ray.get(control.fatal_error.remote()):
                raise fatal


def prove_on_all_nodes(storage_path: str, run_name: str, nodes: list[dict[str, object]]) -> None:
    """Prove from every other node that it sees what this one wrote; raises `StorageError` naming the node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    others = [str(node["NodeID"]) for node in nodes if node["NodeID"] != here]
    if not others:
        return
    run = open_run(storage_path, run_name)
    sees = ray.remote(num_cpus=0, max_retries=1)(try_storage)
    key, content = run.key(f"probe-{uuid.uuid4().hex}"), uuid.uuid4().bytes
    run.storage.write(key, content)
    try:
        for node in others:
            there = sees.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            try:
                problem = ray.get(there.remote(storage_path, run_name, key, content), timeout=PROOF_TIMEOUT_S)
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError as error:  # the node is gone, or on its way
                print(f"warning: node {node[:12]} did not say if it sees the storage: {shorten(error)}", flush=True)
                continue
            if problem:
                raise StorageError(
                    f"{run.location}: node {node[:12]} cannot use it: {problem}. With workers on several nodes, "
                    "SUNSPOT_STORAGE_PATH must be s3://... or a file system that all nodes share"
                )
    finally:
        run.storage.delete(key)


def try_storage(storage_path: str, run_name: str, key: str, content: bytes) -> str:
    """What keeps this node from using the run's storage; empty when nothing does."""
    run = open_run(storage_path, run_name)
    try:
        if run.storage.read(key) != content:
            return "it reads something else than was written"
        run.storage.prove(run.name)
    except SunspotError as error:
        return str(error)
    return ""
