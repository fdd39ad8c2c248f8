"""A training loop of one's own: Sunspot saves, restarts and resumes it between any two steps."""

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
    """Rate each row: the loop trains by it, and held-out rows are evaluated by it."""
    scores = predict(model, batch["image"])
    losses = functional.cross_entropy(scores, batch["label"], reduction="none")  # [B]
    return losses, {"accuracy": scores.argmax(1) == batch["label"]}


def train(run):
    for batch in run.batches():  # this worker's rows of each step, from where the run stands
        losses, metrics = loss(run.model, batch)
        (losses.sum() * run.weight).backward()  # the mean over all rows of the step, whatever each worker has
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.log({"loss": losses, **metrics})
        run.step()
