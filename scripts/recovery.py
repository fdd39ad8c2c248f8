"""`make recovery`: what the loss of a node costs a live run on a real cluster, in seconds and in steps taken again.

A run is submitted to the cluster of KUBE_CONTEXT. When all its workers train, a command of yours takes nodes from it:
RECLAIM with notice, KILL without. The clock begins right before the command and ends with the first step after it, as
the run itself timed that. ADD (for the head's node ADD_HEAD) brings the nodes back, or others like them, and the next
blow waits until all workers train again. In the commands, {node} stands for the node's name.

With --stock, the same blows against the usual loop under the defaults of Ray and KubeRay (scripts/stock.yaml).

The namespace has k8s/base and the Secret sunspot-storage; SUNSPOT_STORAGE_PATH and the AWS_ variables reach the same
storage from here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from app.errors import run_and_exit
from app.settings import PREFIX
from scripts.cluster import Pod, begin, commands_of_the_environment, finish, pods, until
from scripts.subjects import START_S, Group, Ours, Stock, Subject, running, wait_until_complete

BLOWS, TARGETS = ("reclaim", "kill"), ("worker", "rank0", "all", "head")
NEEDED = ("all", "head")
"""Targets without which no run goes on: their nodes come back at once, the others' after the first step."""

PHASES = ("noticed", "save_began", "committed", "restarted")

RECOVER_S = 1200
"""For the first step after a blow: with Ray's defaults, seven minutes have been seen until one was noticed."""

SETTINGS = {
    # Enough for any number of blows: the script ends the run.
    "EPOCHS": "1000",
    "MAX_FAILURES": "100",
    "AUDIT": "true",
}


@dataclass(frozen=True)
class Blow:
    """One blow, and what it cost. Times are in seconds from the signal."""

    blow: str
    target: str
    nodes: list[str]
    signal: float
    "Right before the command, in seconds since the epoch."
    first_step_s: float
    "The first step after it."
    replayed: int
    "Steps that were taken again for that."
    world_before: int
    world_after: int
    complete_s: float | None = None
    "The first step with all workers."
    phases: dict[str, float] = field(default_factory=dict)
    "Each time in the receipt."
    receipt: dict[str, Any] = field(default_factory=dict)


def strike(subject: Subject, blow: str, target: str, commands: dict[str, str], chance: random.Random) -> Blow:
    """Strike once, wait for the first step after it, and bring the nodes back."""

    def find_nodes() -> list[str]:
        return choose(target, pods(subject.job, subject.namespace), subject.rank0(), chance)

    nodes = until(f"node with {target} of {subject.job}", START_S, find_nodes)
    before: Group = until("worker group", START_S, subject.groups)[-1]
    print(f"== {time.strftime('%H:%M:%S')} {blow} {', '.join(nodes)} ({target})", flush=True)
    signal = time.time()
    under_way = [begin(commands[blow], node) for node in nodes]

    def first_after() -> Group | None:
        return next((g for g in subject.groups() if g.number > before.number and g.first_step > signal), None)

    if target in NEEDED:
        bring_back(nodes, target, under_way, commands)
    after: Group = until("step after the blow", RECOVER_S, first_after)
    if target not in NEEDED:
        bring_back(nodes, target, under_way, commands)
    return measure(blow, target, nodes, signal, before, after)


def bring_back(nodes: list[str], target: str, under_way: list[subprocess.Popen[str]], commands: dict[str, str]) -> None:
    """Once the nodes are gone, have them back, if there is a command for that."""
    for command in under_way:
        finish(command)
    back = commands["add_head" if target == "head" else "add"]
    for node in nodes if back else ():
        finish(begin(back, node))


def choose(target: str, alive: Sequence[Pod], rank0: str, chance: random.Random) -> list[str]:
    """The nodes to strike: none while no such pod runs, or only on the head's node, or nobody knows which it is."""
    heads = {pod.node for pod in alive if pod.head}
    workers = {pod.name: pod.node for pod in alive if not pod.head}
    if target == "head":
        return sorted(heads)
    if target == "rank0":
        return [workers[rank0]] if rank0 in workers else []
    free = sorted(set(workers.values()) - heads)  # the head would go with its own
    if target == "all":
        return free
    others = [node for node in free if node != workers.get(rank0)] or free
    return [chance.choice(others)] if others else []


def measure(blow: str, target: str, nodes: list[str], signal: float, before: Group, after: Group) -> Blow:
    """What a blow cost, by the first group after it."""
    receipt = asdict(after.receipt) if after.receipt else {}
    times = {name: receipt[name] for name in PHASES if receipt.get(name) is not None}
    return Blow(
        blow=blow,
        target=target,
        nodes=nodes,
        signal=signal,
        first_step_s=round(after.first_step - signal, 1),
        replayed=after.replayed,
        world_before=before.world_size,
        world_after=after.world_size,
        phases={name: round(at - signal, 1) for name, at in times.items()},
        receipt=receipt,
    )


def table(blows: Sequence[Blow]) -> str:
    """A line for each blow, and the medians."""
    names = ["blow", "target", "workers", *(name.replace("_", " ") for name in PHASES), "first step", "replayed"]
    lines = [[*names, "all workers"], ["---"] * (len(names) + 1)]
    for b in blows:
        phases = [f"{b.phases[name]:.1f}" if name in b.phases else "" for name in PHASES]
        last = f"{b.complete_s:.1f}" if b.complete_s is not None else ""
        about = [b.blow, b.target, f"{b.world_before} to {b.world_after}"]
        lines.append([*about, *phases, f"{b.first_step_s:.1f}", str(b.replayed), last])
    middle = [f"{median(b.first_step_s for b in blows):.1f}", f"{median(b.replayed for b in blows):g}"]
    lines.append(["median", *[""] * (len(names) - 3), *middle, ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def add_options(parser: argparse.ArgumentParser, run: str) -> None:
    """What decides the run that is struck."""
    parser.add_argument("--profile", default=os.environ.get("PROFILE") or "kind")
    parser.add_argument("--image", default=os.environ.get("IMAGE") or None)
    parser.add_argument("--namespace", default="sunspot")
    parser.add_argument("--run", default=run, help=f"name of the run; default: {run}")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="VAR=VALUE", help="a setting")


def settings_of(arguments: argparse.Namespace, defaults: dict[str, str]) -> dict[str, str]:
    """The settings of the run, by their names without the prefix."""
    given = dict(word.partition("=")[::2] for word in arguments.settings)
    given = {name.removeprefix(PREFIX): value for name, value in given.items()}
    return {"NUM_WORKERS": "2", **defaults, "RUN_NAME": arguments.run, **given}


def main() -> int:
    """Strike as often as asked, and print what it cost."""
    parser = argparse.ArgumentParser("recovery", description="Strikes a live run, and prints what it cost.")
    parser.add_argument("--blow", choices=BLOWS, default="reclaim")
    parser.add_argument("--target", choices=TARGETS, default="worker", help="whose node")
    parser.add_argument("--repeat", type=int, default=1, metavar="N")
    parser.add_argument("--stock", action="store_true", help="strike the usual loop instead")
    add_options(parser, "recovery")
    arguments = parser.parse_args()
    commands = commands_of_the_environment(arguments.blow)
    settings = settings_of(arguments, SETTINGS)
    kind = Stock if arguments.stock else Ours
    subject: Subject = kind(arguments.profile, settings, arguments.image, arguments.namespace)
    chance = random.Random(0)
    blows = []
    with running(subject):
        for _ in range(arguments.repeat):
            blow = strike(subject, arguments.blow, arguments.target, commands, chance)
            complete = wait_until_complete(subject, blow.signal)
            blows.append(replace(blow, complete_s=round(complete.first_step - blow.signal, 1)))
            print(json.dumps(asdict(blows[-1])), flush=True)
    print(table(blows))
    return 0


if __name__ == "__main__":
    run_and_exit(main)
