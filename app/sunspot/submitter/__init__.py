"""The submitter: the command `sunspot` and the library that it stands on; knows neither torch nor Ray.

The way of `sunspot submit`, which `sunspot.client.submit` goes too but for its first step:

    commands/submit.py       the words of the command line become a JobRequest
    manifest/render.py       render(JobRequest) -> Rendered: the manifest and the settings; pure
    cluster/preflight.py     check: what of the cluster or the storage would keep the run from starting
    cluster/applied.py       as_submission: the RayJob as a new owner, with its manifest in an annotation
    cluster/start.py         start_job(RunAccess, PreparedJob) -> Submission: attach, refuse, or replace and apply
    cluster/observation.py   RunAccess.observe() -> RunSnapshot: what cluster and storage say of the run
    cluster/state.py         judge: that as one state, with the reason; pure
    cluster/waiting.py       wait_for_end: follows the run, and starts one again whose head was given up
    cluster/progress_lines.py  prints what was done, and how the run goes on
"""
