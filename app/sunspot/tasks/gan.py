"""A small GAN on images: two models and two optimizers, in a loop of its own (docs/own-loop.md).

A generator makes images of noise, and a discriminator learns to tell them from real ones (Goodfellow et al., 2014).
TASK_ARGS: `noise` (64), `width` (256).
"""

import math

import torch
from torch import nn
from torch.nn import functional

from sunspot.data.source import Batch, Source
from sunspot.settings import Settings
from sunspot.tasks import TrainingRun
from sunspot.tasks.images import normalize

__all__ = ["build_model", "build_optimizer", "show", "train"]

BETAS = (0.5, 0.999)
"""Adam's, with less momentum than usual, lest the two chase each other in circles (Radford et al., 2016)."""

DOUBT = 0.1
"""A real image counts as one with 0.9 only, lest the discriminator grow too sure to teach (Salimans et al., 2016)."""

MADE = 48
"""Images that the report shows."""


def build_model(settings: Settings, source: Source) -> nn.Module:
    noise, width, pixels = settings.task_args.get("noise", 64), settings.task_args.get("width", 256), source.shape
    generator = nn.Sequential(
        *(nn.Linear(noise, width), nn.LayerNorm(width), nn.LeakyReLU(0.2)),
        *(nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.LeakyReLU(0.2)),
        *(nn.Linear(2 * width, math.prod(pixels)), nn.Tanh(), nn.Unflatten(1, pixels)),
    )
    discriminator = nn.Sequential(
        *(nn.Flatten(), nn.Linear(math.prod(pixels), 2 * width), nn.LeakyReLU(0.2)),
        *(nn.Linear(2 * width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1), nn.Flatten(0)),
    )
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def build_optimizer(model: nn.ModuleDict, settings: Settings) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.Adam(part.parameters(), settings.learning_rate, BETAS) for name, part in model.items()}


def train(run: TrainingRun) -> None:
    generator, discriminator = run.model["generator"], run.model["discriminator"]
    noise = run.settings.task_args.get("noise", 64)
    for batch in run.batches():
        real = normalize(batch["image"])
        made = generator(2 * run.draw(noise) - 1)

        told = discriminator(torch.cat([real, made.detach()])).view(2, -1)
        of_discriminator = functional.softplus(-told[0]) + DOUBT * told[0] + functional.softplus(told[1])
        (of_discriminator.sum() * run.weight).backward()
        run.optimizer["discriminator"].step()

        of_generator = functional.softplus(-discriminator(made))
        run.optimizer.zero_grad()
        (of_generator.sum() * run.weight).backward()
        run.optimizer["generator"].step()
        run.optimizer.zero_grad()  # the discriminator's, too: the generator's loss has left some

        told_apart = torch.stack([told[0] > 0, told[1] < 0]).float().mean(dim=0)
        run.log({"loss": of_generator, "discriminator_loss": of_discriminator, "told_apart": told_apart})
        run.step()


def show(model: nn.ModuleDict, rows: Batch) -> dict[str, torch.Tensor]:
    """Images made of noise, always of the same."""
    generator = model["generator"]
    size = next(generator.parameters()).shape[1]
    noise = 2 * torch.rand(MADE, size, generator=torch.Generator().manual_seed(0)) - 1
    made = generator(noise.to(rows["image"].device))
    return {"Made of noise": ((made + 1) * 127.5).round().to(torch.uint8)}
