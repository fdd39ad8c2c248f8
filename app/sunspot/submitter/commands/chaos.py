"""`sunspot chaos`: injects faults into a live run, prints what each fault cost, and audits the run."""

import argparse
import time

from sunspot.errors import SettingsError
from sunspot.submitter.cluster.faults import FaultInjector, make_plan
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.commands.arguments import add_run_and_cluster, count, run_target
from sunspot.submitter.commands.audit import print_epochs
from sunspot.submitter.printing import print_json_line, warn
from sunspot.submitter.proof import NO_ROWS, conclude, prove


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_and_cluster(parser)
    parser.add_argument(
        "--kind",
        metavar="KIND",
        dest="kinds",
        action="append",
        required=True,
        help="kind of fault: reclaim or kill for a training worker, or head for the head; several kinds, such as "
        "reclaim,kill, are injected in random order",
    )
    parser.add_argument(
        "--every",
        metavar="TIME",
        type=_seconds,
        default=60.0,
        help="time between faults, such as 90, 90s or 2m; default: 60s",
    )
    parser.add_argument("--count", metavar="N", type=count, default=1, help="number of faults; default: 1")
    parser.add_argument(
        "--seed", metavar="S", type=int, help="seed of all random choices; default: a random seed, which is printed"
    )
    parser.add_argument("--yes", action="store_true", help="inject the faults; without --yes, only show them")


def run(args: argparse.Namespace) -> None:
    """Inject faults into a live run, wait until it has recovered, and audit it."""
    plan = make_plan(args.kinds, args.every, args.count, args.seed)
    injector = FaultInjector(reach_run(run_target(args)), args.json)
    injector.refuse_unless_live()
    if not args.yes:
        where = f"of the run {args.run} in {injector.cluster.namespace}"
        raise SettingsError(f"this would {plan} {where}, but nothing was done; add --yes to do it")
    injector.inject_all(plan)

    proof = prove(injector.run)
    if args.json:
        epochs = [epoch.record() for epoch in proof.epochs]
        print_json_line({"time": time.time(), "event": "audit", "epochs": epochs, "faults": proof.faults})
    elif proof.epochs:
        print_epochs(proof)
    conclude(injector.run, proof)
    if not proof.epochs:
        warn(f"checkpoints and receipts are intact, but the rows cannot be checked: {NO_ROWS}")


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a time > 0, such as 90, 90s or 2m")
    return seconds
