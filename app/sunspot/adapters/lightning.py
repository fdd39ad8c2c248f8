"""Adapter for tasks that train a LightningModule.

Only this file and lightning_loop.py import Lightning, and they are imported only for tasks that define `build_module`.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer

from sunspot.data.order import Steps
from sunspot.data.source import Batch, Source, rows_in
from sunspot.errors import SettingsError, shorten
from sunspot.formatting import kind_of
from sunspot.log import warn_once
from sunspot.metric_names import LOSS, refuse_names
from sunspot.settings import Settings
from sunspot.tasks.defaults import unread_without_defaults
from sunspot.tasks.task import LOOP_FUNCTIONS, RATE_FUNCTIONS, Task

log = logging.getLogger(__name__)

PREFIXES = ("train", "val", "test")
"""Prefixes to remove from logged names such as `val_accuracy`, because the metric history has its own prefix."""

UNREAD_SETTINGS = {
    **unread_without_defaults(("build_optimizer", "schedule")),
    "parallel": "has a LightningModule, which is never sharded; set it to ddp",
    "compile": "has a LightningModule, which is never compiled; set it to off, and use torch.compile in build_module",
    "graph": "has a LightningModule, which is never captured in CUDA graphs; set it to off",
}
"""The reasons why settings do not work with a LightningModule, keyed by setting."""

UNCALLED = {
    **dict.fromkeys(LOOP_FUNCTIONS, "its LightningModule has hooks for it"),
    **dict.fromkeys(
        RATE_FUNCTIONS, "configure_optimizers of its LightningModule returns the optimizer and its schedulers"
    ),
}
"""Reasons, keyed by the functions that are never called."""

SET_BY_SCHEDULERS = frozenset({"lr", "momentum", "betas"})
"""Optimizer options that PyTorch's schedulers change."""

X_AXES = ("step", "epoch")
"""Names that modules log as an x axis for Lightning's own loggers, which Sunspot does not use."""


class LightningTask(Task):
    """Adapter for a task that defines `build_module(settings, source)`, which returns a `LightningModule`.

    `training_step` returns its batch's mean loss, and `validation_step` returns or logs the mean loss. If the module
    has no `validation_step`, `training_step` is used for the evaluation. Values that these two methods log (`self.log`)
    are added to the metric history. Values that other hooks log are dropped.
    """

    uncalled = UNCALLED

    def __init__(self, module: ModuleType, settings: Settings) -> None:
        """Create the adapter for a task's module. Raises `SettingsError` if Lightning cannot use a setting."""
        super().__init__(module, settings, UNREAD_SETTINGS)

    def library_loop(self, worker: Any) -> None:
        from sunspot.adapters.lightning_loop import train

        train(worker, self)

    def build_model(self, settings: Settings, source: Source) -> LightningModule:
        """Build the LightningModule. Raises `SettingsError` if it uses features that are not supported."""
        model = self.module.build_module(settings, source)
        if not isinstance(model, LightningModule):
            raise self.error(f"build_module returned {kind_of(model)}; return a lightning.LightningModule")
        missing = [name for name in ("training_step", "configure_optimizers") if not defines(model, name)]
        if missing:
            raise self.error(f"{type(model).__name__} does not define {', '.join(missing)}")
        if not model.automatic_optimization:
            raise self.error(
                "manual optimization is not supported, because Sunspot cannot see when a step is taken; leave "
                "automatic_optimization on"
            )
        if defines(model, "configure_model"):
            raise self.error(
                "configure_model is not supported, because checkpoints would lack the weights that it creates; create "
                "them in build_module"
            )
        model.log = LogCapture()  # type: ignore[assignment, method-assign]
        self._steps = Steps(rows_in(source), settings.global_batch_size)
        return model

    def build_optimizer(self, model: LightningModule, settings: Settings) -> torch.optim.Optimizer:
        """Build the optimizer with `configure_optimizers`, and keep the schedulers, if any."""
        # `configure_optimizers` may ask its trainer for the length of the run, before the real trainer exists.
        trainer = make_trainer(settings, self._steps, accelerator="cpu", plugins=[LightningEnvironment()])
        model.trainer = trainer
        trainer.strategy.connect(model)
        try:
            trainer.strategy.setup_optimizers(trainer)
        except Exception as error:  # raised by Lightning or by the module
            raise self.error(f"configure_optimizers failed: {shorten(error)}") from error
        [optimizer] = trainer.strategy.optimizers  # Lightning itself rejects more than one
        parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if parameters.isdisjoint(model.parameters()):
            raise self.error("configure_optimizers did not return an optimizer for the module's parameters")
        self._schedulers = trainer.strategy.lr_scheduler_configs
        if any(config.reduce_on_plateau for config in self._schedulers):
            raise self.error(
                "the module's scheduler follows a metric (ReduceLROnPlateau), but a run can resume from any step, so "
                "the learning rate must depend only on the step; choose another scheduler"
            )
        # Reset only the options that schedulers set or add. The optimizer may keep state in other options (Prodigy).
        kept = optimizer.defaults.keys() - SET_BY_SCHEDULERS
        self._at_first = [
            {name: value for name, value in group.items() if name != "params" and name not in kept}
            for group in optimizer.param_groups
        ]
        return optimizer

    def schedule(self, step: int, total_steps: int) -> float:
        """Raise `SettingsError`, because a LightningModule has scheduler objects instead of this function."""
        raise self.error("a LightningModule has no schedule function; train it with `python -m sunspot.train`")

    def begin_schedule(self, model: LightningModule, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rate and other scheduled options to their values after `step` optimizer steps.

        The schedulers that `configure_optimizers` returned are replayed from the beginning, because checkpoints do not
        store their state.
        """
        for group, first in zip(optimizer.param_groups, self._at_first, strict=True):
            group.update(first)
        with warnings.catch_warnings():
            # The schedulers step before the optimizer on purpose.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step")
            for taken in range(1, step + 1):
                count_from(model.trainer, taken, (taken - 1) // self._steps.per_epoch)
                self.advance_schedule(model, taken)

    def advance_schedule(self, model: LightningModule, step: int) -> None:
        """Step the schedulers that are due after the optimizer step `step`.

        As in Lightning, a `frequency` in steps is counted from the beginning of each epoch.
        """
        in_epoch = (step - 1) % self._steps.per_epoch + 1
        for config in self._schedulers:
            every = config.frequency * (self._steps.per_epoch if config.interval == "epoch" else 1)
            if (step if config.interval == "epoch" else in_epoch) % every == 0:
                model.lr_scheduler_step(config.scheduler, None)

    def loss(self, model: LightningModule, batch: Batch) -> tuple[torch.Tensor, Batch]:
        """Return the loss and the metrics of held-out rows, as `per_row` does."""
        given = model.on_after_batch_transfer(model.on_before_batch_transfer(batch, 0), 0)
        step = model.validation_step if defines(model, "validation_step") else model.training_step
        index = {"batch_idx": 0} if "batch_idx" in inspect.signature(step).parameters else {}  # as in Lightning
        return self.per_row(model, lambda: step(given, **index), len(batch["row"]))[:2]

    def per_row(self, model: LightningModule, step: Callable[[], Any], rows: int) -> tuple[torch.Tensor, Batch, Any]:
        """Call `step`, which processes a batch of `rows` rows.

        Returns the loss and the logged metrics, each of shape [rows], and the value that `step` returned. Every row
        gets the batch's mean. Means over all workers are therefore exact, even if workers have different numbers of
        rows.
        """
        log = cast(LogCapture, model.log)
        log.take()
        output, logged = step(), log.take()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        logged_loss = logged.pop("loss", None)
        loss = logged_loss if loss is None else loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
            raise self.error(
                f"a step's loss is {kind_of(loss)}{shape}; return the batch's mean loss as a scalar tensor, or "
                "a dict with that tensor under 'loss'"
            )
        means = {"loss": loss, **logged}
        each = {name: value.reshape(()).expand(rows) for name, value in means.items()}
        return each.pop("loss"), each, output


class LogCapture:
    """A replacement for a module's `log` that keeps the values for the metric history."""

    def __init__(self) -> None:
        self._values: Batch = {}
        self._names: dict[str, str] = {}
        "Original name of each value, before its prefix was removed."

    def __call__(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Store a value for the current batch. The other arguments of Lightning's `log` are ignored.

        Values named `step` or `epoch` are ignored with a warning. Raises `SettingsError` if the name or value is not
        allowed.
        """
        if name in X_AXES:
            warn_on_rank_0(f"self.log({name!r}) is ignored: every record of the metric history has the run's {name}")
            return
        short = next((name[len(p) + 1 :] for p in PREFIXES if name.startswith((f"{p}_", f"{p}/"))), name)
        if short != LOSS:
            refuse_names([short], f"self.log({name!r}) records")
        number = torch.as_tensor(value) if isinstance(value, (torch.Tensor, int, float)) else None
        if number is None or number.numel() != 1:
            raise SettingsError(
                f"self.log({name!r}) got {kind_of(value)}; log one number per batch (if the value is a metric object, "
                "call it and log the result)"
            )
        first = self._names.setdefault(short, name)
        if short != LOSS and name != first:
            both = f"self.log({name!r}) and self.log({first!r})"
            warn_on_rank_0(f"{both} are both recorded as {short}; the later value counts")
        self._values[short] = number.detach()

    def take(self) -> Batch:
        """Return the values logged since the last call."""
        values = self._values
        self._values, self._names = {}, {}
        return values


def warn_on_rank_0(text: str) -> None:
    """Log a warning once, and only on rank 0, because every rank would log the same one."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warn_once(log, text)


class PlannedTrainer(Trainer):
    """A Trainer that knows the length of the run before it has read any rows."""

    @property
    def estimated_stepping_batches(self) -> int:
        return self.max_steps


def make_trainer(settings: Settings, steps: Steps, **options: Any) -> PlannedTrainer:
    """Return a Trainer for this run, without Lightning's own loggers, checkpoints, evaluation and progress bar."""
    # Lightning's remarks about devices and missing dataloaders would only fill the rank's log.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    trainer = PlannedTrainer(
        devices=1,
        max_epochs=settings.epochs,
        max_steps=steps.total(settings.epochs, settings.max_steps),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
        gradient_clip_val=settings.clip_norm or None,
        **options,
    )
    trainer.fit_loop.max_batches = steps.per_epoch
    return trainer


def count_from(trainer: Trainer, step: int, epoch: int) -> None:
    """Set the Trainer's counters to `step` and `epoch`, which are counted from 0.

    These counters determine the module's `global_step` and `current_epoch`. Lightning itself sets them only when it
    loads one of its own checkpoints.
    """
    loop = trainer.fit_loop
    loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    epochs = dict.fromkeys(("ready", "started", "processed", "completed"), epoch)
    loop.epoch_progress.load_state_dict({"total": epochs, "current": epochs})


def defines(model: LightningModule, name: str) -> bool:
    """Return True if a module overrides a method or hook."""
    return getattr(type(model), name) is not getattr(LightningModule, name)
