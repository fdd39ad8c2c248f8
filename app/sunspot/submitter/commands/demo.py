"""`sunspot demo`: trains on this machine, kills a worker, and checks that no row was lost."""

import argparse
import time
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing, because this subcommand has only the common arguments."""


def run(args: argparse.Namespace) -> None:
    """Print each event as soon as it is known, and finally the cost of losing a worker."""
    from sunspot.submitter.demonstration import NAME, demonstrate
    from sunspot.submitter.printing import print_json, print_table, print_text
    from sunspot.submitter.proof import conclude
    from sunspot.submitter.runs import named_run

    began = time.time()
    events: list[dict[str, Any]] = []

    def report(moment: float, text: str) -> None:
        events.append({"after_s": round(moment - began, 1), "text": text})
        if not args.json:
            print_text(f"{moment - began:6.1f} s  {text}", flush=True)

    run = named_run(NAME, args.storage)
    shown = demonstrate(run, report)
    costs = {
        "pause_s": round(shown.loss.recovery_s, 1),
        "steps_again": shown.loss.replayed,
        "rows_missing": sum(epoch.missing for epoch in shown.proof.epochs),
        "rows_repeated": sum(epoch.repeated for epoch in shown.proof.epochs),
    }
    if args.json:
        epochs = [epoch.record() for epoch in shown.proof.epochs]
        print_json({"run": run.name, "events": events, **costs, "epochs": epochs, "report": shown.report})
    else:
        print_text()
        print_table([name.replace("_", " ") for name in costs], [list(costs.values())])
        print_text(f"report: {shown.report}")
    conclude(run, shown.proof)
