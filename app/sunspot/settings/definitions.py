"""Defines all settings of a run, for the training program and the submitter.

A setting is an environment variable with the prefix SUNSPOT_. The sentence below each field is its description in
`--help` and in the documentation. A field's `takes` is the text after "set it to" in the error for an invalid value.
Secrets are never settings.

Some kinds of tasks do not support every setting. The adapter for such a kind (`sunspot.adapters`) lists the unsupported
settings in `UNREAD_SETTINGS`, and rejects them.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)

from sunspot.credentials import URL_PASSWORD, find_credential, find_credential_arguments
from sunspot.errors import SettingsError
from sunspot.formatting import plural
from sunspot.settings.fields import DUMPED, PARSED, parse_json, read_docstrings, setting
from sunspot.settings.goal import check_budget, check_deadline
from sunspot.settings.job_context import JobContext
from sunspot.settings.mixture import check_dataset
from sunspot.settings.task_arguments import TaskArguments, plain
from sunspot.settings.worker_range import WorkerRange, choose_shard_degree, parse_workers
from sunspot.spelling import OTHER_SETTINGS, SUBMIT_OPTIONS, find_meant

PREFIX = "SUNSPOT_"

RUN_NAME_LENGTH = 38
"""Maximum number of characters in a run's name. It becomes part of names in Kubernetes, which have at most 47."""

RUN_NAME = r"[a-z]([a-z0-9-]{0,36}[a-z0-9])?"

MAX_VALUE_LENGTH = 200
"""Maximum number of characters of an invalid value that a message shows."""

NOT_A_SETTING = (
    "settings are stored with the run, where everyone can read them; let the task read it from the environment, "
    "which pods get from a Secret (env_secrets in a profile)"
)
"""Reason why a setting must not contain a credential, and the fix."""

READING_SHARE = 0.25
"""Fraction of a machine's cores that LOADER=ray reserves for reading, but at least one core."""


BUCKET_URLS = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
"""The URLs that STORAGE_PATH and DATASET accept, for messages."""


def _check_task(value: str) -> str:
    if value.endswith(".py"):
        raise ValueError("the task must be a module, not a file")
    return value


def _check_origin(value: str) -> str:
    if value.startswith("run:") and not re.fullmatch(RUN_NAME, value.removeprefix("run:")):
        raise ValueError('the text after "run:" must be the name of a run')
    return value


JsonObject = Annotated[dict[str, Any], PARSED, DUMPED]

Arguments = Annotated[
    TaskArguments,
    GetPydanticSchema(lambda _, handler: handler(dict[str, Any])),
    PARSED,
    AfterValidator(TaskArguments),
    PlainSerializer(lambda value: json.dumps(plain(value), sort_keys=True, default=dict), return_type=str),
]

Labels = Annotated[dict[str, str], PARSED, DUMPED]

Dataset = Annotated[str, BeforeValidator(check_dataset)]

TaskName = Annotated[str, AfterValidator(_check_task)]

Origin = Annotated[str, AfterValidator(_check_origin)]

WorkerCount = Annotated[WorkerRange, BeforeValidator(parse_workers), PlainSerializer(str, return_type=str)]


def _parse_steps_or_share(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf or (number > 1 and number % 1):
        raise ValueError("must be a whole number, or a fraction below 1")
    return number if 0 < number < 1 else int(number)


Deadline = Annotated[str, AfterValidator(check_deadline)]

Budget = Annotated[
    str, BeforeValidator(lambda value: value if isinstance(value, str) else str(value)), AfterValidator(check_budget)
]

StepsOrShare = Annotated[float, PlainValidator(_parse_steps_or_share)]


class Settings(BaseModel):
    """The settings of one run, validated together. They are immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: TaskName = setting(
        "sunspot.tasks.mnist",
        "an importable module, e.g. sunspot.tasks.mnist",
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$",
    )
    "Module with the model and the loss."
    run_name: str = setting(
        "mnist",
        "1 to 38 lower-case letters, digits and '-', starting with a letter and not ending with '-'",
        pattern=f"^{RUN_NAME}$",
    )
    "Name of the run. A run with the same name in the same storage is resumed."
    task_args: Arguments = setting({}, """a JSON object, e.g. {"width": 64}""")
    "The task's own hyperparameters, passed to it unchanged."
    init_from: Origin = setting(
        "", "run:NAME, or the path or URL of weights from torch.save, safetensors or torch.distributed.checkpoint"
    )
    "Initial weights for a run without a checkpoint."

    storage_path: str = setting(
        "runs",
        f"a local or NFS path, {BUCKET_URLS}",
        pattern=r"^((s3|gs|az|abfs)://[^/:]+(/.*)?|[^:]+)$",
    )
    "Directory or bucket that contains the runs."

    dataset: Dataset = setting(
        "sample",
        "sample, mnist, or a path or URL of Parquet, CSV, JSON lines, tar shards, Iceberg tables, image folders, or "
        "save_to_disk's output; or several of these with weights, e.g. a:0.7,b:0.3",
        min_length=1,
    )
    "Training data. Several sources with weights are a mixture."
    test_dataset: str = setting("", "a path or URL, like SUNSPOT_DATASET, or empty")
    "Held-out rows, if SUNSPOT_DATASET is a path. The default is the folder test/ next to train/, if it exists."
    test_share: float = setting(0, "a fraction >= 0 and < 1, e.g. 0.1", ge=0, lt=1)
    "Fraction of the rows to hold out if there are no other held-out rows. SUNSPOT_SEED selects these rows."
    image_size: int = setting(0, "an integer >= 0", ge=0, le=4096)
    "Height and width of scaled images. With 0, images keep their size, but are scaled to 64 if their sizes differ."
    data_root: str = setting("data", "a directory", min_length=1)
    "Directory for torchvision's copy of MNIST."
    data_cache: str = setting("", "a directory on the node's disk, or empty", pattern="^[^:]*$")
    "Directory in which each node caches what it reads from a dataset in a bucket. If empty, nothing is cached."
    data_cache_gb: float = setting(100, "a number above 0, e.g. 200", gt=0, allow_inf_nan=False)
    "Maximum size of SUNSPOT_DATA_CACHE in gigabytes. The least recently used data are removed first."

    loader: Literal["torch", "ray"] = setting("torch", "torch or ray")
    "Loader of the rows. torch keeps all rows in memory, and ray streams them with Ray Data."
    num_workers: WorkerCount = setting("2", "an integer >= 1, such as 4, or a range, such as 2..8")
    "Number of training workers (the world size). A range makes the run elastic."
    use_gpu: Literal["auto", "true", "false"] = setting("auto", "auto, true or false")
    "Use of GPUs. With auto, each worker gets a GPU if the cluster has enough of them."
    resources_per_worker: JsonObject = setting({}, """a JSON object, e.g. {"CPU": 4, "GPU": 1}""")
    "Ray resources of one worker. By default, Sunspot chooses them and prints the reason."

    epochs: int = setting(2, "an integer >= 1", ge=1)
    "Number of passes over the training rows. In a mixture, an epoch has as many rows as all sources together."
    max_steps: int = setting(0, "an integer >= 0", ge=0)
    "Number of optimizer steps after which the run ends, even within an epoch. 0 means no limit."
    global_batch_size: int = setting(128, "an integer >= 2, because batch norm needs two rows", ge=2)
    "Number of rows per optimizer step, summed over all workers."
    micro_batch_size: int = setting(0, "an integer >= 0", ge=0)
    "Maximum number of rows per forward pass. 0 means a worker's share of a step when all workers train."

    learning_rate: float = setting(1e-3, "a number above 0, e.g. 1e-3", gt=0, allow_inf_nan=False)
    "Peak learning rate, which the schedule scales."
    schedule: Literal["linear", "cosine", "constant"] = setting("linear", "linear, cosine or constant")
    "Shape of the learning rate's decay from its peak, for tasks that do not define a schedule."
    warmup_steps: StepsOrShare = setting(0, "an integer >= 0, or a fraction < 1 of all steps, e.g. 0.05")
    "Number of steps until the learning rate reaches its peak, for tasks that do not define a schedule."
    weight_decay: float = setting(0, "a number >= 0, e.g. 0.1", ge=0, allow_inf_nan=False)
    "AdamW's weight decay for matrices, for tasks that do not define an optimizer."
    clip_norm: float = setting(0, "a number >= 0, e.g. 1", ge=0, allow_inf_nan=False)
    "Maximum norm of the gradient, which is scaled down if it is larger. 0 turns clipping off."
    ema: float = setting(0, "a fraction >= 0 and < 1, e.g. 0.999", ge=0, lt=1)
    "Decay of the exponential moving average of the weights. With 0, `model.pt` contains the trained weights instead."

    seed: int = setting(0, "an integer from 0 to 2^32 - 1", ge=0, lt=2**32)
    "Seed for the row order and all random numbers."
    precision: Literal["fp32", "tf32", "bf16"] = setting("fp32", "fp32, tf32 or bf16")
    "Precision of the computation. tf32 multiplies matrices in TF32, and bf16 runs the forward pass with autocast."
    gradient_precision: Literal["fp32", "bf16"] = setting("fp32", "fp32 or bf16")
    "Precision in which workers exchange gradients."
    compile: Literal["off", "default", "max-autotune"] = setting("off", "off, default or max-autotune")
    "Mode of torch.compile, which needs a C or C++ compiler."
    graph: Literal["off", "auto"] = setting("off", "off or auto")
    """CUDA graphs for forward and backward passes. auto captures a graph for each frequent input shape, and
    prints the reason if it cannot."""
    parallel: Literal["ddp", "fsdp", "hsdp"] = setting("ddp", "ddp, fsdp or hsdp")
    """Strategy for distributing the model. ddp keeps a copy on each worker, and fsdp splits the model among all
    workers. hsdp keeps several copies, and splits each of them among SUNSPOT_SHARD_DEGREE workers."""
    shard_degree: int = setting(0, "an integer >= 0", ge=0)
    "Number of workers that hold one copy of the model under hsdp, or 0 for the workers of one node."
    reshard_after_forward: Literal["auto", "true", "false"] = setting("auto", "auto, true or false")
    """Parameters to free after the forward pass under fsdp and hsdp, and to gather again in the backward pass: those of
    the blocks (auto), all (true), or none (false)."""
    recompute: Literal["off", "blocks"] = setting("off", "off or blocks")
    "Activations to compute again in the backward pass instead of keeping them: none, or those inside the blocks."

    checkpoint_every_steps: int = setting(0, "an integer >= 0", ge=0)
    "Number of optimizer steps between checkpoints. 0 turns this off. The end of each epoch adds a checkpoint."
    checkpoint_every_s: float = setting(60, "seconds >= 0", ge=0, allow_inf_nan=False)
    "Seconds between checkpoints. 0 turns this off. The end of each epoch adds a checkpoint."
    checkpoints_to_keep: int = setting(3, "an integer >= 1", ge=1)
    "Number of best checkpoints to keep. The newest checkpoint is always kept, too."
    checkpoint_metric: str = setting("loss", "the name of a metric, e.g. loss or test_accuracy", min_length=1)
    """Metric by which checkpoints are ranked. The metric is computed on the held-out rows or, if there are no such
    rows, on the last 10,000 training rows."""
    checkpoint_order: Literal["min", "max"] = setting("min", "min or max")
    "Direction in which SUNSPOT_CHECKPOINT_METRIC improves: lower (min) or higher (max)."
    early_stop_evaluations: int = setting(0, "an integer >= 0", ge=0)
    "Number of evaluations without a better SUNSPOT_CHECKPOINT_METRIC after which the run ends. 0 turns this off."

    deadline: Deadline = setting("", "a date and time with a time zone, e.g. 2026-12-01T18:00Z, or empty")
    "Time by which the run should be done. `status` and `doctor` warn early if the run will miss it."
    budget: Budget = setting("", "an amount above 0 in the currency of the prices, e.g. 40, or empty")
    "Maximum cost of the run. Once its nodes have cost this amount, the run saves and stops. Needs the nodes' prices."

    trials: int = setting(8, "an integer from 1 to 10000", ge=1, le=10_000)
    "Number of runs in a search."
    concurrent_trials: int = setting(0, "an integer >= 0", ge=0)
    "Number of a search's trials that train at the same time. 0 means as many trials as fit."

    max_failures: int = setting(3, "an integer >= 0", ge=0)
    "Number of losses without notice that a run survives. A new checkpoint or a step after a loss resets the count."
    max_nan_windows: int = setting(3, "an integer >= 0", ge=0)
    "Number of consecutive metric windows with a NaN or infinite loss after which the run fails. 0 turns this off."
    max_driver_starts: int = setting(10, "an integer >= 1", ge=1)
    "Maximum number of times that a job's driver starts without a new checkpoint before the run fails."
    storage_timeout_s: float = setting(600, "seconds above 0", gt=0, allow_inf_nan=False)
    "Seconds for which storage may reject requests or fail to answer before the run ends."

    snapshot_cost: float = setting(0.01, "a fraction >= 0 and < 1, e.g. 0.01", ge=0, lt=1)
    "Maximum fraction of the training time to spend on copies of the state in memory. 0 turns copies off."
    hang_timeout_s: float = setting(300, "seconds >= 0", ge=0, allow_inf_nan=False)
    "Seconds without a step after which a rank's process is ended and counts as lost. 0 turns this off."
    survivors: Literal["auto", "off"] = setting("auto", "auto or off")
    "Handling of lost workers. With auto, the others keep training if possible. With off, all workers restart."

    report_every_s: float = setting(10, "seconds above 0", gt=0, allow_inf_nan=False)
    "Seconds between records of the metric history. Each checkpoint adds a record."
    predict_rows: int = setting(10_000, "an integer >= 0", ge=0)
    "Number of held-out rows that the newest checkpoint predicts for the report."

    tracking: Literal["", "mlflow", "wandb", "tensorboard"] = setting("", "mlflow, wandb, tensorboard, or empty")
    "Tracking service that the run reports to, if any."
    tracking_project: str = setting("sunspot", "the name of an experiment or project", min_length=1)
    "Name of the MLflow experiment or the Weights & Biases project."

    weights: Literal["pt", "safetensors"] = setting("pt", "pt or safetensors")
    "Format of the last checkpoint's weights. safetensors files are written next to model.pt, or replace it under fsdp."
    audit: bool = setting(False, "true or false")
    "True records the id of every row that each step consumed."
    accept: str = setting(
        "", "the name from an error message, several names separated by commas, or empty", pattern=r"^[\w,-]*$"
    )
    "Errors to override: a changed row order, lost checkpoints, a lost attempt, or too many workers for this machine."

    labels: Labels = setting({}, """a JSON object of strings, e.g. {"team": "vision"}""")
    "Labels by which `sunspot cost` groups costs, in addition to the profile's labels."

    job: JobContext = Field(default_factory=JobContext)
    "Values that the job's manifest sets, not the user."

    @property
    def sharded(self) -> bool:
        """True if each worker holds only a part of the model (fsdp and hsdp)."""
        return self.parallel != "ddp"

    @property
    def worker_multiple(self) -> int:
        """The number by which the number of workers must be divisible: SHARD_DEGREE under hsdp, otherwise 1."""
        return max(1, self.shard_degree) if self.parallel == "hsdp" else 1

    def environment(self) -> dict[str, str]:
        """Return all settings and all fields of `job` as environment variables, in the order of definition."""
        values = {**self.model_dump(exclude={"job"}), **self.job.model_dump()}
        return {PREFIX + name.upper(): _as_text(value) for name, value in values.items()}


SETTING_NAMES = tuple(name for name in Settings.model_fields if name != "job")
"""Names of the fields that users set."""

FIELDS = {**{name: Settings.model_fields[name] for name in SETTING_NAMES}, **JobContext.model_fields}
"""All fields that are read from environment variables: those that users set, and those that manifests set."""


IDENTITY = ("task", "task_args", "dataset", "test_share", "seed", "global_batch_size", "loader")
"""Settings that determine what a run's position and weights mean. They cannot change until the run's last step."""


def accepts(environment: Mapping[str, str], name: str) -> bool:
    """Return True if the setting ACCEPT tells the run to ignore the error called `name`.

    `environment` comes from `Settings.environment`.
    """
    return name in environment.get(PREFIX + "ACCEPT", "").split(",")


class SettingInfo(NamedTuple):
    """A setting's description for users."""

    variable: str
    default: str
    "The variable's default, which can be empty."
    takes: str
    meaning: str


def describe_settings(names: Iterable[str] = SETTING_NAMES) -> list[SettingInfo]:
    """Return descriptions of the settings with these field names, in this order. The default is all settings."""
    defaults = Settings.model_construct().environment()
    variables = {name: PREFIX + name.upper() for name in names}
    meanings = read_docstrings(Settings)
    return [
        SettingInfo(variable, defaults[variable], takes(name), meanings[name]) for name, variable in variables.items()
    ]


def takes(name: str) -> str:
    """Return a description of the values allowed for the setting with this field name."""
    extra: Any = FIELDS[name].json_schema_extra
    return extra["takes"]


def variable_of(name: str) -> str:
    """Return a setting's environment variable. `name` can be in either case, with or without the prefix."""
    return PREFIX + name.upper().removeprefix(PREFIX)


def load_settings(overrides: Mapping[str, str] | None = None) -> Settings:
    """Return the settings in the environment. `overrides`, whose names can lack the prefix, take precedence.

    Raises `SettingsError` with the variable, the value and the fix for each problem.
    """
    given = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    for name, value in (overrides or {}).items():
        given[variable_of(name)] = value
    values = {name.removeprefix(PREFIX).lower(): value for name, value in given.items() if value != ""}

    problems = [_misspelled(name) for name in given if name.removeprefix(PREFIX).lower() not in FIELDS]
    if values.get("test_dataset") and not {"sample", "mnist"}.isdisjoint(
        re.split("[,:]", values.get("dataset", "sample"))
    ):
        seen = f"{PREFIX}TEST_DATASET={cut(values['test_dataset'])}"
        problems.append(f"{seen}: set {PREFIX}DATASET to a path, too, or leave this setting empty")
    known = {name: value for name, value in values.items() if name in FIELDS}
    for name in list(known):
        held = _find_credential(known[name])
        if held:
            problems.append(f"{PREFIX}{name.upper()} {held}; {NOT_A_SETTING}")
            del known[name]  # so that no other message shows its value
    try:
        settings = _parse(known)
        choose_shard_degree(settings.num_workers, settings.worker_multiple)
    except ValidationError as error:
        problems += [_explain(problem) for problem in error.errors(include_url=False)]
    except SettingsError as error:
        problems.append(str(error))
    refuse(problems, "in the settings")
    return settings


def _parse(values: Mapping[str, str]) -> Settings:
    """Parse the values of fields in `FIELDS`. Raises `ValidationError` if a value is invalid."""
    job = {name: value for name, value in values.items() if name in JobContext.model_fields}
    return Settings.model_validate({**{name: value for name, value in values.items() if name not in job}, "job": job})


def refuse(problems: list[str], where: str) -> None:
    """Raise `SettingsError`, with one line per problem, if there are problems.

    `where` completes the message's first line, for example "2 problems in the settings:".
    """
    if problems:
        lines = sorted(set(problems))
        raise SettingsError("\n  ".join([f"{plural(len(lines), 'problem')} {where}:", *lines])) from None


def with_place(settings: Mapping[str, str], run: str | None, storage: str | None) -> dict[str, str]:
    """Return the settings, with a run's name and storage added if given.

    Raises `SettingsError` if the name or the storage is an empty string.
    """
    place = {"RUN_NAME": run, "STORAGE_PATH": storage}
    if "" in place.values():  # as a setting, it would mean the default
        raise SettingsError("the run's name or --storage is empty; set it to a value, or omit it")
    return {**settings, **{name: value for name, value in place.items() if value is not None}}


def setting_text(name: str, value: Any) -> str:
    """Return a value as text for a variable: a string unchanged, any other value as JSON.

    Raises `SettingsError` if the value cannot be converted to JSON.
    """
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except TypeError as error:
        raise SettingsError(f"{name}={value!r} is not a JSON value; use a string, a number or a boolean") from error


def recorded_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings that a run recorded (`Settings.environment`), except those unknown to this version."""
    values = {name.removeprefix(PREFIX).lower(): value for name, value in environment.items() if value != ""}
    return _parse({name: value for name, value in values.items() if name in FIELDS})


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return one line `NAME: old -> new` for each variable that differs."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name, '(unset)')} -> {after.get(name, '(unset)')}" for name in names]


def _find_credential(value: str) -> str:
    """Return a description of the credential in a setting's value, or an empty string if it has none."""
    if URL_PASSWORD.search(value):
        return "contains a password in a URL"
    found = find_credential(value)
    if found:
        return f"contains {found.form}"
    try:
        names = list(find_credential_arguments(parse_json(value))) if value.startswith("{") else []
    except ValueError:  # reported by the field's own check
        names = []
    return f"seems to contain a credential, because of the name {', '.join(names)}" if names else ""


def _misspelled(variable: str) -> str:
    name = variable.removeprefix(PREFIX)
    meant = find_meant(name, [field.upper() for field in FIELDS], OTHER_SETTINGS)
    if name in SUBMIT_OPTIONS:
        hint = f"it is an option of `sunspot submit`: --{name.lower()}"
    else:
        hint = f"did you mean {PREFIX}{meant}?" if meant else "`python -m sunspot.train --help` lists all settings"
    return f"{cut(variable)}: no such setting; {hint}"


def _explain(problem: Any) -> str:
    field = next(str(name) for name in problem["loc"] if name != "job")
    if problem["type"] == "string_unicode":
        # Python decodes bytes that are invalid in the locale's encoding as surrogates.
        fix = "use other characters, or set LC_ALL=C.UTF-8 if the name is in UTF-8"
        seen = f"{PREFIX}{field.upper()}={cut(problem['input'])}"
        encoding = sys.getfilesystemencoding()
        return f"{seen}: it contains bytes that are not valid in this process's encoding, {encoding}; {fix}"
    if field == "dataset" and problem["type"] == "value_error":
        return f"{PREFIX}DATASET={cut(problem['input'])}: {problem['ctx']['error']}"
    if field == "task" and str(problem["input"]).endswith(".py"):
        module = PurePath(problem["input"]).stem
        return f"{PREFIX}TASK={cut(problem['input'])}: set it to a module, without .py: {PREFIX}TASK={cut(module)}"
    return f"{PREFIX}{field.upper()}={cut(problem['input'])}: set it to {takes(field)}"


def cut(value: Any) -> str:
    """Return a value as text, shortened for an error message."""
    text = str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}... ({len(text)} characters)"


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
