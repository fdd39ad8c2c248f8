"""Trains a small GAN on images with its own loop, two models and two optimizers (docs/own-loop.md).

The generator makes images from noise, and the discriminator learns to distinguish them from real images (Goodfellow et
al., 2014). TASK_ARGS: `noise` (64), `width` (256).
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
"""Betas of Adam, with less momentum than usual so that the two models do not oscillate (Radford et al., 2016)."""

SMOOTHING = 0.1
"""Label smoothing for real images, which keeps the discriminator from becoming too certain (Salimans et al., 2016)."""

SHOWN = 48
"""Number of images in the report."""


def build_model(settings: Settings, source: Source) -> nn.Module:
    noise = settings.task_args.get("noise", 64)
    width = settings.task_args.get("width", 256)
    pixels = source.shape
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
        fake = generator(2 * run.draw(noise) - 1)

        scores = discriminator(torch.cat([real, fake.detach()])).view(2, -1)
        discriminator_loss = functional.softplus(-scores[0]) + SMOOTHING * scores[0] + functional.softplus(scores[1])
        (discriminator_loss.sum() * run.weight).backward()
        run.optimizer["discriminator"].step()

        generator_loss = functional.softplus(-discriminator(fake))
        run.optimizer.zero_grad()
        (generator_loss.sum() * run.weight).backward()
        run.optimizer["generator"].step()
        run.optimizer.zero_grad()  # the generator's backward pass also leaves gradients in the discriminator

        told_apart = torch.stack([scores[0] > 0, scores[1] < 0]).float().mean(dim=0)
        run.log({"loss": generator_loss, "discriminator_loss": discriminator_loss, "told_apart": told_apart})
        run.step()


def show(model: nn.ModuleDict, rows: Batch) -> dict[str, torch.Tensor]:
    """Return images that the generator makes from fixed noise."""
    generator = model["generator"]
    size = next(generator.parameters()).shape[1]
    noise = 2 * torch.rand(SHOWN, size, generator=torch.Generator().manual_seed(0)) - 1
    images = generator(noise.to(rows["image"].device))
    return {"Images made from noise": ((images + 1) * 127.5).round().to(torch.uint8)}
