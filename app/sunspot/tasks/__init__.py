"""A task is the module with a run's model, optimizer and loss, with a library's module or Trainer, or with trees."""

import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, cast

import torch

from sunspot.data.source import Batch, Source
from sunspot.errors import SettingsError, shorten
from sunspot.extras import how_to_install
from sunspot.settings import Settings
from sunspot.spelling import find_meant
from sunspot.tasks.defaults import fill_in
from sunspot.tasks.signatures import refuse_other_arguments

LOOP_FUNCTIONS = ("train", "augment", "augment_row")
"""Functions of a task that only some loops call."""

RATE_FUNCTIONS = ("build_optimizer", "build_scheduler", "schedule")
"""Functions that set the learning rates of a plain PyTorch task."""


class Adapter(NamedTuple):
    """How a task for another library becomes a `Task`."""

    location: str
    "Module and class, which is called with the task's module and the settings."
    rates: str
    "The source of its learning rates; `RATE_FUNCTIONS` are never called."
    loop: str = ""
    "The reason why `LOOP_FUNCTIONS` are never called; empty if they are."


ADAPTERS = {
    "build_module": Adapter(
        "sunspot.tasks.lightning_adapter:LightningTask",
        "configure_optimizers of its LightningModule returns the optimizer and its schedulers",
        "its LightningModule has hooks for it",
    ),
    "build_keras": Adapter(
        "sunspot.tasks.keras_adapter:KerasTask",
        "its Keras model brings its optimizer, and settings scale the rate",
    ),
    "build_trainer": Adapter(
        "sunspot.tasks.transformers_adapter:TrainerTask",
        "its Trainer builds the optimizer and its scheduler from its arguments",
        "its Trainer loops over the rows that build_dataset returns",
    ),
    "build_trees": Adapter(
        "sunspot.tasks.trees_adapter:TreesTask",
        "trees have one rate, in SUNSPOT_TASK_ARGS",
        "trees see all rows unchanged",
    ),
}
"""Adapter for each function by which a task names its library. A task defines at most one of these functions."""

EXTRAS = {
    **dict.fromkeys(("lightning", "pytorch_lightning", "torchmetrics"), "lightning"),
    **dict.fromkeys(("keras", "tensorflow"), "tensorflow"),
    **dict.fromkeys(("huggingface_hub", "peft", "tokenizers", "transformers"), "hf"),
    **dict.fromkeys(("lightgbm", "xgboost"), "trees"),
}
"""The extra that brings each package."""


class Task(Protocol):
    """The functions of a task module. `settings.task_args` holds its own hyperparameters."""

    def build_model(self, settings: Settings, source: Source) -> torch.nn.Module:
        """Build the model, on the CPU, initialized with torch's default generator.

        For a loop that calls several models: these in an `nn.ModuleDict` or `nn.ModuleList`.
        """

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
        """Return the loss of each row, float [B], and any further metrics of each row by name, [B].

        Per row, so that means over all workers are exact even if their shares differ.
        """

    # Optional: the first two have defaults by the settings (sunspot/tasks/defaults.py). A task with `train`
    # needs no `loss`; if it has one, held-out rows are evaluated by it.

    def build_optimizer(self, model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
        """Build the optimizer, with each group at its peak learning rate; or a dict of several, which are made one."""

    def schedule(self, step: int, total_steps: int) -> float:
        """Return the factor on the learning rates at optimizer step 0 .. total_steps - 1.

        A task may define `build_scheduler(optimizer, settings, total_steps)` instead (train/learning_rates.py).
        """

    def train(self, run: "TrainingRun") -> None:
        """Loop over all steps, in the place of ours (sunspot/train/loop.py)."""

    # augment_row(row) -> the columns of a training row that it changes; other random numbers are seeded for each row.
    # augment(batch, draw) -> the columns of a batch that it changes, on its device; `draw` is that of `TrainingRun`.
    # build_dataset(settings) -> a map-style Dataset of the training rows, or two, with that of the held-out rows.
    # find_sources(settings) -> (training rows, held-out rows or None), each a `Source` (data/source.py), for rows
    # other than those of DATASET.
    # compute_metrics(scores, rows) -> metrics by name, numbers, of all held-out rows at once: their scores by `predict`
    # (float [N, ...]), and their columns `row`, `label` and others of one number a row, on the CPU, sorted by `row`.
    # checkpoint_files(model, state) -> files, bytes by name, that each checkpoint holds besides, given the state_dict.
    # answer(model, prompts, tokens) -> a text for each prompt, of at most so many tokens, for `sunspot.predict`.
    # predict(model, batch) -> scores, float [B, classes] before softmax, or without classes values [B, ...], of a batch
    # without labels on the model's device; or predict(model, images), of images, uint8 [B, C, H, W]. Without it,
    # `sunspot.predict` cannot use the task's models, and the report shows no predictions.


class TrainingRun(Protocol):
    """A run as `train(run)` of a task sees it, on each worker."""

    settings: Settings
    rank: int
    world_size: int
    device: torch.device
    model: Any
    "The task's, on the device; its gradients are averaged over the workers. Of several, each item's."
    optimizer: Any
    "The task's, or the default; its state is that of `position`. Of several: `optimizer[name]`."
    position: int
    "Optimizer steps taken since the run began."
    total_steps: int
    weight: float
    """What the loss of a row counts: backward of the sum of the weighted losses gives the gradient of the mean over all
    rows of the step. 0 for a batch that is none of this worker's: a step may be too small for all workers."""

    @property
    def epoch(self) -> int:
        """The epoch of the step to take, from 1."""

    def batches(self) -> Iterator[Batch]:
        """Yield this worker's rows of each step, from `position` until the run ends or stops, which may be in any step.

        Before each, the random number generators are seeded by the step, and the rates set by the schedule. All
        workers get as many batches, and must make as many passes.
        """

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """Cut a batch into parts of at most MICRO_BATCH_SIZE rows, each with its `weight`; to make one pass of each.

        Gradients are averaged over the workers with the last.
        """

    def draw(self, *shape: int) -> torch.Tensor:
        """Random numbers for each row of the batch, from 0 to below 1; float32 [B, *shape], on the device.

        They are a function of the seed, the step and the row's place in it: the same at any number of workers, unlike
        those of torch's own generators. A column of the batch before `parts` cuts it.
        """

    def forward(self) -> AbstractContextManager[None]:
        """For a forward pass: computes as PRECISION says, and measures how long it takes."""

    def losses(self, batch: Batch) -> tuple[torch.Tensor, Batch]:
        """Return what `loss` of the task returns, in a `forward`; compiled as COMPILE says."""

    def log(self, values: Batch) -> None:
        """Add to the metric history, by name: a value of each row of the batch or part, [B], or their mean, []."""

    def clip(self, model: torch.nn.Module | None = None) -> None:
        """Scale down the gradient of a step, as CLIP_NORM says; of one of several models, or of all together."""

    def step(self) -> None:
        """To be called when a batch's optimizer step has been taken: counts it, saves, evaluates, reports.

        All workers call it together. Raises to end this worker when the group restarts; do not catch that.
        """


Predict = Callable[[torch.nn.Module, Batch], torch.Tensor]
"""The optional `predict` of a task."""


def load_predict(settings: Settings) -> Predict:
    """Import the task's `predict`, made one that takes a batch; raises `SettingsError` if it defines none.

    That of a task on images may take these alone.
    """
    return find_predict(load_task(settings), settings)


def find_predict(task: Task, settings: Settings) -> Predict:
    """Return what `load_predict` returns, of a task that is loaded."""
    predict: Callable[..., torch.Tensor] | None = getattr(task, "predict", None)
    if predict is None:
        raise SettingsError(
            f"SUNSPOT_TASK={settings.task}: defines no predict(model, batch) -> scores, so nothing can be predicted "
            "with its models; docs/predict.md has one to copy"
        )
    takes_batch = list(inspect.signature(predict).parameters)[1:] == ["batch"]
    return lambda model, batch: predict(model, batch if takes_batch or "image" not in batch else batch["image"])


def place_of(error: Exception) -> str:
    """Return file and line of an error of a module that was being imported."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    place = next(frame for frame in reversed(frames) if "importlib" not in frame.filename)
    return f"{place.filename}:{place.lineno}"


def _how_to_find(package: str, settings: Settings) -> str:
    """Say how a task's top module can be found that is not here."""
    if settings.job_id:
        return f"`sunspot submit --code FOLDER` brings the folder that has {package}.py, or name an image that has it"
    meant = find_meant(package, [path.stem for path in Path.cwd().glob("*.py")])
    hint = f"did you mean {meant}? Or " if meant else ""
    return f"{hint}run the command in the folder of {package}.py, or put that folder on PYTHONPATH"


def load_task(settings: Settings) -> Task:
    """Import the task, with defaults for what it leaves out; raises `SettingsError` if it cannot be used."""
    try:
        module = importlib.import_module(settings.task)
        function = next((name for name in ADAPTERS if hasattr(module, name)), "")
        adapter = ADAPTERS[function] if function else None
        build_task = pkgutil.resolve_name(adapter.location) if adapter else None
    except Exception as error:
        package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in EXTRAS:
            fix = how_to_install(EXTRAS[package])
        else:
            absent = package == settings.task.partition(".")[0]
            fix = _how_to_find(package, settings) if absent else f"mend {place_of(error)}"
        raise SettingsError(f"SUNSPOT_TASK={settings.task}: cannot be imported: {shorten(error)}; {fix}") from error
    if adapter:
        refuse_uncalled_functions(module, adapter, settings)
    refuse_unused_functions(module, function, settings)
    if build_task:
        return cast(Task, build_task(module, settings))
    needed = ("build_model",) if hasattr(module, "train") else ("build_model", "loss")
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        raise SettingsError(
            f"SUNSPOT_TASK={settings.task}: {module.__file__} does not define {', '.join(missing)}; nor "
            "build_module, build_keras, build_trainer or build_trees, which a task for a library defines"
        )
    refuse_other_arguments(settings.task, module)
    return cast(Task, fill_in(module, settings))


def refuse_uncalled_functions(module: ModuleType, adapter: Adapter, settings: Settings) -> None:
    """Raise `SettingsError` if a task for a library defines a function that this library's loop never calls."""
    for name in LOOP_FUNCTIONS:
        if adapter.loop and hasattr(module, name):
            raise SettingsError(f"SUNSPOT_TASK={settings.task}: {name} would never be called: {adapter.loop}")
    for name in RATE_FUNCTIONS:
        # An imported function may be meant for the library itself.
        if getattr(getattr(module, name, None), "__module__", None) == module.__name__:
            raise SettingsError(f"SUNSPOT_TASK={settings.task}: {name} would never be called: {adapter.rates}")


def refuse_unused_functions(module: ModuleType, adapted: str, settings: Settings) -> None:
    """Raise `SettingsError` for functions of a task that would not be called; `adapted` is its one for a library."""
    task = f"SUNSPOT_TASK={settings.task}"
    if hasattr(module, "build_dataset") and hasattr(module, "find_sources"):
        raise SettingsError(f"{task}: has both build_dataset and find_sources, which return the rows; keep one")
    if not hasattr(module, "compute_metrics"):
        return
    if adapted == "build_trainer":
        raise SettingsError(f"{task}: compute_metrics would never be called: its Trainer evaluates held-out rows")
    if not hasattr(module, "predict") and adapted not in ("build_keras", "build_trees"):
        raise SettingsError(f"{task}: compute_metrics gets the scores of predict(model, batch); define that, too")
    if hasattr(module, "train") and not hasattr(module, "loss"):
        raise SettingsError(
            f"{task}: compute_metrics would never be called: held-out rows are evaluated by loss(model, batch); define "
            "that, too"
        )
