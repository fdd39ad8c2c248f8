"""`sunspot submit`: starts a run's RayJob, or explains why the RayJob is not started."""

import argparse
import sys

from sunspot.errors import SettingsError
from sunspot.submitter.cluster.mover import Mover
from sunspot.submitter.cluster.placing import render_in_place, submit_in_place
from sunspot.submitter.cluster.progress_lines import ProgressLines, print_pods, print_submission
from sunspot.submitter.cluster.waiting import wait_for_end
from sunspot.submitter.commands.arguments import add_context, add_render_options, job_request, seconds
from sunspot.submitter.printing import print_text, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_render_options(parser)
    add_context(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything and show what would be done, but change nothing"
    )
    parser.add_argument("--take-over", action="store_true", help="take over the run, even if it is alive elsewhere")
    parser.add_argument("--yes", action="store_true", help="submit a run with SUNSPOT_BUDGET without asking")
    parser.add_argument("--wait", action="store_true", help="wait until the run ends; the exit code is its outcome")
    parser.add_argument(
        "--timeout", metavar="S", type=seconds, help="with --wait: stop waiting after S seconds (exit code 5)"
    )


def run(args: argparse.Namespace) -> None:
    if args.timeout is not None and not args.wait:
        raise SettingsError("--timeout has no effect without --wait; add --wait, or omit --timeout")
    rendered, cluster = render_in_place(job_request(args), args.context)
    if not args.json:
        print_pods(rendered.pods)
    if rendered.settings.budget and not args.dry_run and not _accepts_budget(rendered.settings.budget, args):
        print_text("nothing was submitted; set a larger SUNSPOT_BUDGET, or omit it")
        return
    submission = submit_in_place(cluster, rendered, args.dry_run, args.take_over)
    print_submission(submission, args.json)
    if args.wait and not args.dry_run:
        access = submission.access
        mover = Mover(args.profile) if submission.place else None
        wait_for_end(access, args.timeout, ProgressLines(access.run, args.json), mover)


def _accepts_budget(budget: str, args: argparse.Namespace) -> bool:
    """Warn that the budget can stop the run, and return True if the run should be submitted.

    At a terminal, the user is asked first.
    """
    warn(f"SUNSPOT_BUDGET={budget}: once the run's nodes have cost this amount, the run saves a checkpoint and stops")
    if args.yes or args.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    warn("submit it? Type y: ", end="")
    return sys.stdin.readline().strip() in ("y", "yes")
