"""The default optimizer and schedule of PyTorch tasks, and a class that combines several optimizers into one."""

import math
from collections.abc import Container, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch

from sunspot.errors import shorten
from sunspot.formatting import kind_of
from sunspot.settings import PREFIX, Settings
from sunspot.tasks.task import Task

READ_BY_DEFAULTS = {"build_optimizer": ("weight_decay",), "schedule": ("schedule", "warmup_steps")}
"""Settings that only the default functions read, keyed by function."""


class PlainTask(Task):
    """A PyTorch task with a default optimizer and schedule."""

    def __init__(self, module: Any, settings: Settings) -> None:
        """Add the defaults to a task's module.

        Raises `SettingsError` if a setting has no effect because the module replaces the default that reads it.
        """
        scheduled = {"schedule"} if hasattr(module, "build_scheduler") else set()
        super().__init__(module, settings, unread_without_defaults(vars(module).keys() | scheduled))
        if self.schedule and self.build_scheduler:
            raise self.error("the module defines both schedule and build_scheduler; keep one of them")
        if not self.build_scheduler:
            self.schedule = self.schedule or partial(learning_rate_factor, settings)

    def build_optimizer(self, model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
        """Build the optimizer that the task's module defines, or the default optimizer.

        Several optimizers are combined in an `Optimizers`.

        Raises `SettingsError` if the module's `build_optimizer` does not return optimizers, or creates a scheduler.
        """
        built = getattr(self.module, "build_optimizer", build_optimizer)(model, settings)
        try:
            optimizer = Optimizers(built) if isinstance(built, Mapping) else built
        except (ValueError, AttributeError) as error:
            raise self.error(f"build_optimizer: {shorten(error)}") from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self.error(
                f"build_optimizer returned {kind_of(optimizer)}; return a torch.optim.Optimizer, or a dict of several"
            )
        if is_scheduled(optimizer):
            raise self.error(
                "build_optimizer creates a scheduler, but the run would replace its learning rates; return the "
                "scheduler from build_scheduler(optimizer, settings, total_steps)"
            )
        return optimizer


def unread_without_defaults(own: Container[str]) -> dict[str, str]:
    """Return the settings that a task ignores if it defines the functions in `own`, with a reason for each."""
    return {
        name: f"brings its own {function.removeprefix('build_')}, which does not read it; leave it at "
        f"{Settings.model_fields[name].default} (a task's own hyperparameters are in {PREFIX}TASK_ARGS)"
        for function, names in READ_BY_DEFAULTS.items()
        if function in own
        for name in names
    }


def build_empty_optimizer(learning_rate: float) -> torch.optim.Optimizer:
    """Build an optimizer that has no weights and only holds the learning rate for a library's own optimizer."""
    return torch.optim.SGD([torch.nn.Parameter(torch.empty(0))], lr=learning_rate)


def build_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Build an AdamW optimizer that applies WEIGHT_DECAY to matrices, but not to norms and biases."""
    groups = decay_matrices(model, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, fused=fused_on_gpu(model))


def decay_matrices(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay, and norms and biases without it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": weight_decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def fused_on_gpu(model: torch.nn.Module) -> bool | None:
    """Return the value to pass as an optimizer's `fused` argument: True on a GPU, or None to let PyTorch choose."""
    return next(model.parameters()).is_cuda or None


def learning_rate_factor(settings: Settings, step: int, total_steps: int) -> float:
    """Return the factor by which the peak learning rate is multiplied at a step.

    The factor rises to 1 over WARMUP_STEPS. Then it stays at 1 if SCHEDULE is constant; otherwise it falls and reaches
    0 just after the last step.
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
    """Several named optimizers that share one state and one list of groups.

    Checkpoints look like those of a single optimizer. Raises `ValueError` if two optimizers share a parameter.
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
        """Give each optimizer the shared state and its own groups."""
        groups = iter(self.param_groups)
        for each in self.named.values():
            each.__setstate__({"state": self.state, "param_groups": [*islice(groups, len(each.param_groups))]})


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers inside an `Optimizers`, or a list that contains only the given optimizer."""
    return list(optimizer.named.values()) if isinstance(optimizer, Optimizers) else [optimizer]


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a PyTorch scheduler was created for this optimizer or for an optimizer inside it."""
    # A scheduler wraps its optimizer's `step` in a function with this attribute (torch 2.15).
    return any(hasattr(each.step, "_wrapped_by_lr_sched") for each in (optimizer, *optimizers_in(optimizer)))
