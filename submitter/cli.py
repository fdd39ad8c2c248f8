"""The command `sunspot`: which verbs there are, what each takes, and where each begins.

Nothing heavy is imported before a verb has begun: help and wrong usage answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from app.errors import ClusterError, SettingsError, run_and_exit

if TYPE_CHECKING:
    from app.run import Run
    from app.run.status import RunState
    from submitter.cluster.api import Cluster
    from submitter.manifest.render import Rendered

ROWS = 50
"""Rows of a listing, unless more are asked for: each costs a request."""


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Do what the words of the command line say, and end the process."""

    def program() -> int:
        arguments = _parser().parse_args(words)
        arguments.begin(arguments)
        return 0

    run_and_exit(program)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("sunspot", description="Ray Train on Kubernetes spot GPUs.", allow_abbrev=False)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    render = _add_parser(
        verbs, "render", _show_rendered, "print the manifest that submit would apply; no cluster needed"
    )
    _add_render_options(render)
    render.add_argument("--output", metavar="DIR", help="write it there with a kustomization.yaml, for GitOps")
    render.add_argument("--explain", action="store_true", help="print every chosen value and where it came from")
    render.add_argument("--json", action="store_true", help="one JSON document on stdout")

    submit = _add_parser(verbs, "submit", _submit, "check everything, then have the cluster run what render prints")
    _add_render_options(submit)
    submit.add_argument("--context", metavar="NAME", help="a context of the kubeconfig; default: its current one")
    submit.add_argument("--dry-run", action="store_true", help="check everything, change nothing, say what would be")
    submit.add_argument("--wait", action="store_true", help="then wait until the run ends; the exit code says how")
    submit.add_argument("--timeout", metavar="S", type=float, help="with --wait: give up after so long (exit code 5)")
    submit.add_argument("--json", action="store_true", help="one JSON document on stdout; with --wait, JSON lines")

    status = _add_verb(verbs, "status", _status, "where the run stands: cluster and storage in one view")
    wait = _add_verb(verbs, "wait", _wait, "progress until the run ends; the exit code says how")
    wait.add_argument("--timeout", metavar="S", type=float, help="give up after so many seconds (exit code 5)")
    stop = _add_verb(verbs, "stop", _stop, "have the run save and stand still, then remove its cluster")
    stop.add_argument("--timeout", metavar="S", type=float, default=600, help="seconds to wait for it; default: 600")
    stop.add_argument("--no-wait", action="store_true", help="only leave the stop marker")
    resume = _add_verb(verbs, "resume", _resume, "let a stopped run go on: submit again what was submitted last")
    runs = _add_parser(verbs, "list", _list, "all runs, the one that was written last first")
    _add_storage_options(runs)
    _add_limit(runs)
    logs = _add_verb(verbs, "logs", _logs, "what the driver printed, or one rank: from storage, a few seconds behind")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    logs.add_argument("--rank", metavar="N", type=int, help="of this worker, from 0; default: the driver")
    logs.add_argument("--previous", action="store_true", help="of the start before the newest")
    for verb in (status, wait, stop, resume, runs, logs):
        _add_cluster_options(verb)

    checkpoints = verbs.add_parser("checkpoints", help="the run's checkpoints", allow_abbrev=False)
    checkpoint_verbs = checkpoints.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_limit(_add_verb(checkpoint_verbs, "ls", _checkpoints_ls, "list them, each verified"))
    verify = _add_verb(
        checkpoint_verbs, "verify", _checkpoints_verify, "verify all or one; exit code 7 if any is damaged"
    )
    verify.add_argument("name", metavar="NAME", nargs="?", help="a checkpoint, as ls names it")

    get = _add_verb(checkpoint_verbs, "get", _checkpoints_get, "download one; interrupted, the same command goes on")
    get.add_argument(
        "name", metavar="NAME", nargs="?", default="newest", help="as ls names it, or newest (default), or best"
    )
    get.add_argument("--output", metavar="DIR", help="default: a directory called like the checkpoint")
    collect = _add_verb(checkpoint_verbs, "gc", _checkpoints_gc, "show what is of no use any more; --yes removes it")
    collect.add_argument("--keep", metavar="N", type=_count, help="how many of the best stay; default: the run's own")
    collect.add_argument("--yes", action="store_true", help="remove it")

    events = _add_verb(verbs, "events", _events, "what happened to the run besides training, and what it cost")
    events.add_argument("--stacks", action="store_true", help="below, where each rank stood that hung")
    metrics = _add_verb(verbs, "metrics", _metrics, "the run's metric history")
    form = metrics.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="comma-separated values on stdout")
    form.add_argument("--parquet", metavar="FILE", help="write a Parquet file, with the numbers of each rank")
    report = _add_verb(verbs, "report", _report, "write all there is to see of the run into one HTML file")
    report.add_argument("--output", metavar="FILE", help="default: RUN-report.html")

    _add_verb(
        verbs,
        "audit",
        _audit,
        "prove which rows each epoch consumed, checkpoints and receipts; exit code 7 for a fault",
    )
    chaos = _add_verb(verbs, "chaos", _chaos, "reclaim and kill parts of a live run on purpose, then audit it")
    chaos.add_argument(
        "--kind",
        metavar="KIND",
        dest="kinds",
        action="append",
        required=True,
        help="reclaim or kill a training worker, or kill the head; several, as a list or repeated, take random turns",
    )
    chaos.add_argument(
        "--every", metavar="TIME", type=_seconds, default=60.0, help="from blow to blow: 90, 90s or 2m; default: 60s"
    )
    chaos.add_argument("--count", metavar="N", type=_count, default=1, help="blows; default: 1")
    chaos.add_argument("--seed", metavar="S", type=int, help="of all that is random; default: a new one, printed")
    chaos.add_argument("--yes", action="store_true", help="do it; without, only what would be done is said")
    _add_cluster_options(chaos)

    doctor = _add_parser(verbs, "doctor", _doctor, "why a run is pending, slow, stuck or failed, and what to do")
    doctor.add_argument(
        "run", metavar="RUN", nargs="?", help="name of the run; without, cluster and storage are tried: fit for a run?"
    )
    doctor.add_argument("--stacks", action="store_true", help="below, whole stacks and tracebacks")
    doctor.add_argument("--profile", metavar="NAME", help="without RUN: what a run would be made by; default: kind")
    doctor.add_argument("--image", metavar="REF", help="without RUN: the image; default: the profile's")
    doctor.add_argument(
        "--from-pods",
        action="store_true",
        help="without RUN: try the storage from two pods too, made like a run's head and workers; may bring nodes",
    )
    doctor.set_defaults(settings=[], cluster=None, queue=None, generation=1)
    _add_storage_options(doctor)
    _add_cluster_options(doctor)
    dashboard = _add_verb(verbs, "dashboard", _dashboard, "the run's Ray dashboard on a port of this machine")
    dashboard.add_argument("--port", metavar="N", type=_count, default=8265, help="of this machine; default: 8265")
    _add_cluster_options(dashboard)
    delete = _add_verb(verbs, "delete", _delete, "show all there is of a run, ask, and remove it")
    delete.add_argument("--yes", action="store_true", help="remove it without asking")
    _add_cluster_options(delete)
    return parser


def _add_verb(
    verbs: Any, name: str, begin: Callable[[argparse.Namespace], None], about: str
) -> argparse.ArgumentParser:
    """Add a verb about one run, with the options that all of them take."""
    verb = _add_parser(verbs, name, begin, about)
    verb.add_argument("run", metavar="RUN", help="name of the run")
    _add_storage_options(verb)
    return verb


def _add_parser(
    verbs: Any, name: str, begin: Callable[[argparse.Namespace], None], about: str
) -> argparse.ArgumentParser:
    """Add a verb that takes nothing yet."""
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=about, description=about, allow_abbrev=False)
    verb.set_defaults(begin=begin)
    return verb


def _add_storage_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--storage", metavar="PATH", help="where runs are kept; default: SUNSPOT_STORAGE_PATH, or runs")
    verb.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _add_cluster_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--context", metavar="NAME", help="a context of the kubeconfig; default: its current one")
    verb.add_argument("--namespace", metavar="NAME", help="default: sunspot")


def _add_limit(verb: argparse.ArgumentParser) -> None:
    limit = verb.add_mutually_exclusive_group()
    limit.add_argument("--limit", metavar="N", type=_count, default=ROWS, help=f"the newest N; default: {ROWS}")
    limit.add_argument("--all", action="store_const", const=None, dest="limit", help="all of them")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give a time above 0, such as 90, 90s or 2m")
    return seconds


def _add_render_options(verb: argparse.ArgumentParser) -> None:
    """Everything that a manifest depends on, besides the SUNSPOT_ variables of the environment."""
    verb.add_argument("--profile", metavar="NAME", default="kind", help="one of k8s/profiles, or a path; default: kind")
    verb.add_argument("--run", metavar="NAME", help="name of the run; default: SUNSPOT_RUN_NAME")
    verb.add_argument("--storage", metavar="URL", help="where runs are kept: s3://bucket/prefix")
    verb.add_argument(
        "--set", metavar="VAR=VALUE", dest="settings", action="append", default=[], help="a setting; repeatable"
    )
    verb.add_argument("--image", metavar="REF", help="the image; default: the profile's")
    verb.add_argument("--namespace", metavar="NAME", help="default: the profile's")
    verb.add_argument("--queue", metavar="NAME", help="a LocalQueue of Kueue")
    verb.add_argument("--cluster", metavar="NAME", help="run in this RayCluster instead of one of the job's own")
    verb.add_argument(
        "--generation", metavar="N", type=int, default=1, help="another number starts an ended job again; default: 1"
    )


def _render(arguments: argparse.Namespace) -> Rendered:
    from submitter.manifest.render import render

    overrides: dict[str, str] = {}
    for word in arguments.settings:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise SettingsError(f"--set {word}: write VAR=VALUE")
        overrides[name] = value
    for name, value in (("RUN_NAME", arguments.run), ("STORAGE_PATH", arguments.storage)):
        if value == "":  # as a setting, it would mean the default
            raise SettingsError("--run and --storage may not be empty")
        if value is not None:
            overrides[name] = value
    return render(
        arguments.profile,
        overrides,
        image=arguments.image,
        namespace=arguments.namespace,
        cluster=arguments.cluster,
        queue=arguments.queue,
        generation=arguments.generation,
    )


def _show_rendered(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from submitter.manifest.render import write_directory
    from submitter.output import print_json, print_table, warn

    rendered = _render(arguments)
    if arguments.output is not None:
        for path in write_directory(rendered, arguments.output):
            warn(f"wrote {path}")
    if arguments.explain and arguments.json:
        print_json([asdict(value) for value in rendered.derived])
    elif arguments.explain:
        print_table(["value", "is", "from"], [[v.name, v.value, v.source] for v in rendered.derived])
    elif arguments.json:
        print_json(rendered.manifest)
    elif arguments.output is None:
        print(rendered.to_yaml(), end="")


def _submit(arguments: argparse.Namespace) -> None:
    from submitter.cluster.api import connect
    from submitter.commands.submit import submit
    from submitter.commands.wait import wait

    if arguments.timeout is not None and not arguments.wait:
        raise SettingsError("--timeout: give --wait too")
    rendered = _render(arguments)
    cluster = connect(arguments.context, rendered.namespace)
    run = submit(cluster, rendered, arguments.dry_run, arguments.json)
    if arguments.wait and not arguments.dry_run:
        wait(cluster, run, arguments.timeout, arguments.json)


def _status(arguments: argparse.Namespace) -> None:
    from submitter.commands.status import show

    cluster, run, without = _reach(arguments)
    show(cluster, run, arguments.json, without)


def _wait(arguments: argparse.Namespace) -> None:
    from submitter.commands.wait import wait

    cluster, run, without = _reach(arguments)
    wait(cluster, run, arguments.timeout, arguments.json, without)


def _stop(arguments: argparse.Namespace) -> None:
    from submitter.commands.stop import stop

    cluster, run, without = _reach(arguments)
    stop(cluster, run, arguments.timeout, not arguments.no_wait, arguments.json, without)


def _resume(arguments: argparse.Namespace) -> None:
    from submitter.commands.stop import resume

    cluster, run, without = _reach(arguments)
    resume(cluster, run, arguments.json, without)


def _reach(arguments: argparse.Namespace) -> tuple[Cluster | None, Run, str]:
    """The cluster, or None and why there is none; and the run, there or not."""
    from submitter.cluster.watch import locate_run

    cluster, without = _connect(arguments)
    return cluster, locate_run(cluster, arguments.run, arguments.storage), without


def _connect(arguments: argparse.Namespace) -> tuple[Cluster | None, str]:
    """The cluster, or None and why there is none; raises that when a cluster was asked for."""
    from submitter.cluster.api import connect

    try:
        return connect(arguments.context, arguments.namespace), ""
    except ClusterError as error:
        if arguments.context or arguments.namespace:
            raise
        return None, str(error)


def _list(arguments: argparse.Namespace) -> None:
    from submitter.commands.list import list_all
    from submitter.runs import find_storage

    list_all(find_storage(arguments.storage), arguments.limit, arguments.json, _connect(arguments)[0])


def _logs(arguments: argparse.Namespace) -> None:
    from submitter.commands.logs import show
    from submitter.runs import read_state

    state: Callable[[Run], tuple[RunState, str]] = read_state
    if arguments.follow and (cluster := _connect(arguments)[0]):
        from submitter.cluster.watch import observe_run

        def state(run: Run) -> tuple[RunState, str]:
            return observe_run(cluster, run).verdict()

    show(_find_run(arguments), arguments.rank, arguments.previous, arguments.follow, arguments.json, state)


def _checkpoints_ls(arguments: argparse.Namespace) -> None:
    from submitter.commands.checkpoints import list_all

    list_all(_find_run(arguments), arguments.limit, arguments.json)


def _checkpoints_verify(arguments: argparse.Namespace) -> None:
    from submitter.commands.checkpoints import verify

    verify(_find_run(arguments), arguments.name, arguments.json)


def _checkpoints_get(arguments: argparse.Namespace) -> None:
    from submitter.commands.download import get

    get(_find_run(arguments), arguments.name, arguments.output, arguments.json)


def _checkpoints_gc(arguments: argparse.Namespace) -> None:
    from submitter.commands.collect import collect

    collect(_find_run(arguments), arguments.keep, arguments.yes, arguments.json)


def _events(arguments: argparse.Namespace) -> None:
    from submitter.commands.events import show

    show(_find_run(arguments), arguments.stacks, arguments.json)


def _metrics(arguments: argparse.Namespace) -> None:
    from submitter.commands.metrics import show, write_parquet

    if arguments.json and arguments.csv:
        raise SettingsError("--json and --csv: choose one")
    if arguments.parquet is not None:
        write_parquet(_find_run(arguments), arguments.parquet, arguments.json)
    else:
        show(_find_run(arguments), "json" if arguments.json else "csv" if arguments.csv else "table")


def _report(arguments: argparse.Namespace) -> None:
    from submitter.commands.report import write

    write(_find_run(arguments), arguments.output, arguments.json)


def _audit(arguments: argparse.Namespace) -> None:
    from submitter.commands.audit import audit

    audit(_find_run(arguments), arguments.json)


def _chaos(arguments: argparse.Namespace) -> None:
    from submitter.commands.chaos import chaos, make_plan

    plan = make_plan(arguments.kinds, arguments.every, arguments.count, arguments.seed)
    if not arguments.yes:
        where = f"of the run {arguments.run}" + (f" in {arguments.namespace}" if arguments.namespace else "")
        raise SettingsError(f"this would {plan} {where}, and has done nothing; --yes does it")
    cluster, run, without = _reach(arguments)
    chaos(cluster, run, plan, arguments.json, without)


def _doctor(arguments: argparse.Namespace) -> None:
    if arguments.run is None:
        _examine(arguments)
        return
    if arguments.profile or arguments.image or arguments.from_pods:
        raise SettingsError("--profile, --image, --from-pods: leave out RUN, or these: they are for no run yet")
    from submitter.doctor.diagnose import show

    cluster, run, without = _reach(arguments)
    show(cluster, run, arguments.stacks, arguments.json, without)


def _examine(arguments: argparse.Namespace) -> None:
    from submitter.cluster.api import connect
    from submitter.doctor.preconditions import examine

    arguments.profile = arguments.profile or "kind"
    rendered, cluster, without = _render(arguments), None, ""
    try:
        cluster = connect(arguments.context, rendered.namespace)
    except ClusterError as error:
        without = str(error)
    examine(cluster, rendered, arguments.from_pods, arguments.json, without)


def _dashboard(arguments: argparse.Namespace) -> None:
    from submitter.commands.dashboard import show

    cluster, run, without = _reach(arguments)
    show(cluster, run, arguments.port, arguments.json, without)


def _delete(arguments: argparse.Namespace) -> None:
    from submitter.commands.delete import delete

    cluster, run, without = _reach(arguments)
    delete(cluster, run, arguments.yes, arguments.json, without)


def _find_run(arguments: argparse.Namespace) -> Run:
    """The run that RUN and --storage mean; raises `NotFoundError` when nothing is there."""
    from submitter.runs import find_run

    return find_run(arguments.run, arguments.storage)


if __name__ == "__main__":
    main()
