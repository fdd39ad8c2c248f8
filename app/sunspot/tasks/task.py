"""The interfaces of a task and of the run that is passed to a task's own loop.

`load_task` returns a `Task`. The user's module defines some of the task's functions. `PlainTask` (defaults.py) adds the
others for PyTorch, and an adapter (sunspot/adapters) adds them for another library.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch

from sunspot.data.source import Batch, Source
from sunspot.errors import SettingsError
from sunspot.settings import PREFIX, Settings

LOOP_FUNCTIONS = ("train", "augment", "augment_row")
"""Functions that only some training loops call."""

RATE_FUNCTIONS = ("build_optimizer", "build_scheduler", "schedule")
"""Functions that set the learning rates of a PyTorch task."""

FUNCTIONS = (
    *("build_model", "load_pretrained", "loss", "build_dataset", "find_sources", "compute_metrics", "checkpoint_files"),
    *("predict", "answer", "show", *LOOP_FUNCTIONS, *RATE_FUNCTIONS),
)
"""Functions that a task's module may define."""


class Task:
    """A loaded task.

    An optional function is None if the task does not define it. `settings.task_args` holds the task's hyperparameters.
    Adapters are subclasses, whose methods take precedence over the functions of the task's module.
    """

    build_model: Callable[[Settings, Source], Any]
    """Builds the model on the CPU and initializes it with torch's default generator.

    If the loop uses several models, return them in an `nn.ModuleDict` or `nn.ModuleList`."""

    load_pretrained: Callable[[Any], None] | None = None
    """Fills the parameters that `build_model` left on the meta device, once the model is on its device.

    Under fsdp, parameters are DTensors by then, so that each worker can read only its parts. Values that a checkpoint
    contains are loaded later."""

    build_optimizer: Callable[[Any, Settings], torch.optim.Optimizer]
    """Builds the optimizer for a model, with each group at its peak learning rate.

    A module's `build_optimizer` may also return several optimizers as a dict keyed by name. The default reads the
    settings."""

    loss: Callable[[Any, Batch], tuple[torch.Tensor, Batch]] | None = None
    """Returns the loss of each row and a dict of other metrics of each row, given the model and a batch.

    All are tensors of shape [B], and the loss is float. Because losses are not averaged, their mean over all workers is
    exact even if workers have different numbers of rows. A task with `train` needs no `loss`, except to evaluate
    held-out rows."""

    schedule: Callable[[int, int], float] | None = None
    """Returns the factor on the learning rates, given the optimizer step (from 0) and the total number of steps.

    The default reads the settings. It is None if the task has `build_scheduler`."""

    build_scheduler: Callable[..., Any] | None = None
    """Builds PyTorch schedulers to use instead of `schedule`. See train/learning_rates.py.

    It is called as `build_scheduler(optimizer, settings, total_steps)`."""

    train: "Callable[[TrainingRun], None] | None" = None
    """Loops over all steps instead of Sunspot's own loop (sunspot/train/loop.py)."""

    augment_row: Callable[[Batch], Batch] | None = None
    """Augments a training row and returns the changed columns. The global random generators are seeded for each row."""

    augment: Callable[[Batch, Callable[..., torch.Tensor]], Batch] | None = None
    """Augments a batch on the device and returns the changed columns, given the batch and `TrainingRun.draw`."""

    build_dataset: Callable[[Settings], Any] | None = None
    """Returns a map-style Dataset of training rows, or a pair of Datasets with the training and the held-out rows."""

    find_sources: Callable[[Settings], tuple[Source, Source | None]] | None = None
    """Returns sources (data/source.py) of the training rows and of the held-out rows, or None if no rows are held out.

    Tasks define this function if their rows are not in DATASET."""

    compute_metrics: Callable[[torch.Tensor, Batch], Mapping[str, Any]] | None = None
    """Returns a dict of numbers computed from all held-out rows at once, as `compute_metrics(scores, rows)`.

    `scores` holds the results of `predict`, float [N, ...]. `rows` has the columns `row` and `label`, and any others
    with one number per row. Both are on the CPU and sorted by `row`."""

    checkpoint_files: Callable[[Any, Mapping[str, Any]], dict[str, bytes]] | None = None
    """Returns the contents of extra files for a checkpoint, keyed by file name, given the model and its state_dict."""

    predict: Callable[[Any, Any], torch.Tensor] | None = None
    """Returns scores before softmax, float [B, classes], or values [B, ...] for a task without classes.

    It is called with the model and a batch without labels, on the model's device. A task on images may instead define
    predict(model, images) with uint8 [B, C, H, W]. Without `predict`, `sunspot.predict` cannot use the task's models,
    and the report shows no predictions."""

    answer: Callable[[Any, list[str], int], list[str]] | None = None
    """Returns an answer of at most `tokens` tokens to each prompt. The signature is `answer(model, prompts, tokens)`.

    `sunspot.predict` calls it."""

    show: Callable[[Any, Batch], Mapping[str, Any]] | None = None
    """Returns a dict of exhibits for the report, keyed by title, given a model and rows.

    An exhibit is a number, a table or images."""

    library_loop: Callable[[Any], None] | None = None
    """Trains a `Worker` with a library's Trainer, which takes the steps and schedules the learning rates.

    Only adapters define this function. It calls `LibraryRun.before_change` before each optimizer step, and
    `LibraryRun.end_step` after each step. Neither `train` nor `schedule` is called."""

    find_ray_trainer: Callable[[Settings, Source], str] | None = None
    """Returns the location of the Ray trainer that starts the workers, such as `ray.train.xgboost:XGBoostTrainer`.

    Raises `SettingsError` if the trainer's library is not installed. The default is Ray's TorchTrainer."""

    full_batch = False
    "True if every step uses all rows. Each row then stays on the same worker until the group ends."

    uncalled: ClassVar[Mapping[str, str]] = {}
    "Reasons, keyed by the functions that are never called. A module that defines one of these functions is rejected."

    unread: Mapping[str, str]
    "Reasons, keyed by the settings that the task ignores. Only the defaults of these settings are accepted."

    def __init__(self, module: Any, settings: Settings, unread: Mapping[str, str] | None = None) -> None:
        """Take the functions from a task's module.

        Raises `SettingsError` if the module defines a function in `uncalled`, or if a setting in `unread` is set.
        """
        self.module = module
        self.settings = settings
        self.unread = unread or {}
        self._refuse_uncalled()
        refuse_unread(settings, self.unread)
        for name in FUNCTIONS:
            if hasattr(module, name) and name not in self.uncalled and getattr(type(self), name, None) is None:
                setattr(self, name, getattr(module, name))

    @property
    def has_own_loop(self) -> bool:
        """True if the user's module defines a `train` function, which takes the steps."""
        return self.train is not None and not self.needs_all_workers

    @property
    def needs_all_workers(self) -> bool:
        """True if a library drives the workers, so no worker can keep training after another is lost."""
        return self.library_loop is not None or self.find_ray_trainer is not None

    def error(self, text: str) -> SettingsError:
        """Return an error whose message begins with the task's name."""
        return SettingsError(f"{PREFIX}TASK={self.settings.task}: {text}")

    def _refuse_uncalled(self) -> None:
        for name, reason in self.uncalled.items():
            function = getattr(self.module, name, None)
            # An imported function for learning rates may be intended for the library itself.
            imported = getattr(function, "__module__", None) != self.module.__name__
            if function is not None and not (name in RATE_FUNCTIONS and imported):
                raise self.error(f"{name} would never be called: {reason}")


def refuse_unread(settings: Settings, unread: Mapping[str, str]) -> None:
    """Raise `SettingsError` if a setting that the task does not read differs from its default.

    `unread` maps each setting's name to the reason and the fix, which follow the task's name in the message.
    """
    given = [name for name in unread if getattr(settings, name) != Settings.model_fields[name].default]
    if given:
        reason = unread[given[0]]
        alike = [name for name in given if unread[name] == reason]
        values = ", ".join(f"{PREFIX}{name.upper()}={getattr(settings, name)}" for name in alike)
        raise SettingsError(f"{values}: {settings.task} {reason}")


class TrainingRun(Protocol):
    """The run that is passed to a task's `train(run)` on each worker."""

    settings: Settings
    rank: int
    world_size: int
    device: torch.device
    model: Any
    "The task's model or collection of models, on the device. Gradients are averaged over the workers."
    optimizer: Any
    "The task's optimizer, or the default optimizer. If there are several, `optimizer[name]` returns one of them."
    position: int
    "Number of optimizer steps since the run began."
    total_steps: int
    weight: float
    """Weight of each row's loss in the backward pass.

    The sum of the weighted losses has the gradient of the mean over all rows of the step. The weight is 0 if the step
    has too few rows for all workers and this worker's batch is padding."""

    @property
    def epoch(self) -> int:
        """The epoch of the next step, counted from 1."""

    def batches(self) -> Iterator[Batch]:
        """Yield this worker's batch for each step, from `position` until the run ends or is stopped.

        Seeds the random generators and sets the scheduled learning rates before it yields a step's batch.
        All workers get the same number of batches and must run the same number of passes.
        """

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield parts of a batch, each with at most MICRO_BATCH_SIZE rows, and set `weight` for each part.

        Run one forward and backward pass per part. The last part's pass averages the gradients over the workers.
        """

    def draw(self, *shape: int) -> torch.Tensor:
        """Return random numbers in [0, 1) for each row of the batch, float32 [B, *shape], on the device.

        The numbers depend only on the seed, the step and the row's position in the step. Unlike numbers from torch's
        generators, they are the same for any number of workers. Add them to the batch before `parts` splits it.
        """

    def forward(self) -> AbstractContextManager[None]:
        """Return a context manager for a forward pass that applies PRECISION and measures the time."""

    def losses(self, batch: Batch) -> tuple[torch.Tensor, Batch]:
        """Call the task's `loss` inside `forward`, and return its result. `loss` is compiled if COMPILE is set."""

    def log(self, values: Batch) -> None:
        """Add named values to the metric history.

        Each value has one entry per row (shape [B]), or is the mean over the rows (shape []). The rows are those of the
        batch or, if `parts` splits the batch, those of the current part.
        """

    def clip(self, model: torch.nn.Module | None = None) -> None:
        """Clip the gradients of one model, or of all models together, to CLIP_NORM."""

    def step(self) -> None:
        """Record that the optimizer step of the batch was taken. Save, evaluate and report if it is time to do so.

        All workers must call this together. If the group restarts, this raises an error that ends the worker. Do not
        catch the error.
        """
