"""Renders the RayJob from k8s/rayjob.yaml, a profile, the arguments and the SUNSPOT_ environment variables.

The same inputs always produce the same bytes. Rendering needs no cluster, network or clock.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sunspot.code_archive import CODE, code_in
from sunspot.credentials import is_credential
from sunspot.errors import SettingsError, StorageError, shorten
from sunspot.formatting import plural
from sunspot.run.owner import Owner
from sunspot.settings import BUCKET_URLS, PREFIX, Settings, refuse, variable_of
from sunspot.settings.mixture import find_locations
from sunspot.settings.search_space import Search, load_search
from sunspot.submitter.code_files import CodeArchive
from sunspot.submitter.manifest.merge import CREDENTIAL_SHOWN, merge_job
from sunspot.submitter.manifest.pods import (
    DRAIN,
    FEW_WORKERS,
    NOTICE,
    PRICES,
    RUN_LABEL,
    TRIAL_MEMORY,
    PodPrice,
    find_prices,
    group_name,
    head_group,
    make_cluster,
    parse_runtime_env,
    pod_prices,
    ray_container,
    set_variable,
    worker_group,
)
from sunspot.submitter.manifest.profile import (
    ELASTIC,
    QUEUE,
    Profile,
    ProfileSource,
    Sizes,
    Worker,
    find_origin,
    load_profile,
    manifests,
)
from sunspot.submitter.manifest.shape import RESOURCES_PER_WORKER, SHARD_DEGREE, USE_GPU, Shape, choose_shape
from sunspot.submitter.manifest.yaml_files import read_yaml, to_yaml
from sunspot.submitter.printing import write_file

STORAGE_PATH = PREFIX + "STORAGE_PATH"

JOB_ID = PREFIX + "JOB_ID"

MOVES_FROM = PREFIX + "MOVES_FROM"

NODE_GROUPS = PREFIX + "NODE_GROUPS"

NODES_TIMEOUT = PREFIX + "NODES_TIMEOUT_S"

LABELS = PREFIX + "LABELS"

BASE = "k8s/rayjob.yaml"

GENERATION = "sunspot/generation"

BUCKET = r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?"
"""Pattern of bucket and container names in any cloud (only Google allows '_')."""

MAX_PODS = 2**31 - 1

SEARCH = "python -m sunspot.tune"
"""Entrypoint of a job if its settings contain a search space."""


@dataclass(frozen=True)
class JobRequest:
    """All inputs of a manifest except the SUNSPOT_ environment variables."""

    profile: str = "kind"
    "Name of a profile in k8s/profiles, or a path."
    settings: Mapping[str, str] = field(default_factory=dict)
    "Settings keyed by variable, with or without the prefix. They override the environment and the profile."
    image: str | None = None
    namespace: str | None = None
    queue: str | None = None
    cluster: str | None = None
    "Existing RayCluster to run the job in, or None to create one for the job."
    generation: int = 1
    "A number in the job's name. Change it to run a job again after it has ended."
    code: str | None = None
    "The user's code: a folder, or an archive's URL with its hash."
    place: str | None = None
    "The name of one of the profile's places, or None if the profile has no places."

    @property
    def source(self) -> ProfileSource:
        """The profile and, if the profile has places, the place."""
        return ProfileSource(self.profile, self.place)

    def all_settings(self) -> dict[str, str]:
        """Return the settings, including those from the environment, keyed by variable."""
        given = [*_of_environment(), *self.settings.items()]
        return dict(sorted({variable_of(name): value for name, value in given}.items()))

    def arguments(self) -> tuple[str, ...]:
        """Return the `sunspot submit` arguments for the same job, including settings from the environment.

        The namespace is not included.
        """
        settings = self.all_settings()
        places = {"--run": settings.pop(PREFIX + "RUN_NAME", None), "--storage": settings.pop(STORAGE_PATH, None)}
        options = {name: getattr(self, name) for name in ("place", "image", "code", "queue", "cluster")}
        chosen = {"--profile": self.profile, **places, **{f"--{name}": value for name, value in options.items()}}
        words = [word for name, value in chosen.items() if value is not None for word in (name, value)]
        words += ["--generation", str(self.generation)] if self.generation != 1 else []
        return (*words, *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")))


@dataclass(frozen=True)
class Derived:
    """A value in the manifest and its origin."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Rendered:
    """A manifest that is ready to apply, and the inputs that it was made from."""

    manifest: dict[str, Any]
    settings: Settings
    "The given settings, except those that a search varies. `settings_of(manifest)` also contains derived settings."
    namespace: str
    derived: list[Derived]
    chosen_namespace: str | None
    "Namespace set by an option or the profile, or None if the default is used."
    request: JobRequest
    archive: CodeArchive | None = None
    "The user's packed code, which must be in the run's storage before the job starts."

    @property
    def name(self) -> str:
        """The RayJob's name, made from the run's name and a hash of the specification."""
        return str(self.manifest["metadata"]["name"])

    @property
    def pods(self) -> list[PodPrice]:
        """The number and price of each group's pods. The list is empty for a job in an existing cluster."""
        return pod_prices(self.manifest, settings_of(self.manifest))

    def to_yaml(self) -> str:
        """Return the manifest as YAML, in the order of k8s/rayjob.yaml."""
        return to_yaml(self.manifest)


def choose_profile(request: JobRequest) -> Profile:
    """Load a request's profile, with the values of the request's place. Options override all of these values."""
    options = {name: getattr(request, name) for name in ("image", "namespace", "queue", "code")}
    given = {name: value for name, value in options.items() if value is not None}
    return load_profile(request.profile, given, request.place)


def render(request: JobRequest, archive: CodeArchive | None = None) -> Rendered:
    """Render a run's RayJob. If the run's code is a folder, `archive` is the packed folder.

    Raises `SettingsError` with a list of all problems if there are any.
    """
    # Collect the inputs: the profile, and the settings with their sources.
    chosen = choose_profile(request)
    # The JSON round trip copies YAML aliases, so that changing one copy does not affect the others.
    job: dict[str, Any] = json.loads(json.dumps(read_yaml(manifests() / "rayjob.yaml")))
    given = _gather(ray_container(head_group(job))["env"], chosen, request)
    search = load_search({name: value for name, (value, _) in given.items()})
    settings = search.settings
    where = f"with profile {request.profile}"

    # Choose the cluster's shape, and find everything that would keep the job from running.
    base_cpus = int(worker_group(job)["resources"]["CPU"])
    at_once = min(settings.trials, max(1, settings.concurrent_trials)) if search.dimensions else 1
    shape, problems = (None, []) if request.cluster is not None else choose_shape(settings, chosen, base_cpus, at_once)
    problems += _find_problems(settings, chosen, request, worker_group(job)["template"]["spec"])
    if chosen.cloud:
        problems += _find_unnamed(job, chosen, shape, given)
    if settings.budget and (not shape or any(group.price is None for group in chosen.groups)):
        problems.append(
            f"{PREFIX}BUDGET={settings.budget} needs the price of all training pods; set price under worker or workers "
            "in the profile, or omit the budget"
        )
    if chosen.places and request.place is None:
        names = ", ".join(each.name for each in chosen.places)
        problems.append(f"the profile has several places, and none is chosen; choose one of {names} with --place")
    if chosen.code and not archive and not (code_in(chosen.code) and "://" in chosen.code):
        problems.append(
            f"code {chosen.code} is not an archive; set it to a URL with a hash (s3://bucket/code.tar@sha256:HASH), "
            "made with `git archive -o code.tar HEAD` and `sha256sum code.tar`, or use `sunspot submit`, which packs "
            "and uploads a folder"
        )
    refuse(problems, where)

    # Fill in the manifest.
    deadline_s = chosen.pre_running_deadline_s or job["spec"]["preRunningDeadlineSeconds"]
    derived = _resolve(search, given, chosen, shape, deadline_s)
    if chosen.code:
        url = archive.url(settings.storage_path, settings.run_name) if archive else chosen.code
        derived.append(Derived(CODE, url, "given" if request.code else find_origin(request.source, "code")))
    variables = {each.name: each.value for each in derived}
    if shape:
        refuse(make_cluster(job, chosen, shape, settings.run_name, variables), where)
        derived += _explain(job, chosen, shape, request.source)
    else:
        _select_cluster(job, str(request.cluster), variables)
    _set_job(job, chosen, settings.run_name, request.generation)
    if search.dimensions:
        job["spec"]["entrypoint"] = SEARCH
        derived.append(Derived("entrypoint", SEARCH, f"{', '.join(search.given)}: a search space"))

    if chosen.rayjob:
        refuse(merge_job(job, chosen.rayjob.model_dump(exclude_none=True)), where)

    # Set the name first, because later values depend on it. The reasons are not part of the hashed specification.
    name = f"{settings.run_name}-{_digest(job)}"
    job["metadata"]["name"] = name
    set_variable(job, JOB_ID, str(Owner(name, place=request.place or "")))
    prices = find_prices(chosen) if shape else {}
    if prices:  # added after hashing, because a price change does not make a new job
        set_variable(job, PRICES, json.dumps(prices))
        derived.append(Derived(PRICES, json.dumps(prices), "the profile's prices"))
    job["metadata"]["annotations"]["sunspot/derived"] = json.dumps({value.name: value.value for value in derived})
    return Rendered(job, settings, job["metadata"]["namespace"], derived, chosen.namespace, request, archive)


def settings_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return a RayJob's SUNSPOT_ variables, whether it was rendered here or read from a cluster."""
    spec = manifest["spec"]
    if spec.get("rayClusterSpec"):
        entries = ray_container(head_group(manifest)).get("env", ())
        variables = {entry["name"]: entry.get("value", "").replace("$$", "$") for entry in entries}
    else:
        variables = parse_runtime_env(spec.get("runtimeEnvYAML", ""))
    return {name: value for name, value in variables.items() if name.startswith(PREFIX)}


def has_registry(reference: str) -> bool:
    """Return True if container runtimes would read the first part of an image reference as a registry."""
    host, slash, _ = reference.partition("/")
    return bool(slash) and ("." in host or ":" in host or host == "localhost")


def image_problem(reference: str) -> str:
    """Return a warning if an image reference can later resolve to a different image, or an empty string.

    A digest is safe. A tag without a registry is also accepted, because the image was probably loaded onto the nodes.
    """
    name = reference.rpartition("/")[2]
    tagged = name.partition(":")[2] not in ("", "latest")
    if "@sha256:" in name or (tagged and not has_registry(reference)):
        return ""
    if tagged:
        why = "if the tag is pushed again, new nodes will run a different program than the current ones"
        digest = f"{reference}@sha256:... (`docker buildx imagetools inspect {reference}` prints it)"
        return f"image {reference} is a tag, which can change: {why}; use a digest instead: {digest}"
    why = "a retry could run a different program than the first attempt, and nodes keep the image they have"
    return f"image {reference} has no version: {why}; add a tag, or better a digest (@sha256:...)"


def write_directory(rendered: Rendered, path: str) -> list[Path]:
    """Write the manifest and a kustomization for Argo CD, Flux or `kubectl apply -k`, and return their paths.

    An existing kustomization is kept. Raises `SettingsError` if a file cannot be written.
    """
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    kustomization = {**kind, "resources": ["rayjob.yaml"]}
    folder = Path(path)
    contents = {"rayjob.yaml": rendered.to_yaml(), "kustomization.yaml": to_yaml(kustomization)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            if name == "rayjob.yaml" or not os.path.lexists(folder / name):
                write_file(str(folder / name), text.encode(), mark=b"app.kubernetes.io/part-of: sunspot")
    except (OSError, StorageError) as error:
        why = error.strerror if isinstance(error, OSError) else ""
        raise SettingsError(
            f"cannot write to --output {path}: {why or shorten(error)}; use a writable directory"
        ) from error
    return [folder / name for name in contents]


# ------------------------------------------------------------------------------------------------------------- settings


def _gather(base: list[dict[str, str]], profile: Profile, request: JobRequest) -> dict[str, tuple[str, str]]:
    """Return the value and the source of each given setting, keyed by variable. An empty value removes a setting."""
    source = request.source
    # Each pod has its own notice, set by the profile or by the existing cluster.
    of_base = {e["name"]: e["value"] for e in base if e["name"].startswith(PREFIX) and e["name"] != NOTICE}
    in_profile = profile.settings or {}
    every = [
        *((variable, value, BASE) for variable, value in of_base.items()),
        *(
            (key, value, find_origin(source, "settings", key) or f"profile {source.name}")
            for key, value in in_profile.items()
        ),
        *((variable, value, "the environment") for variable, value in _of_environment()),
        *((variable, value, "given") for variable, value in request.settings.items()),
    ]
    return {variable_of(name): (value, source) for name, value, source in every}


def _of_environment() -> Iterator[tuple[str, str]]:
    """Yield the name and value of each SUNSPOT_ variable in the environment."""
    return ((name, value) for name, value in os.environ.items() if name.startswith(PREFIX) and value)


def _resolve(
    search: Search, given: Mapping[str, tuple[str, str]], profile: Profile, shape: Shape | None, deadline_s: int
) -> list[Derived]:
    """Return the job's variables, in the order of the settings.

    Only given and derived settings are included. The image can set defaults for the other settings, such as its own
    task.
    """
    every = {**search.settings.environment(), **search.given}
    chosen = {variable: (every[variable], source) for variable, (value, source) in given.items() if value != ""}
    for variable in (PREFIX + "RUN_NAME", PREFIX + "NUM_WORKERS"):
        chosen.setdefault(variable, (every[variable], "default"))
    if shape:
        per_worker = json.dumps(shape.per_worker, sort_keys=True)
        for variable, value in ((USE_GPU, "true" if shape.gpus else "false"), (RESOURCES_PER_WORKER, per_worker)):
            chosen[variable] = (value, shape.reasons.get(variable) or chosen[variable][1])
        if SHARD_DEGREE in shape.reasons:
            chosen[SHARD_DEGREE] = (str(shape.shard_degree), shape.reasons[SHARD_DEGREE])
        if len(profile.groups) > 1:
            groups = [
                {"name": group_name(number), "most": pods * shape.workers_per_pod, "after_s": group.after_s}
                for number, (group, pods) in enumerate(zip(profile.groups, shape.group_pods, strict=True))
            ]
            chosen[NODE_GROUPS] = (json.dumps(groups), "the profile's workers")
            chosen.setdefault(NODES_TIMEOUT, (str(deadline_s), "preRunningDeadlineSeconds"))
    # Label keys with a "/" are meant for other software.
    own = {name: value for name, value in (profile.labels or {}).items() if "/" not in name}
    if own:
        labels = {**own, **search.settings.labels}
        chosen[LABELS] = (json.dumps(labels, sort_keys=True), "the profile's labels")
    return [Derived(variable, *chosen[variable]) for variable in every if variable in chosen]


def _find_problems(settings: Settings, profile: Profile, request: JobRequest, pod: Mapping[str, Any]) -> list[str]:
    """Return the problems that can be found without a cluster. `pod` is the base spec of a training pod."""
    cluster, generation = request.cluster, request.generation
    problems = []
    place = f"{STORAGE_PATH}={settings.storage_path}"
    if "://" not in settings.storage_path:
        problems.append(f"{place} is a local path, but pods share no disk; set it to {BUCKET_URLS}")
    elif not re.fullmatch(BUCKET, settings.storage_path.partition("://")[2].partition("/")[0]):
        fix = "use only lower-case letters, digits, '-' and '.' in its name"
        problems.append(f"{place} does not start with a valid bucket; {fix}")
    problems += [
        f"{PREFIX}{name}={path} is a path on this machine, which pods cannot read; set it to a URL such as "
        "s3://bucket/data, or to an absolute path in the image or on a volume"
        for name, paths in (("DATASET", find_locations(settings.dataset)), ("TEST_DATASET", [settings.test_dataset]))
        for path in paths
        if path not in ("", "sample", "mnist") and "://" not in path and not path.startswith("/")
    ]
    if settings.num_workers.most > MAX_PODS:
        problems.append(
            f"{PREFIX}NUM_WORKERS={settings.num_workers} is too large; Kubernetes allows at most {MAX_PODS} pods"
        )
    if settings.job.code:
        problems.append(f"{CODE}={settings.job.code} cannot be set; unset it, and use --code or the profile's code")
    if settings.job.job_id:
        problems.append(f"{JOB_ID}={settings.job.job_id} cannot be set; unset it, because it is the RayJob's name")
    if settings.job.moves_from:
        problems.append(f"{MOVES_FROM}={settings.job.moves_from} cannot be set; use `sunspot move`")
    if "notice_s" in settings.job.model_fields_set:
        problems.append(f"{NOTICE}={settings.job.notice_s} cannot be set; set notice_s in the profile instead")
    if settings.job.prices and cluster is None:
        problems.append(f"{PRICES} cannot be set; set price under head and worker in the profile instead")
    if settings.job.node_groups:
        problems.append(f"{NODE_GROUPS} cannot be set; set workers in the profile instead")
    problems += [
        f"env.{name}: {CREDENTIAL_SHOWN}; read it from a Secret, "
        f"with env_secrets: {{{name}: {{secret: NAME, key: KEY}}}}"
        for name, value in (profile.env or {}).items()
        if is_credential(name, value)
    ]
    drain = (profile.env or {}).get(DRAIN)
    grace_s = profile.notice_s or pod["terminationGracePeriodSeconds"]
    if drain is not None and not (re.fullmatch("[0-9]{1,9}", drain) and int(drain) < grace_s):
        limit = f"is not a number of seconds below {grace_s}, after which a pod is killed"
        fix = "leave it out, or set notice_s to the notice that the nodes really give"
        problems.append(f"env.{DRAIN}={drain} {limit}; {fix}")
    if request.image and profile.head and profile.head.image:
        head = f"the head would keep head.image={profile.head.image}, which might be a different version"
        problems.append(f"image {request.image}: {head}; set both images in the profile")
    if generation < 1:
        problems.append(f"generation {generation} is not valid; set it to an integer >= 1")
    if cluster is not None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", cluster):
            problems.append(f"cluster {cluster!r} is not a valid name; set it to the name of a RayCluster")
        problems += [
            f"{variable}={value}: in a job for an existing cluster, Ray would expand the $; use a value without $"
            for variable, value in settings.environment().items()
            if "$" in value
        ]
        if profile.queue:
            why = "a job in an existing cluster creates no pods that Kueue could admit"
            problems.append(f"queue {profile.queue}: {why}; omit either the queue or the cluster")
    if profile.queue and len(profile.groups) > 1:
        both = "with several groups, waiting pods and their replacements would both count against its quota"
        fix = "keep one group in workers (the queue's flavors can choose the nodes), or leave the queue out"
        problems.append(f"queue {profile.queue}: {both}; {fix}")
    return problems


def _find_unnamed(
    job: dict[str, Any], profile: Profile, shape: Shape | None, given: Mapping[str, tuple[str, str]]
) -> list[str]:
    """Return a problem for each default that does not work in a cloud: the bucket, and images without a registry."""
    problems = []
    storage_path, source = given[STORAGE_PATH]
    if source == BASE:
        default = f"{STORAGE_PATH}={storage_path} is the default, which on a cloud is someone else's bucket"
        problems.append(f"{default}; set your own with --storage, the environment, or settings in your profile")
    images = [profile.image or ray_container(head_group(job))["image"], profile.head.image if profile.head else None]
    problems += [
        f"image {image} has no registry, so nodes would pull it from Docker Hub; add the registry you pushed to, as in "
        "registry.example/sunspot:1 or docker.io/me/sunspot:1, with --image, make IMAGE=..., or image in your profile"
        for image in images
        if image and shape and not has_registry(image)
    ]
    return problems


# ------------------------------------------------------------------------------------------------------------- manifest


def _set_job(job: dict[str, Any], profile: Profile, run: str, generation: int) -> None:
    """Set the fields of the RayJob itself."""
    metadata, spec = job["metadata"], job["spec"]
    metadata["namespace"] = profile.namespace or metadata["namespace"]
    metadata["labels"] = {**metadata["labels"], RUN_LABEL: run, **(profile.labels or {})}
    metadata["annotations"] = {GENERATION: str(generation), **(profile.annotations or {})}
    if profile.queue:
        metadata["labels"][QUEUE] = profile.queue
        if spec.get("rayClusterSpec", {}).get("enableInTreeAutoscaling"):
            metadata["annotations"][ELASTIC] = "true"
    for key, value in {
        "preRunningDeadlineSeconds": profile.pre_running_deadline_s,
        "activeDeadlineSeconds": profile.active_deadline_s,
        "backoffLimit": profile.backoff_limit if "backoffLimit" in spec else None,
        "ttlSecondsAfterFinished": profile.ttl_s if "ttlSecondsAfterFinished" in spec else None,
    }.items():
        if value is not None:
            spec[key] = value


def _select_cluster(job: dict[str, Any], cluster: str, variables: Mapping[str, str]) -> None:
    """Make the job run in an existing cluster, which the job neither scales nor deletes."""
    spec = job["spec"]
    for key in ("rayClusterSpec", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"):
        del spec[key]
    spec["clusterSelector"] = {"ray.io/cluster": cluster}
    spec["runtimeEnvYAML"] = to_yaml({"env_vars": dict(variables)})


def _explain(job: dict[str, Any], profile: Profile, shape: Shape, origin: ProfileSource) -> list[Derived]:
    """List the chosen values that are not settings, with their reasons."""
    head, workers = head_group(job), worker_group(job)
    found: list[Derived] = []

    def add(what: str, value: object, source: str) -> None:
        found.append(Derived(what, str(value), source))

    def source(value: object, *keys: str) -> str:
        return BASE if value is None else find_origin(origin, *keys) or f"profile {origin.name}"

    image = ray_container(workers)["image"]
    add("image", image, BASE if profile.image is None else find_origin(origin, "image") or "given")
    head_image = profile.head.image if profile.head else None
    if head_image:
        add("head's image", head_image, source(head_image, "head", "image"))
    trials = f" of each of {shape.runs} trials" if shape.runs > 1 else ""
    per_pod = f"{shape.gpus} GPUs per pod with one worker each" if shape.gpus > 1 else "one worker per pod"
    add("training pods", shape.pods, f"NUM_WORKERS{trials}, {per_pod}")
    if shape.shard_degree:
        add("replicas of the model", shape.describe_replicas(), f"{SHARD_DEGREE} workers hold one replica")
    found += _explain_sizes(ray_container(workers), profile, origin)
    for number, (group, pods) in enumerate(zip(profile.groups, shape.group_pods, strict=True)):
        if len(profile.groups) > 1:
            where = ", never on spot nodes" if group.spot is False else ", on spot nodes"
            when = f"used after earlier groups have lacked nodes for {group.after_s} s, until they have enough nodes"
            up_to = f"up to {pods}{where if profile.spot else ''}"
            add(f"pods of {group_name(number)}", up_to, when if number else "the first choice")
    may_change = "can change" if shape.autoscaled else "is fixed"
    add("autoscaler", "v2" if shape.autoscaled else "none", f"the number of pods {may_change}")
    if profile.spot:
        add("head", "not on spot nodes", "losing the head would end all workers")
    else:
        add("head", "on any node", "the profile has no spot nodes")
    account = head["template"]["spec"]["serviceAccountName"]
    holder = "only the autoscaler has its token" if shape.autoscaled else "no container has its token"
    add("head's service account", account, holder)
    placement = profile.groups[0].placement
    of_first = "workers" if find_origin(origin, "workers", "placement") else "worker"
    benefit = "losing a node costs as few workers as possible"
    if placement in ("pack", "zone"):
        benefit = "the network within a zone is faster and free"
    add("placement", placement or "spread", f"{source(placement, of_first, 'placement')}: {benefit}")
    notice = profile.notice_s or workers["template"]["spec"]["terminationGracePeriodSeconds"]
    add("terminationGracePeriodSeconds", notice, f"the notice, {source(profile.notice_s, 'notice_s')}")
    drain = next(entry["value"] for entry in ray_container(workers)["env"] if entry["name"] == DRAIN)
    add(DRAIN, drain, f"the notice, minus {notice - int(drain)} s for Ray to stop its processes")
    add(NOTICE, drain, f"the time to save before {DRAIN} ends")
    deadline_s = profile.pre_running_deadline_s
    deadline = "preRunningDeadlineSeconds"
    add(deadline, deadline_s or job["spec"][deadline], source(deadline_s, "pre_running_deadline_s"))
    resources = ray_container(head)["resources"]["requests"]
    enlarged = (
        [f"{TRIAL_MEMORY} more for each of the {shape.runs - 1} trials after the first"] if shape.runs > 1 else []
    )
    if profile.head and profile.head.per_worker and shape.workers > FEW_WORKERS:
        enlarged.append(f"head.per_worker for each of the {shape.workers} workers beyond {FEW_WORKERS}")
    for size in ("cpu", "memory") if enlarged else ():
        add(f"head's {size}", resources[size], "; ".join(enlarged))
    if shape.data:
        most = shape.data.max
        add("data pods", f"{shape.data.min}..{most}", source(most, "data_workers", "max"))
    elif profile.data_workers:
        add("data pods", "none", "only SUNSPOT_LOADER=ray with GPUs uses them")
    return found


def _explain_sizes(container: Mapping[str, Any], profile: Profile, origin: ProfileSource) -> Iterator[Derived]:
    """Yield each size of the first group's training pods, with its origin."""
    given = profile.workers[0] if profile.workers else profile.worker or Worker()
    for key in Sizes.model_fields:
        each = getattr(given.per_gpu, key, None)
        if getattr(given, key) is not None:
            why = find_origin(origin, "workers", key) or find_origin(origin, "worker", key)
        elif each:
            sizes = find_origin(origin, "workers", "per_gpu", key) or find_origin(origin, "worker", "per_gpu", key)
            why = f"{sizes}: {each} per GPU, for {plural(max(1, given.gpus or 0), 'GPU')}"
        else:
            why = BASE
        if key == "ephemeral_storage" and given.data_cache:
            why += f", plus data_cache={given.data_cache}"
        resource = key.replace("_", "-")
        yield Derived(f"training pod's {resource}", container["resources"]["requests"][resource], why)


def _digest(job: Mapping[str, Any]) -> str:
    without_name = {**job, "metadata": {name: value for name, value in job["metadata"].items() if name != "name"}}
    return hashlib.sha256(json.dumps(without_name, sort_keys=True).encode()).hexdigest()[:8]
