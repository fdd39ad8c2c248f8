"""Runs a task's `predict` for prediction, evaluation and `sunspot check`."""

import torch

from sunspot.data.source import Batch, model_inputs
from sunspot.errors import SettingsError
from sunspot.settings import PREFIX, Settings
from sunspot.tasks import Predict


def forward_rows(
    predict: Predict, model: torch.nn.Module, rows: Batch, settings: Settings, classes: int = 0
) -> torch.Tensor:
    """Return the scores that a task's `predict` computes for rows on the model's device, in the run's PRECISION.

    Raises `SettingsError` unless the scores are a tensor [rows, classes], or [rows, ...] if `classes` is 0.
    """
    inputs = model_inputs(rows)
    first = next(iter(inputs.values()))
    count = len(first)
    with torch.autocast(first.device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
        scores = predict(model, inputs)
    got = list(getattr(scores, "shape", [type(scores).__name__]))
    fits = got == [count, classes] if classes else got[:1] == [count]
    if not fits:
        wanted = f"[{count}, {classes}] (rows and classes)" if classes else f"[{count}, ...], one for each row"
        raise SettingsError(f"{PREFIX}TASK={settings.task}: predict returned scores of shape {got}; return {wanted}")
    return scores
