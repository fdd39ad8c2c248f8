"""`sunspot doctor`: explains a run's state, or checks that the cluster and storage are ready for a run."""

import argparse
import textwrap
from collections.abc import Iterable
from dataclasses import asdict

from sunspot.errors import ClusterError, SettingsError, StorageError, SunspotError
from sunspot.settings import with_place
from sunspot.storage.prove import Check, Result, failure, probe_path
from sunspot.submitter.cluster.kubeconfig import is_configured
from sunspot.submitter.cluster.observation import reach_run
from sunspot.submitter.cluster.placing import context_of
from sunspot.submitter.cluster.start import render_for_cluster, render_with_code
from sunspot.submitter.commands.arguments import add_cluster, run_target
from sunspot.submitter.doctor.cluster_checks import check_cluster
from sunspot.submitter.doctor.diagnose import Examination, examine
from sunspot.submitter.doctor.machine_checks import check_training_here
from sunspot.submitter.doctor.probe_pods import try_from_pods
from sunspot.submitter.manifest.render import JobRequest
from sunspot.submitter.printing import print_json, print_text, warn
from sunspot.submitter.runs import find_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="name of the run to examine; without RUN, doctor checks the cluster and storage, or this machine",
    )
    add_cluster(parser)
    parser.add_argument("--stacks", action="store_true", help="also print full stacks and tracebacks")
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="check the cluster for a run with this profile (only without RUN); default: kind",
    )
    parser.add_argument(
        "--image",
        metavar="REF",
        help="check the cluster for a run with this image (only without RUN); default: the profile's image",
    )
    parser.add_argument("--place", metavar="NAME", help="check this place of the profile (only without RUN)")
    parser.add_argument(
        "--from-pods",
        action="store_true",
        help="run the storage, GPU and network tests in pods like those of a run (only without RUN); the cluster may "
        "add nodes for them",
    )


def run(args: argparse.Namespace) -> None:
    if args.run is None:
        _check_preconditions(args)
        return
    if args.profile or args.place or args.image or args.from_pods:
        raise SettingsError(
            "--profile, --place, --image and --from-pods cannot be used with RUN; omit either RUN or these options"
        )
    access = reach_run(run_target(args))
    report = examine(access)
    if args.json:
        print_json({"run": access.run.name, **report.record()})
    else:
        _print_report(access.run.name, report, args.stacks)
    if report.cluster_trouble:
        raise ClusterError(f"{access.run.name}'s cluster could not be examined; the first finding explains why")


def _print_report(name: str, report: Examination, stacks: bool) -> None:
    """Print the findings and, with `stacks`, full stacks and tracebacks."""
    print_text(f"{name}: {report.state}")
    for number, finding in enumerate(report.findings, 1):
        print_text(f"\n{number}. {finding.finding} ({finding.severity})")
        print_text(textwrap.indent(f"{finding.evidence}\nto do: {finding.advice}", "   "))
        for trace in finding.traces if stacks else ():
            print_text(textwrap.indent(trace.rstrip(), "       "))
    if not stacks and any(finding.traces for finding in report.findings):
        warn("--stacks shows full stacks and tracebacks")
    for text in report.unseen:
        if not report.cluster_trouble or report.cluster_trouble not in text:  # the first finding reports it
            warn(f"not examined: {text}")


def _check_preconditions(args: argparse.Namespace) -> None:
    """Check the cluster and storage, or this machine if no cluster is configured and no cluster option was given."""
    of_a_cluster = (args.profile, args.place, args.image, args.from_pods, args.context, args.namespace)
    if any(of_a_cluster) or is_configured():
        _report_checks(_checks_in_cluster(args), args.json, "ready for a run")
    else:
        of_storage = probe_path(find_storage(args.storage).locate("").rstrip("/"))
        parts = [(SettingsError, check_training_here()), (StorageError, of_storage)]
        _report_checks(parts, args.json, "ready for a run on this machine")


def _checks_in_cluster(args: argparse.Namespace) -> list[tuple[type[SunspotError], Iterable[Check]]]:
    """Return the checks of the cluster, the checks of storage and, with `--from-pods`, the checks made in pods."""
    settings = with_place({}, None, args.storage)
    request = JobRequest(args.profile or "kind", settings, args.image, args.namespace, place=args.place)
    of_pods: Iterable[Check] = ()
    try:
        rendered, cluster = render_for_cluster(request, args.context or context_of(request))
        of_cluster: Iterable[Check] = check_cluster(cluster, rendered)
        if args.from_pods:
            of_pods = try_from_pods(cluster, rendered)
    except ClusterError as error:
        rendered, of_cluster = render_with_code(request), [failure("API server", error)]
    of_storage = probe_path(rendered.settings.storage_path)
    return [(ClusterError, of_cluster), (StorageError, of_storage), (ClusterError, of_pods)]


def _report_checks(parts: Iterable[tuple[type[SunspotError], Iterable[Check]]], as_json: bool, ready: str) -> None:
    """Print the result and fix of each check. Each part has the class of the error to raise if one of its checks fails.

    If several parts have failed checks, `ClusterError` takes precedence over other classes.
    """
    checks: list[Check] = []
    failed: list[type[SunspotError]] = []
    for kind, part in parts:
        for check in part:
            checks.append(check)
            if check.result is Result.FAILED:
                failed.append(kind)
            if not as_json:
                print_text(f"{check.result:8} {check.check}: {check.seen}", flush=True)
                if check.fix and check.result is not Result.OK:
                    print_text(f"{'':8} -> {check.fix}", flush=True)
    if as_json:
        print_json({"fit": not failed, "checks": [asdict(check) for check in checks]})
    if failed:
        first = next(check.check for check in checks if check.result is Result.FAILED)
        kind = ClusterError if ClusterError in failed else failed[0]
        raise kind(f"not {ready}: {len(failed)} of {len(checks)} checks failed, starting with {first}")
    if not as_json:
        warnings = sum(check.result is Result.WARNING for check in checks)
        print_text(f"{ready}: {len(checks)} checks, {warnings} with a warning")
