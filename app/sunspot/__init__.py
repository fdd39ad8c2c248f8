"""Sunspot: Ray Train on Kubernetes spot GPUs, where losing a node loses no work.

The command (cli.py, submitter/) turns a profile and settings (settings/) into a RayJob. The job's driver (train/)
loads the task (tasks/), plans the run (plan.py), joins Ray (ray_session/), and starts the workers. The workers load
rows (data/), compute each step together (parallel/), and copy their state to memory and storage (checkpoint/,
storage/). If a node gets a notice, is lost or is added, elastic/ changes the group of workers. The run's files (run/)
record what happened, and report/, ui/, predict/ and tracking/ read these files. docs/architecture.md describes all
packages.
"""

__version__ = "0.1.0"
