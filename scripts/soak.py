"""`make soak`: a run that is struck for half an hour, in every way and in random order, and still has to be as good.

Nodes are taken by the commands of `make recovery`, pods by `sunspot chaos`. In the end the run has to have succeeded,
with a clean audit and an accuracy as without incidents; its receipts and its goodput are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time

from app.errors import SunspotError, run_and_exit
from app.run.history import read_journal
from app.run.incidents import describe, read_receipts
from scripts.cluster import commands_of_the_environment
from scripts.recovery import add_options, settings_of, strike
from scripts.smoke import LEAST_ACCURACY
from scripts.subjects import Ours, running, wait_until_complete

INCIDENTS = [
    *(("reclaim", target) for target in ("worker", "rank0")),
    *(("kill", target) for target in ("worker", "rank0", "all", "head")),
    *(("chaos", kind) for kind in ("reclaim", "kill", "head")),
]
"""What is done, and to whose node; or which blow `sunspot chaos` deals."""

LONGEST_PAUSE_S = 60
END_S = 7200
"""For the rest of the run after the last blow."""

SETTINGS = {"EPOCHS": "40", "MAX_FAILURES": "100", "AUDIT": "true"}


def main() -> int:
    """Strike, wait for the end, and check what is left."""
    parser = argparse.ArgumentParser("soak", description="Strikes a run in every way, and checks what it comes to.")
    parser.add_argument("--incidents", type=int, default=15, metavar="N", help="at least; default: 15")
    parser.add_argument("--minutes", type=float, default=30, metavar="M", help="at least; default: 30")
    parser.add_argument("--seed", type=int, help="of all that is random; default: a new one, printed")
    add_options(parser, "soak")
    arguments = parser.parse_args()
    commands = commands_of_the_environment("reclaim", "kill")
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"== seed {seed}", flush=True)
    run = Ours(arguments.profile, settings_of(arguments, SETTINGS), arguments.image, arguments.namespace)
    with running(run):
        storm(run, commands, random.Random(seed), arguments.incidents, 60 * arguments.minutes)
        print("== wait for the end", flush=True)
        sunspot("wait", run.run.name, "--timeout", str(END_S), *on_the_cluster(run))
        report(run)
    return 0


def storm(run: Ours, commands: dict[str, str], chance: random.Random, incidents: int, seconds: float) -> None:
    """Strike so often, and for so long; each kind as often as any other.

    Half of the time it is not waited for that all workers train: a blow falls on whatever there is.
    """
    began, struck = time.monotonic(), 0
    order: list[tuple[str, str]] = []
    while struck < incidents or time.monotonic() - began < seconds:
        order = order or chance.sample(INCIDENTS, len(INCIDENTS))
        how, whom = order.pop()
        if chance.random() < 0.5:
            wait_until_complete(run, 0)
        time.sleep(chance.uniform(0, LONGEST_PAUSE_S))
        struck += 1
        print(f"== incident {struck}, after {(time.monotonic() - began) / 60:.1f} min: {how} {whom}", flush=True)
        if how == "chaos":
            seed = str(chance.randrange(10**6))
            sunspot("chaos", run.run.name, "--kind", whom, "--seed", seed, "--yes", *on_the_cluster(run))
        else:
            blow = strike(run, how, whom, commands, chance)
            print(f"   first step after {blow.first_step_s} s, {blow.replayed} replayed", flush=True)


def report(run: Ours) -> None:
    """Print the receipts and the goodput; raises `SunspotError` when the run is not as good as any other."""
    receipts = [receipt for receipt in read_receipts(read_journal(run.run, "events")) if receipt.cause.incident]
    for receipt in receipts:
        print(f"{time.strftime('%H:%M:%S', time.gmtime(receipt.first_step))}  {describe(receipt)}")
    sunspot("audit", run.run.name)
    status = json.loads(sunspot("status", run.run.name, "--json", *on_the_cluster(run), quiet=True))
    newest = json.loads(sunspot("checkpoints", "ls", run.run.name, "--json", "--limit", "1", quiet=True))[0]
    accuracy = newest["metrics"]["test_accuracy"]
    print(f"{len(receipts)} receipts, goodput {status['goodput']:.1%}, accuracy {accuracy:.2%}, {status['state']}")
    if status["state"] != "succeeded" or accuracy < LEAST_ACCURACY:
        raise SunspotError(f"it should have succeeded, with an accuracy of {LEAST_ACCURACY:.0%} or more")


def on_the_cluster(run: Ours) -> list[str]:
    """The options that lead a verb to the run's cluster."""
    context = os.environ.get("KUBE_CONTEXT")
    return [*(["--context", context] if context else []), "--namespace", run.namespace]


def sunspot(*words: str, quiet: bool = False) -> str:
    """Run a verb as a user does; its output is shown, or with `quiet` returned."""
    done = subprocess.run(
        [sys.executable, "-m", "submitter.cli", *words], text=True, stdout=subprocess.PIPE if quiet else None
    )
    if done.returncode:
        raise SunspotError(f"sunspot {' '.join(words)} ended with {done.returncode}")
    return done.stdout or ""


if __name__ == "__main__":
    run_and_exit(main)
