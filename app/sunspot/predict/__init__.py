"""Prediction with a checkpoint's model: of files, of whole datasets, and in other programs (`model_worker`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sunspot.predict.actor import ModelWorker, model_worker

__all__ = ["ModelWorker", "model_worker"]


def __getattr__(name: str) -> Any:
    """Import torch and Ray only when one of them is used: `python -m sunspot.predict --help` answers at once."""
    if name not in __all__:
        raise AttributeError(name)
    from sunspot.predict import actor

    return getattr(actor, name)
