"""Tables of texts that language models show in the report."""

from typing import Any

import torch

SHOWN = 5
"""Number of texts with the lowest loss, and also with the highest loss, in the report."""


def by_loss(losses: torch.Tensor, **columns: list[Any]) -> list[dict[str, Any]]:
    """Return the rows with the lowest and the highest loss, each with its loss. `losses` are float [rows]."""
    order = losses.argsort().tolist()
    chosen = dict.fromkeys([*order[:SHOWN], *order[-SHOWN:]])
    return [
        {"loss": losses[index].item()} | {name: column[index] for name, column in columns.items()} for index in chosen
    ]
