"""The submitter: the command `sunspot` and the library below it, which need neither torch nor Ray.

`sunspot submit` runs these steps, and `sunspot.client.submit` runs all of them except the first:

    commands/submit.py         turns the command line into a JobRequest
    manifest/render.py         renders the manifest (render)
    cluster/preflight.py       checks the cluster and storage for problems (check)
    cluster/applied.py         gives the RayJob a new owner ID, and stores its manifest in an annotation (as_submission)
    cluster/start.py           attaches to the RayJob, replaces it, or raises an error (start_job)
    cluster/observation.py     reads the run from the cluster and storage (RunAccess.observe)
    cluster/state.py           reduces the snapshot to one state and a reason (judge)
    cluster/waiting.py         follows the run, and restarts it if KubeRay abandons its head pod (wait_for_end)
    cluster/progress_lines.py  prints the result of the submission and the run's progress
"""
