"""The small task as a LightningModule. TASK_ARGS can slow it down for tests that act on a run while it trains."""

from __future__ import annotations

import time
from typing import Any

import lightning
import torch
from torch.nn import functional

from sunspot.data.source import Source
from sunspot.settings import Settings
from sunspot.tasks.images import normalize, schedule
from tests.tasks import tiny


class Tiny(lightning.LightningModule):
    def __init__(self, settings: Settings, source: Source) -> None:
        super().__init__()
        self.network = tiny.build_model(settings, source)
        self.settings = settings

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return normalize(batch["image"]), batch["label"]

    def training_step(self, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        time.sleep(self.settings.task_args.get("sleep", 0))
        scores = self.network(images)
        self.log("accuracy", (scores.argmax(1) == labels).float().mean(), on_step=True, prog_bar=True)
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores.detach()}

    def configure_optimizers(self) -> Any:
        optimizer = tiny.build_optimizer(self, self.settings)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def build_module(settings: Settings, source: Source) -> Tiny:
    return Tiny(settings, source)
