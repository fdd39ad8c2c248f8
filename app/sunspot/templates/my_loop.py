"""A training loop of your own, which Sunspot can save, restart and resume between any two steps."""

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
    """Return the loss of each row, for training and for the evaluation of held-out rows."""
    scores = predict(model, batch["image"])
    losses = functional.cross_entropy(scores, batch["label"], reduction="none")  # one for each row, [B]
    return losses, {"accuracy": scores.argmax(1) == batch["label"]}


def train(run):
    for batch in run.batches():  # this worker's rows of each step, from the last checkpoint on
        losses, metrics = loss(run.model, batch)
        (losses.sum() * run.weight).backward()  # the mean over the rows of all workers
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.log({"loss": losses, **metrics})
        run.step()
