"""`sunspot dashboard`: the Ray dashboard of a live run on a local port, with its token added to every request."""

import argparse
import base64
import contextlib
import threading
import time
from typing import Any

from sunspot.errors import ClusterError, NotFoundError, StorageError
from sunspot.submitter.cluster.api import Cluster, RefusedError, UnreachableError
from sunspot.submitter.cluster.observation import RunAccess, reach_run, stored_arguments
from sunspot.submitter.cluster.port_forward import LocalPort
from sunspot.submitter.cluster.views import pod_view
from sunspot.submitter.commands.arguments import add_run_and_cluster, count, run_target
from sunspot.submitter.printing import print_json_line, print_text, progress_note, warn

PORT = 8265
"""Ray's default, on the head."""

POLL_EVERY_S = 3.0
"""How soon the loss of the head is noticed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_and_cluster(parser)
    parser.add_argument("--port", metavar="N", type=count, default=PORT, help=f"of this machine; default: {PORT}")


def run(args: argparse.Namespace) -> None:
    """Forward the dashboard until Ctrl-C or the loss of the head, and print where it is."""
    access = reach_run(run_target(args))
    cluster = access.require_cluster()
    run = access.run
    with progress_note("looking for the head of the run"):
        head = _find_head(access, cluster)
        name = head["metadata"]["name"]
        token, token_error = _read_token(cluster, head)
        cluster.dial(name, PORT).close()  # a refusal shows now
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with LocalPort(args.port, lambda: cluster.dial(name, PORT), headers) as local:
        threading.Thread(target=local.serve_forever, daemon=True).start()
        try:
            if args.json:
                print_json_line({"run": run.name, "url": local.url, "pod": name, "token_added": bool(token)})
            else:
                print_text(f"{local.url} is the Ray dashboard of {run.name} (pod {name})", flush=True)
            if token:
                warn("its token is added to every request, so all who use this machine can use it, until Ctrl-C")
            if token_error:
                warn(token_error)
            _watch(access, cluster, head)
        except KeyboardInterrupt:
            warn("")
        finally:
            local.shutdown()


def _find_head(access: RunAccess, cluster: Cluster) -> dict[str, Any]:
    """Find the pod of the run's newest ready head."""
    run = access.run
    for job in cluster.list_jobs(run.name):
        ready = [pod for pod in cluster.list_pods([job]) if pod.head and pod.ready and not pod.deleting]
        if ready and (found := cluster.find("pod", ready[0].name)):
            return found
    snapshot = access.observe()
    access.require_known(snapshot)
    state, reason = snapshot.state()
    instead = f"`sunspot report {stored_arguments(run)}` shows what is in storage"
    raise NotFoundError(f"{run.name} has no head that is ready, so no dashboard: {state}, {reason}; {instead}")


def _read_token(cluster: Cluster, head: dict[str, Any]) -> tuple[str, str]:
    """Read the head's token; also returns why it cannot be read. Both are empty if it wants none."""
    environment = {entry["name"]: entry for entry in head["spec"]["containers"][0].get("env", ())}
    variable = environment.get("RAY_AUTH_TOKEN", {})
    if "value" in variable:
        return str(variable["value"]), ""
    source = variable.get("valueFrom", {}).get("secretKeyRef")
    if not source:
        return "", ""
    why = f"there is no such Secret in namespace {cluster.namespace}"
    try:
        if secret := cluster.find("Secret", source["name"]):
            return base64.b64decode(secret["data"][source["key"]]).decode(), ""
    except (RefusedError, KeyError, ValueError) as error:
        why = str(error)
    wanted = f"{source['key']} of Secret {source['name']}"
    return "", f"the dashboard will ask for its token, {wanted}, unreadable here: {why}"


def _watch(access: RunAccess, cluster: Cluster, head: dict[str, Any]) -> None:
    """Return never; raises `NotFoundError` when the head is gone."""
    name = head["metadata"]["name"]
    away = False
    while True:
        time.sleep(POLL_EVERY_S)
        try:
            now = cluster.find("pod", name)
        except UnreachableError as error:
            if not away:
                warn(f"still forwarding, as far as that goes: {error}")
            away = True
            continue
        away = False
        same = now is not None and now["metadata"].get("uid") == head["metadata"].get("uid")
        if now is None or not same or pod_view(now).deleting or now.get("status", {}).get("phase") != "Running":
            why = ""
            with contextlib.suppress(ClusterError, StorageError):
                state, reason = access.observe().state()
                why = f"; {access.run.name} is {state}, {reason}"
            raise NotFoundError(f"the head {name} is gone, and its dashboard with it{why}")
