"""How many trials train at once, and with what resources."""

import time
from collections.abc import Callable

from sunspot.formatting import plural
from sunspot.plan import choose_resources
from sunspot.ray_internals.coordinator import ROUNDING
from sunspot.settings import Settings

NODES_TIMEOUT_S = 60.0
"""How long to wait for the nodes of a job; a search that goes on without them trains fewer trials at a time."""

POLL_EVERY_S = 1.0

Allocation = tuple[int, tuple[Settings, ...], str]
"""How many trials train at once, the trials with the resources of their workers, and both in words."""


def await_nodes(trials: tuple[Settings, ...], observe: Callable[[], tuple[dict[str, float], int]]) -> Allocation:
    """Wait for nodes, and return what `allocate` does for the resources and number of nodes that `observe` returns.

    On Kubernetes, a restarted driver may be there before the nodes are back: wait for them.
    """
    settings = trials[0]
    wanted = min(settings.concurrent_trials, len(trials)) if settings.job_id else 0
    deadline = time.monotonic() + NODES_TIMEOUT_S
    allocation = allocate(trials, *observe())
    if allocation[0] < wanted:
        print(f"  waiting for room for {wanted} trials at a time, for at most {NODES_TIMEOUT_S:.0f} s", flush=True)
    while allocation[0] < wanted and time.monotonic() < deadline:
        time.sleep(POLL_EVERY_S)
        allocation = allocate(trials, *observe())
    return allocation


def allocate(trials: tuple[Settings, ...], cluster: dict[str, float], nodes: int) -> Allocation:
    """Divide the resources of the cluster, as Ray counts them over `nodes` nodes, among the trials."""
    settings = trials[0]
    workers, wanted = settings.num_workers.most, settings.concurrent_trials
    resources = choose_resources(settings, cluster, nodes)
    needs = dict(resources.per_worker)
    shared = nodes == 1 and not settings.resources_per_worker  # one machine, whose cores a single run would take
    if shared:
        needs["CPU"] = 0.0 if wanted else min(1.0, needs["CPU"])  # a core each, or less for CONCURRENT_TRIALS
    fits = [int(cluster.get(name, 0.0) / (workers * amount) + ROUNDING) for name, amount in needs.items() if amount]
    at_once = max(1, min(*fits, wanted or len(trials), len(trials)))
    if shared:
        resources = choose_resources(settings, {**cluster, "CPU": cluster.get("CPU", 0.0) / at_once}, nodes)
    given = {"resources_per_worker": resources.per_worker, "use_gpu": "true" if resources.use_gpu else "false"}
    each = ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.per_worker.items()))
    reason = f"{at_once} at a time, each with {plural(workers, 'worker')} of {each}"
    if at_once < min(wanted, len(trials)):
        reason += f" (no room for CONCURRENT_TRIALS={wanted})"
    return at_once, tuple(trial.model_copy(update=given) for trial in trials), reason
