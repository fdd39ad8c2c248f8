"""`sunspot resume`: lets a stopped run go on."""

from __future__ import annotations

import argparse

from app.errors import ClusterError
from app.run import Run
from app.run.attempts import newest_submission
from app.run.status import clear_stop
from submitter.cluster.api import Cluster
from submitter.cluster.watch import reach_run
from submitter.commands.arguments import add_run
from submitter.commands.stop import observe, print_state
from submitter.commands.submit import bring_up, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)


def run(args: argparse.Namespace) -> None:
    cluster, run, cluster_error = reach_run(args)
    resume(cluster, run, args.json, cluster_error)


def resume(cluster: Cluster | None, run: Run, as_json: bool, cluster_error: str = "") -> None:
    """Clear the stop marker, and bring to life again what was submitted last.

    Raises `NotFoundError` when there is no such run, `ClusterError` when there is no cluster to submit to.
    """
    snapshot = observe(cluster, run, cluster_error)
    submission = newest_submission(run)
    if submission is None:
        clear_stop(run)
        how = "`make train` again, or for GitOps a commit that raises GENERATION"
        print_state(
            run,
            snapshot.state()[0],
            f"it may train again; it was not started by `sunspot submit`, so start it: {how}",
            as_json,
        )
        return
    if cluster is None or snapshot.cluster_trouble:
        raise ClusterError(snapshot.cluster_trouble)
    import yaml

    job, text = submission
    outcome = bring_up(cluster, run, yaml.safe_load(text), text, None)
    tell(cluster, run, job, outcome, dry_run=False, as_json=as_json)
