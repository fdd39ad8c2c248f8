"""Starts, follows, stops and deletes runs in a Kubernetes cluster.

1. `kubeconfig.make_client` chooses the API server and the credentials. `api.Cluster` sends all requests.
2. `placing.render_in_place` chooses one of the places in the profile. `start.submit` looks for problems
   (`preflight.check`), and then applies the RayJob, with its manifest in an annotation for restarts (`applied`).
   `moving.move_run` moves a live run to another place.
3. `observation.RunAccess` reads the run from the cluster (`state.ClusterSeen`, made of `views`) and from storage
   (`run.seen.RunSeen`). `gone_jobs` finds RayJobs that were deleted before their runs had ended.
4. `pod_problems.find_problems` explains why pods are not running. `state.judge` combines everything seen into one state
   and a reason.
5. `records` combines cluster and storage for `status` and `list`. `progress_lines` prints progress.
6. `waiting.wait_for_end` follows a run to its end, and restarts it if the operator gives up on its head pod.
   `waiting.Reconciler` does the same for all runs in a namespace. Given a `mover.Mover`, `wait_for_end` and
   `Reconciler` also move runs to better places.
7. `stopping.stop_run` stops a run, and `deletion.delete_run` deletes it. `faults.FaultInjector` injects faults, and
   `port_forward.LocalPort` forwards the Ray dashboard.
"""
