"""`make bench-failures`: measure wall time, goodput and lost rows of each contender under one schedule of losses.

Your commands remove nodes from the cluster of KUBE_CONTEXT, at the same times after all workers of a contender train:
RECLAIM with notice, and KILL without. ADD brings them back. In the commands, {node} stands for the node's name. The
contenders train the same task to the same step: Sunspot; the loop from Ray's guides with the defaults of Ray and
KubeRay, with and without saving on notice; and TorchFT through Ray's `TorchftConfig`, with an image that contains it
(--torchft-image).

Results, table and plot are written to --output continuously, so that an interrupted benchmark leaves its results. A
later call with --only measures a single contender again and keeps the others' results. The cluster must meet the
requirements of `make recovery`, and its clocks must agree with this machine's. Goodput is the number of steps at a
contender's own usual pace, divided by the time that it took.
"""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scripts.cluster import commands_of_the_environment, pods, ready_nodes, until
from scripts.failures.losses import injected, schedule
from scripts.failures.result import Result, read, table, write
from scripts.failures.rows import rows_of
from scripts.recovery import SETTINGS, add_options, request_of
from scripts.subjects import START_S, SUBJECTS, Subject, wait_until_complete
from sunspot.errors import ClusterError, GaveUpError, SettingsError, StorageError, SunspotError, run_and_exit, shorten

LOOK_EVERY_S = 60.0
"""Seconds between two checks. Each check of a Sunspot run reads its whole history, which slows down training."""

END_S = 300.0
"""Seconds for the checkpoint and the rows after the last step."""

STILL_S = 1800.0
"""Seconds without a step after which a contender has failed. With Ray's defaults, noticing a loss has taken seven
minutes."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser("bench-failures", description="Trains through the same losses, in several ways.")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps of each contender; default: 3000")
    parser.add_argument("--minutes", type=float, default=240, help="time limit of each contender; default: 240")
    parser.add_argument("--every", type=float, default=240, metavar="S", help="seconds between losses; default: 240")
    parser.add_argument("--away", type=float, default=60, metavar="S", help="seconds until a node returns; default: 60")
    parser.add_argument("--seed", type=int, default=0, help="seed of the schedule; default: 0")
    parser.add_argument("--nodes", required=True, help="the workers' nodes, separated by commas, except the head's")
    parser.add_argument("--only", default=",".join(SUBJECTS), help="contenders to train; default: %(default)s")
    parser.add_argument("--torchft-image", help="image that contains torchft; required to train TorchFT")
    parser.add_argument("--output", default="bench-failures", help="folder for the results; default: bench-failures")
    add_options(parser, "failures")
    return parser


def main() -> int:
    """Run the contenders one after the other."""
    arguments = make_parser().parse_args()
    unknown = set(arguments.only.split(",")) - set(SUBJECTS)
    if unknown:
        raise SettingsError(f"--only {', '.join(sorted(unknown))}: choose from {', '.join(SUBJECTS)}")
    commands = commands_of_the_environment("reclaim", "kill", "add")
    # The name must be new, because an existing run would continue.
    arguments.run = f"{arguments.run}-{int(time.time()) % 10**6}"
    defaults = {**SETTINGS, "MAX_STEPS": str(arguments.steps), "CHECKPOINT_EVERY_STEPS": "60", "REPORT_EVERY_S": "1"}
    request = request_of(arguments, defaults)
    folder = Path(arguments.output)
    for name in arguments.only.split(","):
        if name == "torchft" and not arguments.torchft_image:
            print("TorchFT is left out because --torchft-image is not set", flush=True)
            continue
        image = arguments.torchft_image if name == "torchft" else arguments.image
        subject = SUBJECTS[name](replace(request, image=image))
        result = Result(subject.title, subject.job, arguments.steps)
        results = [*(each for each in read(folder) if each.name != result.name), result]
        try:
            train(subject, results, commands, arguments)
        except SunspotError as error:  # keep measuring the other contenders
            result.ended = shorten(error)
        try:
            epochs = rows_of(subject)
            if epochs:
                result.missing = sum(epoch.missing for epoch in epochs)
                result.repeated = sum(epoch.repeated for epoch in epochs)
        except SunspotError as error:
            print(f"the rows of {subject.job} are unknown: {error}", flush=True)
        write(results, folder)
        print(table(results), flush=True)
    return int(any(result.ended for result in read(folder)))


def train(subject: Subject, results: list[Result], commands: dict[str, str], arguments: argparse.Namespace) -> None:
    """Train a contender to the last step while nodes are lost, and write the results continuously."""
    result = results[-1]
    nodes = sorted(arguments.nodes.split(","))
    losses = schedule(arguments.seed, arguments.every, nodes)
    until(f"cluster with all of {', '.join(nodes)}", START_S, lambda: ready_nodes(subject.namespace) >= set(nodes))
    print(f"== {time.strftime('%H:%M:%S')} {result.name}: {subject.job}", flush=True)
    submitted = time.time()
    subject.submit()
    try:
        wait_until_complete(subject, submitted)
        began = time.time()
        heads = {pod.node for pod in pods(subject.job, subject.namespace) if pod.head} & set(nodes)
        if heads:
            raise SettingsError(f"--nodes {arguments.nodes}: the head of {subject.job} runs on {', '.join(heads)}")

        with injected(losses, result.losses, commands, arguments.away, began) as dealing:
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
        except SunspotError as error:  # the result is complete
            print(f"   {error}", flush=True)


def look(subject: Subject, result: Result, began: float, time_is_up: bool) -> None:
    """Update a contender's result. If the cluster or storage does not answer, the result stays as it is."""
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
        if result.ended and not over:  # a contender that ended by itself counts until its last step
            result.points.append((round(now, 2), result.reached))


if __name__ == "__main__":
    run_and_exit(main)
