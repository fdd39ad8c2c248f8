"""Loads a task: the module that defines what a run trains.

A plain task defines a model and a loss for PyTorch, and may define an optimizer, a schedule or a training loop
(`Task`). defaults.py completes it. A task for another library defines a single function, such as `build_keras`, and an
adapter from ADAPTERS turns the library's model into a `Task`. `load_task` checks the module before it returns a task.
The other modules here are tasks to use or to copy.
"""

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
    """Adapter that turns a task for another library into a `Task`."""

    location: str
    "Module and name of the class, which is called with the task's module and the settings."
    rates: str
    "Reason why `RATE_FUNCTIONS` are never called: the source of the learning rates."
    loop: str = ""
    "Reason why `LOOP_FUNCTIONS` are never called; empty if they are called."


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
"""Extra of sunspot-train that brings each package."""


class Task(Protocol):
    """The functions of a task's module. `settings.task_args` holds its own hyperparameters."""

    def build_model(self, settings: Settings, source: Source) -> torch.nn.Module:
        """Build the model on the CPU, initialized with torch's default generator.

        If the loop uses several models, return them in an `nn.ModuleDict` or `nn.ModuleList`.
        """

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
        """Return the loss of each row, float [B], and any further metrics of each row by name, [B].

        Losses are per row so that means over all workers are exact even if their shares differ.
        """

    # The other functions are optional. `build_optimizer` and `schedule` have defaults that read the settings
    # (sunspot/tasks/defaults.py). A task with `train` needs no `loss`; if it defines one, it evaluates held-out rows.

    def build_optimizer(self, model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
        """Build the optimizer with each group at its peak learning rate, or a dict of several optimizers by name."""

    def schedule(self, step: int, total_steps: int) -> float:
        """Return the factor on the learning rates at optimizer step 0 .. total_steps - 1.

        A task may define `build_scheduler(optimizer, settings, total_steps)` instead (train/learning_rates.py).
        """

    def train(self, run: "TrainingRun") -> None:
        """Loop over all steps, instead of Sunspot's own loop (sunspot/train/loop.py)."""

    # augment_row(row) -> the changed columns of a training row. The global random generators are seeded for each row.
    # augment(batch, draw) -> the changed columns of a batch, on its device. `draw` is the method of `TrainingRun`.
    # build_dataset(settings) -> a map-style Dataset of training rows, or a pair with a Dataset of held-out rows.
    # find_sources(settings) -> (training rows, held-out rows or None), each a `Source` (data/source.py), for rows that
    # are not in DATASET.
    # compute_metrics(scores, rows) -> numbers by name, computed from all held-out rows at once. `scores` are results of
    # `predict`, float [N, ...]. `rows` has the columns `row`, `label` and others with one number per row. Both are on
    # the CPU, sorted by `row`.
    # checkpoint_files(model, state) -> further files of each checkpoint, bytes by name, given the state_dict.
    # answer(model, prompts, tokens) -> a text of at most `tokens` tokens for each prompt, for `sunspot.predict`.
    # predict(model, batch) -> scores before softmax, float [B, classes], or values [B, ...] for a task without classes.
    # The batch has no labels and is on the model's device. A task on images may define predict(model, images) with
    # uint8 [B, C, H, W] instead. Without it, `sunspot.predict` cannot use the task's models, and the report shows no
    # predictions.
    # show(model, rows) -> exhibits for the report by their titles: a number, a table, or images.
    #
    # An adapter may also define:
    # find_library(settings, source) -> the library whose Ray trainer starts the workers. A loss restarts all of them.
    # begin_schedule(...) -> brings the library's own schedulers to the state after a number of steps.
    # full_batch: True if every step sees all rows.
    # Its `train` calls `run.optimizer.step()` before it changes the state, which waits until the state has been copied.


class TrainingRun(Protocol):
    """A run as a task's `train(run)` sees it on each worker."""

    settings: Settings
    rank: int
    world_size: int
    device: torch.device
    model: Any
    "The task's model, on the device, or a collection of several. Gradients are averaged over the workers."
    optimizer: Any
    "The task's optimizer, or the default, with its state at `position`. If there are several: `optimizer[name]`."
    position: int
    "Number of optimizer steps since the run began."
    total_steps: int
    weight: float
    """Weight of a row's loss. The backward pass of the sum of the weighted losses gives the gradient of the mean over
    all rows of the step. It is 0 if a step has too few rows for all workers and the batch is another worker's."""

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 1."""

    def batches(self) -> Iterator[Batch]:
        """Yield this worker's rows of each step, from `position` until the run ends or is stopped, possibly early.

        Before each batch, the random generators are seeded by the step, and the learning rates are set by the schedule.
        All workers get the same number of batches, and must make the same number of passes.
        """

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield parts of at most MICRO_BATCH_SIZE rows of a batch, and set `weight` for each. Make one pass per part.

        Gradients are averaged over the workers in the pass of the last part.
        """

    def draw(self, *shape: int) -> torch.Tensor:
        """Return random numbers for each row of the batch, in [0, 1); float32 [B, *shape], on the device.

        They depend only on the seed, the step and the row's position in the step. So they are the same for any number
        of workers, unlike numbers from torch's own generators. Add them to the batch before `parts` cuts it.
        """

    def forward(self) -> AbstractContextManager[None]:
        """Return a context for a forward pass, which applies PRECISION and measures the time."""

    def losses(self, batch: Batch) -> tuple[torch.Tensor, Batch]:
        """Return the results of the task's `loss`, called in `forward` and compiled if COMPILE is set."""

    def log(self, values: Batch) -> None:
        """Add values to the metric history by name: for each row of the batch or part, [B], or their mean, []."""

    def clip(self, model: torch.nn.Module | None = None) -> None:
        """Scale down a step's gradient to CLIP_NORM, for one of several models or for all of them together."""

    def step(self) -> None:
        """Count the optimizer step of a batch, after it was taken; then save, evaluate and report if that is due.

        All workers call this together. It raises an error to end this worker when the group restarts. Do not catch it.
        """


Predict = Callable[[torch.nn.Module, Batch], torch.Tensor]
"""Optional function `predict` of a task."""


def load_predict(settings: Settings) -> Predict:
    """Import the task and return its `predict`, adapted to take a batch even if the original takes only images.

    Raises `SettingsError` if the task does not define `predict`.
    """
    return find_predict(load_task(settings), settings)


def find_predict(task: Task, settings: Settings) -> Predict:
    """Return the `predict` of a loaded task, as `load_predict` does."""
    predict: Callable[..., torch.Tensor] | None = getattr(task, "predict", None)
    if predict is None:
        raise SettingsError(
            f"SUNSPOT_TASK={settings.task}: does not define predict(model, batch) -> scores, so its models cannot "
            "predict; docs/predict.md has an example to copy"
        )
    takes_batch = list(inspect.signature(predict).parameters)[1:] == ["batch"]
    return lambda model, batch: predict(model, batch if takes_batch or "image" not in batch else batch["image"])


def place_of(error: Exception) -> str:
    """Return the file and the line at which the import of a module failed."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    place = next(frame for frame in reversed(frames) if "importlib" not in frame.filename)
    return f"{place.filename}:{place.lineno}"


def _how_to_find(package: str, settings: Settings) -> str:
    """Return the fix for a message that a task's top-level module was not found."""
    if settings.job_id:
        return f"`sunspot submit --code FOLDER` uploads the folder of {package}.py, or use an image that contains it"
    meant = find_meant(package, [path.stem for path in Path.cwd().glob("*.py")])
    hint = f"did you mean {meant}? Or " if meant else ""
    return f"{hint}run the command in the folder of {package}.py, or put that folder on PYTHONPATH"


def load_task(settings: Settings) -> Task:
    """Import the task and complete it with defaults. Raises `SettingsError` if it cannot be used."""
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
            fix = _how_to_find(package, settings) if absent else f"fix {place_of(error)}"
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
            f"SUNSPOT_TASK={settings.task}: {module.__file__} does not define {', '.join(missing)}, nor "
            "build_module, build_keras, build_trainer or build_trees, which a task for another library defines"
        )
    refuse_other_arguments(settings.task, module)
    return cast(Task, fill_in(module, settings))


def refuse_uncalled_functions(module: ModuleType, adapter: Adapter, settings: Settings) -> None:
    """Raise `SettingsError` if a task for a library defines a function that this library's loop never calls."""
    for name in LOOP_FUNCTIONS:
        if adapter.loop and hasattr(module, name):
            raise SettingsError(f"SUNSPOT_TASK={settings.task}: {name} would never be called: {adapter.loop}")
    for name in RATE_FUNCTIONS:
        # An imported function may be intended for the library itself.
        if getattr(getattr(module, name, None), "__module__", None) == module.__name__:
            raise SettingsError(f"SUNSPOT_TASK={settings.task}: {name} would never be called: {adapter.rates}")


def refuse_unused_functions(module: ModuleType, adapted: str, settings: Settings) -> None:
    """Raise `SettingsError` if a task defines functions that would never be called because of its other functions.

    `adapted` is the task's function for a library, such as `build_keras`, or an empty text.
    """
    task = f"SUNSPOT_TASK={settings.task}"
    if hasattr(module, "build_dataset") and hasattr(module, "find_sources"):
        raise SettingsError(f"{task}: defines both build_dataset and find_sources to return the rows; keep one of them")
    if not hasattr(module, "compute_metrics"):
        return
    if adapted == "build_trainer":
        raise SettingsError(f"{task}: compute_metrics would never be called: its Trainer evaluates held-out rows")
    if not hasattr(module, "predict") and adapted not in ("build_keras", "build_trees"):
        raise SettingsError(f"{task}: compute_metrics gets the scores of predict(model, batch); define predict, too")
    if hasattr(module, "train") and not hasattr(module, "loss"):
        raise SettingsError(
            f"{task}: compute_metrics would never be called: held-out rows are evaluated by loss(model, batch); define "
            "loss, too"
        )
