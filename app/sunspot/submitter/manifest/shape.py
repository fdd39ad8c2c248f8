"""Chooses the number of pods of a run and the resources of a training worker, from settings and profile."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sunspot.formatting import plural
from sunspot.settings import PREFIX, READING_SHARE, Settings, WorkerRange
from sunspot.submitter.manifest.profile import DataWorkers, Profile, Worker
from sunspot.submitter.manifest.quantities import parse_quantity

USE_GPU = PREFIX + "USE_GPU"

RESOURCES_PER_WORKER = PREFIX + "RESOURCES_PER_WORKER"

SLOT = "training-worker"
"""Custom resource that places workers: a training pod offers one for each of its workers, and each worker takes one.

With CPUs alone, two workers could share a pod, and the autoscaler would never add the second pod.
"""

RAY_RESOURCES = ("CPU", "GPU", "memory", SLOT)
"""Resources that our pods offer. A worker that requests any other resource waits forever."""


@dataclass(frozen=True)
class Shape:
    """Pods of a run and resources of a worker, with the reason for each choice."""

    pods: WorkerRange
    "Number of training pods, of all concurrent trials together if the run is a search."
    group_pods: list[int]
    "Largest number of training pods, for each group of the profile."
    gpus: int
    "GPUs of a training pod, each with its own worker. A pod without GPUs has one worker."
    cpus: int
    "CPUs of a training pod, as Ray counts them: the smallest number of all groups."
    per_worker: dict[str, float]
    data: DataWorkers | None
    reasons: Mapping[str, str]
    "Reason for the value of each setting that was derived, by variable."
    runs: int = 1
    "Number of concurrent trials of a search."

    @property
    def workers_per_pod(self) -> int:
        """Number of training workers in a pod."""
        return max(1, self.gpus)

    @property
    def workers(self) -> int:
        """Largest number of training workers."""
        return self.pods.most * self.workers_per_pod

    @property
    def autoscaled(self) -> bool:
        """True if the number of pods may change during the run."""
        return len(self.group_pods) > 1 or self.pods.elastic or bool(self.data and self.data.min < self.data.max)


def choose_shape(settings: Settings, profile: Profile, base_cpus: int, at_once: int = 1) -> tuple[Shape, list[str]]:
    """Return the shape, and every reason why it cannot work.

    `base_cpus` are the CPUs of a pod if the profile sets none, and `at_once` is the number of runs that train at the
    same time.
    """
    problems: list[str] = []

    offers = sorted({group.gpus or 0 for group in profile.groups})
    if len(offers) > 1:
        numbers = " and ".join(map(str, offers))
        problems.append(f"workers: the groups have {numbers} GPUs in a pod; give all groups the same number")
    offered = offers[-1]
    use_gpu = offered > 0 and settings.use_gpu != "false"
    reasons: dict[str, str] = {}
    if settings.use_gpu == "auto":
        reasons[USE_GPU] = f"the profile's training pods have {offered or 'no'} GPU{'s' * (offered != 1)}"
    elif settings.use_gpu == "true" and not offered:
        problems.append(
            "SUNSPOT_USE_GPU=true: the profile has no GPU; set worker.gpus in it, or keep this setting at auto"
        )

    gpus = offered if use_gpu else 0
    per_pod = max(gpus, 1)
    workers = WorkerRange(settings.num_workers.least * at_once, settings.num_workers.most * at_once)
    if workers.least % per_pod or workers.most % per_pod:
        each = f" for each of {at_once} trials" if at_once > 1 else ""
        has = f"each GPU has a worker, and a pod of this profile has {gpus} GPUs (worker.gpus)"
        problems.append(f"SUNSPOT_NUM_WORKERS={settings.num_workers}{each}: {has}; set it to a multiple of {gpus}")
    pods = WorkerRange(max(1, workers.least // per_pod), max(1, workers.most // per_pod))

    group_pods = [min(group.max or pods.most, pods.most) for group in profile.groups]
    if sum(group_pods) < pods.most:
        has = f"the groups have at most {sum(group_pods)} pods together (max)"
        needs = f"SUNSPOT_NUM_WORKERS={settings.num_workers} needs {pods.most}"
        problems.append(f"workers: {has}, and {needs}; raise max, or lower the setting")
    for number, group in enumerate(profile.groups):
        if group.spot is not None and not profile.spot:
            given = f"workers.{number}.spot={group.spot}"
            problems.append(f"{given}: the profile does not describe spot nodes; set spot in it, or leave this key out")
    if len(group_pods) > 1 and at_once > 1:
        problems.append(
            f"workers: a search of {at_once} trials at once cannot use {len(group_pods)} groups; keep one group"
        )

    data = profile.data_workers
    if data and not offered:
        problems.append("data_workers: the profile has no GPU, so training pods read as cheaply; remove data_workers")
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
    """Return the CPUs of a training pod, as Ray counts them."""
    return worker.num_cpus or (whole_cpus(worker.cpu) if worker.cpu else base_cpus)


def whole_cpus(quantity: str) -> int:
    """Return a Kubernetes quantity of CPUs as Ray counts them: rounded down, and at least one."""
    return max(1, math.floor(parse_quantity(quantity)))


def _choose_resources(settings: Settings, cpus: int, per_pod: int) -> tuple[dict[str, float], str]:
    if settings.resources_per_worker:
        return dict(settings.resources_per_worker), ""
    reading = max(1, math.floor(cpus * READING_SHARE)) if settings.loader == "ray" else 0
    each = (cpus - reading) / per_pod
    rounded = math.floor(each) if each >= 1 else math.floor(each * 100) / 100
    shared = f" for {per_pod} workers" if per_pod > 1 else ""
    reserved = f", {reading} of them reserved for reading" if reading else ""
    return {"CPU": rounded}, f"{cpus} CPUs of a pod{shared}{reserved}"


def _find_misfits(settings: Settings, shape: Shape, per_pod: int) -> list[str]:
    """Return each reason why a worker would never be placed or never get a row. Ray would wait silently."""
    asked = f"SUNSPOT_RESOURCES_PER_WORKER={shape.per_worker}".replace("'", '"')
    cpu = shape.per_worker.get("CPU", 1)
    gpu = shape.per_worker.get("GPU", 0)
    unknown = [name for name in shape.per_worker if name not in RAY_RESOURCES]
    problems = [f"{asked}: no pod offers {name}; remove it" for name in unknown]
    if gpu != (1 if shape.gpus else 0):
        problems.append(
            f"{asked}: a worker of this profile has {1 if shape.gpus else 'no'} GPU; leave GPU out, Sunspot adds it"
        )
    if cpu * per_pod > shape.cpus:
        problems.append(
            f"{asked}: a pod has {shape.cpus} CPUs for {plural(per_pod, 'worker')}; request fewer, or raise worker.cpu"
        )
    elif settings.loader == "ray" and (cpu <= 0 or (not shape.data and shape.cpus - cpu * per_pod < 1)):
        needs = f"SUNSPOT_LOADER=ray needs one of a pod's {shape.cpus} CPUs for reading"
        problems.append(f"{asked}: {needs}; request fewer, or raise worker.cpu")
    return problems
