"""`sunspot resume`: lets a stopped run go on, as it was submitted last."""

import argparse

from sunspot.errors import ClusterError
from sunspot.run.status import clear_stop
from sunspot.run.submissions import newest_submission
from sunspot.submitter.cluster.restart import parse_submission
from sunspot.submitter.cluster.watch import observe_existing, print_state, reach_run
from sunspot.submitter.commands.arguments import add_run
from sunspot.submitter.commands.submit import print_outcome, start_job

add_arguments = add_run


def run(args: argparse.Namespace) -> None:
    """Clear the stop marker, and start again what was submitted last.

    Raises `NotFoundError` when there is no such run, `DamageError` for a submission that cannot be used, and
    `ClusterError` when there is no cluster to submit to.
    """
    cluster, run, cluster_error = reach_run(args)
    snapshot = observe_existing(cluster, run, cluster_error)
    submission = newest_submission(run)
    if submission is None:
        clear_stop(run)
        how = "`make train` again, or for GitOps a commit that raises GENERATION"
        reason = f"it may train again; it was not started by `sunspot submit`, so start it: {how}"
        print_state(run, snapshot.state()[0], reason, args.json)
        return
    if cluster is None or snapshot.cluster_trouble:
        raise ClusterError(snapshot.cluster_trouble)
    job, text = submission
    outcome = start_job(cluster, run, parse_submission(run, job, text), text, None)
    print_outcome(cluster, run, job, outcome, dry_run=False, as_json=args.json)
