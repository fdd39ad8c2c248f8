"""Saves the training state: copies in shared memory, committed to storage behind the training, and read back."""

from sunspot.checkpoint.manager import CheckpointManager, versions
from sunspot.checkpoint.memory import NodeMemory

__all__ = ["CheckpointManager", "NodeMemory", "versions"]
