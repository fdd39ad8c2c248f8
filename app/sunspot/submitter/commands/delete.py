"""`sunspot delete`: lists everything that belongs to a run, asks for confirmation, and deletes it."""

import argparse
import sys
from typing import Any

from sunspot.errors import SettingsError, SunspotError
from sunspot.formatting import as_bytes, plural
from sunspot.submitter.cluster.deletion import RunContents, delete_run, find_contents, find_left
from sunspot.submitter.cluster.observation import RunAccess, reach_run
from sunspot.submitter.commands.arguments import add_run_and_cluster, run_target
from sunspot.submitter.printing import print_json, print_table, print_text, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_and_cluster(parser)
    parser.add_argument("--yes", action="store_true", help="delete without asking")


def run(args: argparse.Namespace) -> None:
    """List everything that belongs to the run, and delete it if the user confirms or passes `--yes`."""
    access = reach_run(run_target(args), changed_by="delete")
    contents = find_contents(access)
    if not args.json:
        _print(access, contents)
    others = contents.not_submitted
    if others:
        fix = "remove it there first, because otherwise it is recreated, and the run starts from the beginning"
        names = ", ".join(others)
        warn(f"`sunspot submit` did not create the RayJob {names}; if it is defined in a GitOps repository, {fix}")
    if not args.yes:
        if args.json:
            print_json(_record(contents, contents, removed=False))
        if args.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            why = "--json never asks" if args.json else "there is no terminal to ask at"
            raise SettingsError(f"nothing was removed, because {why}; add --yes to remove {contents}")
        warn(f"delete all of it permanently? Type y or {args.run}: ", end="")
        if sys.stdin.readline().strip() not in ("y", "yes", access.run.name):
            print_text(f"nothing was removed; add --yes to remove {contents} without asking")
            return
        contents = find_contents(access)  # the answer can take a long time
    try:
        delete_run(access.run, contents.snapshot.cluster.jobs, access.cluster)
    except (SunspotError, KeyboardInterrupt):
        left = find_left(access)
        if args.json:
            print_json(_record(contents, left, removed=False))
        rest = left or "unknown, because it cannot be listed now"
        again = f"Run `sunspot delete {access.arguments}` to delete the rest"
        warn(f"{args.run} was only partly deleted. Remaining: {rest}. {again}")
        raise
    if args.json:
        print_json(_record(contents, None, removed=True))
    else:
        print_text(f"removed: {contents}")
    if contents.foreign:
        names = contents.name_foreign()
        warn(f"these files were left in {access.run.location}, because they do not belong to the run: {names}")
    if access.run.storage.keeps_versions():
        warn("the bucket keeps versions of deleted objects, which take up space until its lifecycle rules remove them")


def _print(access: RunAccess, contents: RunContents) -> None:
    run, cluster = access.run, access.cluster
    state, reason = contents.snapshot.state()
    print_text(f"{run.name}: {state}, {reason}")
    rows = [[thing["kind"], thing["name"], ""] for thing in contents.objects]
    in_cluster = f"in namespace {cluster.namespace} of {cluster.server}, and " if cluster and rows else ""
    for kind in contents.kinds:
        which = f"{kind['checkpoints']}, in " if "checkpoints" in kind else ""
        rows.append([kind["kind"], which + plural(kind["files"], "file"), as_bytes(kind["bytes"])])
    print_table(["what", "which", "size"], rows)
    print_text(f"{in_cluster}in {run.location}")
    if contents.snapshot.cluster.trouble:
        trouble = contents.snapshot.cluster.trouble
        warn(f"cannot query the cluster ({trouble}), so only the run's storage was checked")
    if contents.foreign:
        print_text(f"these files are not touched, because they do not belong to the run: {contents.name_foreign()}")
    if contents.dataset:
        print_text(f"the dataset {contents.dataset} is not touched, because no run creates a dataset")
    trials = contents.trials
    if trials:
        print_text(f"its {plural(len(trials), 'trial')}, {trials[0]} to {trials[-1]}, are separate runs and stay")


def _record(contents: RunContents, left: RunContents | None, removed: bool) -> dict[str, Any]:
    """Return the JSON record of the deletion.

    `left` holds what still exists. It is None if nothing remains, or if the rest cannot be listed.
    """
    return {
        "run": contents.run.name,
        "removed": removed,
        "storage": contents.run.location,
        "objects": contents.objects,
        "files": len(contents.entries),
        "bytes": contents.bytes,
        "kinds": contents.kinds,
        "dataset": contents.dataset or None,
        "dataset_removed": False,  # a dataset is never removed, even if it is in the run's folder
        "trials_kept": list(contents.trials),
        "left": {"objects": left.objects, "files": len(left.entries), "bytes": left.bytes} if left else None,
    }
