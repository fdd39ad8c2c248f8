"""`sunspot resume`: clears a run's stop marker, and restarts the RayJob that is still in the cluster."""

import argparse

from sunspot.run.status import RunState
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.progress_lines import print_state, print_submission
from sunspot.submitter.cluster.start import resume_run
from sunspot.submitter.commands.arguments import add_run_and_cluster, run_target

add_arguments = add_run_and_cluster


def run(args: argparse.Namespace) -> None:
    access = reach_run(run_target(args), changed_by="resume")
    snapshot = access.observe_existing()
    submission = resume_run(access, snapshot)
    if submission:
        print_submission(submission, args.json)
        return
    state, _ = snapshot.state()
    how = "`sunspot train` or `make train`; for GitOps, a commit that raises GENERATION"
    longer = " with more SUNSPOT_EPOCHS" if state is RunState.SUCCEEDED else ""
    reason = f"the stop marker is cleared; repeat the command that started the run{longer} ({how})"
    print_state(access.run, state, reason, args.json)
