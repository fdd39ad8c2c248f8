"""Completes a task with the default optimizer and schedule, and combines several optimizers into one.

Also refuses settings that a kind of task does not read.
"""

import math
from collections.abc import Container, Mapping
from functools import partial
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from sunspot.errors import SettingsError, shorten
from sunspot.settings import PREFIX, Settings

READ_BY_DEFAULTS = {"build_optimizer": ("weight_decay",), "schedule": ("schedule", "warmup_steps")}
"""Settings that only the default functions of these names read."""


def fill_in(module: ModuleType, settings: Settings) -> SimpleNamespace:
    """Return the functions of a task's module, and the defaults for those that it does not define.

    Raises `SettingsError` if a setting is given that only a replaced default would read.
    """
    scheduled = {"schedule"} if hasattr(module, "build_scheduler") else set()
    refuse_unread(settings, unread_without_defaults(vars(module).keys() | scheduled))
    if scheduled & vars(module).keys():
        raise SettingsError(f"{PREFIX}TASK={settings.task}: has both schedule and build_scheduler; keep one of them")
    default = {} if scheduled else {"schedule": partial(learning_rate_factor, settings)}

    def combined(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
        built = getattr(module, "build_optimizer", build_optimizer)(model, settings)
        try:
            optimizer = Optimizers(built) if isinstance(built, Mapping) else built
        except (ValueError, AttributeError) as error:
            raise SettingsError(f"{PREFIX}TASK={settings.task}: its build_optimizer: {shorten(error)}") from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SettingsError(
                f"{PREFIX}TASK={settings.task}: its build_optimizer returned a {type(optimizer).__name__}; return a "
                "torch.optim.Optimizer, or a dict of several"
            )
        if is_scheduled(optimizer):
            raise SettingsError(
                f"{PREFIX}TASK={settings.task}: its build_optimizer makes a scheduler, whose learning rates the run "
                "would replace; return the scheduler from build_scheduler(optimizer, settings, total_steps)"
            )
        return optimizer

    return SimpleNamespace(**{**default, **vars(module), "build_optimizer": combined})


def unread_without_defaults(own: Container[str]) -> dict[str, str]:
    """Return the settings that are not read if a task brings its own functions of these names, for `refuse_unread`."""
    return {
        name: f"brings its own {function.removeprefix('build_')}, which does not read it; leave it at "
        f"{Settings.model_fields[name].default} (a task's own hyperparameters are in {PREFIX}TASK_ARGS)"
        for function, names in READ_BY_DEFAULTS.items()
        if function in own
        for name in names
    }


def refuse_unread(settings: Settings, unread: Mapping[str, str]) -> None:
    """Raise `SettingsError` if a setting that the task does not read differs from its default.

    `unread` maps each such setting to the end of a sentence about the task, with the reason and the fix.
    """
    given = [name for name in unread if getattr(settings, name) != Settings.model_fields[name].default]
    if given:
        reason = unread[given[0]]
        alike = [name for name in given if unread[name] == reason]
        values = ", ".join(f"{PREFIX}{name.upper()}={getattr(settings, name)}" for name in alike)
        raise SettingsError(f"{values}: {settings.task} {reason}")


def build_empty_optimizer(learning_rate: float) -> torch.optim.Optimizer:
    """Build an optimizer without weights or state that holds the learning rate for a library's own optimizer."""
    return torch.optim.SGD([torch.nn.Parameter(torch.empty(0))], lr=learning_rate)


def build_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Build AdamW with WEIGHT_DECAY on matrices, and no weight decay on norms and biases."""
    groups = decay_matrices(model, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, fused=fused_on_gpu(model))


def decay_matrices(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups of the trainable parameters: matrices with this weight decay, and norms and biases without it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": weight_decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def fused_on_gpu(model: torch.nn.Module) -> bool | None:
    """Return an optimizer's argument `fused`: True on a GPU, and elsewhere None, which leaves the choice to PyTorch."""
    return next(model.parameters()).is_cuda or None


def learning_rate_factor(settings: Settings, step: int, total_steps: int) -> float:
    """Return the factor on the peak learning rate at a step.

    The factor rises to 1 over WARMUP_STEPS. Then it stays at 1 if SCHEDULE is constant, or else falls to 0 just after
    the last step.
    """
    warmup = settings.warmup_steps
    if warmup < 1:
        warmup = math.ceil(warmup * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total_steps - warmup)
    if settings.schedule == "linear":
        return 1 - done
    return 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1.0


class Optimizers(torch.optim.Optimizer):
    """Several optimizers by name, each with its own parameters, that share one state and one list of groups.

    So a checkpoint looks like that of a single optimizer. Raises `ValueError` if two optimizers have the same
    parameter.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.named = dict(optimizers)
        super().__init__([group for each in self.named.values() for group in each.param_groups], {})
        for each in self.named.values():
            self.state.update(each.state)
        self._share()
        self.register_load_state_dict_post_hook(lambda _: self._share())

    def __getitem__(self, name: str) -> torch.optim.Optimizer:
        return self.named[name]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with each optimizer."""
        for each in self.named.values():
            each.step()

    def _share(self) -> None:
        """Let each optimizer use the common state and its own part of the groups."""
        groups = iter(self.param_groups)
        for each in self.named.values():
            each.__setstate__({"state": self.state, "param_groups": [*islice(groups, len(each.param_groups))]})


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that take the steps: the parts of `Optimizers`, or else the optimizer itself."""
    return list(optimizer.named.values()) if isinstance(optimizer, Optimizers) else [optimizer]


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a PyTorch scheduler was created for this optimizer, or for one of its parts."""
    # A scheduler wraps the `step` of its optimizer with a function that has this mark (torch 2.15).
    return any(hasattr(each.step, "_wrapped_by_lr_sched") for each in (optimizer, *optimizers_in(optimizer)))
