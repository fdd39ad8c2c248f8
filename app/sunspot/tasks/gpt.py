"""A small GPT that predicts bytes of text. TASK_ARGS can make it large enough for sharding (PARALLEL=fsdp).

It uses the pre-norm blocks of GPT-2 (Radford et al., 2019). DATASET is the path of a text file, or `sample` for the
language reference that comes with Python. TASK_ARGS: `layers` (4), `width` (128), `heads` (4), `context` (128 bytes),
and `tied` (true if the output layer shares the weights of the byte embedding).
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sunspot.data.source import Batch, Source
from sunspot.data.text import open_text
from sunspot.errors import SettingsError
from sunspot.settings import Settings
from sunspot.tasks.defaults import decay_matrices, fused_on_gpu
from sunspot.tasks.images import schedule
from sunspot.tasks.texts import by_loss

__all__ = ["build_model", "build_optimizer", "find_sources", "loss", "schedule", "show"]

DEFAULTS = {"layers": 4, "width": 128, "heads": 4, "context": 128, "tied": True}

WEIGHT_DECAY = 0.1
"""Weight decay of matrices, as in GPT-3 (Brown et al., 2020). Norms and biases have none."""

INIT_STD = 0.02
"""Standard deviation of the initial weights (GPT-2)."""


class GPT(nn.Module):
    """A causal transformer that predicts the next byte."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, context: int, tied: bool) -> None:
        super().__init__()
        self.byte = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # Each block adds to the residual stream twice. Scaling keeps the sum from growing with the depth.
                adds_to_stream = name.endswith("out.weight")
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * layers) if adds_to_stream else INIT_STD)
        if tied:
            self.head.weight = self.byte.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next byte, float [B, T, vocabulary]. `text` contains bytes as int64 [B, T]."""
        stream = self.byte(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))


class Block(nn.Module):
    """Causal self-attention followed by a two-layer MLP. Input and output are float [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_in, self.feed_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        batch, length, width = stream.shape
        parts = self.attention_in(self.attention_norm(stream)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return stream + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(stream))))


def find_sources(settings: Settings) -> tuple[Source, Source | None]:
    return open_text(settings.dataset, read_sizes(settings)["context"])


def build_model(settings: Settings, source: Source) -> nn.Module:
    return GPT(source.classes, **read_sizes(settings))


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    groups = decay_matrices(model, WEIGHT_DECAY)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=fused_on_gpu(model))


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Return each row's mean cross-entropy in nats, and its accuracy and bits per byte as metrics."""
    text = batch["text"].long()
    scores = model(text[:, :-1])
    targets = text[:, 1:]
    each = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    losses = each.view_as(targets).mean(dim=1)
    accuracy = (scores.argmax(dim=2) == targets).float().mean(dim=1)
    return losses, {"accuracy": accuracy, "bits_per_byte": losses.detach() / math.log(2)}


def show(model: nn.Module, rows: Batch) -> dict[str, Any]:
    """Return the perplexity per byte, and the rows with the lowest and the highest loss."""
    losses, _ = loss(model, rows)
    texts = [bytes(text).decode(errors="replace") for text in rows["text"].tolist()]
    return {
        f"Perplexity of {len(losses)} held-out texts": math.exp(losses.mean()),
        "Texts by their loss": by_loss(losses, text=texts),
    }


def read_sizes(settings: Settings) -> dict[str, Any]:
    """Return TASK_ARGS with defaults. Raises `SettingsError` if an argument is invalid."""
    sizes = {**DEFAULTS, **settings.task_args}
    wrong = [
        f"{name}={value!r}"
        for name, value in sizes.items()
        if name not in DEFAULTS or type(value) is not type(DEFAULTS[name]) or (name != "tied" and value < 1)
    ]
    if not wrong and sizes["width"] % sizes["heads"]:
        wrong = [f"width={sizes['width']} is not a multiple of heads={sizes['heads']}"]
    if wrong:
        raise SettingsError(
            f"SUNSPOT_TASK_ARGS: {', '.join(wrong)}; sunspot.tasks.gpt takes layers, width, heads and context (whole "
            "numbers from 1, with width a multiple of heads), and tied (true or false)"
        )
    return sizes
