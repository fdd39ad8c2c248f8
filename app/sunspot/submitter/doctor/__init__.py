"""Explains why a run is pending, slow, stuck or failed, and checks whether a cluster and a bucket are ready for a run.

With a run, `diagnose.examine` collects findings. `pending` explains RayJobs that do not start and pods that do not run,
with the help of `unschedulable` and `schedulable_nodes` for pods that no node takes. `failed_tries` explains failures
that storage does not record. The checks in `training` examine the files of a run that has begun. `fewer_workers` says
what a run with too few workers waits for. Findings that explain most come first (`submitter/findings.py`).

Without a run, `cluster_checks` examines the cluster, `probe_pods` tries storage, GPUs and network from pods, and
`machine_checks` examines this machine.
"""
