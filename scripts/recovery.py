"""`make recovery`: measure the cost of losing a node of a live run on a real cluster, in seconds and repeated steps.

The script submits a run to the cluster of KUBE_CONTEXT. When all workers train, one of your commands removes nodes:
RECLAIM with notice, or KILL without. The clock starts right before the command and stops at the next step, according to
the run's own record. ADD (or ADD_HEAD for the head's node) brings back these nodes or similar ones. The next fault
waits until all workers train again. In the commands, {node} stands for the node's name.

--subject chooses another way to train (scripts/subjects.py): the loop from Ray's guides with the defaults of Ray and
KubeRay (scripts/stock.yaml), saving on notice or not, or TorchFT, which must be in the image.

The namespace must contain k8s/base and the Secret sunspot-storage. SUNSPOT_STORAGE_PATH and the AWS_ variables must
lead to the same storage from this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from scripts.cluster import Pod, begin, commands_of_the_environment, finish, pods, until
from scripts.subjects import START_S, SUBJECTS, Group, Subject, running, wait_until_complete
from sunspot.errors import run_and_exit
from sunspot.settings import PREFIX
from sunspot.submitter.manifest.render import JobRequest

KINDS, TARGETS = ("reclaim", "kill"), ("worker", "rank0", "all", "head")
NEEDED = ("all", "head")
"""Targets that every run needs to continue. Their nodes come back at once, and others after the first step."""

PHASES = ("noticed", "save_began", "committed", "launched", "up", "formed", "restarted", "loaded")

RECOVER_S = 1200
"""Seconds for the first step after a fault. With Ray's defaults, noticing a fault has taken seven minutes."""

SETTINGS = {
    # The run must outlast any number of faults. The script ends it.
    "EPOCHS": "1000",
    "MAX_FAILURES": "100",
    "AUDIT": "true",
}


@dataclass(frozen=True)
class Fault:
    """A fault and its cost."""

    kind: str
    target: str
    nodes: list[str]
    signal: float
    "Time right before the command, in seconds since the epoch."
    world_before: int
    after: Group
    "The first worker group after the fault."
    complete_s: float | None = None
    "Seconds from the signal to the first step with all workers."

    @property
    def first_step_s(self) -> float:
        """The seconds from the signal to the next step."""
        return round(self.after.first_step - self.signal, 1)

    def cells(self) -> list[str]:
        """Return the cells of the fault's line in the table. The cell of an unknown time is empty."""
        receipt = self.after.receipt
        times = [getattr(receipt, name, None) for name in PHASES]
        phases = ["" if at is None else f"{at - self.signal:.1f}" for at in times]
        workers = f"{self.world_before} to {self.after.world_size}"
        done = ["" if self.complete_s is None else f"{self.complete_s:.1f}"]
        figures = [f"{self.first_step_s:.1f}", str(self.after.replayed)]
        return [self.kind, self.target, workers, *phases, *figures, *done]


def inject(subject: Subject, kind: str, target: str, commands: dict[str, str], chance: random.Random) -> Fault:
    """Remove the nodes, wait for the next step, and bring the nodes back."""

    def find_nodes() -> list[str]:
        return choose(target, pods(subject.job, subject.namespace), subject.rank0(), chance)

    nodes = until(f"node with {target} of {subject.job}", START_S, find_nodes)
    before: Group = until("worker group", START_S, subject.groups)[-1]
    print(f"== {time.strftime('%H:%M:%S')} {kind} {', '.join(nodes)} ({target})", flush=True)
    signal = time.time()
    under_way = [begin(commands[kind], node) for node in nodes]

    def first_after() -> Group | None:
        return next((g for g in subject.groups() if g.number > before.number and g.first_step > signal), None)

    if target in NEEDED:
        bring_back(nodes, target, under_way, commands)
    after: Group = until("step after the fault", RECOVER_S, first_after)
    if target not in NEEDED:
        bring_back(nodes, target, under_way, commands)
    return Fault(kind, target, nodes, signal, before.world_size, after)


def bring_back(nodes: list[str], target: str, under_way: list[subprocess.Popen[str]], commands: dict[str, str]) -> None:
    """Wait until the nodes are gone, and bring them back if a command for that is set."""
    for command in under_way:
        finish(command)
    back = commands["add_head" if target == "head" else "add"]
    for node in nodes if back else ():
        finish(begin(back, node))


def choose(target: str, alive: Sequence[Pod], rank0: str, chance: random.Random) -> list[str]:
    """Return the nodes to remove. The list is empty while the target is unknown or only runs on the head's node."""
    heads = {pod.node for pod in alive if pod.head}
    workers = {pod.name: pod.node for pod in alive if not pod.head}
    if target == "head":
        return sorted(heads)
    if target == "rank0":
        return [workers[rank0]] if rank0 in workers else []
    free = sorted(set(workers.values()) - heads)  # losing the head's node would lose the head, too
    if target == "all":
        return free
    others = [node for node in free if node != workers.get(rank0)] or free
    return [chance.choice(others)] if others else []


def table(faults: Sequence[Fault]) -> str:
    """Return a table with a line for each fault, and with the medians."""
    phases = [name.replace("_", " ") for name in PHASES]
    names = ["fault", "target", "workers", *phases, "first step", "replayed", "all workers"]
    middle = [f"{median(f.first_step_s for f in faults):.1f}", f"{median(f.after.replayed for f in faults):g}", ""]
    lines = [names, ["---"] * len(names), *(fault.cells() for fault in faults)]
    lines.append(["median", *[""] * (len(names) - 4), *middle])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def add_options(parser: argparse.ArgumentParser, run: str) -> None:
    """Add the options that describe the run to submit."""
    parser.add_argument("--profile", default=os.environ.get("PROFILE") or "kind")
    parser.add_argument("--image", default=os.environ.get("IMAGE") or None)
    parser.add_argument("--namespace", default="sunspot")
    parser.add_argument("--run", default=run, help=f"name of the run; default: {run}")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="VAR=VALUE", help="a setting")


def request_of(arguments: argparse.Namespace, defaults: dict[str, str]) -> JobRequest:
    """Return the run that the options describe, with its settings by their names without the prefix."""
    given = dict(word.removeprefix(PREFIX).partition("=")[::2] for word in arguments.settings)
    settings = {"NUM_WORKERS": "2", **defaults, "RUN_NAME": arguments.run, **given}
    return JobRequest(arguments.profile, settings, arguments.image, arguments.namespace)


def main() -> int:
    """Inject the faults, and print their cost."""
    parser = argparse.ArgumentParser("recovery", description="Removes nodes from a live run, and prints the cost.")
    parser.add_argument("--fault", choices=KINDS, default="reclaim")
    parser.add_argument("--target", choices=TARGETS, default="worker", help="pod whose node is removed")
    parser.add_argument("--repeat", type=int, default=1, metavar="N")
    parser.add_argument("--subject", choices=SUBJECTS, default="sunspot", help="way to train; default: sunspot")
    add_options(parser, "recovery")
    arguments = parser.parse_args()
    commands = commands_of_the_environment(arguments.fault)
    subject = SUBJECTS[arguments.subject](request_of(arguments, SETTINGS))
    chance = random.Random(0)
    faults = []
    with running(subject):
        for _ in range(arguments.repeat):
            fault = inject(subject, arguments.fault, arguments.target, commands, chance)
            complete = wait_until_complete(subject, fault.signal)
            faults.append(replace(fault, complete_s=round(complete.first_step - fault.signal, 1)))
            print(json.dumps(asdict(faults[-1])), flush=True)
    print(table(faults))
    return 0


if __name__ == "__main__":
    run_and_exit(main)
