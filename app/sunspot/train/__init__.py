"""Trains a plan: the TorchTrainer, the worker, the loop over steps, and the reporter of its progress."""
