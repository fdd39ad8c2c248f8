"""`sunspot events`: lists a run's incidents and the starts of its workers."""

import argparse
import textwrap
from typing import Any

from sunspot.formatting import as_time
from sunspot.run.history import read_events
from sunspot.run.incidents import describe_receipt, read_receipts
from sunspot.submitter.commands.arguments import add_run_and_cluster
from sunspot.submitter.printing import print_json, print_table, print_text, progress_note, warn
from sunspot.submitter.runs import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_and_cluster(parser)
    parser.add_argument("--stacks", action="store_true", help="also print the stack of each hung rank")


def run(args: argparse.Namespace) -> None:
    """Print the events of all attempts, oldest first. `--json` includes all fields of each event."""
    found = find_run(args.run, args.storage)
    with progress_note("reading the events"):
        events = read_events(found)
    if not events:
        from sunspot.submitter.cluster.observation import explain_missing_output

        why = explain_missing_output(found, args.context, args.namespace)
        if why:
            warn(why)
    if args.json:
        print_json(events)
        return
    rows = [[as_time(e["time"]), e["attempt"], e["step"], e["event"], _detail(e)] for e in events]
    print_table(["time", "attempt", "step", "event", "detail"], rows)
    hung = [event for event in events if event.get("stacks")]
    if hung and not args.stacks:
        warn("--stacks shows the stacks of the hung ranks")
    for event in hung if args.stacks else ():
        print_text(f"\nattempt {event['attempt']}, step {event['step']}: {event.get('detail')}")
        print_text(textwrap.indent(event["stacks"].rstrip(), "    "))


def _detail(event: dict[str, Any]) -> str | None:
    receipts = read_receipts([event])
    return describe_receipt(receipts[0]) if receipts else event.get("detail")
