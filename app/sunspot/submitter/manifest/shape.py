"""How many pods a run gets, and what share of a pod a training worker gets, from settings and profile."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sunspot.settings import PREFIX, READING_SHARE, Settings, WorkerRange
from sunspot.submitter.manifest.profile import DataWorkers, Profile, Worker
from sunspot.submitter.manifest.quantities import parse_quantity

USE_GPU = PREFIX + "USE_GPU"

RESOURCES_PER_WORKER = PREFIX + "RESOURCES_PER_WORKER"

SLOT = "training-worker"
"""A custom resource: a training pod offers one per worker it should hold, and each worker takes one. With CPUs alone,
two workers could share one pod, and the autoscaler would never add the second."""

RAY_RESOURCES = ("CPU", "GPU", "memory", SLOT)
"""What our pods offer; a worker that asks for anything else waits for ever."""


@dataclass(frozen=True)
class Shape:
    """The pods of a run and the resources of a worker, with reasons."""

    pods: WorkerRange
    "Training pods; for a search, of all concurrent trials."
    group_pods: list[int]
    "The most training pods of each group of the profile."
    gpus: int
    "Per training pod, each with its own training worker. Without GPUs a pod has one worker."
    cpus: int
    "Per training pod, as Ray counts them; of groups that differ, the fewest."
    per_worker: dict[str, float]
    data: DataWorkers | None
    reasons: Mapping[str, str]
    "Why a setting has its value, by its variable; not of those that say so themselves."
    runs: int = 1
    "Concurrent trials of a search."

    @property
    def workers_per_pod(self) -> int:
        """Training workers per pod."""
        return max(1, self.gpus)

    @property
    def workers(self) -> int:
        """The most training workers."""
        return self.pods.most * self.workers_per_pod

    @property
    def autoscaled(self) -> bool:
        """Whether the number of pods may change during the run."""
        return len(self.group_pods) > 1 or self.pods.elastic or bool(self.data and self.data.min < self.data.max)


def choose_shape(settings: Settings, profile: Profile, base_cpus: int, at_once: int = 1) -> tuple[Shape, list[str]]:
    """Choose the shape; also returns every reason why it cannot work.

    `base_cpus`: a pod's, if the profile sets none; `at_once`: runs that train at the same time.
    """
    problems: list[str] = []

    offers = sorted({group.gpus or 0 for group in profile.groups})
    if len(offers) > 1:
        numbers = " and ".join(map(str, offers))
        problems.append(f"workers: groups with {numbers} GPUs in a pod; give all the same number")
    offered = offers[-1]
    use_gpu = offered > 0 and settings.use_gpu != "false"
    reasons: dict[str, str] = {}
    if settings.use_gpu == "auto":
        reasons[USE_GPU] = f"the profile's training pods have {offered or 'no'} GPU{'s' * (offered != 1)}"
    elif settings.use_gpu == "true" and not offered:
        problems.append("SUNSPOT_USE_GPU=true: the profile has no GPU; set worker.gpus in it, or leave this at auto")

    gpus = offered if use_gpu else 0
    per_pod = max(gpus, 1)
    workers = WorkerRange(settings.num_workers.least * at_once, settings.num_workers.most * at_once)
    if workers.least % per_pod or workers.most % per_pod:
        each = f" for each of {at_once} trials" if at_once > 1 else ""
        has = f"each GPU has a worker, and a pod of this profile {gpus} GPUs (worker.gpus)"
        problems.append(f"SUNSPOT_NUM_WORKERS={settings.num_workers}{each}: {has}; set it to multiples of {gpus}")
    pods = WorkerRange(max(1, workers.least // per_pod), max(1, workers.most // per_pod))

    group_pods = [min(group.max or pods.most, pods.most) for group in profile.groups]
    if sum(group_pods) < pods.most:
        has = f"at most {sum(group_pods)} pods together (max)"
        takes = f"SUNSPOT_NUM_WORKERS={settings.num_workers} takes {pods.most}"
        problems.append(f"workers: {has}, and {takes}; raise max, or lower the setting")
    for number, group in enumerate(profile.groups):
        if group.spot is not None and not profile.spot:
            given = f"workers.{number}.spot={group.spot}"
            problems.append(f"{given}: the profile knows no spot nodes; set spot, or leave it out")
    if len(group_pods) > 1 and at_once > 1:
        problems.append(f"workers: {len(group_pods)} groups, for a search of {at_once} trials at once; keep one group")

    data = profile.data_workers
    if data and not offered:
        problems.append("data_workers: the profile has no GPU, so every worker reads as cheaply; take the group away")
    data = data if use_gpu and settings.loader == "ray" else None

    cpus = min(pod_cpus(group, base_cpus) for group in profile.groups)
    per_worker, reason = _choose_resources(settings, cpus, per_pod)
    if reason:
        reasons[RESOURCES_PER_WORKER] = reason
    if use_gpu:
        per_worker = {**per_worker, "GPU": per_worker.get("GPU", 1)}
    per_worker = {**per_worker, SLOT: 1}
    shape = Shape(pods, group_pods, gpus, cpus, per_worker, data, reasons, at_once)
    return shape, problems + _find_misfits(settings, shape, per_pod)


def pod_cpus(worker: Worker, base_cpus: int) -> int:
    """Count the CPUs of a training pod as Ray does."""
    return worker.num_cpus or (whole_cpus(worker.cpu) if worker.cpu else base_cpus)


def whole_cpus(quantity: str) -> int:
    """Count CPUs as Ray does, from a Kubernetes quantity: rounded down, at least one."""
    return max(1, math.floor(parse_quantity(quantity)))


def _choose_resources(settings: Settings, cpus: int, per_pod: int) -> tuple[dict[str, float], str]:
    if settings.resources_per_worker:
        return dict(settings.resources_per_worker), ""
    reading = max(1, math.floor(cpus * READING_SHARE)) if settings.loader == "ray" else 0
    each = (cpus - reading) / per_pod
    rounded = math.floor(each) if each >= 1 else math.floor(each * 100) / 100
    shared = f" for {per_pod} workers" if per_pod > 1 else ""
    left = f", {reading} of them left for reading" if reading else ""
    return {"CPU": rounded}, f"{cpus} CPUs of a pod{shared}{left}"


def _find_misfits(settings: Settings, shape: Shape, per_pod: int) -> list[str]:
    """Find why a worker would never be placed or never get a row, for which Ray waits silently."""
    asked = f"SUNSPOT_RESOURCES_PER_WORKER={shape.per_worker}".replace("'", '"')
    cpu = shape.per_worker.get("CPU", 1)
    gpu = shape.per_worker.get("GPU", 0)
    unknown = [name for name in shape.per_worker if name not in RAY_RESOURCES]
    problems = [f"{asked}: no pod offers {name}; take it away" for name in unknown]
    if gpu != (1 if shape.gpus else 0):
        problems.append(f"{asked}: a worker has {1 if shape.gpus else 'no'} GPU here; leave GPU out, it is added")
    if cpu * per_pod > shape.cpus:
        problems.append(f"{asked}: a pod has {shape.cpus} CPUs for {per_pod}; ask for fewer, or raise worker.cpu")
    elif settings.loader == "ray" and (cpu <= 0 or (not shape.data and shape.cpus - cpu * per_pod < 1)):
        needs = f"of a pod's {shape.cpus} CPUs, SUNSPOT_LOADER=ray needs one to read with"
        problems.append(f"{asked}: {needs}; ask for fewer, or raise worker.cpu")
    return problems
