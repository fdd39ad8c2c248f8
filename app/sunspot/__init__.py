"""Sunspot: Ray Train on Kubernetes spot GPUs, where losing a node loses no work."""

__version__ = "0.1.0"
