"""`make bench-failures`: wall time, goodput and rows lost under one schedule of failures, for each contender in turn.

Nodes of the cluster of KUBE_CONTEXT go by your commands, at the same seconds after all workers of a contender train:
RECLAIM with notice, KILL without, and ADD brings them back; {node} in them stands for the name. The contenders train
the same task to the same step: Sunspot; the loop of Ray's guides under the defaults of Ray and KubeRay, and
the same saving on notice; and TorchFT through Ray's `TorchftConfig`, with an image that has it (--torchft-image).

Results, table and plot are written to --output as they come, so that what is cut short leaves what it knew, and stay
there for the contenders of a later call: --only does one again. The cluster is one for `make recovery`; its clocks and
this machine's agree. Goodput is the steps at a contender's own usual pace, over the time that it took.
"""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scripts.cluster import commands_of_the_environment, pods, ready_nodes, until
from scripts.failures.losses import dealt, schedule
from scripts.failures.result import Result, read, table, write
from scripts.failures.rows import rows_of
from scripts.recovery import SETTINGS, add_options, request_of
from scripts.subjects import START_S, SUBJECTS, Subject, wait_until_complete
from sunspot.errors import ClusterError, GaveUpError, SettingsError, StorageError, SunspotError, run_and_exit, shorten

LOOK_EVERY_S = 60.0
"""A look at ours reads all of its history, and all are to have the cores for themselves."""

END_S = 300.0
"""For what follows the last step: a checkpoint, and its rows."""

STILL_S = 1800.0
"""A contender that takes no step for so long has failed: Ray's defaults have taken seven minutes to notice a loss."""


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser("bench-failures", description="Trains through the same losses, in several ways.")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps of each contender; default: 3000")
    parser.add_argument("--minutes", type=float, default=240, help="of each contender at most; default: 240")
    parser.add_argument("--every", type=float, default=240, metavar="S", help="seconds between losses; default: 240")
    parser.add_argument("--away", type=float, default=60, metavar="S", help="until a node comes back; default: 60")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--nodes", required=True, help="names of the workers' nodes, with commas; never the head's")
    parser.add_argument("--only", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}, with commas")
    parser.add_argument("--torchft-image", help="with torchft in it; without, TorchFT is left out")
    parser.add_argument("--output", default="bench-failures", help="folder; default: bench-failures")
    add_options(parser, "failures")
    return parser


def main() -> int:
    """Run the contenders one after the other."""
    arguments = make_parser().parse_args()
    if unknown := set(arguments.only.split(",")) - set(SUBJECTS):
        raise SettingsError(f"--only {', '.join(sorted(unknown))}: choose from {', '.join(SUBJECTS)}")
    commands = commands_of_the_environment("reclaim", "kill", "add")
    # A name of its own, as a run that is there would go on.
    arguments.run = f"{arguments.run}-{int(time.time()) % 10**6}"
    defaults = {**SETTINGS, "MAX_STEPS": str(arguments.steps), "CHECKPOINT_EVERY_STEPS": "60", "REPORT_EVERY_S": "1"}
    request = request_of(arguments, defaults)
    folder = Path(arguments.output)
    for name in arguments.only.split(","):
        if name == "torchft" and not arguments.torchft_image:
            print("TorchFT is left out: --torchft-image names none", flush=True)
            continue
        image = arguments.torchft_image if name == "torchft" else arguments.image
        subject = SUBJECTS[name](replace(request, image=image))
        result = Result(subject.title, subject.job, arguments.steps)
        results = [*(each for each in read(folder) if each.name != result.name), result]
        try:
            train(subject, results, commands, arguments)
        except SunspotError as error:  # the others' figures are worth having
            result.ended = shorten(error)
        try:
            if epochs := rows_of(subject):
                result.missing = sum(epoch.missing for epoch in epochs)
                result.repeated = sum(epoch.repeated for epoch in epochs)
        except SunspotError as error:
            print(f"the rows of {subject.job} are not known: {error}", flush=True)
        write(results, folder)
        print(table(results), flush=True)
    return int(any(result.ended for result in read(folder)))


def train(subject: Subject, results: list[Result], commands: dict[str, str], arguments: argparse.Namespace) -> None:
    """Train to the last step through the losses, and write the results as they come."""
    result, nodes = results[-1], sorted(arguments.nodes.split(","))
    losses = schedule(arguments.seed, arguments.every, nodes)
    until(f"cluster with all of {', '.join(nodes)}", START_S, lambda: ready_nodes(subject.namespace) >= set(nodes))
    print(f"== {time.strftime('%H:%M:%S')} {result.name}: {subject.job}", flush=True)
    submitted = time.time()
    subject.submit()
    try:
        wait_until_complete(subject, submitted)
        began = time.time()
        if heads := {pod.node for pod in pods(subject.job, subject.namespace) if pod.head} & set(nodes):
            raise SettingsError(f"--nodes {arguments.nodes}: the head of {subject.job} runs on {', '.join(heads)}")

        with dealt(losses, result.losses, commands, arguments.away, began) as dealing:
            while result.reached < arguments.steps and not result.ended and not dealing.done():
                left_s = began + arguments.minutes * 60 - time.time()
                time.sleep(min(LOOK_EVERY_S, max(left_s, 0)))
                look(subject, result, began, time_is_up=left_s <= LOOK_EVERY_S)
                write(results, Path(arguments.output))
        if not result.ended:
            result.losses = [loss for loss in result.losses if loss[0] <= result.wall_s]
            with suppress(GaveUpError):
                until(f"end of {subject.job}", END_S, subject.over)
    finally:
        try:
            subject.end()
        except SunspotError as error:  # what it did is known
            print(f"   {error}", flush=True)


def look(subject: Subject, result: Result, began: float, time_is_up: bool) -> None:
    """Take in what is new; a cluster or storage that does not answer is asked again, until it counts as no step."""
    over = ""
    try:
        over = subject.over()
        result.points = [(round(at - began, 2), step) for at, step in subject.timeline() if at >= began]
        result.again = subject.replayed()
    except (ClusterError, StorageError) as error:
        print(f"   {error}", flush=True)
    if result.reached < result.steps:
        now = time.time() - began
        still = now - max((at for at, _ in result.points), default=0.0)
        result.ended = over or (f"no step for {still:.0f} s" if still > STILL_S else "time is up" if time_is_up else "")
        if result.ended and not over:  # the end of its own may be a whole look ago, and counts from the last step
            result.points.append((round(now, 2), result.reached))


if __name__ == "__main__":
    run_and_exit(main)
