"""`sunspot resume`: lets a stopped run go on, as it was submitted last."""

import argparse

from sunspot.errors import ClusterError
from sunspot.run.requests import clear_stop
from sunspot.run.submissions import newest_submission
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.progress_lines import print_state, print_submission
from sunspot.submitter.cluster.restart import parse_submission
from sunspot.submitter.cluster.start import PreparedJob, start_job
from sunspot.submitter.commands.arguments import add_run, run_target

add_arguments = add_run


def run(args: argparse.Namespace) -> None:
    """Clear the stop marker, and start again what was submitted last.

    Raises `NotFoundError` when there is no such run, `DamageError` for a submission that cannot be used, and
    `ClusterError` when there is no cluster to submit to.
    """
    access = reach_run(run_target(args))
    snapshot = access.observe_existing()
    submitted = newest_submission(access.run)
    if submitted is None:
        clear_stop(access.run)
        how = "`make train` again, or for GitOps a commit that raises GENERATION"
        reason = f"it may train again; it was not started by `sunspot submit`, so start it: {how}"
        print_state(access.run, snapshot.state()[0], reason, args.json)
        return
    if snapshot.cluster.trouble:
        raise ClusterError(snapshot.cluster.trouble)
    job, text = submitted
    print_submission(start_job(access, PreparedJob(parse_submission(access.run, job, text), text)), args.json)
