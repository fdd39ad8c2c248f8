"""Classifies digits or other images with a ResNet-18. Its first and last layers are adapted to the dataset."""

import torch
from torch import nn
from torchvision.models import resnet18

from sunspot.data.source import Source
from sunspot.settings import Settings
from sunspot.tasks.defaults import fused_on_gpu
from sunspot.tasks.images import loss, predict, schedule

__all__ = ["build_model", "build_optimizer", "loss", "predict", "schedule"]


def build_model(settings: Settings, source: Source) -> nn.Module:
    channels, _, _ = source.shape
    model = resnet18(num_classes=source.classes)
    model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=settings.learning_rate, fused=fused_on_gpu(model))
