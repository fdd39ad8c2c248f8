"""`sunspot audit`: checks which rows each epoch consumed, and finds damaged checkpoints and missing receipts."""

import argparse

from sunspot.errors import NotFoundError
from sunspot.submitter.commands.arguments import add_run
from sunspot.submitter.printing import print_json, print_table
from sunspot.submitter.proof import COLUMNS, NO_ROWS, Proof, conclude, prove
from sunspot.submitter.runs import find_run

add_arguments = add_run


def run(args: argparse.Namespace) -> None:
    """Print the rows that each epoch consumed, up to the newest intact checkpoint."""
    run = find_run(args.run, args.storage)
    proof = prove(run)
    if proof.epochs and args.json:
        print_json([epoch.record() for epoch in proof.epochs])
    elif proof.epochs:
        print_epochs(proof)
    conclude(run, proof)
    if not proof.epochs:
        raise NotFoundError(f"{run.location}: {NO_ROWS}")


def print_epochs(proof: Proof) -> None:
    """Print a table of the rows that each epoch consumed. For a mixture, each line names its source."""
    rows = [[e.epoch, e.rows, e.missing if e.finished else "unfinished", e.repeated] for e in proof.epochs]
    if any(epoch.source for epoch in proof.epochs):
        print_table(("source", *COLUMNS), [[e.source, *row] for e, row in zip(proof.epochs, rows, strict=True)])
    else:
        print_table(COLUMNS, rows)
