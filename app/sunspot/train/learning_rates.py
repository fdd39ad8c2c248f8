"""The learning rates of each step. A task's `schedule` scales them, or its PyTorch schedulers set them.

The rates are a function of the step. A run can therefore resume from any step, and checkpoints do not contain
schedulers. A task's scheduler does not get the real optimizer. It gets a stand-in with the same parameter groups, and
the options that it sets in the stand-in are copied to the real optimizer.
"""

import inspect
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from sunspot.errors import SettingsError, shorten
from sunspot.formatting import kind_of, plural
from sunspot.plan import Plan
from sunspot.settings import PREFIX
from sunspot.tasks import Task
from sunspot.tasks.defaults import Optimizers, optimizers_in

OF_STEP = (
    *(lr_scheduler.ConstantLR, lr_scheduler.CosineAnnealingLR, lr_scheduler.CyclicLR, lr_scheduler.ExponentialLR),
    *(lr_scheduler.LambdaLR, lr_scheduler.LinearLR, lr_scheduler.MultiStepLR, lr_scheduler.OneCycleLR),
    *(lr_scheduler.PolynomialLR, lr_scheduler.StepLR),
)
"""PyTorch schedulers, but not their subclasses, that can compute a step's rate without the previous steps."""

MAKERS_OF_RATES = (lr_scheduler.CyclicLR, lr_scheduler.OneCycleLR)
"""Schedulers that set the optimizer's rate when they are created. Earlier schedulers in a sequence start from it."""

EXAMINED_STEPS = 10_000
"""Number of steps that `describe` examines at the start of the run, and as many more spread over the whole run.

This takes half a second.
"""

MAX_NAMED_GROUPS = 6
"""Maximum number of groups that `describe` names."""

Options = dict[str, Any]
"""Options of a group, keyed by name. `lr` is a float. A scheduler may set others, such as `momentum`."""


class LearningRates:
    """The learning rates of an optimizer's parameter groups, as a function of the step."""

    def __init__(self, plan: Plan, task: Task, optimizer: Optimizer) -> None:
        """Copy the learning rates of a new `optimizer`. Call this before the optimizer loads a state."""
        self._plan = plan
        self._task = task
        self._built = stand_in_for(optimizer)
        self._played: dict[int, PlayedSchedulers] = {}
        "Played schedulers, keyed by the number of steps in the run."

    def at(self, step: int, total_steps: int) -> list[Options]:
        """Return each group's options at a step of a run with `total_steps` steps. The first step is 0.

        Raises `SettingsError` if the task's schedulers cannot be used.
        """
        if self._task.build_scheduler:
            if total_steps not in self._played:
                self._played[total_steps] = PlayedSchedulers(self._plan, self._task, self._built, total_steps)
            return self._played[total_steps].at(step)
        assert self._task.schedule
        # A task may compute rates with NumPy, whose numbers could not be loaded from a checkpoint.
        factor = float(self._task.schedule(step, total_steps))
        return [{"lr": float(group["lr"]) * factor} for group in self._built.param_groups]

    def describe(self, total_steps: int) -> list[str]:
        """Return lines with the first, the highest and the last learning rate of each group.

        Examines at most 2 * EXAMINED_STEPS steps. Raises `SettingsError` if a learning rate cannot be computed.
        """
        spread = range(0, total_steps, math.ceil(total_steps / EXAMINED_STEPS))
        steps = sorted({*range(min(total_steps, EXAMINED_STEPS)), *spread, total_steps - 1})
        rates = list(zip(*(self._rates_at(step, total_steps) for step in steps), strict=True))
        names: dict[str, list[str]] = {}
        for name, each in zip(self._names(), rates, strict=True):
            text = f"{each[0]:.1e} at first, {max(each):.1e} at most, {each[-1]:.1e} at last"
            names.setdefault(text, []).append(name)
        if len(names) == 1:
            return [f"learning rate: {next(iter(names))}"]
        lines = [f"learning rate of {join_names(alike)}: {text}" for text, alike in names.items()]
        more = sum(map(len, list(names.values())[MAX_NAMED_GROUPS:]))
        return lines[:MAX_NAMED_GROUPS] + ([f"learning rate: other rates in {plural(more, 'more group')}"] * bool(more))

    def _rates_at(self, step: int, total_steps: int) -> list[float]:
        try:
            return [options["lr"] for options in self.at(step, total_steps)]
        except Exception as error:
            if step == 0:  # the error of the first step is raised unchanged, with its traceback
                raise
            raise SettingsError(
                f"{PREFIX}TASK={self._plan.settings.task}: the learning rate of step {step + 1} of {total_steps} "
                f"cannot be computed: {type(error).__name__}: {shorten(error)}"
            ) from error

    def _names(self) -> Iterator[str]:
        """Yield a name for each group: its number, with the name of its optimizer if there are several optimizers."""
        several = self._built.named if isinstance(self._built, Optimizers) else {"": self._built}
        for name, optimizer in several.items():
            for number in range(1, len(optimizer.param_groups) + 1):
                group = f"group {number}" if not name or len(optimizer.param_groups) > 1 else ""
                yield f"{name} {group}".strip()


class PlayedSchedulers:
    """The schedulers that a task builds on a stand-in for its optimizer, for a run with `total_steps` steps.

    If all schedulers can jump (`can_jump`), they jump to the requested step. Otherwise, they take every step up to the
    requested step. If they have already passed that step, they are first built again.
    """

    def __init__(self, plan: Plan, task: Any, built: Optimizer, total_steps: int) -> None:
        """Build the schedulers. `built` is a stand-in for the task's new optimizer."""
        self._plan = plan
        self._built = built
        self._build = task.build_scheduler
        self._total_steps = total_steps
        self._begin()

    def at(self, step: int) -> list[Options]:
        """Return each group's options, as the schedulers set them at a step."""
        if self._jumps:
            for scheduler in self._schedulers:
                jump(scheduler, step)
        else:
            self._play_to(step)
        groups = zip(self._optimizer.param_groups, self._built.param_groups, strict=True)
        return [set_by_scheduler(group, before) for group, before in groups]

    def _begin(self) -> None:
        """Build the schedulers, starting at the first step."""
        self._optimizer = stand_in_for(self._built)
        self._step = 0
        self._schedulers = self._build_schedulers()
        alone = len({each.optimizer for each in self._schedulers}) == len(self._schedulers)
        self._jumps = alone and all(can_jump(each) and each.last_epoch == 0 for each in self._schedulers)

    def _play_to(self, step: int) -> None:
        """Step the schedulers up to this step, as a training loop does."""
        if step < self._step:
            self._begin()
        for _ in range(self._step, step):
            self._optimizer.step()
            for scheduler in self._schedulers:
                scheduler.step()
        self._step = step

    def _build_schedulers(self) -> list[LRScheduler]:
        """Build the task's schedulers. Raises `SettingsError` if any of them cannot be used."""
        more = {"steps_per_epoch": self._plan.steps.per_epoch}
        wanted = {name: value for name, value in more.items() if name in inspect.signature(self._build).parameters}
        built = self._build(self._optimizer, self._plan.settings, self._total_steps, **wanted)
        schedulers = list(built.values()) if isinstance(built, Mapping) else [built]
        for each in schedulers:
            returned = f"{PREFIX}TASK={self._plan.settings.task}: its build_scheduler returned {kind_of(each)}"
            if isinstance(each, ReduceLROnPlateau):
                raise SettingsError(
                    f"{returned}, which follows a metric, but a run can resume from any step, so the learning rates "
                    "must be a function of the step; choose another scheduler"
                )
            if not isinstance(each, LRScheduler):
                raise SettingsError(f"{returned}; return a scheduler from torch.optim, or a dict of several schedulers")
            if each.optimizer not in (self._optimizer, *optimizers_in(self._optimizer)):
                raise SettingsError(
                    f"{returned} for a different optimizer; create it with the optimizer that is passed to "
                    "build_scheduler"
                )
        return schedulers


class StandIn(Optimizer):
    """An optimizer that gives schedulers a copy of another optimizer's groups. Its steps change no parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([Group(each) for each in optimizer.param_groups], optimizer.defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class Group(Options):
    """A copy of an optimizer's parameter group that records which options are set later."""

    def __init__(self, options: Options) -> None:
        # A scheduler changes a rate in place if it is a tensor, and records the initial rate itself.
        super().__init__({name: copy_if_tensor(value) for name, value in options.items() if name != "initial_lr"})
        self.were_set = set[str]()

    def __setitem__(self, name: str, value: Any) -> None:
        self.were_set.add(name)
        super().__setitem__(name, value)


def copy_if_tensor(value: Any) -> Any:
    """Return a copy of a tensor on the CPU, or any other value unchanged."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def stand_in_for(optimizer: Optimizer) -> Optimizer:
    """Return a stand-in for an optimizer or for a combination of several optimizers."""
    if isinstance(optimizer, Optimizers):
        return Optimizers({name: stand_in_for(each) for name, each in optimizer.named.items()})
    return StandIn(optimizer)


def set_by_scheduler(group: Options, built: Options) -> Options:
    """Return the learning rate of a stand-in optimizer's `group`, and the other options that a scheduler has set there.

    Options that the task's own group (`built`) does not have are omitted.
    """
    others = (group.were_set if isinstance(group, Group) else set()) & built.keys() - {"params", "lr", "initial_lr"}
    return {"lr": float(group["lr"]), **{name: group[name] for name in others}}


def set_options(optimizer: Optimizer, options: list[Options]) -> None:
    """Set the options of each group. Tensors are replaced, because a save may still be reading the old tensors."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name, value in values.items():
            before = group.get(name)
            group[name] = torch.full_like(before, value) if isinstance(before, torch.Tensor) else value


def can_jump(scheduler: LRScheduler) -> bool:
    """Return True if a scheduler can compute the learning rate of any step without taking the previous steps."""
    if type(scheduler) is SequentialLR:
        return all(can_jump(part) and not isinstance(part, MAKERS_OF_RATES) for part in scheduler._schedulers)
    return type(scheduler) in OF_STEP


def jump(scheduler: LRScheduler, step: int) -> None:
    """Set the learning rate of a scheduler's optimizer to the rate at a step, counted from 0.

    This uses private methods, because the public method `step(epoch)` is deprecated and warns.
    """
    while isinstance(scheduler, SequentialLR):
        number = bisect_right(scheduler._milestones, step)
        step -= scheduler._milestones[number - 1] if number else 0
        scheduler = scheduler._schedulers[number]
    scheduler._update_lr(step)


def join_names(names: list[str]) -> str:
    """Join the names of parameter groups.

    After MAX_NAMED_GROUPS names, only the number of the others is given, as in `a, b and 3 more`.
    """
    more = len(names) - MAX_NAMED_GROUPS
    return ", ".join(names[:MAX_NAMED_GROUPS]) + (f" and {more} more" if more > 0 else "")
