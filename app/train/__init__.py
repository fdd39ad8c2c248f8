"""Training: the Ray trainer, the worker, and the loop."""
