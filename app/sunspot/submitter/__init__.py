"""The submitter: the command `sunspot` and the library below it, which need neither torch nor Ray.

`sunspot submit` runs these steps, and `sunspot.client.submit` all of them except the first:

    commands/submit.py       turns the command line into a JobRequest
    manifest/render.py       render(JobRequest) -> Rendered: makes the manifest and the settings; pure
    cluster/preflight.py     check: finds everything in cluster and storage that would keep the run from starting
    cluster/applied.py       as_submission: makes the RayJob a new owner, with its manifest in an annotation
    cluster/start.py         start_job(RunAccess, PreparedJob) -> Submission: attaches, refuses, or replaces and applies
    cluster/observation.py   RunAccess.observe() -> RunSnapshot: reads the run from cluster and storage
    cluster/state.py         judge: reduces the snapshot to one state, with its reason; pure
    cluster/waiting.py       wait_for_end: follows the run, and restarts it if KubeRay has given up its head
    cluster/progress_lines.py  prints what was done, and the progress of the run
"""
