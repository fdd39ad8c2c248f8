"""The GPT in double precision, so that different layouts of its parameters can be compared exactly."""

from __future__ import annotations

from torch import nn

from sunspot.data.source import Source
from sunspot.settings import Settings
from sunspot.tasks import gpt
from sunspot.tasks.gpt import build_optimizer, find_sources, loss

__all__ = ["build_model", "build_optimizer", "find_sources", "loss"]


def build_model(settings: Settings, source: Source) -> nn.Module:
    return gpt.build_model(settings, source).double()
