"""The storm's task with two optimizers, a GAN. Workers can be lost between the optimizers' steps."""

import math

import torch
from torch import nn
from torch.nn import functional

from scripts.storm_task import Slow
from sunspot.data.source import Source
from sunspot.settings import Settings
from sunspot.tasks import TrainingRun
from sunspot.tasks.images import normalize

NOISE = 8


class Discriminator(Slow):
    """Distinguishes real images from generated ones, slowly."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.score(pixels)[:, 0]


def build_model(settings: Settings, source: Source) -> nn.Module:
    pixels = math.prod(source.shape)
    generator = nn.Sequential(nn.Linear(NOISE, pixels), nn.Tanh()).double()
    discriminator = Discriminator(pixels, 1, settings.task_args["pause_s"])
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def build_optimizer(model: nn.ModuleDict, settings: Settings) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.Adam(part.parameters(), settings.learning_rate) for name, part in model.items()}


def train(run: TrainingRun) -> None:
    generator, discriminator = run.model["generator"], run.model["discriminator"]
    for batch in run.batches():
        real = normalize(batch["image"]).double().flatten(1)
        fake = generator(2 * run.draw(NOISE).double() - 1)

        scores = discriminator(torch.cat([real, fake.detach()])).view(2, -1)
        discriminator_loss = functional.softplus(-scores[0]) + functional.softplus(scores[1])
        (discriminator_loss.sum() * run.weight).backward()
        run.optimizer["discriminator"].step()
        run.optimizer.zero_grad()

        generator_loss = functional.softplus(-discriminator(fake))
        (generator_loss.sum() * run.weight).backward()
        run.optimizer["generator"].step()
        run.optimizer.zero_grad()

        run.log({"loss": generator_loss, "discriminator_loss": discriminator_loss})
        run.step()
