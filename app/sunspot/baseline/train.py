"""Trains in plain PyTorch on one device, without Ray and without Sunspot.

docs/tutorial.ipynb explains this program and makes it distributed, one change at a time.
"""

import csv
from pathlib import Path

import pyarrow.parquet
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.models import resnet18

SAMPLE = Path(__file__).parents[1] / "data" / "sample.parquet"
"""A table of 14,000 MNIST digits. The last rows are held out."""

TRAINING_ROWS = 12_000
"""Number of digits to train on. The others are held out."""

Digits = Dataset[tuple[torch.Tensor, ...]]
"""A dataset of images, float32 [1, 28, 28], with their labels."""


def load_digits() -> tuple[Digits, Digits]:
    """Return the bundled training digits and held-out digits."""
    table = pyarrow.parquet.read_table(SAMPLE)
    pixels = table["image"].combine_chunks().to_numpy_ndarray()  # uint8 [14000, 28, 28]
    images = torch.tensor(pixels).unsqueeze(1).float() / 127.5 - 1  # from -1 (black) to 1 (white)
    labels = torch.tensor(table["label"].to_numpy())
    return (
        TensorDataset(images[:TRAINING_ROWS], labels[:TRAINING_ROWS]),
        TensorDataset(images[TRAINING_ROWS:], labels[TRAINING_ROWS:]),
    )


def build_model() -> nn.Module:
    """Build a ResNet-18 for one-channel images and ten classes."""
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def train(
    training: Digits, test: Digits, epochs: int, batch_size: int, learning_rate: float
) -> tuple[nn.Module, list[dict[str, float]]]:
    """Train a model, and return it with each epoch's loss and accuracy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model().to(device)
    loader = DataLoader(training, batch_size, shuffle=True)
    measure_loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)

    history = []
    for epoch in range(1, epochs + 1):
        model.train()
        losses = []
        for images, labels in loader:
            loss = measure_loss(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        record = {"epoch": epoch, "loss": sum(losses) / len(losses), "accuracy": evaluate(model, test)}
        print(f"epoch {epoch}  loss {record['loss']:.4f}  held-out accuracy {record['accuracy']:.4f}", flush=True)
        history.append(record)
    return model, history


@torch.inference_mode()
def evaluate(model: nn.Module, test: Digits) -> float:
    """Return the fraction of held-out digits that the model classifies correctly."""
    model.eval()
    device = next(model.parameters()).device
    correct = 0
    rows = 0
    for images, labels in DataLoader(test, batch_size=500):
        correct += int((model(images.to(device)).argmax(dim=1).cpu() == labels).sum())
        rows += len(labels)
    return correct / rows


def save(folder: Path, model: nn.Module, history: list[dict[str, float]]) -> None:
    """Write `model.pt` and `metrics.csv` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "model.pt")
    with open(folder / "metrics.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(history[0]))
        writer.writeheader()
        writer.writerows(history)
