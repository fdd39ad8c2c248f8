"""Classifies texts by the mean embedding of their words."""

import zlib

from torch import nn
from torch.nn import functional

from sunspot.data.columns import Column
from sunspot.data.table import open_table

WORDS = 2**14


def encode(text):
    """Return one number per word, computed from its hash. The number 0 is reserved for padding."""
    return [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.lower().split()] or [0]


def find_sources(settings):
    words = Column("int64", longest=200, cut=True, decode=encode, of="text")  # keep only the first 200 words
    return open_table(settings, {"words": words, "label": Column("int64")})


class Words(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.embed = nn.EmbeddingBag(WORDS, width, padding_idx=0)
        self.classify = nn.Linear(width, classes)

    def forward(self, words):
        return self.classify(functional.relu(self.embed(words)))


def build_model(settings, source):
    return Words(settings.task_args.get("width", 32), source.classes)


def predict(model, batch):
    return model(batch["words"])  # one score per class


def loss(model, batch):
    scores = predict(model, batch)
    losses = functional.cross_entropy(scores, batch["label"], reduction="none")  # one per row, shape [B]
    return losses, {"accuracy": scores.argmax(1) == batch["label"]}
