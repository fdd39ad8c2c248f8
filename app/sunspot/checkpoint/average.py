"""The exponential moving average of a run's weights (EMA), which is what its checkpoints have in `model.pt`.

Training goes on from other weights: those are in a checkpoint, too, as `trained` in the optimizer's state of each
parameter. So the form of checkpoints stays as it is, and in parts each worker has the average of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sunspot.parallel.sharding import is_fsdp, parameters_of, part_of

TRAINED = "trained"


class WeightAverage:
    """The average of the parameters that an optimizer trains; nothing when `decay` is 0."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        """Make it after the weights have been loaded, and before the optimizer's state is."""
        self._decay, self._parameters = decay, parameters_of(optimizer)
        self._averages: list[torch.Tensor] = []
        "One for each parameter; empty before the first step."
        optimizer.register_load_state_dict_pre_hook(self._load)

    def update(self, step: int) -> None:
        """Take in the weights after `step` steps; while there are few, earlier ones count less."""
        if not self._decay:
            return
        if not self._averages:
            self._averages = [parameter.detach().clone() for parameter in self._parameters]
        decay = min(self._decay, (1 + step) / (10 + step))
        averages, weights = ([part_of(each.detach()) for each in every] for every in (self._averages, self._parameters))
        get_ema_multi_avg_fn(decay)(averages, weights, None)

    @contextmanager
    def in_place(self, model: torch.nn.Module) -> Iterator[None]:
        """Have the model compute with the average, until the context ends."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def exchange(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a training state as a checkpoint has it: `model` with the average, `optimizer` with the weights."""
        if not self._averages:
            return state
        averages = {id(weight): average for weight, average in zip(self._parameters, self._averages, strict=True)}
        optimizer = state["optimizer"]
        values = {
            number: {**optimizer["state"].get(number, {}), TRAINED: weight}
            for number, weight in enumerate(self._parameters)
        }
        return {
            "model": {name: averages.get(id(tensor), tensor) for name, tensor in state["model"].items()},
            "optimizer": {**optimizer, "state": {**optimizer["state"], **values}},
        }

    def _load(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Undo `exchange`: the model has been loaded already."""
        trained = {number: values[TRAINED] for number, values in state["state"].items() if TRAINED in values}
        if trained and self._decay:
            self._averages = [parameter.detach().clone() for parameter in self._parameters]
        with torch.no_grad():
            for number, weight in trained.items():
                self._parameters[number].copy_(weight)
        others = {
            number: {name: value for name, value in values.items() if name != TRAINED}
            for number, values in state["state"].items()
        }
        return {**state, "state": {number: values for number, values in others.items() if values}}

    def _swap(self, model: torch.nn.Module) -> None:
        for average, parameter in zip(self._averages, self._parameters, strict=bool(self._averages)):
            weight = parameter.data  # whose changes are not counted as the parameter's: it will be as it was
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)
        for module in model.modules() if self._averages else ():
            if is_fsdp(module):
                module.reshard()  # what it has gathered is of the other weights
