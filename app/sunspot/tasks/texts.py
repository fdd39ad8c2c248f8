"""Tables of texts for language models' reports."""

from typing import Any

import torch

SHOWN = 5
"""The number of texts to show with the lowest losses, and with the highest losses."""


def by_loss(losses: torch.Tensor, **columns: list[Any]) -> list[dict[str, Any]]:
    """Return the rows with the lowest and the highest losses. `losses` has shape [rows]."""
    order = losses.argsort().tolist()
    chosen = dict.fromkeys([*order[:SHOWN], *order[-SHOWN:]])
    return [
        {"loss": losses[index].item()} | {name: column[index] for name, column in columns.items()} for index in chosen
    ]
