"""LightningModules that cannot be trained, each for a different reason."""

from __future__ import annotations

from typing import Any

import lightning
import torch


class NoModule(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)


class Whole(lightning.LightningModule):
    """A module that only lacks a loss. Each module below has another fault."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any) -> Any:
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Whole):
    automatic_optimization = False


class NoStep(lightning.LightningModule):
    pass


class Late(Whole):
    def configure_model(self) -> None:
        self.more = torch.nn.Linear(1, 1)


class NoOptimizer(Whole):
    def configure_optimizers(self) -> Any:
        return None


class TwoOptimizers(Whole):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class Plateau(Whole):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "loss"}


class EveryFourthStep(Whole):
    """A valid module whose learning rate falls after every fourth step. It also falls at the end of each epoch, by a
    factor that depends on the epoch."""

    def training_step(self, batch: Any) -> Any:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        self.rates: list[float] = []
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        every_fourth = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        by_epoch = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 1 / (2 + self.current_epoch))
        return [optimizer], [{"scheduler": every_fourth, "interval": "step", "frequency": 4}, by_epoch]


class LogsRows(Whole):
    def training_step(self, batch: Any) -> Any:
        self.log("train_rows", 2)


class LogsMany(Whole):
    def training_step(self, batch: Any) -> Any:
        self.log("scores", torch.zeros(2))


class ManyLosses(Whole):
    def training_step(self, batch: Any) -> Any:
        return self.layer(torch.zeros(2, 1))
