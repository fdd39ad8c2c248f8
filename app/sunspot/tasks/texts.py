"""Builds tables of texts for the reports of runs that train language models."""

from typing import Any

import torch

SHOWN = 5
"""The number of texts to show with the lowest losses, and with the highest losses."""


def by_loss(losses: torch.Tensor, **columns: list[Any]) -> list[dict[str, Any]]:
    """Return a table of the texts with the lowest and the highest losses.

    `losses` has shape [texts]. `columns` are the table's other columns, with one entry per text.
    """
    order = losses.argsort().tolist()
    chosen = dict.fromkeys([*order[:SHOWN], *order[-SHOWN:]])
    return [
        {"loss": losses[index].item()} | {name: column[index] for name, column in columns.items()} for index in chosen
    ]
