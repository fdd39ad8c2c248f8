"""Plans a run's data, steps and resources before the run starts, and gives a reason for each chosen value."""

import json
import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from sunspot.data.held_out import RowSubset
from sunspot.data.mixed_source import MixedSource, order_of
from sunspot.data.order import MIN_ROWS, Steps, forward_passes, largest_pass
from sunspot.data.source import DataPlan, ModelData, Source, notes_on, rows_in
from sunspot.data.task_rows import open_rows_of_task
from sunspot.errors import DataError, SettingsError
from sunspot.formatting import plural
from sunspot.run.epochs import EpochLayout
from sunspot.run.identity import SourceRows
from sunspot.settings import READING_SHARE, Settings
from sunspot.settings.mixture import map_locations
from sunspot.storage.local import local_path
from sunspot.tasks.task import Task

READING_TASK_CPUS = 0.5
"""CPUs that a reading task requests. Ray Data gives at most half of the CPUs to each of LOADER=ray's two stages."""

MAX_NAMED_CLASSES = 20
"""Maximum number of classes whose names the plan lists."""


@dataclass(frozen=True)
class Plan:
    """The data, steps and other facts of a run that are decided before it starts."""

    settings: Settings
    source: Source
    test: Source | None
    steps: Steps
    total_steps: int
    reasons: list[str] = field(default_factory=list)
    order: str = ""
    "Checksum of the row order on the driver, or an empty string if unknown."
    one_machine: bool = False
    "True if the driver starts Ray itself, so that no other machine can join."
    outlives: bool = False
    "True if workers keep training after another worker is lost (survivor mode)."

    @property
    def data(self) -> DataPlan:
        """The data that the loaders read."""
        return DataPlan(self.source, self.test, self.steps, self.settings.seed)

    @cached_property
    def pass_limit(self) -> int:
        """Maximum number of rows in a forward pass.

        This is MICRO_BATCH_SIZE or, if MICRO_BATCH_SIZE is 0, a worker's share of a step with the maximum number of
        workers. If COMPILE is on, a worker's share is split evenly into passes of at most MICRO_BATCH_SIZE rows, and
        the limit is the size of the largest pass. After the loss of a worker, the other workers get larger shares but
        need no more memory, because they accumulate gradients over more passes.
        """
        settings, limit = self.settings, self.settings.micro_batch_size
        if limit and settings.compile == "off":
            return limit
        largest = max(largest_pass(rows, settings.num_workers.most, limit) for rows in self.steps.sizes)
        least = MIN_ROWS + 1  # otherwise, 3 rows would be cut into 2 and 1
        return max(largest, min(least, limit or least))

    def passes(self, world_size: int) -> int:
        """Return the maximum number of forward passes that a worker runs in a step."""
        return max(forward_passes(rows, world_size, self.pass_limit) for rows in self.steps.sizes)

    @property
    def pass_rows(self) -> int:
        """Number of rows in every forward pass if COMPILE is on, or 0 if COMPILE is off and passes vary in size.

        This does not depend on how many workers are training.
        """
        return 0 if self.settings.compile == "off" else self.pass_limit

    def find_order(self) -> str:
        """Return the checksum of the row order in this process, which depends on NumPy's version."""
        return order_of(self.source, self.settings.loader, self.settings.seed).checksum()


@dataclass(frozen=True)
class Resources:
    """The resources of one worker."""

    use_gpu: bool
    per_worker: dict[str, float]
    threads: int
    reading_cpus: float
    "Number of CPUs for each of Ray Data's reading tasks."
    reason: str


def make_plan(settings: Settings, task: Task) -> Plan:
    """Open the data, and return the plan of a run with this task and these settings.

    Raises `DataError` if the data are unsuitable for training, and `SettingsError` if a setting does not fit the data.
    """
    source, test = open_rows_of_task(settings, task)
    unrated = task.train is not None and task.loss is None
    test = None if unrated else test
    rows = rows_in(source)
    if rows < MIN_ROWS:
        raise DataError(f"{settings.dataset} has {plural(rows, 'training row')}, but at least {MIN_ROWS} are needed")
    data = ModelData.of(source)
    if len(data.class_names) == 1 and task.predict:
        raise DataError(
            f"{settings.dataset}: all training rows are in one class, {data.class_names[0]}, so there is nothing to "
            "classify; put the rows of each class into a separate folder, or add labels. If the task has no classes, "
            "omit `label` from its columns (docs/data.md)"
        )
    if settings.early_stop_evaluations and not test:
        raise SettingsError(
            f"SUNSPOT_EARLY_STOP_EVALUATIONS={settings.early_stop_evaluations}: the run has no evaluations, because "
            "there are no held-out rows or the task has no loss; set SUNSPOT_EARLY_STOP_EVALUATIONS to 0"
        )
    if task.full_batch:  # each step ends with a checkpoint, so there is nothing to copy in between
        settings = settings.model_copy(update={"snapshot_cost": 0.0})
    steps = Steps(rows, rows if task.full_batch else settings.global_batch_size)
    by_epochs = settings.epochs * steps.per_epoch
    total = steps.total(settings.epochs, settings.max_steps)
    shape = "x".join(map(str, source.shape))
    scaled = ", scaled to this size" if data.scales else ""
    classes = describe_classes(source)
    if test:
        evaluated = f"{rows_in(test)} held-out rows{describe_share(settings, test)}"
    elif unrated:
        evaluated = "no loss, so no evaluation"
    else:
        evaluated = f"no held-out rows, so no evaluation ({describe_ways_to_evaluate(task)})"
    length = f"{plural(settings.epochs, 'epoch')} of {plural(steps.per_epoch, 'step')} of {describe_batch(steps)}"
    if total < by_epochs:
        length = f"SUNSPOT_MAX_STEPS, of {by_epochs} by SUNSPOT_EPOCHS"
    reasons = [f"data: {rows} training rows of {shape}{scaled}, {classes}; {evaluated}"]
    reasons += [
        f"mixture: {each.share:.3g} of each step from {each.source}, {each.rows} rows, {each.epochs:.3g} epochs in all"
        for each in lay_out(source, steps).progress(total)
    ]
    reasons += [*notes_on(source, test), f"steps: {total} = {length}"]
    if settings.parallel == "hsdp":
        reasons.append(
            "hsdp: each replica of the model is divided among several workers; losing a worker repeats no step while "
            "all shards have a worker left"
        )
    if settings.parallel == "fsdp":
        every = [
            f"{name.upper()}={value:g}"
            for name in ("checkpoint_every_s", "checkpoint_every_steps")
            if (value := getattr(settings, name))
        ]
        loss = "losing a shard and its copy on the next node" if settings.snapshot_cost else "losing a worker"
        reasons.append(
            f"fsdp: each worker holds a shard of the state; {loss} returns the run to the newest checkpoint in storage "
            f"({', '.join(every) or 'at the end of each epoch'})"
        )
    if settings.num_workers.most * MIN_ROWS > settings.global_batch_size:
        reasons.append(
            f"only {settings.global_batch_size // MIN_ROWS} of {settings.num_workers.most} workers get rows: "
            f"SUNSPOT_GLOBAL_BATCH_SIZE={settings.global_batch_size} is too small for {MIN_ROWS} rows each"
        )
    plan = Plan(settings, source, test, steps, total, reasons, outlives=can_outlive(settings, task))
    return replace(plan, order=plan.find_order())


def can_outlive(settings: Settings, task: Task) -> bool:
    """Return True if workers can keep training after another worker is lost.

    This requires LOADER=torch, a single node group, and a task that does not need all workers. SURVIVORS=off disables
    it.
    """
    if settings.survivors == "off" or task.needs_all_workers:
        return False
    return settings.loader == "torch" and not settings.job.node_groups


def lay_out(source: Source, steps: Steps) -> EpochLayout:
    """Return how a run's epochs are divided into steps and, in a mixture, into sources."""
    mixed = zip(source.sources, source.mixture, strict=True) if isinstance(source, MixedSource) else ()
    sources = tuple(SourceRows(each.location, rows_in(part), each.weight) for part, each in mixed)
    return EpochLayout(steps.rows, steps.per_epoch, steps.batch, sources)


def describe_batch(steps: Steps) -> str:
    """Describe the size of a step: GLOBAL_BATCH_SIZE, or the whole dataset if it has fewer rows."""
    if steps.rows >= steps.batch:
        return f"{steps.batch} rows"
    return f"{steps.rows} rows, the whole dataset (SUNSPOT_GLOBAL_BATCH_SIZE={steps.batch})"


def describe_ways_to_evaluate(task: Task) -> str:
    """Return advice on how to add held-out rows to a run of this task."""
    own = "return train and test from build_dataset"
    share = "hold out a tenth of the rows with SUNSPOT_TEST_SHARE=0.1"
    if "test_share" in task.unread:
        return own
    if task.build_dataset:
        return f"{own}, or {share}"
    return f"put them into test/ next to train/, set SUNSPOT_TEST_DATASET, or {share}"


def describe_share(settings: Settings, test: Source) -> str:
    """Return a note about the effect of TEST_SHARE on the held-out rows, or an empty string if it is not set."""
    share = f"SUNSPOT_TEST_SHARE={settings.test_share:g}"
    parts = test.sources if isinstance(test, MixedSource) else (test,)
    held_out = [isinstance(part, RowSubset) for part in parts]
    if any(held_out):
        return f" ({share} of the {'data' if all(held_out) else 'sources that have no held-out rows'})"
    return f" (from the data; {share} has no effect)" if settings.test_share else ""


def describe_classes(source: Source) -> str:
    """Return a description of the classes with their number and names.

    If some classes have no rows, the description also says how many classes have rows.
    """
    classes, names = source.classes, ModelData.of(source).class_names
    if not classes:
        return "no classes"
    named = f" ({', '.join(names)})" if 0 < len(names) <= MAX_NAMED_CLASSES else ""
    seen = getattr(source, "classes_seen", 0)
    lack = f", of which {seen} have rows (labels are numbers from 0 to {classes - 1})" if 0 < seen < classes else ""
    return f"{classes} classes{named}{lack}"


def choose_resources(settings: Settings, cluster: dict[str, float], nodes: int) -> Resources:
    """Choose the resources of one worker, given the cluster's Ray resources and its number of nodes.

    Raises `SettingsError` if RESOURCES_PER_WORKER leaves no core for LOADER=ray.
    """
    workers = settings.num_workers.most
    gpus, cores = cluster.get("GPU", 0), cluster.get("CPU", 0)
    given = settings.resources_per_worker
    if settings.use_gpu == "auto":
        use_gpu = gpus >= settings.num_workers.least or given.get("GPU", 0) > 0
        why = f"GPUs: {gpus:g}, workers: {settings.num_workers}"
    else:
        use_gpu, why = settings.use_gpu == "true", "USE_GPU"

    if given:
        per_worker = {name: float(amount) for name, amount in given.items()}
        because = "RESOURCES_PER_WORKER"
    elif nodes > 1:
        per_worker = {"CPU": 1.0}
        because = "one core on a cluster, unless SUNSPOT_RESOURCES_PER_WORKER is set"
    else:
        reading = max(1, math.floor(cores * READING_SHARE)) if settings.loader == "ray" else 0
        cpus = max(cores - reading, cores * READING_SHARE) / workers
        per_worker = {"CPU": float(math.floor(cpus)) if cpus >= 1 else math.floor(cpus * 100) / 100}
        because = f"cores: {cores:g}, workers: {workers}" + (f", left for reading: {reading}" if reading else "")
    if use_gpu:
        per_worker = {"GPU": 1.0, **per_worker}
    left = cores - workers * per_worker.get("CPU", 1)
    if settings.loader == "ray" and nodes == 1 and left <= 0:
        raise SettingsError(
            f"SUNSPOT_RESOURCES_PER_WORKER={json.dumps(given)}: {workers} workers take all {cores:g} cores, and "
            "SUNSPOT_LOADER=ray would wait forever for a core; give each worker fewer cores, or leave the setting empty"
        )
    threads = max(1, math.floor(per_worker.get("CPU", 1)))
    shown = ", ".join(f"{amount:g} {name}" for name, amount in sorted(per_worker.items()))
    device = f"device {'cuda' if use_gpu else 'cpu'} ({why})"
    reason = f"workers: {settings.num_workers} of {shown} each ({because}); {device}"
    return Resources(
        use_gpu, per_worker, threads, min(READING_TASK_CPUS, left) if nodes == 1 else READING_TASK_CPUS, reason
    )


def with_absolute_paths(settings: Settings) -> Settings:
    """Return the settings with absolute local paths, because workers run in a different directory."""
    names = ("storage_path", "test_dataset", "data_root", "data_cache", "init_from")
    paths = {name: getattr(settings, name) for name in names}
    local = {name: _absolute(path) for name, path in paths.items() if path}
    return settings.model_copy(update={**local, "dataset": map_locations(settings.dataset, _absolute_dataset)})


def _absolute(path: str) -> str:
    return path if "://" in path or path.startswith("run:") else str(local_path(path))


def _absolute_dataset(location: str) -> str:
    return location if location in ("sample", "mnist") else _absolute(location)
