"""A checkpoint's model, for prediction: of files, of whole datasets, and in other programs (`model_worker`)."""

from __future__ import annotations

from app.predict.actor import ModelWorker, model_worker

__all__ = ["ModelWorker", "model_worker"]
