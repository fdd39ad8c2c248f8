"""A profile: how one environment differs from k8s/rayjob.yaml, as a small YAML file.

Those in k8s/profiles are given by name, a user's own by path; each may extend another. The text below a field is its
documentation; what it takes is the fix named when a value is wrong.
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
"""Kueue's annotation for jobs whose number of pods changes; the operator passes it on to the cluster that it makes."""

RESERVED = ("sunspot/", "app.kubernetes.io/part-of", QUEUE, ELASTIC)
"""Prefixes of labels and annotations that the renderer sets, or that have their own option."""

NAMESPACE_PATTERN = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"

MIN_NOTICE_S = 5
"""With less, no time is left to save once Ray has noticed."""


def _to_text(value: Any) -> Any:
    """Turn a YAML number (`cpu: 6`) into text."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _as_json(value: Any) -> Any:
    """Return the value as JSON has it, with text for every key."""
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:  # YAML also has dates and bytes
        raise ValueError("not a JSON value") from error


def _to_setting(value: Any) -> Any:
    """Write a setting as its variable holds it: YAML numbers, booleans and mappings become text."""
    return json.dumps(_as_json(value)) if isinstance(value, (bool, dict)) else _to_text(value)


def _setting_name(name: Any) -> Any:
    return name.upper().removeprefix(PREFIX) if isinstance(name, str) else name


def _no_setting(name: str) -> str:
    if name.upper().startswith(PREFIX):
        raise ValueError("a setting")
    return name


def _not_reserved(name: str) -> str:
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
"""As container runtimes parse it (distribution/reference)."""

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
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_no_setting)]
Key = Annotated[str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]
OwnKey = Annotated[Key, AfterValidator(_not_reserved)]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]

LABELS = 'labels with their values in quotes, e.g. {team: "vision"}; not those of Sunspot'
VARIABLES = "variables with their values in quotes; settings of Sunspot go below settings"
CPU = "CPUs, e.g. 4 or 500m"
BYTES = "bytes with their unit, e.g. 16Gi"
PRICE = "a number from 0, e.g. 0.35"
"""What several keys take."""


def _takes(takes: str, default: Any = None) -> Any:
    return Field(default, description=takes)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Toleration(_Part):
    """As Kubernetes has it."""

    key: Key | None = _takes("the key of a taint")
    operator: Literal["Exists", "Equal"] | None = _takes("Exists or Equal")
    value: LabelValue | None = _takes("the value of a taint, in quotes, and only with the operator Equal")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = _takes(
        "NoSchedule, PreferNoSchedule or NoExecute"
    )
    tolerationSeconds: int | None = _takes("seconds")  # Kubernetes' own name

    @field_validator("value")
    @classmethod
    def _none_for_exists(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and info.data.get("operator") == "Exists":
            raise ValueError("Exists takes any value")
        return value


class Spot(_Part):
    """How spot nodes are recognized: workers go to them, the head never does."""

    label: Key = _takes("the label that spot nodes have", ...)
    value: LabelValue = _takes("that label's value, in quotes", ...)
    tolerations: list[Toleration] | None = _takes("a list of tolerations, as Kubernetes has them")
    "Default: a taint of the same key, whatever its value."


class Sizes(_Part):
    """What a pod gets for each of something."""

    cpu: Cpus | None = _takes(CPU)
    memory: Bytes | None = _takes(BYTES)
    ephemeral_storage: Bytes | None = _takes(BYTES)


class Machine(_Part):
    """What one pod gets, and where it may go."""

    cpu: Cpus | None = _takes(CPU)
    "Requested; there is no limit but `cpu_limit`."
    cpu_limit: Cpus | None = _takes(CPU)
    "Only where a quota demands it, as it throttles. Of the head, it gives the autoscaler one of 1."
    memory: Bytes | None = _takes(BYTES)
    "Request and limit, including /dev/shm."
    ephemeral_storage: Bytes | None = _takes(BYTES)
    "Request and limit: Ray's logs and what spills from its object store."
    node_selector: dict[Key, LabelValue] | None = _takes(LABELS)
    tolerations: list[Toleration] | None = _takes("a list of tolerations, as Kubernetes has them")
    pod: Json | None = _takes("metadata and spec of a pod, as Kubernetes has them")
    "Merged into the pod last: what no other key can say."


class PricedMachine(Machine):
    """A pod of which a profile may say what it costs."""

    price: Price | None = _takes(PRICE)
    "Of an hour of such a pod, in any currency."
    on_demand_price: Price | None = _takes(PRICE)
    "The same on demand, to say what spot saves."


class Head(PricedMachine):
    """The pod of the head."""

    image: Image | None = _takes("the reference of an image, e.g. registry.example/sunspot:1")
    "For the head alone, e.g. without CUDA (`make image HEAD=1`)."
    per_worker: Sizes | None = _takes("cpu, memory and ephemeral_storage")
    "More of them for each training worker beyond 16."
    evictable: bool | None = _takes("true or false")
    "Whether the drain of a node may end it; default: only the end of the run does."


class Worker(PricedMachine):
    """A training pod."""

    num_cpus: Annotated[int, Field(ge=1)] | None = _takes("a whole number from 1")
    "CPUs as Ray counts them; default: `cpu`, rounded down."
    gpus: Annotated[int, Field(ge=0)] | None = _takes("a whole number from 0")
    "GPUs per pod, each with a training worker."
    per_gpu: Sizes | None = _takes("cpu, memory and ephemeral_storage")
    "Sizes of a pod for each of its GPUs, where `cpu` and so on are not given."
    gpu_resource: Annotated[Key, Field(pattern="/")] | None = _takes("the name of a resource, e.g. nvidia.com/gpu")
    "Also the key of the tolerated taint."
    gpu_claim: ObjectName | None = _takes("the name of a ResourceClaimTemplate")
    "For GPUs by dynamic resource allocation, not by `gpu_resource`; `gpus` says how many it claims."
    gpu_selector: dict[Key, LabelValue] | None = _takes(LABELS)
    "The labels of nodes with the wanted GPU."
    gpu_tolerations: list[Toleration] | None = _takes("a list of tolerations, as Kubernetes has them")
    "For taints of nodes with GPUs, beside that of `gpu_resource`."
    placement: Literal["spread", "pack", "zone"] | None = _takes("spread, pack or zone")
    "Over many nodes or in one zone as far as possible, or in one zone or not at all."

    def with_sizes(self) -> Self:
        """Return it with the sizes of a pod, those that it has for each GPU multiplied."""
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
    "Whether its pods go to spot nodes, or never to one; default: to them, if there is `spot`."
    max: Annotated[int, Field(ge=1)] | None = _takes("a whole number from 1")
    "Most pods of the group; default: as many as NUM_WORKERS may need."
    after_s: Annotated[int, Field(ge=0)] = _takes("whole seconds from 0", 300)
    "How long the groups before must lack nodes until it stands in, or have enough until it steps back."


class DataWorkers(Machine):
    """CPU pods for Ray Data (LOADER=ray), so that reading never scales up GPU nodes."""

    cpu: Cpus = _takes(CPU, ...)
    memory: Bytes = _takes(BYTES, ...)
    min: Annotated[int, Field(ge=0)] = _takes("a whole number from 0", 0)
    max: Annotated[int, Field(ge=1)] = _takes("a whole number from 1, and not below min", ...)

    @field_validator("max")
    @classmethod
    def _not_below_min(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("min", 0):
            raise ValueError("below min")
        return value


class JobPatch(_Part):
    """What is merged into the RayJob."""

    metadata: Json | None = _takes("labels and annotations")
    spec: Json | None = _takes("the spec of a RayJob, as KubeRay has it")


class SecretKey(_Part):
    """One value in a Secret."""

    secret: ObjectName = _takes("the name of a Secret", ...)
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = _takes("a key in that Secret", ...)


class Profile(_Part):
    """How one environment differs; what is left out stays as in k8s/rayjob.yaml."""

    extends: Text | None = _takes("the name of a profile, or a path from this file")
    "To which this one adds; null removes a value."
    notice_s: Annotated[int, Field(ge=MIN_NOTICE_S)] | None = _takes(f"whole seconds from {MIN_NOTICE_S}")
    "How long before its end a node's pods are told."
    namespace: Annotated[str, Field(pattern=f"^{NAMESPACE_PATTERN}$")] | None = _takes("the name of a namespace")
    cloud: bool | None = _takes("true or false")
    "Whether image and bucket must be yours."
    image: Image | None = _takes("the reference of an image, e.g. registry.example/sunspot:1")
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] | None = _takes("IfNotPresent, Always or Never")
    image_pull_secrets: list[ObjectName] | None = _takes("a list of names of Secrets")
    code: Text | None = _takes("a folder, for `submit`, or an archive's URL@sha256:HASH")
    "Your own code, first on the path of every pod."
    service_account: ObjectName | None = _takes("the name of a service account")
    "Of all pods, for workload identity."
    assigned_ids: bool | None = _takes("true or false")
    "Whether the namespace assigns users and groups to pods, as on OpenShift; default: they are 1000."
    env: dict[Variable, str] | None = _takes(VARIABLES)
    "Not for credentials: see `env_secrets`."
    env_from_secrets: list[ObjectName] | None = _takes("a list of names of Secrets")
    "Secrets whose keys all become variables. All must exist."
    env_secrets: dict[Variable, SecretKey] | None = _takes(
        "variables with the Secret of each, e.g. {TOKEN: {secret: hub, key: token}}"
    )
    priority_class: ObjectName | None = _takes("the name of a PriorityClass")
    labels: dict[OwnKey, LabelValue] | None = _takes(LABELS)
    annotations: dict[OwnKey, str] | None = _takes(LABELS.replace("labels", "annotations"))
    "Labels and annotations of the RayJob and its pods."
    settings: (
        dict[Annotated[str, BeforeValidator(_setting_name)], Annotated[str, BeforeValidator(_to_setting)]] | None
    ) = _takes("settings with their values, e.g. {EPOCHS: 5}")
    spot: Spot | None = _takes("label and value of spot nodes")
    head: Head | None = _takes("what the head gets: cpu, memory and so on")
    worker: Worker | None = _takes("what a training pod gets: cpu, memory, gpus and so on")
    workers: Annotated[list[WorkerGroup], Field(min_length=1)] | None = _takes("a list of groups of training pods")
    "First choice first; each adds to what `worker` says."
    data_workers: DataWorkers | None = _takes("a group of CPU pods: cpu, memory, min and max")
    pre_running_deadline_s: Seconds | None = _takes("whole seconds from 1")
    "Until every pod is ready."
    active_deadline_s: Seconds | None = _takes("whole seconds from 1")
    "Time limit of one attempt; default: none."
    ttl_s: Annotated[int, Field(ge=0)] | None = _takes("whole seconds from 0")
    "How long the cluster stays after the job ends."
    backoff_limit: Annotated[int, Field(ge=0, le=10)] | None = _takes("a whole number from 0 to 10")
    "Attempts after the first, each on its own cluster."
    queue: ObjectName | None = _takes("the name of a LocalQueue of Kueue")
    rayjob: JobPatch | None = _takes("metadata and spec of a RayJob, as KubeRay has them")
    "Merged into the RayJob last: what no other key can say."

    @property
    def groups(self) -> list[WorkerGroup]:
        """The groups of training pods: those of `workers`, or the one that `worker` is."""
        groups = self.workers or [WorkerGroup.model_construct(**dict(self.worker or Worker()))]
        return [group.with_sizes() for group in groups]


def manifests() -> Path:
    """Find the folder k8s: beside this package in the repository, within it when installed."""
    here = Path(__file__).resolve()
    within = here.parents[1] / "k8s"
    return within if within.is_dir() else here.parents[4] / "k8s"


def load_profile(name: str, given: Mapping[str, Any]) -> Profile:
    """Load a profile by name or path, merged over those it extends, `given` values over all; raises `SettingsError`."""
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
    """Find which profile sets the value at this place: the one named, or one that it extends; else "".

    Of a list, its first item counts; a setting is found however its name is written.
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
    """Read the profile of that name or path, and then each that it extends, by name or path."""
    contents: dict[str, dict[str, Any]] = {}
    label = name
    seen: dict[str, Path] = {}
    path: Path | None = _find(name, Path())
    while path:
        place = os.path.abspath(path)
        if place in seen:
            [*_, last] = seen.values()
            raise SettingsError(f"{last}: extends {path.name}, which extends it; take one of the two away")
        seen[place] = path
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise SettingsError(f"{path}: no profile: it must be a mapping, such as notice_s: 30")
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
        known = f"{f'did you mean {meant}? There' if meant else 'there'} are {', '.join(shipped)}"
        raise SettingsError(f"no profile {cut(name)!r}; {known}; your own is given by its path, as ./mine.yaml")
    return shipped[name]


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` merged over `under`: mappings by key, the rest replaced; null removes."""
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
    """Explain one of pydantic's problems in the profile's terms: where, the value, the fix."""
    *above, last = names = [str(part) for part in problem["loc"] if part != "[key]"]
    model: type[BaseModel] | None = Profile
    takes = ""
    for name in names:
        if model and name in model.model_fields:
            field = model.model_fields[name]
            takes = field.description or ""
            model = _model_of(field.annotation)
    where = cut(".".join(names))
    if problem["type"] == "invalid_key":
        return f"{where}: no such key; keys are words"
    if model and problem["type"] == "extra_forbidden":
        meant = find_meant(last, model.model_fields)
        hint = f"did you mean {'.'.join([*above, meant])}?" if meant else f"there are {', '.join(model.model_fields)}"
        return f"{where}: no such key; {hint}"
    if problem["type"] == "missing":
        return f"{where}: missing; set it to {takes}"
    return f"{where}={cut(repr(problem['input']))}: set it to {takes}"


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field or of its items, if it has one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_of, get_args(annotation))), None)
