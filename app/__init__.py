"""The training program: everything that runs in the cluster, or on one machine with `python -m app`."""

__version__ = "0.1.0"
