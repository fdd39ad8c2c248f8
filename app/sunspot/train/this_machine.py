"""Rejects a run if its workers can never start on this machine, or if the machine is far too small for them."""

import json
from collections.abc import Mapping

import torch

from sunspot.errors import SettingsError
from sunspot.formatting import as_bytes, plural
from sunspot.machine.cgroup import memory_left
from sunspot.plan import choose_resources
from sunspot.ray_internals.coordinator import ROUNDING
from sunspot.ray_session import cores_here
from sunspot.settings import PREFIX, Settings, accepts

WORKERS_PER_CORE = 4
"""Maximum number of workers per core without the user's consent.

More workers gain nothing, and a worker could wait for a core for longer than the others wait for that worker.
"""

WORKER_BYTES = 300_000_000
"""Minimum memory of a worker in bytes, for Python with torch and Ray but no model. 64 workers used 23.5 GB."""


def refuse_impossible(settings: Settings) -> None:
    """Raise `SettingsError` if a run's workers do not fit on this machine, where `sunspot train` starts Ray.

    The setting ACCEPT can allow too many workers for the machine's cores and free memory. It cannot allow a run that
    needs more CPUs or GPUs than the machine has.
    """
    cores = cores_here()
    machine = {"CPU": float(cores), "GPU": float(torch.cuda.device_count())}
    per_worker = choose_resources(settings, machine, nodes=1).per_worker
    known = {name: amount for name, amount in per_worker.items() if name in machine}
    fits = refuse_lack(settings, known, machine)
    workers = min(fits, settings.num_workers.most)
    most = cores * WORKERS_PER_CORE
    left = memory_left()
    memory = ""
    if left is not None:
        most = min(most, left // WORKER_BYTES)
        memory = f" and {as_bytes(left)} of free memory (a worker needs at least {as_bytes(WORKER_BYTES)})"
    consent = f"{workers}-workers"
    if workers <= most or accepts(settings.environment(), consent):
        return
    fix = f"set it to {most} or less" if most else "free some memory"
    raise SettingsError(
        f"SUNSPOT_NUM_WORKERS={settings.num_workers}: {plural(workers, 'worker')} would be too many for this machine, "
        f"which has {plural(cores, 'core')}{memory}; {fix}, or start them anyway with {PREFIX}ACCEPT={consent}"
    )


def refuse_lack(settings: Settings, per_worker: Mapping[str, float], machine: Mapping[str, float]) -> int:
    """Return the number of workers that fit on a machine with these resources.

    Raises `SettingsError` if fewer workers fit than the run needs, because the run would wait forever.
    """
    fits = settings.num_workers.most
    for name, amount in per_worker.items():
        has = machine.get(name, 0.0)
        least = settings.num_workers.least
        fits = min(fits, int(has / amount + ROUNDING)) if amount else fits
        if fits >= least:
            continue
        if name in settings.resources_per_worker:
            setting = f"SUNSPOT_RESOURCES_PER_WORKER={json.dumps(settings.resources_per_worker)}"
            fix = "lower it"
        else:
            setting = f"SUNSPOT_USE_GPU={settings.use_gpu}"
            fix = "set it to auto"
        seen = " that torch sees" if name == "GPU" else ""
        fewer = f", or set SUNSPOT_NUM_WORKERS to {fits}" if fits else ""
        raise SettingsError(
            f"{setting}: the run needs {least * amount:g} {name} for {plural(least, 'worker')}, but this machine has "
            f"{has:g}{seen}; {fix}{fewer}"
        )
    return fits
