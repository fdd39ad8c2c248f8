"""Loads a profile: a small YAML file with the differences between one environment and k8s/rayjob.yaml.

The profiles in k8s/profiles are chosen by name, and a user's own profile by its path. A profile may extend another. The
text below a field is its documentation. The description of a field states the values that it takes, and is the fix
when a wrong value is refused.
"""

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from sunspot.errors import SettingsError
from sunspot.settings import PREFIX, cut, refuse
from sunspot.spelling import find_meant
from sunspot.submitter.manifest.quantities import format_quantity, parse_quantity
from sunspot.submitter.manifest.yaml_files import read_yaml

QUEUE = "kueue.x-k8s.io/queue-name"

ELASTIC = "kueue.x-k8s.io/elastic-job"
"""Kueue's annotation for jobs whose number of pods changes. The operator copies it to the RayCluster."""

RESERVED = ("sunspot/", "app.kubernetes.io/part-of", QUEUE, ELASTIC)
"""Prefixes of labels and annotations that the renderer sets, or that have their own option."""

NAMESPACE_PATTERN = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"

MIN_NOTICE_S = 5
"""Shortest notice that leaves time to save after Ray has noticed it."""


def _to_text(value: Any) -> Any:
    """Return a YAML number (`cpu: 6`) as text."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _as_json(value: Any) -> Any:
    """Return the value as JSON has it, with text for every key."""
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:  # YAML also has dates and bytes
        raise ValueError("not a JSON value") from error


def _to_setting(value: Any) -> Any:
    """Return a setting as its variable holds it, with YAML numbers, booleans and mappings as text."""
    return json.dumps(_as_json(value)) if isinstance(value, (bool, dict)) else _to_text(value)


def _setting_name(name: Any) -> Any:
    return name.upper().removeprefix(PREFIX) if isinstance(name, str) else name


def _refuse_setting(name: str) -> str:
    if name.upper().startswith(PREFIX):
        raise ValueError("a setting")
    return name


def _refuse_reserved(name: str) -> str:
    if name.startswith(RESERVED):
        raise ValueError("reserved")
    return name


Text = Annotated[str, Field(min_length=1)]

Image = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]+)?/)?"  # a registry
        r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*)*"
        r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?$"
    ),
]
"""Reference of an image, as container runtimes parse it (distribution/reference)."""

Cpus = Annotated[str, BeforeValidator(_to_text), Field(pattern=r"^([1-9][0-9]*(\.[0-9]+|m)?|0\.[0-9]*[1-9][0-9]*)$")]

Bytes = Annotated[
    str,
    BeforeValidator(_to_text),
    Field(pattern=r"^([1-9][0-9]{6,}|([1-9][0-9]*(\.[0-9]+)?|0\.[0-9]*[1-9][0-9]*)(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi))$"),
]

Json = Annotated[dict[str, Any], AfterValidator(_as_json)]

Seconds = Annotated[int, Field(ge=1)]

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]

ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_refuse_setting)]
Key = Annotated[str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]
OwnKey = Annotated[Key, AfterValidator(_refuse_reserved)]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]

LABELS = 'labels with their values in quotes, e.g. {team: "vision"}; not those of Sunspot'
VARIABLES = "variables with their values in quotes; settings of Sunspot go under settings"
CPU = "CPUs, e.g. 4 or 500m"
BYTES = "bytes with their unit, e.g. 16Gi"
PRICE = "a number >= 0, e.g. 0.35"
"""Descriptions of the values that several keys take."""


def _takes(takes: str, default: Any = None) -> Any:
    return Field(default, description=takes)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Toleration(_Part):
    """A toleration, as in a pod's spec."""

    key: Key | None = _takes("the key of a taint")
    operator: Literal["Exists", "Equal"] | None = _takes("Exists or Equal")
    value: LabelValue | None = _takes("the value of a taint, in quotes, and only with the operator Equal")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = _takes(
        "NoSchedule, PreferNoSchedule or NoExecute"
    )
    tolerationSeconds: int | None = _takes("seconds")  # the name in Kubernetes

    @field_validator("value")
    @classmethod
    def _none_for_exists(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and info.data.get("operator") == "Exists":
            raise ValueError("the operator Exists allows no value")
        return value


class Spot(_Part):
    """Label and value by which spot nodes are recognized. Workers go to them, and the head never does."""

    label: Key = _takes("the label that spot nodes have", ...)
    value: LabelValue = _takes("that label's value, in quotes", ...)
    tolerations: list[Toleration] | None = _takes("a list of Kubernetes tolerations")
    "Tolerations of the spot nodes' taints. Default: any taint with `label` as its key."


class Sizes(_Part):
    """Resources of a pod per GPU or per worker."""

    cpu: Cpus | None = _takes(CPU)
    memory: Bytes | None = _takes(BYTES)
    ephemeral_storage: Bytes | None = _takes(BYTES)


class Machine(_Part):
    """Resources of one pod, and the nodes that it may go to."""

    cpu: Cpus | None = _takes(CPU)
    "CPU request. There is no CPU limit unless `cpu_limit` sets one."
    cpu_limit: Cpus | None = _takes(CPU)
    "CPU limit, for namespaces with a quota that requires one. On the head, it also limits the autoscaler to 1 CPU."
    memory: Bytes | None = _takes(BYTES)
    "Memory request and limit, including /dev/shm."
    ephemeral_storage: Bytes | None = _takes(BYTES)
    "Local disk request and limit, for Ray's logs and objects spilled from its object store."
    node_selector: dict[Key, LabelValue] | None = _takes(LABELS)
    tolerations: list[Toleration] | None = _takes("a list of Kubernetes tolerations")
    pod: Json | None = _takes("metadata and spec of a pod")
    "Fields without a key of their own, merged into the pod last."


class PricedMachine(Machine):
    """A pod whose price a profile may name."""

    price: Price | None = _takes(PRICE)
    "Price of one pod per hour, in any currency."
    on_demand_price: Price | None = _takes(PRICE)
    "Price of the same pod on demand, for computing the savings from spot nodes."


class Head(PricedMachine):
    """Pod of the head."""

    image: Image | None = _takes("an image reference, e.g. registry.example/sunspot:1")
    "Separate image for the head, e.g. without CUDA (`make image HEAD=1`)."
    per_worker: Sizes | None = _takes("cpu, memory and ephemeral_storage")
    "Additional resources for each training worker beyond 16."
    evictable: bool | None = _takes("true or false")
    "True allows a drain of its node to end the head. By default, the head ends only with the run."


class Worker(PricedMachine):
    """Pod of training workers."""

    num_cpus: Annotated[int, Field(ge=1)] | None = _takes("an integer >= 1")
    "Number of CPUs that Ray may use. Default: `cpu`, rounded down."
    gpus: Annotated[int, Field(ge=0)] | None = _takes("an integer >= 0")
    "GPUs per pod. Each GPU has one training worker."
    per_gpu: Sizes | None = _takes("cpu, memory and ephemeral_storage")
    "Resources of a pod per GPU. An explicit value, such as `cpu`, takes precedence."
    gpu_resource: Annotated[Key, Field(pattern="/")] | None = _takes("the name of a resource, e.g. nvidia.com/gpu")
    "Name of the resource that counts as one GPU, also used as the key of the tolerated taint."
    gpu_claim: ObjectName | None = _takes("the name of a ResourceClaimTemplate")
    "Claim template for dynamic resource allocation, instead of `gpu_resource`. `gpus` is the number of claimed GPUs."
    gpu_selector: dict[Key, LabelValue] | None = _takes(LABELS)
    "Labels of the nodes that have the desired GPU."
    gpu_tolerations: list[Toleration] | None = _takes("a list of Kubernetes tolerations")
    "Additional tolerations of GPU nodes' taints. The taint of `gpu_resource` is always tolerated."
    placement: Literal["spread", "pack", "zone"] | None = _takes("spread, pack or zone")
    "Placement of pods: `spread` over nodes, `pack` into one zone if possible, or only in one `zone`."

    def with_sizes(self) -> Self:
        """Return the worker with the sizes of a whole pod: missing sizes are `per_gpu` times the number of GPUs."""
        given = self.per_gpu.model_dump(exclude_none=True) if self.per_gpu else {}
        gpus = max(1, self.gpus or 0)
        missing = {name: each for name, each in given.items() if getattr(self, name) is None}
        sizes = {
            name: format_quantity(gpus * parse_quantity(each), of_cpus=name == "cpu") for name, each in missing.items()
        }
        return self.model_copy(update=sizes)


class WorkerGroup(Worker):
    """One of several groups of training pods."""

    spot: bool | None = _takes("true or false")
    "True requires spot nodes for the group's pods, and false excludes them. Default: true if the profile has `spot`."
    max: Annotated[int, Field(ge=1)] | None = _takes("an integer >= 1")
    "Maximum number of pods in the group. Default: as many as NUM_WORKERS can need."
    after_s: Annotated[int, Field(ge=0)] = _takes("whole seconds, at least 0", 300)
    "Seconds for which earlier groups must lack nodes before this group starts, or have enough nodes before it stops."


class DataWorkers(Machine):
    """CPU pods for Ray Data (LOADER=ray), which keep reading from scaling up GPU nodes."""

    cpu: Cpus = _takes(CPU, ...)
    memory: Bytes = _takes(BYTES, ...)
    min: Annotated[int, Field(ge=0)] = _takes("an integer >= 0", 0)
    max: Annotated[int, Field(ge=1)] = _takes("an integer >= 1 and >= min", ...)

    @field_validator("max")
    @classmethod
    def _not_below_min(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("min", 0):
            raise ValueError("below min")
        return value


class JobPatch(_Part):
    """Fields that are merged into the RayJob."""

    metadata: Json | None = _takes("labels and annotations")
    spec: Json | None = _takes("the spec of a RayJob")


class SecretKey(_Part):
    """Reference to one value in a Secret."""

    secret: ObjectName = _takes("the name of a Secret", ...)
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = _takes("a key in that Secret", ...)


class Profile(_Part):
    """Differences between one environment and k8s/rayjob.yaml. Every key may be left out."""

    extends: Text | None = _takes("the name of a profile, or a path from this file")
    "Profile that this one extends. A null value removes a key of that profile."
    notice_s: Annotated[int, Field(ge=MIN_NOTICE_S)] | None = _takes(f"whole seconds, at least {MIN_NOTICE_S}")
    "Seconds of notice that pods get before their node is reclaimed."
    namespace: Annotated[str, Field(pattern=f"^{NAMESPACE_PATTERN}$")] | None = _takes("the name of a namespace")
    cloud: bool | None = _takes("true or false")
    "True rejects the default image and bucket, because a cloud needs your own."
    image: Image | None = _takes("an image reference, e.g. registry.example/sunspot:1")
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] | None = _takes("IfNotPresent, Always or Never")
    image_pull_secrets: list[ObjectName] | None = _takes("a list of Secret names")
    code: Text | None = _takes("a folder, for `submit`, or an archive's URL@sha256:HASH")
    "Your own code, which comes first on `sys.path` in every pod."
    service_account: ObjectName | None = _takes("the name of a service account")
    "Service account for all pods, for workload identity."
    assigned_ids: bool | None = _takes("true or false")
    "True lets the namespace assign the pods' user and group ids, as on OpenShift. By default, both are 1000."
    env: dict[Variable, str] | None = _takes(VARIABLES)
    "Environment variables for all pods. Use `env_secrets` for credentials."
    env_from_secrets: list[ObjectName] | None = _takes("a list of Secret names")
    "Secrets to import as environment variables, with all their keys. All of these Secrets must exist."
    env_secrets: dict[Variable, SecretKey] | None = _takes(
        "variables with a Secret for each, e.g. {TOKEN: {secret: hub, key: token}}"
    )
    priority_class: ObjectName | None = _takes("the name of a PriorityClass")
    labels: dict[OwnKey, LabelValue] | None = _takes(LABELS)
    "Labels for the RayJob and its pods."
    annotations: dict[OwnKey, str] | None = _takes(LABELS.replace("labels", "annotations"))
    "Annotations for the RayJob and its pods."
    settings: (
        dict[Annotated[str, BeforeValidator(_setting_name)], Annotated[str, BeforeValidator(_to_setting)]] | None
    ) = _takes("settings with their values, e.g. {EPOCHS: 5}")
    spot: Spot | None = _takes("label and value of spot nodes")
    head: Head | None = _takes("keys of the head pod: cpu, memory and so on")
    worker: Worker | None = _takes("keys of a training pod: cpu, memory, gpus and so on")
    workers: Annotated[list[WorkerGroup], Field(min_length=1)] | None = _takes("a list of groups of training pods")
    "Groups of training pods, in order of preference. Each inherits the keys of `worker`."
    data_workers: DataWorkers | None = _takes("a group of CPU pods: cpu, memory, min and max")
    pre_running_deadline_s: Seconds | None = _takes("whole seconds, at least 1")
    "Seconds within which all pods must be ready."
    active_deadline_s: Seconds | None = _takes("whole seconds, at least 1")
    "Time limit of one attempt. By default, attempts have no limit."
    ttl_s: Annotated[int, Field(ge=0)] | None = _takes("whole seconds, at least 0")
    "Seconds until the Ray cluster is removed after the job has ended."
    backoff_limit: Annotated[int, Field(ge=0, le=10)] | None = _takes("an integer from 0 to 10")
    "Number of retries, each in a new Ray cluster."
    queue: ObjectName | None = _takes("the name of a Kueue LocalQueue")
    rayjob: JobPatch | None = _takes("metadata and spec of a RayJob")
    "Fields without a key of their own, merged into the RayJob last."

    @property
    def groups(self) -> list[WorkerGroup]:
        """Groups of training pods: `workers`, or the single group that `worker` describes."""
        groups = self.workers or [WorkerGroup.model_construct(**dict(self.worker or Worker()))]
        return [group.with_sizes() for group in groups]


def manifests() -> Path:
    """Return the folder k8s, which is inside the installed package, or at the top of the repository."""
    here = Path(__file__).resolve()
    within = here.parents[1] / "k8s"
    return within if within.is_dir() else here.parents[4] / "k8s"


def load_profile(name: str, given: Mapping[str, Any]) -> Profile:
    """Load a profile by name or path, merged over the profiles that it extends, with `given` values over all of them.

    Raises `SettingsError` with every problem.
    """
    contents = [given, *_read_chain(name).values()]
    merged = functools.reduce(_merge, reversed(contents))
    worker = merged.get("worker")
    groups = merged.get("workers")
    if isinstance(worker, dict) and isinstance(groups, list):
        merged["workers"] = [_merge(worker, group) if isinstance(group, dict) else group for group in groups]
    try:
        return Profile.model_validate(merged)
    except ValidationError as error:
        refuse([_explain(problem) for problem in error.errors(include_url=False)], f"with profile {name}")
        raise


def find_origin(name: str, *keys: str) -> str:
    """Return the profile that sets the value below these keys: this one or one that it extends, or an empty text.

    In a list, only the first item is looked at. A setting is found with and without its prefix, in any case.
    """
    for label, content in _read_chain(name).items():
        value: Any = content
        for key in keys:
            value = value[0] if isinstance(value, list) and value else value
            named = value if isinstance(value, dict) else {}
            value = next((each for name, each in named.items() if key in (name, _setting_name(name))), None)
        if value is not None:
            return f"profile {label}"
    return ""


def _read_chain(name: str) -> dict[str, dict[str, Any]]:
    """Read a profile and each profile that it extends. Returns their contents by name or path, this profile first."""
    contents: dict[str, dict[str, Any]] = {}
    label = name
    seen: dict[str, Path] = {}
    path: Path | None = _find(name, Path())
    while path:
        place = os.path.abspath(path)
        if place in seen:
            *_, last = seen.values()
            raise SettingsError(f"{last}: extends {path.name}, which extends it; remove one of the two")
        seen[place] = path
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise SettingsError(f"{path}: not a profile: it must be a mapping, such as notice_s: 30")
        contents[label if label not in contents else place] = content
        below = content.get("extends")
        path = _find(below, path.parent) if isinstance(below, str) and below else None
        label = str(below)
    return contents


def _find(name: str, folder: Path) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        return folder / name
    shipped = {path.stem: path for path in sorted((manifests() / "profiles").glob("*.yaml"))}
    if name not in shipped:
        meant = find_meant(name, shipped)
        hint = f"did you mean {meant}? Choose" if meant else "choose"
        known = ", ".join(shipped)
        raise SettingsError(
            f"no profile {cut(name)!r}; {hint} one of {known}, or give the path of your own: ./mine.yaml"
        )
    return shipped[name]


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` over `under`: mappings by key, and other values replaced. A null removes a value."""
    merged = dict(under)
    for key, value in over.items():
        if value is None and key in merged:
            del merged[key]
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _explain(problem: Any) -> str:
    """Describe one problem that pydantic found: the key, its value, and the fix."""
    names = [str(part) for part in problem["loc"] if part != "[key]"]
    *above, last = names
    model: type[BaseModel] | None = Profile
    takes = ""
    for name in names:
        if model and name in model.model_fields:
            field = model.model_fields[name]
            takes = field.description or ""
            model = _model_of(field.annotation)
    where = cut(".".join(names))
    if problem["type"] == "invalid_key":
        return f"{where}: no such key; a key has to be text"
    if model and problem["type"] == "extra_forbidden":
        meant = find_meant(last, model.model_fields)
        hint = (
            f"did you mean {'.'.join([*above, meant])}?" if meant else f"choose one of {', '.join(model.model_fields)}"
        )
        return f"{where}: no such key; {hint}"
    if problem["type"] == "missing":
        return f"{where}: missing; set it to {takes}"
    return f"{where}={cut(repr(problem['input']))}: set it to {takes}"


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field or of its items, or None if they have no model."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_of, get_args(annotation))), None)
