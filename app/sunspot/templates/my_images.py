"""Classifies images with a small convolutional network. DATASET in sunspot.toml selects the images."""

from torch import nn
from torch.nn import functional


def build_model(settings, source):
    channels, _, _ = source.shape
    width = settings.task_args.get("width", 16)
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel_size=3, stride=2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, source.classes),
    )


def predict(model, images):
    return model(images.float() / 255)  # uint8 [B, C, H, W] -> one score per class


def loss(model, batch):
    scores = predict(model, batch["image"])
    losses = functional.cross_entropy(scores, batch["label"], reduction="none")  # one per row, shape [B]
    return losses, {"accuracy": scores.argmax(1) == batch["label"]}
