"""Detects NaN or infinite values in the loss and the weights, and decides when they end a run.

The loss is checked only when the means of a metric window are read. The weights are checked only when a group starts,
when they are saved, and when the mean loss of a window is not finite. Other steps therefore never wait for the device.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from sunspot.checkpoint.tensors import tensors_in
from sunspot.data.source import Batch
from sunspot.errors import DivergedError
from sunspot.metric_names import LOSS
from sunspot.parallel.collectives import any_rank
from sunspot.parallel.sharding import is_dtensor
from sunspot.run.checkpoints import NAN_ACCEPTED, NAN_SINCE, NAN_WEIGHTS, NAN_WINDOWS
from sunspot.settings import PREFIX, Settings

MIN_BYTES = 2
"""Minimum size in bytes of the numbers to check, because torch cannot sum 8-bit numbers."""


class NanWatch:
    """Counts consecutive metric windows whose last step has a loss that is not finite.

    All workers see the same mean losses, and share their other findings, so that they make the same decision.
    """

    def __init__(
        self,
        settings: Settings,
        group: dist.ProcessGroup,
        before: Mapping[str, Any],
        model: torch.nn.Module,
        weights_checked: bool = True,
    ) -> None:
        """Continue from a state that `model` has loaded. `before` are the metrics of this state.

        `weights_checked` is False if this state's weights were never checked, as is the case for copies in memory.
        """
        self._limit = settings.max_nan_windows
        self._group, self._model = group, model
        names = (NAN_SINCE, NAN_WINDOWS, NAN_WEIGHTS, *([] if weights_checked else [NAN_ACCEPTED]))
        self.state = {name: before[name] for name in names if before.get(name)}
        "Entries for records and checkpoint metrics, which let a restart continue counting. Empty if all is finite."
        # A task may train with weights that are infinite on purpose, such as a mask.
        known = NAN_WEIGHTS in self.state or not self._limit
        if weights_checked and not known and not has_finite_weights(model):
            self.state[NAN_ACCEPTED] = 1
        self._looks_at_weights = self._limit > 0 and NAN_ACCEPTED not in self.state

    def look(self, record: Mapping[str, Any], newest: list[Batch], saves: bool) -> None:
        """Check a closed metric window. All workers call this together.

        `record` is the window's record. `newest` contains this worker's values from the window's last step. A loss
        that is not finite counts only in this last step. If the loss is finite again by then, the earlier loss was
        harmless, for example because it came from a few rows, or because a loss scaler skipped the step. The weights
        are checked if the window's mean loss is not finite, or if the state will be saved (`saves`).
        """
        losses = {name for name in names_of_losses(record) if not math.isfinite(record[name])}
        suspect = bool(losses)
        in_loss = False
        in_weights = not self.finite_weights
        if suspect or saves:
            values = [part[name] for part in newest for name in losses & part.keys()]
            found = not all(bool(value.isfinite().all()) for value in values)
            broken = self._looks_at_weights and not has_finite_weights(self._model)
            in_loss, in_weights, accepted = any_rank(self._group, found, broken, NAN_ACCEPTED in self.state)
            if accepted:  # under FSDP, perhaps in another worker's part
                self.state[NAN_ACCEPTED] = 1
        if not (in_loss or in_weights):
            self.state = self._accepted
            return
        began = record["step"] - record["steps"] + 1 if in_loss else record["step"]
        windows = self.state.get(NAN_WINDOWS, 0) + 1 if in_loss else 0
        since = self.state.get(NAN_SINCE, began)
        self.state = {**self._accepted, NAN_SINCE: since, NAN_WINDOWS: windows, NAN_WEIGHTS: int(in_weights)}

    @property
    def _accepted(self) -> dict[str, int]:
        """The metrics entry that marks infinite weights as intended, or an empty dict."""
        return {NAN_ACCEPTED: 1} if NAN_ACCEPTED in self.state else {}

    @property
    def finite_weights(self) -> bool:
        """True if the weights were finite when they were last checked."""
        return not self.state.get(NAN_WEIGHTS)

    def verdict(self, last: bool) -> DivergedError | None:
        """Return the error that should end the run now, or None. `last` is True if no step follows.

        The run ends after `max_nan_windows` windows in a row without a finite loss. It also ends if the loss or the
        weights are not finite at the last step. If `max_nan_windows` is 0, this always returns None.
        """
        windows = self.state.get(NAN_WINDOWS, 0)
        if not self._limit or NAN_SINCE not in self.state or not (last or windows >= self._limit):
            return None
        what = "the loss has" if windows else "the weights have"
        times = f"up to the last step ({PREFIX}MAX_NAN_WINDOWS=0 accepts that)"
        if windows >= self._limit:
            times = f"for {windows} windows of metrics in a row ({PREFIX}MAX_NAN_WINDOWS={self._limit})"
        return DivergedError(
            f"{what} not been finite since step {self.state[NAN_SINCE]}, {times}: lower {PREFIX}LEARNING_RATE, set "
            f"{PREFIX}CLIP_NORM, or fix the data. If started again, the run resumes from its newest checkpoint with "
            "finite weights. If it has no such checkpoint, start a run with another name"
        )


def names_of_losses(record: Mapping[str, Any]) -> list[str]:
    """Return `loss` if the record contains it, or else all names that end with `loss`."""
    return [LOSS] if LOSS in record else [name for name in record if name.endswith(LOSS)]


def has_finite_weights(model: torch.nn.Module) -> bool:
    """Return True if the weights that this worker trains are finite. This waits for the device.

    This checks the sum of the weights. The sum of finite weights is finite, unless the weights are so large that the
    model is useless anyway. If a model has no trainable parameters, its state_dict is checked instead.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sums: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for weight in trained or tensors_in(model.state_dict()):
            part = weight.to_local() if is_dtensor(weight) else weight
            numbers = torch.view_as_real(part) if part.is_complex() else part
            if numbers.is_floating_point() and numbers.itemsize >= MIN_BYTES:
                total = numbers.sum(dtype=torch.promote_types(numbers.dtype, torch.float32))
                sums.setdefault(total.device, []).append(total)
        return all(bool(torch.stack(totals).isfinite().all()) for totals in sums.values())
