"""`sunspot logs`: what a run's processes printed, from storage: a few seconds behind, and there when no cluster is."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
import time
from collections.abc import Callable

from app.errors import GaveUpError, NotFoundError, SettingsError
from app.run import Run
from app.run.logs import list_streams, read_pieces
from app.run.overview import read_state
from app.run.status import RunState
from submitter.commands.arguments import add_run
from submitter.output import warn
from submitter.runs import find_run

POLL_S = 2.0
"""Seconds between two looks at a stream that is followed. Processes ship what they print every 5 s."""

FIRST_OUTPUT_S = 3600
"""How long a run may take to print anything: longer than any profile lets its pods take to be ready."""

LOOK_FOR_NEW_EVERY = 3
"""Looks at a stream for one listing of all streams, in which that of a later start of the process would be."""

QUIET_LOOKS = 3
"""Looks without news after the run has ended: what its processes printed last is shipped at their very end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--rank", metavar="N", type=int, help="of this worker, from 0; default: the driver")
    parser.add_argument("--previous", action="store_true", help="of the start before the newest")


def run(args: argparse.Namespace) -> None:
    state: Callable[[Run], tuple[RunState, str]] = read_state
    if args.follow:
        from submitter.cluster.api import try_connect
        from submitter.cluster.watch import observe_run

        cluster, _ = try_connect(args)
        if cluster:

            def state(run: Run) -> tuple[RunState, str]:
                return observe_run(cluster, run).state()

    show(find_run(args.run, args.storage), args.rank, args.previous, args.follow, args.json, state)


def show(
    run: Run,
    rank: int | None = None,
    previous: bool = False,
    follow: bool = False,
    as_json: bool = False,
    state: Callable[[Run], tuple[RunState, str]] = read_state,
) -> None:
    """Print the newest output of the driver, or of one rank; `previous`: of the start before the newest.

    With `follow`, goes on until `state` says that the run has ended. Raises `NotFoundError` when there is no such
    output; one that may still come is waited for.
    """
    if follow and previous:
        raise SettingsError("-f and --previous: choose one; what a start before the newest printed is complete")
    try:
        _show(run, rank, previous, follow, as_json, state)
    except KeyboardInterrupt:  # the usual end of following: nothing is to be said about it
        raise SystemExit(130) from None


def _show(
    run: Run,
    rank: int | None,
    previous: bool,
    follow: bool,
    as_json: bool,
    state: Callable[[Run], tuple[RunState, str]],
) -> None:
    streams = _find(run, rank)
    if not streams and follow and not list_streams(run) and not state(run)[0].terminal:
        warn(f"waiting for the first output of {run.name}")
        deadline = time.monotonic() + FIRST_OUTPUT_S
        while not streams and not state(run)[0].terminal:
            if time.monotonic() > deadline:
                raise GaveUpError(f"{run.name} has printed nothing in {FIRST_OUTPUT_S / 60:.0f} min: {state(run)[1]}")
            time.sleep(POLL_S)
            streams = _find(run, rank)
    if len(streams) < 1 + previous:
        raise NotFoundError(_explain_absence(run, rank, previous and bool(streams)))
    printer = _Printer(run, streams[-2 if previous else -1], as_json)
    printer.print_new()
    if follow:
        _follow(run, rank, printer, state)
    printer.close()


def _follow(run: Run, rank: int | None, printer: _Printer, state: Callable[[Run], tuple[RunState, str]]) -> None:
    looks = quiet = 0
    while quiet < QUIET_LOOKS:
        time.sleep(POLL_S)
        looks += 1
        news = printer.print_new()
        now, reason = state(run)
        quiet = quiet + 1 if now.terminal and not news else 0
        if looks % LOOK_FOR_NEW_EVERY == 0 or quiet == QUIET_LOOKS:
            newer = [stream for stream in _find(run, rank) if stream > printer.stream]
            if newer:
                quiet = 0
            for stream in newer:
                printer.turn_to(stream)
    warn(f"{run.name}: {now}, {reason}")


class _Printer:
    """Prints a stream from where it stopped the last time."""

    def __init__(self, run: Run, stream: str, as_json: bool) -> None:
        self._run, self._as_json = run, as_json
        self._begin(stream)

    def _begin(self, stream: str) -> None:
        self.stream = stream
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = ""
        warn(f"{stream}, in {self._run.storage.locate(self._run.key('logs', stream))}")

    def print_new(self) -> bool:
        """Print what is there and was not printed; whether there was anything."""
        before = self._read
        for piece in read_pieces(self._run, self.stream, self._read):
            self._read += len(piece)
            self._print(self._decoder.decode(piece))
        sys.stdout.flush()
        return self._read > before

    def turn_to(self, stream: str) -> None:
        """Finish this stream, and begin another."""
        self.print_new()
        self.close()
        self._begin(stream)
        self.print_new()

    def close(self) -> None:
        """Print a last line that has no end."""
        self._print(self._decoder.decode(b"", final=True))
        if self._unfinished:
            self._print("\n")
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        if not self._as_json:
            sys.stdout.write(text)
            self._unfinished = "" if text.endswith("\n") else text[-1:] or self._unfinished
            return
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            print(json.dumps({"stream": self.stream, "line": line}))


def _find(run: Run, rank: int | None) -> list[str]:
    """The streams of the driver or of one rank, the newest last."""
    return [stream for stream in list_streams(run) if _is_of(stream, rank)]


def _is_of(stream: str, rank: int | None) -> bool:
    if rank is None:
        return stream.startswith("driver-")
    attempt, _, number = stream.partition("-rank-")
    return attempt.startswith("attempt-") and number.isdigit() and int(number) == rank


def _explain_absence(run: Run, rank: int | None, only_one: bool) -> str:
    who = "the driver" if rank is None else f"rank {rank}"
    what = f"one start of {who} only, so --previous has nothing" if only_one else f"no output of {who}"
    streams = list(list_streams(run))
    there = f"; there are {', '.join(streams[-10:])}" if streams else "; no process of it has shipped any output"
    return f"{run.storage.locate(run.key('logs'))}: {what}{there}"
