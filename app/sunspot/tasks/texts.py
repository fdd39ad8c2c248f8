"""What language models show of themselves in the report."""

from typing import Any

import torch

SHOWN = 5
"""Texts in the report: so many of the easiest, and of the hardest."""


def by_loss(losses: torch.Tensor, **columns: list[Any]) -> list[dict[str, Any]]:
    """Return the easiest and the hardest rows of a table, each with its loss; `losses` are float [rows]."""
    order = losses.argsort().tolist()
    chosen = dict.fromkeys([*order[:SHOWN], *order[-SHOWN:]])
    return [
        {"loss": losses[index].item()} | {name: column[index] for name, column in columns.items()} for index in chosen
    ]
