"""What a model is given: some rows as tensors."""

from __future__ import annotations

import torch

Batch = dict[str, torch.Tensor]
"""The columns of a few rows: `row` int64 [B] (row ids), and what their source has, such as `image` uint8 [B, C, H, W]
and `label` int64 [B], or `text` uint8 [B, T]."""
