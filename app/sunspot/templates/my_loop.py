"""A custom training loop that Sunspot can save and resume after any step."""

from torch import nn
from torch.nn import functional


def build_model(settings, source):
    channels, height, width = source.shape
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, 64),
        nn.ReLU(),
        nn.Linear(64, source.classes),
    )


def predict(model, images):
    return model(images.float() / 255)


def loss(model, batch):
    """Return the loss of each row, for training and for evaluation on held-out rows."""
    scores = predict(model, batch["image"])
    losses = functional.cross_entropy(scores, batch["label"], reduction="none")  # one per row, shape [B]
    return losses, {"accuracy": scores.argmax(1) == batch["label"]}


def train(run):
    for batch in run.batches():  # this worker's rows of each step, starting after the last checkpoint
        losses, metrics = loss(run.model, batch)
        (losses.sum() * run.weight).backward()  # the gradient of the mean over all workers' rows
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.log({"loss": losses, **metrics})
        run.step()
