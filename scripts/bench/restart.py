"""A worker that is killed, with cold and with warm restarts: each phase from the signal to the next group's first step.

    python -m scripts.bench.restart --pairs 5
    python -m scripts.bench.restart --kills 200

The first trains a small model on two workers, in turn cold and warm, and prints each loss. The second kills one run so
often, with warm restarts, and ends with 1 unless each loss was made up for by forked workers, no row is missing or
repeated, and no process and no shared memory is left.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from statistics import median

from scripts.bench.product import phases_of, train
from scripts.bench.restart_task import STEPS
from sunspot.errors import SunspotError
from sunspot.ray_session import ray_session
from sunspot.run import SHARED_MEMORY, Run, node_memory_directory
from sunspot.run.history import read_journal
from sunspot.run.incidents import read_receipts
from sunspot.settings import load_settings
from sunspot.submitter.proof import prove

SETTINGS = {
    "TASK": "scripts.bench.restart_task",
    "NUM_WORKERS": "2",
    "USE_GPU": "false",
    "EPOCHS": "1000",
    "REPORT_EVERY_S": "1",
    "PREDICT_ROWS": "0",
    "AUDIT": "true",
}

WORKERS = ("ray::RayTrain", "sunspot.warm.server", "app/sunspot/warm/client")
"""Begin or are in the command lines of workers, their clients and their servers."""

GONE_WITHIN_S = 30.0

HUNG_S = 120.0
"""A restart that takes so long stood still, even on a busy machine."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="of a cold and a warm run, each killed twice; default: 3")
    parser.add_argument("--kills", type=int, default=0, help="kill one warm run so often, instead")
    arguments = parser.parse_args()
    with ray_session(), tempfile.TemporaryDirectory() as folder:
        if arguments.kills:
            before = find_processes()
            run, phases = kill(folder, "killed", arguments.kills, warm=True)
            faults = find_faults(run, phases, arguments.kills, before)
            print("\n".join(faults) or f"{arguments.kills} kills: all made up for, every row once, nothing left")
            return 1 if faults else 0
        losses: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for pair in range(arguments.pairs):
            for warm in (False, True):
                losses[warm] += kill(folder, f"{'warm' if warm else 'cold'}-{pair}", 2, warm)[1]
        for warm, each in losses.items():
            middle = {name: f"{median(phases[name] for phases in each):.1f} s" for name in each[0]}
            print(f"median of {len(each)}, {'warm' if warm else 'cold'}: {middle}")
    return 0


def kill(folder: str, name: str, kills: int, warm: bool) -> tuple[Run, list[dict[str, float]]]:
    """Train a run that is killed so often; prints and returns the seconds from each signal to the end of each phase."""
    signals = Path(folder, f"{name}-signals")
    own = {"STORAGE_PATH": folder, "RUN_NAME": name, "MAX_FAILURES": str(kills), "MAX_STEPS": str((kills + 1) * STEPS)}
    own |= {"TASK_ARGS": json.dumps({"signals": str(signals), "kills": kills})}
    own |= {"WARM_RESTART_AFTER_S": "0.1" if warm else "0"}
    run, _ = train(load_settings({**SETTINGS, **own}))
    lost = [receipt for receipt in read_receipts(read_journal(run, "events")) if receipt.cause.incident]
    sent = [float(line) for line in signals.read_text().split()]
    phases = [phases_of(receipt, at) for receipt, at in zip(lost, sent, strict=False)]
    for receipt, each in zip(lost, phases, strict=True):
        shown = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in each.items())
        print(f"{name}: SIGKILL to {shown}; {receipt.forked} of {receipt.world_after} forked", flush=True)
    return run, phases


def find_faults(run: Run, phases: list[dict[str, float]], kills: int, before: Collection[str]) -> list[str]:
    """A line for each thing that is not as it should be after so many kills; `before` is `find_processes` before."""
    faults = [f"{len(phases)} receipts of {kills} losses"] if len(phases) != kills else []
    faults += [f"a restart of {each['first step']:.0f} s" for each in phases if each["first step"] > HUNG_S]
    forked = [receipt.forked for receipt in read_receipts(read_journal(run, "events"))][1:]
    faults += [f"{sum(count < 2 for count in forked)} restarts with processes that were not forked"] * (min(forked) < 2)
    try:
        faults += prove(run).faults
    except SunspotError as error:
        faults.append(f"the audit: {error}")
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := find_processes() - set(before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    faults += [f"a process is left: {line[:100]}" for line in left]
    copies = node_memory_directory(run.location)
    stacks = SHARED_MEMORY.glob(f"sunspot-hang-{copies.name[:12]}-*")
    return faults + [f"{path} is left" for path in (copies, *stacks) if path.exists()]


def find_processes() -> set[str]:
    """Workers, their clients and their servers: ids and command lines."""
    lines = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            lines.add(f"{path.parent.name} {path.read_text(errors='replace')}".replace("\0", " "))
    return {line for line in lines if any(name in line for name in WORKERS)}


if __name__ == "__main__":
    sys.exit(main())
