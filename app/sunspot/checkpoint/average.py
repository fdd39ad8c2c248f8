"""The exponential moving average (EMA) of a run's weights, which its checkpoints store in `model.pt`.

Training continues from the trained weights. A checkpoint stores them as `trained` in each parameter's optimizer state,
so it has the same files with or without an average. Under FSDP, each worker averages its own part of the weights.

A 16-bit average would lose most updates, because they are smaller than the precision of 16 bits. The average of 16-bit
weights therefore has 32 bits. `model.pt` stores the average rounded to the weights' dtype, and the optimizer state
stores it with full precision as `average`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sunspot.parallel.sharding import is_fsdp, parameters_of, part_of

TRAINED = "trained"
"""Key of the trained weights in a parameter's optimizer state."""

AVERAGE = "average"
"""Key of the average in a parameter's optimizer state, if `model.pt` contains only the rounded average."""

NARROW = (torch.float16, torch.bfloat16)
"""Dtypes of weights that are averaged in float32."""


class WeightAverage:
    """The exponential moving average of an optimizer's parameters. Does nothing if `decay` is 0."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        """Create the average. Call this after the model's weights are loaded, but before the optimizer's state is."""
        self._decay = decay
        self._parameters = parameters_of(optimizer)
        self._averages: list[torch.Tensor] = []
        "The average of each parameter. Empty before the first step."
        self._weights: dict[int, torch.Tensor] = {}
        "The 16-bit weights, keyed by parameter index, while the model contains their averages."
        optimizer.register_load_state_dict_pre_hook(self._load)

    def update(self, step: int) -> None:
        """Add the weights after step `step` to the average. During the first steps, the decay is smaller."""
        if not self._decay:
            return
        if not self._averages:
            self._averages = self._copy_weights()
        decay = min(self._decay, (1 + step) / (10 + step))
        averages = list[torch.Tensor]()
        weights = list[torch.Tensor]()
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            own, weight = part_of(average), part_of(parameter.detach())
            if own.dtype == weight.dtype:
                averages.append(own)
                weights.append(weight)
            else:
                own.lerp_(weight.to(own.dtype), 1 - decay)  # one at a time, because each update copies its weights
        if averages:
            get_ema_multi_avg_fn(decay)(averages, weights, None)

    def _copy_weights(self) -> list[torch.Tensor]:
        """Return initial averages, which equal the current weights."""
        weights = [parameter.detach() for parameter in self._parameters]
        return [weight.float() if weight.dtype in NARROW else weight.clone() for weight in weights]

    @contextmanager
    def in_place(self, model: torch.nn.Module) -> Iterator[None]:
        """Context manager inside which the model uses the averaged weights."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def exchange(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state as checkpoints store it, with the average in `model` and the weights in `optimizer`."""
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
        """Undo `exchange`: load the trained weights and the average, and return the optimizer's state without them.

        The model's state is loaded before the optimizer's state, so the parameters contain the average at first.
        """
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
            weight = parameter.data  # not seen by PyTorch's count of changes; the value is restored later
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
                module.reshard()  # it has gathered the previous weights
