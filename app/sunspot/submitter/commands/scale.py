"""`sunspot scale`: changes the number of workers of a live elastic run."""

import argparse

from sunspot.settings import WorkerRange, parse_workers
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.scaling import scale_run
from sunspot.submitter.commands.arguments import add_run_and_cluster, run_target, seconds
from sunspot.submitter.printing import print_json, print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_and_cluster(parser)
    parser.add_argument(
        "workers",
        metavar="WORKERS",
        type=_workers,
        help="number of workers, such as 3 or 2..4, within SUNSPOT_NUM_WORKERS; its full range undoes a request",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=seconds,
        default=600,
        help="seconds to wait until workers have left; default: 600",
    )


def run(args: argparse.Namespace) -> None:
    access = reach_run(run_target(args), changed_by="scale")
    scaled = scale_run(access, args.workers, args.timeout)
    if args.json:
        numbers = {"workers": str(scaled.wanted), "num_workers": str(scaled.given), "training": scaled.training}
        print_json({"run": access.run.name, **numbers, "pods": list(scaled.pods)})
        return
    print_text(f"{access.run.name}: {scaled.wanted} workers wanted, {scaled.training} training")
    if scaled.pods:
        print_text(f"  given back: {', '.join(scaled.pods)}")
    if scaled.training < scaled.wanted.most:
        print_text("  more workers join as soon as there are nodes for them")
    if scaled.wanted != scaled.given:
        print_text(f"  to undo this: sunspot scale {access.arguments} {scaled.given}")


def _workers(text: str) -> WorkerRange:
    try:
        return parse_workers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text}: must be a number of workers >= 1, or a range, such as 2..4"
        ) from error
