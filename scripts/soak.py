"""`make soak`: half an hour of faults of every kind in random order, after which a run must be as good as any other.

Nodes are taken by the commands of `make recovery`, pods by `sunspot chaos`. In the end the run must have succeeded,
with a clean audit and the accuracy of a run without incidents; its receipts and goodput are printed.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from scripts.cluster import commands_of_the_environment, options, sunspot
from scripts.recovery import add_options, inject, request_of
from scripts.smoke import MIN_ACCURACY
from scripts.subjects import Ours, running, wait_until_complete
from sunspot.errors import SunspotError, run_and_exit
from sunspot.run.incidents import describe_receipt

INCIDENTS = [
    *(("reclaim", target) for target in ("worker", "rank0")),
    *(("kill", target) for target in ("worker", "rank0", "all", "head")),
    *(("chaos", kind) for kind in ("reclaim", "kill", "head")),
]
"""What is done, and to whose node; or which fault `sunspot chaos` injects."""

LONGEST_PAUSE_S = 60
END_S = 7200
"""For the rest of the run after the last fault."""

SETTINGS = {"EPOCHS": "40", "MAX_FAILURES": "100", "AUDIT": "true"}


def main() -> int:
    """Inject faults, wait for the end, and check the result."""
    parser = argparse.ArgumentParser("soak", description="Injects faults of every kind, and checks the result.")
    parser.add_argument("--incidents", type=int, default=15, metavar="N", help="at least; default: 15")
    parser.add_argument("--minutes", type=float, default=30, metavar="M", help="at least; default: 30")
    parser.add_argument("--seed", type=int, help="of all that is random; default: a new one, printed")
    add_options(parser, "soak")
    arguments = parser.parse_args()
    commands = commands_of_the_environment("reclaim", "kill")
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"== seed {seed}", flush=True)
    run = Ours(request_of(arguments, SETTINGS))
    with running(run):
        inject_all(run, commands, random.Random(seed), arguments.incidents, 60 * arguments.minutes)
        print("== wait for the end", flush=True)
        sunspot("wait", run.run.name, "--timeout", str(END_S), *options(run.namespace))
        report(run)
    return 0


def inject_all(run: Ours, commands: dict[str, str], chance: random.Random, incidents: int, seconds: float) -> None:
    """Inject at least so many faults, for at least so long, each kind as often as the others.

    Every other one, at random, does not wait until all workers train.
    """
    began, injected = time.monotonic(), 0
    order: list[tuple[str, str]] = []
    while injected < incidents or time.monotonic() - began < seconds:
        order = order or chance.sample(INCIDENTS, len(INCIDENTS))
        how, whom = order.pop()
        if chance.random() < 0.5:
            wait_until_complete(run, 0)
        time.sleep(chance.uniform(0, LONGEST_PAUSE_S))
        injected += 1
        print(f"== incident {injected}, after {(time.monotonic() - began) / 60:.1f} min: {how} {whom}", flush=True)
        if how == "chaos":
            seed = str(chance.randrange(10**6))
            sunspot("chaos", run.run.name, "--kind", whom, "--seed", seed, "--yes", *options(run.namespace))
        else:
            fault = inject(run, how, whom, commands, chance)
            print(f"   first step after {fault.first_step_s} s, {fault.after.replayed} replayed", flush=True)


def report(run: Ours) -> None:
    """Print receipts and goodput; raises `SunspotError` if the run is not as good as any other."""
    receipts = [receipt for receipt in run.receipts() if receipt.cause.incident]
    for receipt in receipts:
        print(f"{time.strftime('%H:%M:%S', time.gmtime(receipt.first_step))}  {describe_receipt(receipt)}")
    sunspot("audit", run.run.name)
    status = json.loads(sunspot("status", run.run.name, "--json", *options(run.namespace), quiet=True))
    newest = json.loads(sunspot("checkpoints", "ls", run.run.name, "--json", "--limit", "1", quiet=True))[0]
    accuracy = newest["metrics"]["test_accuracy"]
    print(f"{len(receipts)} receipts, goodput {status['goodput']:.1%}, accuracy {accuracy:.2%}, {status['state']}")
    if status["state"] != "succeeded" or accuracy < MIN_ACCURACY:
        raise SunspotError(f"it should have succeeded, with an accuracy of {MIN_ACCURACY:.0%} or more")


if __name__ == "__main__":
    run_and_exit(main)
