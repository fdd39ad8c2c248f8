"""The submitter: the command `sunspot` and the library below it, which need neither torch nor Ray.

`sunspot submit` runs these steps (commands/submit.py). `sunspot.client.submit` skips the first step and does not wait
for the run. The function `submit` in cluster/start.py runs the steps from preflight.py to api.py.

    commands/arguments.py      turns the command line into a JobRequest (job_request)
    cluster/placing.py         chooses the place, if the profile has places (render_in_place)
    code_files.py              packs the user's code, if it is a folder (pack)
    manifest/render.py         renders the manifest (render)
    cluster/placing.py         submits the job, and deletes the run's RayJob in its previous place (submit_in_place)
    cluster/preflight.py       checks the cluster and storage for problems, and applies the RayJob as a dry run (check)
    cluster/applied.py         gives the RayJob a new owner ID, and stores its manifest in an annotation (as_submission)
    cluster/observation.py     reads the run from the cluster and storage (RunAccess.observe)
    cluster/state.py           reduces everything that was read to one state and a reason (judge)
    cluster/start.py           raises an error if there is a conflict, waits for a RayJob that is ending, and returns
                               early if the RayJob is live or the run has succeeded. Otherwise, it uploads the code, and
                               replaces the RayJob (start_job)
    cluster/stopping.py        deletes the run's RayJobs that have ended (delete_jobs)
    cluster/api.py             creates the RayJob (Cluster.apply)
    cluster/waiting.py         follows the run, and restarts it if KubeRay gives up on its head pod (wait_for_end)
    cluster/progress_lines.py  prints the result of the submission and the run's progress
"""
