"""Saves the training state: copies in shared memory, committed to storage behind the training, and read back."""

from app.checkpoint.manager import CheckpointManager, versions
from app.checkpoint.memory import NodeMemory

__all__ = ["CheckpointManager", "NodeMemory", "versions"]
