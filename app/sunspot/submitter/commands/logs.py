"""`sunspot logs`: prints the output of a run's processes from storage, with a delay of a few seconds."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import sys
import time
from typing import TYPE_CHECKING

from sunspot.errors import GaveUpError, NotFoundError, SettingsError
from sunspot.run import Run
from sunspot.run.logs import list_streams, read_parts
from sunspot.submitter.commands.arguments import add_run_and_cluster
from sunspot.submitter.printing import print_json_line, print_text, warn
from sunspot.submitter.runs import find_run, find_stream, streams_of

if TYPE_CHECKING:
    from sunspot.submitter.cluster.api import Cluster
    from sunspot.submitter.cluster.observation import RunAccess

POLL_S = 2.0
"""Seconds between reads of a followed stream. Processes upload their output every 5 s."""

FIRST_OUTPUT_S = 3600
"""Seconds within which a run must print its first output. All profiles give pods less time to become ready."""

QUIET_READS = 3
"""Number of reads without new output before a run that has ended counts as complete. Processes upload their last output
at exit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_and_cluster(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new output until the run ends")
    parser.add_argument(
        "--rank", metavar="N", type=int, help="print the output of the worker with this rank; default: the driver"
    )
    parser.add_argument("--previous", action="store_true", help="print the output of the previous start")


def run(args: argparse.Namespace) -> None:
    """Print the newest output of the driver or one rank. With `-f`, continue until the run has ended."""
    if args.follow and args.previous:
        raise SettingsError(
            "-f and --previous cannot be combined, because output from before a restart no longer grows; choose one"
        )
    cluster = None
    if args.follow:
        from sunspot.submitter.cluster.api import try_connect

        cluster, _ = try_connect(args.context, args.namespace)
    run = find_run(args.run, args.storage)
    with contextlib.suppress(KeyboardInterrupt):  # the usual way to stop following
        if args.follow:
            follow(run, args.rank, args.json, cluster)
        else:
            printer = _Printer(run, _find_printed(run, args), args.json)
            printer.print_new()
            printer.close()
        return
    raise SystemExit(130)


def _find_printed(run: Run, args: argparse.Namespace) -> str:
    """Find the stream selected by the arguments.

    Raises `NotFoundError` if the stream does not exist. If the run has written no output at all, the message also says
    why, according to the cluster.
    """
    try:
        return find_stream(run, args.rank, args.previous)
    except NotFoundError as error:
        from sunspot.submitter.cluster.observation import explain_missing_output

        why = "" if any(list_streams(run)) else explain_missing_output(run, args.context, args.namespace)
        if not why:
            raise
        raise NotFoundError(f"{error}; {why}") from error


def _await_output(access: RunAccess, rank: int | None) -> None:
    """Wait until a stream exists or the run has ended. Raises `GaveUpError` after FIRST_OUTPUT_S."""
    run = access.run
    if list_streams(run) or access.observe().state()[0].terminal:
        return
    warn(f"waiting for the first output of {run.name}")
    deadline = time.monotonic() + FIRST_OUTPUT_S
    while not streams_of(run, rank):
        state, reason = access.observe().state()
        if state.terminal:
            return
        if time.monotonic() > deadline:
            raise GaveUpError(f"{run.name} has printed nothing in {FIRST_OUTPUT_S / 60:.0f} min: {reason}")
        time.sleep(POLL_S)


def follow(run: Run, rank: int | None = None, as_json: bool = False, cluster: Cluster | None = None) -> None:
    """Print the run's newest stream, and then the streams of any restarts, until the run has ended."""
    from sunspot.submitter.cluster.observation import RunAccess

    access = RunAccess(run, cluster)
    _await_output(access, rank)
    printer = _Printer(run, find_stream(run, rank, previous=False), as_json)
    printer.print_new()
    quiet = 0
    while quiet < QUIET_READS:
        time.sleep(POLL_S)
        printed = printer.print_new()
        state, reason = access.observe().state()
        later = [stream for stream in streams_of(run, rank) if stream > printer.stream]
        for stream in later:
            printer.print_new()
            printer.close()
            printer = _Printer(run, stream, as_json)
            printer.print_new()
        quiet = quiet + 1 if state.terminal and not printed and not later else 0
    warn(f"{run.name}: {state}, {reason}")
    printer.close()


class _Printer:
    """Prints a stream piece by piece."""

    def __init__(self, run: Run, stream: str, as_json: bool) -> None:
        self.stream = stream
        self._run = run
        self._as_json = as_json
        self._read = 0
        self._unfinished = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        warn(f"{stream}, in {run.storage.locate(run.key('logs', stream))}")

    def print_new(self) -> bool:
        """Print the new output, and return True if there was any."""
        before = self._read
        for piece in read_parts(self._run, self.stream, self._read):
            self._read = piece.end
            self._print(self._decoder.decode(piece.data))
        sys.stdout.flush()
        return self._read > before

    def close(self) -> None:
        """Finish an incomplete last line."""
        self._print(self._decoder.decode(b"", final=True))
        if self._unfinished:
            self._print("\n")
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        if not self._as_json:
            print_text(text, end="")
            self._unfinished = "" if text.endswith("\n") else text[-1:] or self._unfinished
            return
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            print_json_line({"stream": self.stream, "line": line})
