"""`sunspot doctor`: with RUN, why it is as it is; without, whether a cluster and a bucket are ready for a run."""

import argparse

from sunspot.errors import ClusterError, SettingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="name of the run; without, cluster and storage are tried: ready for a run?",
    )
    parser.add_argument("--stacks", action="store_true", help="below, whole stacks and tracebacks")
    parser.add_argument("--profile", metavar="NAME", help="without RUN: what a run would be made by; default: kind")
    parser.add_argument("--image", metavar="REF", help="without RUN: the image; default: the profile's")
    parser.add_argument(
        "--from-pods",
        action="store_true",
        help="without RUN: try storage and GPU in two pods, made like a run's head and workers; may bring nodes",
    )
    parser.set_defaults(settings=[], cluster=None, queue=None, generation=1)


def run(args: argparse.Namespace) -> None:
    if args.run is None:
        _check_preconditions(args)
        return
    if args.profile or args.image or args.from_pods:
        raise SettingsError("--profile, --image, --from-pods: leave out RUN, or these: they are for no run yet")
    from sunspot.submitter.cluster.watch import reach_run
    from sunspot.submitter.doctor.diagnose import show

    cluster, run, cluster_error = reach_run(args)
    show(cluster, run, args.stacks, args.json, cluster_error)


def _check_preconditions(args: argparse.Namespace) -> None:
    from sunspot.submitter.commands.arguments import render_from
    from sunspot.submitter.commands.submit import render_for_cluster
    from sunspot.submitter.doctor.preconditions import examine

    args.profile = args.profile or "kind"
    cluster, cluster_error = None, ""
    try:
        rendered, cluster = render_for_cluster(args)
    except ClusterError as error:
        rendered, cluster_error = render_from(args), str(error)
    examine(cluster, rendered, args.from_pods, args.json, cluster_error)
