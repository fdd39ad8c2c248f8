"""Makes predictions for files and datasets with a checkpoint's model, in Sunspot or in other programs.

1. `classifier.open_checkpoint` finds a checkpoint, verifies its files, and reads its settings.

2. `classifier.Classifier` builds the model, loads the weights and predicts rows. `forward.forward_rows` runs each
forward pass.

3. `batch.predict_dataset` predicts a whole dataset with a pool of classifiers, and can resume if it is killed.

4. `actor.model_worker` runs a classifier as a Ray actor for other programs.

5. `for_report` stores predictions of held-out rows at the end of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sunspot.predict.actor import ModelWorker, model_worker

__all__ = ["ModelWorker", "model_worker"]


def __getattr__(name: str) -> Any:
    """Import torch and Ray only when a name is used, which keeps `python -m sunspot.predict --help` fast."""
    if name not in __all__:
        raise AttributeError(name)
    from sunspot.predict import actor

    return getattr(actor, name)
