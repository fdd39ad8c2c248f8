"""Explains a run's problems, or checks that a cluster, a bucket or this machine is ready for a run.

For a run, `diagnose.examine` collects the findings of these modules:

    pending.py            RayJobs that do not start and pods that are not running
    unschedulable.py      pods that fit on no node, with the help of schedulable_nodes.py
    failed_tries.py       failures that storage does not record
    training/             problems of a run that has started
    fewer_workers.py      the reason why a run has fewer workers than requested

Without a run, `cluster_checks` checks the cluster, `probe_pods` tests storage, GPUs and the network from pods, and
`machine_checks` checks this machine.
"""
