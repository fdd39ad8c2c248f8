"""`make soak`: inject faults of every kind in random order for half an hour, and check that the run is not affected.

The commands of `make recovery` remove nodes, and `sunspot chaos` kills pods. At the end, the run must have succeeded
with a clean audit and the accuracy of a run without incidents. The script prints its receipts and goodput.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from scripts.cluster import commands_of_the_environment, options, sunspot
from scripts.recovery import add_options, inject, request_of
from scripts.smoke import MIN_ACCURACY
from scripts.subjects import SunspotRun, running, wait_until_complete
from sunspot.errors import SunspotError, run_and_exit
from sunspot.run.incidents import describe_receipt

INCIDENTS = [
    *(("reclaim", target) for target in ("worker", "rank0")),
    *(("kill", target) for target in ("worker", "rank0", "all", "head")),
    *(("chaos", kind) for kind in ("reclaim", "kill", "head")),
]
"""Faults to inject: a command and the pod whose node it affects, or `chaos` and the kind of its fault."""

LONGEST_PAUSE_S = 60
END_S = 7200
"""Seconds for the rest of the run after the last fault."""

SETTINGS = {"EPOCHS": "40", "MAX_FAILURES": "100", "AUDIT": "true"}


def main() -> int:
    """Inject faults, wait for the end, and check the result."""
    parser = argparse.ArgumentParser("soak", description="Injects faults of every kind, and checks the result.")
    parser.add_argument("--incidents", type=int, default=15, metavar="N", help="minimum number of faults; default: 15")
    parser.add_argument("--minutes", type=float, default=30, metavar="M", help="minimum minutes of faults; default: 30")
    parser.add_argument("--seed", type=int, help="seed of all random numbers; default: a new one, which is printed")
    add_options(parser, "soak")
    arguments = parser.parse_args()
    commands = commands_of_the_environment("reclaim", "kill")
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"== seed {seed}", flush=True)
    run = SunspotRun(request_of(arguments, SETTINGS))
    with running(run):
        inject_all(run, commands, random.Random(seed), arguments.incidents, 60 * arguments.minutes)
        print("== wait for the end", flush=True)
        sunspot("wait", run.run.name, "--timeout", str(END_S), *options(run.namespace))
        report(run)
    return 0


def inject_all(
    run: SunspotRun, commands: dict[str, str], chance: random.Random, incidents: int, seconds: float
) -> None:
    """Inject at least `incidents` faults for at least `seconds`, each kind equally often.

    Half of the faults, chosen at random, do not wait until all workers train.
    """
    began = time.monotonic()
    injected = 0
    order: list[tuple[str, str]] = []
    while injected < incidents or time.monotonic() - began < seconds:
        order = order or chance.sample(INCIDENTS, len(INCIDENTS))
        how, target = order.pop()
        if chance.random() < 0.5:
            wait_until_complete(run, 0)
        time.sleep(chance.uniform(0, LONGEST_PAUSE_S))
        injected += 1
        print(f"== incident {injected}, after {(time.monotonic() - began) / 60:.1f} min: {how} {target}", flush=True)
        if how == "chaos":
            seed = str(chance.randrange(10**6))
            sunspot("chaos", run.run.name, "--kind", target, "--seed", seed, "--yes", *options(run.namespace))
        else:
            fault = inject(run, how, target, commands, chance)
            print(f"   first step after {fault.first_step_s} s, {fault.after.replayed} replayed", flush=True)


def report(run: SunspotRun) -> None:
    """Print the receipts and the goodput. Raises `SunspotError` if the run failed or its accuracy is too low."""
    receipts = [receipt for receipt in run.receipts() if receipt.cause.incident]
    for receipt in receipts:
        print(f"{time.strftime('%H:%M:%S', time.gmtime(receipt.first_step))}  {describe_receipt(receipt)}")
    sunspot("audit", run.run.name)
    status = json.loads(sunspot("status", run.run.name, "--json", *options(run.namespace), quiet=True))
    newest = json.loads(sunspot("checkpoints", "ls", run.run.name, "--json", "--limit", "1", quiet=True))[0]
    accuracy = newest["metrics"]["test_accuracy"]
    print(f"{len(receipts)} receipts, goodput {status['goodput']:.1%}, accuracy {accuracy:.2%}, {status['state']}")
    if status["state"] != "succeeded" or accuracy < MIN_ACCURACY:
        raise SunspotError(f"expected the run to succeed with an accuracy of at least {MIN_ACCURACY:.0%}")


if __name__ == "__main__":
    run_and_exit(main)
