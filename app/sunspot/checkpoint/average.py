"""The exponential moving average of a run's weights (EMA), which is what its checkpoints have in `model.pt`.

Training goes on from other weights: those are in a checkpoint, too, as `trained` in the optimizer's state of each
parameter. So the form of checkpoints stays as it is, and in parts each worker has the average of its own.

An average in 16 bits would lose most of its updates, because they are smaller than its precision. So the average of
such weights has 32 bits. `model.pt` has it rounded to the weights' dtype, and the optimizer's state has it in full as
`average`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sunspot.parallel.sharding import is_fsdp, parameters_of, part_of

TRAINED, AVERAGE = "trained", "average"
"""Keys in a parameter's optimizer state: the weights, and the average if `model.pt` has it only rounded."""

NARROW = (torch.float16, torch.bfloat16)
"""Dtypes whose average is kept in float32."""


class WeightAverage:
    """The average of the parameters that an optimizer trains; nothing when `decay` is 0."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        """Make it after the weights have been loaded, and before the optimizer's state is."""
        self._decay, self._parameters = decay, parameters_of(optimizer)
        self._averages: list[torch.Tensor] = []
        "One for each parameter; empty before the first step."
        self._weights: dict[int, torch.Tensor] = {}
        "Weights of 16 bits by parameter number, while the average takes their place in the model."
        optimizer.register_load_state_dict_pre_hook(self._load)

    def update(self, step: int) -> None:
        """Take in the weights after `step` steps; while there are few, earlier ones count less."""
        if not self._decay:
            return
        if not self._averages:
            self._averages = self._copy_weights()
        decay = min(self._decay, (1 + step) / (10 + step))
        averages, weights = list[torch.Tensor](), list[torch.Tensor]()
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            own, weight = part_of(average), part_of(parameter.detach())
            if own.dtype == weight.dtype:
                averages.append(own)
                weights.append(weight)
            else:
                own.lerp_(weight.to(own.dtype), 1 - decay)  # one by one: each needs a copy of its weights
        if averages:
            get_ema_multi_avg_fn(decay)(averages, weights, None)

    def _copy_weights(self) -> list[torch.Tensor]:
        """Return an average that is equal to the current weights."""
        weights = [parameter.detach() for parameter in self._parameters]
        return [weight.float() if weight.dtype in NARROW else weight.clone() for weight in weights]

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
        optimizer = state["optimizer"]
        averages: dict[int, torch.Tensor] = {}
        values: dict[int, dict[str, Any]] = {}
        for number, (weight, average) in enumerate(zip(self._parameters, self._averages, strict=True)):
            rounded = average.to(weight.dtype)
            unrounded = {} if rounded is average else {AVERAGE: average}
            averages[id(weight)] = rounded
            values[number] = {**optimizer["state"].get(number, {}), TRAINED: weight, **unrounded}
        return {
            "model": {name: averages.get(id(tensor), tensor) for name, tensor in state["model"].items()},
            "optimizer": {**optimizer, "state": {**optimizer["state"], **values}},
        }

    def _load(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Undo `exchange`: the model has been loaded already."""
        trained = {number: values[TRAINED] for number, values in state["state"].items() if TRAINED in values}
        averages = {number: values[AVERAGE] for number, values in state["state"].items() if AVERAGE in values}
        if trained and self._decay:
            self._averages = self._copy_weights()
            for number, average in averages.items():
                self._averages[number].copy_(average)
        with torch.no_grad():
            for number, weight in trained.items():
                self._parameters[number].copy_(weight)
        others = {
            number: {name: value for name, value in values.items() if name not in (TRAINED, AVERAGE)}
            for number, values in state["state"].items()
        }
        return {**state, "state": {number: values for number, values in others.items() if values}}

    def _swap(self, model: torch.nn.Module) -> None:
        parameters = self._parameters if self._averages else []
        for number, (average, parameter) in enumerate(zip(self._averages, parameters, strict=True)):
            weight = parameter.data  # whose changes are not counted as the parameter's: it will be as it was
            if number in self._weights:
                weight.copy_(self._weights.pop(number))
                continue
            held = weight.clone()
            weight.copy_(average)
            if average.dtype == weight.dtype:
                average.copy_(held)
            else:
                self._weights[number] = held
        for module in model.modules() if self._averages else ():
            if is_fsdp(module):
                module.reshard()  # what it has gathered is of the other weights
