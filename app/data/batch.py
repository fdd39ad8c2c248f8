"""What a model is given: some rows as tensors."""

from __future__ import annotations

import torch

Batch = dict[str, torch.Tensor]
"""The columns of a few rows: `row` int64 [B] (row ids), `image` uint8 [B, C, H, W], `label` int64 [B]."""
