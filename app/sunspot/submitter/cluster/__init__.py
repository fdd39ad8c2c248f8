"""Starts, follows, stops and deletes runs in a Kubernetes cluster.

1. `kubeconfig.make_client` chooses the API server and the credentials. `api.Cluster` sends every request.
2. `preflight.check` looks for problems before a job is sent. `start.submit` then applies the RayJob, whose annotation
   keeps its manifest for restarts (`applied`).
3. `observation.RunAccess` reads the run from the cluster (`views`) and from storage into a `RunSnapshot`.
4. `pod_problems.find_problems` finds why pods do not run. `state.judge` derives one state with its reason from
   everything known. `gone_jobs` finds RayJobs that were deleted before their runs had ended.
5. `records` combines cluster and storage for `status` and `list`. `progress_lines` prints progress.
6. `waiting.wait_for_end` follows a run to its end, and restarts it if the operator gives up its head.
   `waiting.Reconciler` restarts all runs of a namespace.
7. `stopping.stop_run` stops a run, and `deletion.delete_run` deletes it. `faults.FaultInjector` injects faults on
   purpose, and `port_forward.LocalPort` forwards the Ray dashboard.
"""
