"""Chooses a run's number of pods and each worker's resources from the settings and the profile."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sunspot.errors import SettingsError
from sunspot.formatting import plural
from sunspot.settings import PREFIX, READING_SHARE, Settings, WorkerRange, choose_shard_degree
from sunspot.submitter.manifest.profile import DataWorkers, Profile, Worker
from sunspot.submitter.manifest.quantities import parse_quantity

USE_GPU = PREFIX + "USE_GPU"

RESOURCES_PER_WORKER = PREFIX + "RESOURCES_PER_WORKER"

SHARD_DEGREE = PREFIX + "SHARD_DEGREE"

SLOT = "training-worker"
"""Custom Ray resource of training pods. Each pod offers one unit per worker, and each worker takes one unit. With CPUs
alone, two workers could share a pod, and the autoscaler would never add the second pod."""

RAY_RESOURCES = ("CPU", "GPU", "memory", SLOT)
"""The Ray resources that training pods offer. A worker that requests any other resource waits forever."""


@dataclass(frozen=True)
class Shape:
    """A run's pods and the resources of each worker, with the reason for each choice."""

    pods: WorkerRange
    "Number of training pods. In a search, this includes all concurrent trials."
    group_pods: list[int]
    "Maximum number of training pods in each group of the profile."
    gpus: int
    "GPUs per training pod. Each GPU has its own worker, and a pod without GPUs has one worker."
    cpus: int
    "CPUs that Ray can schedule on a training pod. This is the minimum over all groups."
    per_worker: dict[str, float]
    data: DataWorkers | None
    reasons: Mapping[str, str]
    "Reasons for the derived settings, keyed by variable."
    runs: int = 1
    "Number of concurrent trials of a search."
    shard_degree: int = 0
    "Number of workers that hold one replica of the model, or 0 if PARALLEL is not hsdp."

    @property
    def workers_per_pod(self) -> int:
        """The number of training workers per pod."""
        return max(1, self.gpus)

    @property
    def workers(self) -> int:
        """The maximum number of training workers."""
        return self.pods.most * self.workers_per_pod

    def describe_replicas(self) -> str:
        """Describe the nodes and the replicas of the model, for example `4 nodes of 8 workers: 4 replicas of 8`."""
        each, degree = self.workers_per_pod, self.shard_degree
        replicas = WorkerRange(self.pods.least * each, self.pods.most * each, degree).replicas
        nodes, copies = (
            f"{name}{'s' * (number.most > 1)}" for name, number in (("node", self.pods), ("replica", replicas))
        )
        return f"{self.pods} {nodes} of {plural(each, 'worker')}: {replicas} {copies} of {degree}"

    @property
    def autoscaled(self) -> bool:
        """True if the number of pods can change during the run."""
        return len(self.group_pods) > 1 or self.pods.elastic or bool(self.data and self.data.min < self.data.max)


def choose_shape(settings: Settings, profile: Profile, base_cpus: int, at_once: int = 1) -> tuple[Shape, list[str]]:
    """Return the shape, and a list of problems that make it unusable.

    `base_cpus` is the number of CPUs per pod if the profile sets none. `at_once` is the number of concurrent trials.
    """
    problems: list[str] = []

    offers = sorted({group.gpus or 0 for group in profile.groups})
    if len(offers) > 1:
        numbers = " and ".join(map(str, offers))
        problems.append(f"workers: the groups have {numbers} GPUs per pod; give all groups the same number")
    offered = offers[-1]
    use_gpu = offered > 0 and settings.use_gpu != "false"
    reasons: dict[str, str] = {}
    if settings.use_gpu == "auto":
        reasons[USE_GPU] = f"the profile's training pods have {offered or 'no'} GPU{'s' * (offered != 1)}"
    elif settings.use_gpu == "true" and not offered:
        problems.append(
            "SUNSPOT_USE_GPU=true needs a profile with GPUs; set worker.gpus in the profile, or leave the setting out"
        )

    gpus = offered if use_gpu else 0
    per_pod = max(gpus, 1)
    degree = 0
    workers = WorkerRange(settings.num_workers.least * at_once, settings.num_workers.most * at_once)
    if workers.least % per_pod or workers.most % per_pod:
        each = f" for each of {at_once} trials" if at_once > 1 else ""
        has = f"does not fill whole pods, which have {gpus} GPUs (worker.gpus) with one worker each"
        problems.append(f"SUNSPOT_NUM_WORKERS={settings.num_workers}{each} {has}; set it to a multiple of {gpus}")
    elif settings.parallel == "hsdp":
        try:
            degree = choose_shard_degree(settings.num_workers, settings.shard_degree, [per_pod])
        except SettingsError as error:
            problems.append(str(error))
        if not settings.shard_degree:
            reasons[SHARD_DEGREE] = "the number of workers in a pod, which has all GPUs of a node"
    pods = WorkerRange(max(1, workers.least // per_pod), max(1, workers.most // per_pod))

    group_pods = [min(group.max or pods.most, pods.most) for group in profile.groups]
    if sum(group_pods) < pods.most:
        has = f"the groups can have at most {sum(group_pods)} pods in total (max)"
        needs = f"SUNSPOT_NUM_WORKERS={settings.num_workers} needs {pods.most}"
        problems.append(f"workers: {has}, but {needs}; raise max, or lower the setting")
    for number, group in enumerate(profile.groups):
        if group.spot is not None and not profile.spot:
            given = f"workers.{number}.spot={group.spot}"
            problems.append(f"{given}: the profile has no spot nodes; set spot in the profile, or leave this key out")
    if len(group_pods) > 1 and at_once > 1:
        problems.append(
            f"workers: a search with {at_once} concurrent trials cannot use {len(group_pods)} groups; keep one group"
        )

    data = profile.data_workers
    if data and not offered:
        problems.append("data_workers: without GPUs, training pods read data just as cheaply; remove data_workers")
    data = data if use_gpu and settings.loader == "ray" else None

    cpus = min(pod_cpus(group, base_cpus) for group in profile.groups)
    per_worker, reason = _choose_resources(settings, cpus, per_pod)
    if reason:
        reasons[RESOURCES_PER_WORKER] = reason
    if use_gpu:
        per_worker = {**per_worker, "GPU": per_worker.get("GPU", 1)}
    per_worker = {**per_worker, SLOT: 1}
    shape = Shape(pods, group_pods, gpus, cpus, per_worker, data, reasons, at_once, degree)
    return shape, problems + _find_misfits(settings, shape, per_pod)


def pod_cpus(worker: Worker, base_cpus: int) -> int:
    """Return the number of CPUs that Ray can schedule on a training pod."""
    return worker.num_cpus or (whole_cpus(worker.cpu) if worker.cpu else base_cpus)


def whole_cpus(quantity: str) -> int:
    """Convert a Kubernetes CPU quantity to whole CPUs for Ray, rounded down but at least one."""
    return max(1, math.floor(parse_quantity(quantity)))


def _choose_resources(settings: Settings, cpus: int, per_pod: int) -> tuple[dict[str, float], str]:
    if settings.resources_per_worker:
        return dict(settings.resources_per_worker), ""
    reading = max(1, math.floor(cpus * READING_SHARE)) if settings.loader == "ray" else 0
    each = (cpus - reading) / per_pod
    rounded = math.floor(each) if each >= 1 else math.floor(each * 100) / 100
    shared = f" for {per_pod} workers" if per_pod > 1 else ""
    reserved = f", {reading} of them reserved for reading" if reading else ""
    return {"CPU": rounded}, f"{cpus} CPUs per pod{shared}{reserved}"


def _find_misfits(settings: Settings, shape: Shape, per_pod: int) -> list[str]:
    """Return the reasons why a worker would never start or never get a row.

    Without this check, Ray would wait forever and print nothing.
    """
    asked = f"SUNSPOT_RESOURCES_PER_WORKER={shape.per_worker}".replace("'", '"')
    cpu = shape.per_worker.get("CPU", 1)
    gpu = shape.per_worker.get("GPU", 0)
    unknown = [name for name in shape.per_worker if name not in RAY_RESOURCES]
    problems = [f"{asked}: no pod offers {name}; remove it" for name in unknown]
    if gpu != (1 if shape.gpus else 0):
        problems.append(
            f"{asked}: with this profile, a worker has {'one' if shape.gpus else 'no'} GPU; "
            "leave GPU out, because Sunspot sets it"
        )
    if cpu * per_pod > shape.cpus:
        problems.append(
            f"{asked}: a pod has only {shape.cpus} CPUs for {plural(per_pod, 'worker')}; "
            "request fewer, or raise worker.cpu"
        )
    elif settings.loader == "ray" and (cpu <= 0 or (not shape.data and shape.cpus - cpu * per_pod < 1)):
        needs = f"SUNSPOT_LOADER=ray needs one of a pod's {shape.cpus} CPUs for reading"
        problems.append(f"{asked}: {needs}; request fewer, or raise worker.cpu")
    return problems
