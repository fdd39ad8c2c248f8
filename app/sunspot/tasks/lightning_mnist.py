"""Classifies digits with an ordinary LightningModule. The values that it logs become the run's metric history."""

from typing import Any

import lightning
import torch
from torch import nn
from torch.nn import functional

from sunspot.data.source import Batch, Source
from sunspot.settings import Settings
from sunspot.tasks.images import predict

__all__ = ["Digits", "build_module", "predict"]


class Digits(lightning.LightningModule):
    """A small convolutional network without batch norm, so the losses do not depend on the number of workers."""

    def __init__(self, channels: int, classes: int, width: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(channels, width, kernel_size=5, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * width, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss, accuracy = self.measure(batch)
        self.log("train_accuracy", accuracy)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, accuracy = self.measure(batch)
        self.log_dict({"val_loss": loss, "val_accuracy": accuracy})

    def measure(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss and the mean accuracy of a batch."""
        scores = predict(self, batch["image"])
        return functional.cross_entropy(scores, batch["label"]), (scores.argmax(1) == batch["label"]).float().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def build_module(settings: Settings, source: Source) -> Digits:
    channels, _, _ = source.shape
    return Digits(channels, source.classes, settings.task_args.get("width", 16), settings.learning_rate)
