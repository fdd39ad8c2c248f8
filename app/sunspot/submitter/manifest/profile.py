"""Loads profiles. A profile is a small YAML file with the differences between an environment and k8s/rayjob.yaml.

The string below a field is its text in docs/profiles.md. A field's `description` lists its allowed values. The error
for an invalid value ends with "set it to" and the description.
"""

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

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
"""Kueue's annotation for jobs with a variable number of pods. The operator copies it to the RayCluster."""

RESERVED = ("sunspot/", "app.kubernetes.io/part-of", QUEUE, ELASTIC)
"""Prefixes of labels and annotations that the renderer sets, or that have an option of their own."""

NAMESPACE_PATTERN = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"

MIN_NOTICE_S = 5
"""Shortest notice that leaves time for a save after Ray has detected the notice."""


def _to_text(value: Any) -> Any:
    """Convert a number to text, for example in `cpu: 6`. Any other value is returned unchanged."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _as_json(value: Any) -> Any:
    """Return the value after a round trip through JSON, which turns all keys into text."""
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:  # YAML also has dates and bytes
        raise ValueError("not a JSON value") from error


def _to_setting(value: Any) -> Any:
    """Return a setting's value as the text of its environment variable."""
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
"""An image reference, as parsed by container runtimes (distribution/reference)."""

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

OF_PLACE = ("name", "context", "traffic_price")
"""Keys of a place that are not keys of a profile."""

LABELS = 'labels with quoted values, e.g. {team: "vision"}, except Sunspot\'s own labels'
VARIABLES = "variables with quoted values, except SUNSPOT_ settings, which go under settings"
CPU = "a number of CPUs, e.g. 4 or 500m"
BYTES = "a number of bytes with a unit, e.g. 16Gi"
PRICE = "a number >= 0, e.g. 0.35"
TOLERATIONS = "a list of Kubernetes tolerations"
SIZES = "cpu, memory and ephemeral_storage"
"""Descriptions of the values that several keys take."""


def _takes(takes: str, default: Any = None) -> Any:
    return Field(default, description=takes)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Toleration(_Part):
    """A toleration, as in a pod spec."""

    key: Key | None = _takes("a taint key")
    operator: Literal["Exists", "Equal"] | None = _takes("Exists or Equal")
    value: LabelValue | None = _takes("a quoted taint value, and only with the operator Equal")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = _takes(
        "NoSchedule, PreferNoSchedule or NoExecute"
    )
    tolerationSeconds: int | None = _takes("a number of seconds")  # the name in Kubernetes

    @field_validator("value")
    @classmethod
    def _none_for_exists(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and info.data.get("operator") == "Exists":
            raise ValueError("a toleration with the operator Exists cannot have a value")
        return value


class Spot(_Part):
    """The label that identifies spot nodes. Workers run on these nodes by default, and the head never does."""

    label: Key = _takes("the label of spot nodes", ...)
    value: LabelValue = _takes("the label's value, in quotes", ...)
    tolerations: list[Toleration] | None = _takes(TOLERATIONS)
    "Tolerations that replace the default. By default, any taint with the same key is tolerated."


class Sizes(_Part):
    """A pod's resources per GPU or per worker."""

    cpu: Cpus | None = _takes(CPU)
    memory: Bytes | None = _takes(BYTES)
    ephemeral_storage: Bytes | None = _takes(BYTES)


class Machine(_Part):
    """One pod's resources and node requirements."""

    cpu: Cpus | None = _takes(CPU)
    "CPU request. CPU is not limited unless `cpu_limit` is set."
    cpu_limit: Cpus | None = _takes(CPU)
    "CPU limit, for namespaces with a quota that requires one. On the head, it also limits the autoscaler to 1 CPU."
    memory: Bytes | None = _takes(BYTES)
    "Memory request and limit, including /dev/shm."
    ephemeral_storage: Bytes | None = _takes(BYTES)
    "Local disk request and limit, for Ray's logs and for objects that Ray spills to disk."
    node_selector: dict[Key, LabelValue] | None = _takes(LABELS)
    tolerations: list[Toleration] | None = _takes(TOLERATIONS)
    pod: Json | None = _takes("the metadata and spec of a Kubernetes pod")
    "Pod fields that have no key of their own. They are merged last."


class PricedMachine(Machine):
    """A pod whose price a profile can set."""

    price: Price | None = _takes(PRICE)
    "Price of one pod per hour, in any currency."
    on_demand_price: Price | None = _takes(PRICE)
    "Price per hour of the same pod on an on-demand node. It determines the savings from spot nodes."


class Head(PricedMachine):
    """The head pod."""

    image: Image | None = _takes("an image reference, e.g. registry.example/sunspot:1")
    "Image for the head only, e.g. one without CUDA (`make image HEAD=1`)."
    per_worker: Sizes | None = _takes(SIZES)
    "Additional resources for each training worker beyond 16."
    evictable: bool | None = _takes("true or false")
    "True allows a node drain to evict the head. By default, the head stays until the run ends."


class Worker(PricedMachine):
    """A pod with training workers."""

    num_cpus: Annotated[int, Field(ge=1)] | None = _takes("an integer >= 1")
    "Number of CPUs that Ray can schedule. Defaults to `cpu`, rounded down."
    gpus: Annotated[int, Field(ge=0)] | None = _takes("an integer >= 0")
    "Number of GPUs per pod. Each GPU gets its own training worker."
    per_gpu: Sizes | None = _takes(SIZES)
    "A pod's resources for each of its GPUs. A resource of the whole pod, such as `cpu`, takes precedence."
    gpu_resource: Annotated[Key, Field(pattern="/")] | None = _takes("a resource name, e.g. nvidia.com/gpu")
    "Name of the resource that counts as one GPU. Taints with this key are tolerated."
    gpu_claim: ObjectName | None = _takes("the name of a ResourceClaimTemplate")
    "Claim template for dynamic resource allocation, instead of `gpu_resource`. The template must claim `gpus` GPUs."
    gpu_selector: dict[Key, LabelValue] | None = _takes(LABELS)
    "Labels of the nodes that have the required GPU."
    gpu_tolerations: list[Toleration] | None = _takes(TOLERATIONS)
    "Additional tolerations for GPU nodes. The taint of `gpu_resource` is always tolerated."
    data_cache: Bytes | None = _takes(BYTES)
    "Local disk for a cache of the dataset, in addition to `ephemeral_storage`. The pod's workers share the cache."
    placement: Literal["spread", "pack", "zone"] | None = _takes("spread, pack or zone")
    "Placement of pods: `spread` them over nodes, `pack` them into one zone if possible, or require one `zone`."

    def with_sizes(self) -> Self:
        """Return a copy in which each unset resource is set to its `per_gpu` value times the number of GPUs."""
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
    "True requires spot nodes, and false forbids them. Defaults to true if the profile has `spot`."
    max: Annotated[int, Field(ge=1)] | None = _takes("an integer >= 1")
    "Maximum number of pods in the group. Defaults to the number that NUM_WORKERS can need."
    after_s: Annotated[int, Field(ge=0)] = _takes("an integer >= 0", 300)
    """Seconds for which the earlier groups must lack nodes before this group starts. Once the earlier groups have had
    enough nodes for at least the same number of seconds, this group stops."""


class DataWorkers(Machine):
    """CPU pods for Ray Data (LOADER=ray), so that reading data does not add GPU nodes."""

    cpu: Cpus = _takes(CPU, ...)
    memory: Bytes = _takes(BYTES, ...)
    data_cache: Bytes | None = _takes(BYTES)
    "Local disk for a cache of the dataset, in addition to `ephemeral_storage`."
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
    spec: Json | None = _takes("the spec of a KubeRay RayJob")


class SecretKey(_Part):
    """A reference to one value in a Secret."""

    secret: ObjectName = _takes("the name of a Secret", ...)
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = _takes("a key in that Secret", ...)


class Profile(_Part):
    """The differences between one environment and k8s/rayjob.yaml. All keys are optional."""

    extends: Text | None = _takes("a profile's name, or a path relative to this file")
    "The profile that this one extends. To remove a value of that profile, set its key to null."
    notice_s: Annotated[int, Field(ge=MIN_NOTICE_S)] | None = _takes(f"an integer >= {MIN_NOTICE_S}")
    "Seconds between a pod's notice and the end of its node."
    namespace: Annotated[str, Field(pattern=f"^{NAMESPACE_PATTERN}$")] | None = _takes("a namespace's name")
    cloud: bool | None = _takes("true or false")
    "True rejects the default image and bucket, because on a cloud both must be your own."
    image: Image | None = _takes("an image reference, e.g. registry.example/sunspot:1")
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] | None = _takes("IfNotPresent, Always or Never")
    image_pull_secrets: list[ObjectName] | None = _takes("a list of Secret names")
    code: Text | None = _takes("a folder (only for `submit`), or an archive as URL@sha256:HASH")
    "Your own code, which comes first on sys.path in every pod."
    service_account: ObjectName | None = _takes("a service account's name")
    "Service account of all pods, used for workload identity."
    assigned_ids: bool | None = _takes("true or false")
    "True lets the namespace assign the pods' user and group ids, as on OpenShift. By default, both are 1000."
    env: dict[Variable, str] | None = _takes(VARIABLES)
    "Environment variables of all pods. Put credentials into `env_secrets`."
    env_from_secrets: list[ObjectName] | None = _takes("a list of Secret names")
    "Secrets to load as environment variables, one variable per key. All of these Secrets must exist."
    env_secrets: dict[Variable, SecretKey] | None = _takes(
        "variables with one Secret key each, e.g. {TOKEN: {secret: hub, key: token}}"
    )
    priority_class: ObjectName | None = _takes("the name of a PriorityClass")
    labels: dict[OwnKey, LabelValue] | None = _takes(LABELS)
    "Labels for the RayJob and its pods."
    annotations: dict[OwnKey, str] | None = _takes(LABELS.replace("labels", "annotations"))
    "Annotations for the RayJob and its pods."
    settings: (
        dict[Annotated[str, BeforeValidator(_setting_name)], Annotated[str, BeforeValidator(_to_setting)]] | None
    ) = _takes("settings and their values, e.g. {EPOCHS: 5}")
    spot: Spot | None = _takes("the label and value of spot nodes")
    head: Head | None = _takes("the head pod's cpu, memory and so on")
    worker: Worker | None = _takes("a training pod's cpu, memory, gpus and so on")
    workers: Annotated[list[WorkerGroup], Field(min_length=1)] | None = _takes("a list of training pod groups")
    "Groups of training pods, in order of preference. Each group inherits the values in `worker`."
    data_workers: DataWorkers | None = _takes("a data pod's cpu and memory, and the min and max number of data pods")
    pre_running_deadline_s: Seconds | None = _takes("an integer >= 1")
    "Seconds within which all pods must be ready."
    active_deadline_s: Seconds | None = _takes("an integer >= 1")
    "Time limit of one attempt in seconds. By default, attempts have no limit."
    ttl_s: Annotated[int, Field(ge=0)] | None = _takes("an integer >= 0")
    "Seconds between the end of the job and the deletion of its cluster."
    backoff_limit: Annotated[int, Field(ge=0, le=10)] | None = _takes("an integer from 0 to 10")
    "Number of attempts after the first, each in its own cluster."
    queue: ObjectName | None = _takes("the name of a Kueue LocalQueue")
    rayjob: JobPatch | None = _takes("the metadata and spec of a KubeRay RayJob")
    "RayJob fields that have no key of their own. They are merged last."
    places: Annotated[list["Place"], Field(min_length=1)] | None = _takes(
        "a list of places, e.g. [{name: us-east, context: gke-us-east}]"
    )
    "Clusters, or groups of nodes, in which the run can train. `submit` chooses one of them."

    @field_validator("places")
    @classmethod
    def _named_once(cls, value: list["Place"] | None) -> list["Place"] | None:
        names = [each.name for each in value or ()]
        if len(names) > len(set(names)):
            raise ValueError("two places have the same name")
        return value

    @property
    def groups(self) -> list[WorkerGroup]:
        """The groups of training pods: `workers`, or a single group with the values in `worker`."""
        groups = self.workers or [WorkerGroup.model_construct(**dict(self.worker or Worker()))]
        return [group.with_sizes() for group in groups]


class Place(Profile):
    """A cluster, or a group of nodes in a cluster, with the profile keys whose values differ there."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")] = _takes(
        "at most 32 lower-case letters, digits and '-'", ...
    )
    context: Text | None = _takes("a context of the kubeconfig")
    "The context of the cluster. By default, the place is in the current context's cluster."
    traffic_price: Price | None = _takes(PRICE)
    "Price of 10^9 bytes of traffic between the place and the bucket. The choice of a place takes it into account."
    extends: None = _takes("nothing, because a place extends its profile")
    places: None = _takes("nothing, because a place cannot contain places")


Profile.model_rebuild()


def manifests() -> Path:
    """Return the k8s folder, which is in the installed package or at the top of the repository."""
    here = Path(__file__).resolve()
    within = here.parents[1] / "k8s"
    return within if within.is_dir() else here.parents[4] / "k8s"


def load_profile(name: str, given: Mapping[str, Any], place: str | None = None) -> Profile:
    """Load a profile by name or path, including the profiles that it extends.

    If `place` is not None, the values of the place with this name override the profile's values. Values in `given`
    override both. Raises `SettingsError` with a list of all problems if there are any.
    """
    merged = functools.reduce(_merge, reversed(_read_chain(name).values()))
    there = {} if place is None else _find_place(name, merged, place)
    merged = _merge(_merge(merged, there), given)
    worker = merged.get("worker")
    groups = merged.get("workers")
    if isinstance(worker, dict) and isinstance(groups, list):
        merged["workers"] = [_merge(worker, group) if isinstance(group, dict) else group for group in groups]
    try:
        return Profile.model_validate(merged)
    except ValidationError as error:
        refuse([_explain(problem) for problem in error.errors(include_url=False)], f"with profile {name}")
        raise


def _find_place(name: str, content: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the keys that a place sets for its profile. Raises `SettingsError` if the profile has no such place."""
    entries = content.get("places")
    found = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    names = [str(each.get("name")) for each in found]
    if place not in names:
        fix = f"choose one of {', '.join(names)}" if names else "add it to the key places of your profile"
        raise SettingsError(f"profile {name} has no place {cut(place)!r}; {fix}")
    there = found[names.index(place)]
    return {key: value for key, value in there.items() if key not in OF_PLACE}


class ProfileSource(NamedTuple):
    """A profile's name or path, and the name of one of its places or None."""

    name: str
    place: str | None = None


def find_origin(source: ProfileSource, *keys: str) -> str:
    """Return the name of the place or profile that sets the value at the path `keys`, or an empty string.

    Searches the place, the profile and the profiles that it extends. In a list, only the first item is searched.
    Settings match with or without their prefix, in upper or lower case.
    """
    chain = _read_chain(source.name)
    contents = {f"profile {label}": content for label, content in chain.items()}
    if source.place is not None:
        merged = functools.reduce(_merge, reversed(chain.values()))
        contents = {f"place {source.place}": _find_place(source.name, merged, source.place), **contents}
    for label, content in contents.items():
        value: Any = content
        for key in keys:
            value = value[0] if isinstance(value, list) and value else value
            named = value if isinstance(value, dict) else {}
            value = next((each for name, each in named.items() if key in (name, _setting_name(name))), None)
        if value is not None:
            return label
    return ""


def _read_chain(name: str) -> dict[str, dict[str, Any]]:
    """Read a profile and the profiles that it extends. The result is keyed by name or path, starting with `name`."""
    contents: dict[str, dict[str, Any]] = {}
    label = name
    seen: dict[str, Path] = {}
    path: Path | None = _find(name, Path())
    while path:
        place = os.path.abspath(path)
        if place in seen:
            *_, last = seen.values()
            raise SettingsError(
                f"profiles cannot extend each other in a circle: {last} extends {path.name}; remove one `extends`"
            )
        seen[place] = path
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise SettingsError(f"{path} is not a profile; write it as a mapping, such as notice_s: 30")
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
            f"there is no profile named {cut(name)!r}; {hint} one of {known}, or pass the path of your own profile, "
            "such as ./mine.yaml"
        )
    return shipped[name]


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings by key. A value in `over` replaces the value in `under`, and a null removes it."""
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
    """Describe a validation error with its key, value and fix."""
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
        return f"{where} is not a valid key; keys must be text"
    if model and problem["type"] == "extra_forbidden":
        meant = find_meant(last, model.model_fields)
        hint = (
            f"did you mean {'.'.join([*above, meant])}?" if meant else f"choose one of {', '.join(model.model_fields)}"
        )
        return f"{where} is an unknown key; {hint}"
    if problem["type"] == "missing":
        return f"{where} is missing; set it to {takes}"
    return f"{where}={cut(repr(problem['input']))} is not valid; set it to {takes}"


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model of a field or of its items, or None if there is no model."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_of, get_args(annotation))), None)
