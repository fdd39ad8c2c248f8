"""Waits for the end of a run."""

import time

from sunspot.errors import ConflictError, GaveUpError, SunspotError
from sunspot.run.status import RunState
from sunspot.submitter.cluster.follow import Follower, OutageReporter
from sunspot.submitter.cluster.observation import RunAccess, RunSnapshot, warn_of_hidden
from sunspot.submitter.cluster.progress_lines import ProgressLines
from sunspot.submitter.cluster.restart import HeadRestarts, head_given_up, start_again
from sunspot.submitter.printing import warn


def wait_for_end(access: RunAccess, timeout: float | None, show: ProgressLines) -> RunState:
    """Follow the run to its end; the job goes on whatever happens to this command.

    A run that ends because the operator gave up its head is started again. Returns whether the run succeeded or was
    stopped. Raises `SunspotError` when it failed or is lost, `ConflictError` when it is being deleted, `NotFoundError`
    when there is no such run, `GaveUpError` after `timeout` seconds, and `ClusterError` when the API server stays out
    of reach.
    """
    name, cluster = access.run.name, access.cluster
    restarts = HeadRestarts(access.run)
    began = time.monotonic()
    try:
        snapshot = access.observe()
        access.require_known(snapshot)
        warn_of_hidden(snapshot)
        while True:
            snapshot = _follow(access, began, timeout, show)
            state, reason = snapshot.state()
            manifest = restarts.next(snapshot)
            if not (cluster and snapshot.job and manifest):
                break
            show(snapshot, RunState.RETRYING, f"{reason}; it is started again")
            start_again(access, snapshot.job, manifest)
        show(snapshot, state, reason)
    finally:
        show.close()
    if state in (RunState.FAILED, RunState.LOST):
        raise SunspotError(f"{name} {state}: {reason}")
    if state is RunState.DELETING:
        raise ConflictError(f"{name} is {state}: {reason}")
    return state


def _follow(access: RunAccess, began: float, timeout: float | None, show: ProgressLines) -> RunSnapshot:
    """Show every change until the run has ended; returns what is known then.

    An end because the head was given up is not shown: it may be none.
    """
    outage = OutageReporter()
    again = access.arguments
    follower = Follower(access)
    try:
        for snapshot in follower:
            state, reason = snapshot.state()
            if access.cluster:
                outage.note(snapshot)
            if not head_given_up(snapshot):
                show(snapshot, state, reason)
            # As long as the cluster does not answer, a failure may be followed by another try.
            sure = state in (RunState.SUCCEEDED, RunState.STOPPED) or not (access.cluster and snapshot.cluster.trouble)
            if state.terminal and sure and (follower.settled or snapshot.storage.trouble):
                return snapshot
            if timeout is not None and time.monotonic() - began > timeout:
                raise GaveUpError(
                    f"{access.run.name} is {state} after {timeout:g} s: {reason}. It goes on; `sunspot wait {again}` "
                    "comes back to it"
                )
    except KeyboardInterrupt:
        show.close()
        warn(f"\nthe run goes on; `sunspot wait {again}` comes back to it, `sunspot stop {again}` ends it")
        raise
    raise AssertionError("following never ends by itself")
